"""Images that were never built, for what is written about images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from launcher.base.settings import ROOT
from launcher.images.builder.attest import ImageRecord
from launcher.images.builder.context import Inputs
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import recipe
from launcher.images.sources.megatron_source import MegatronSource
from launcher.images.sources.pins import StartImage


def sha(letter: str) -> str:
    return f"sha256:{letter * 64}"


COMMIT, TREE, SDIST = "1" * 40, "2" * 40, "3" * 64
IMAGE, WHEEL = sha("4"), "5" * 64
EINOPS = f"einops==0.8.2 --hash=sha256:{'6' * 64}"
TORCH = f"torch==2.13.0+cpu --hash=sha256:{'7' * 64}"
PIP = f"pip==26.3 --hash=sha256:{'8' * 64}"

SOURCES = {
    "git": MegatronSource("git", "0.9.0", TREE, COMMIT, True, 1700000000, Path("/git")),
    "sdist": MegatronSource("sdist", "0.9.0", SDIST, "megatron-core 0.9.0", False, 1, Path("/s")),
    "path": MegatronSource("path", "0.9.0", SDIST, COMMIT + "+edited", True, 2, Path("/home/me")),
}


# Of the row 24.10, whose packages no lock has.
RECIPE = replace(
    recipe(load_matrix(), load_lock(), "24.10", "0.9.0"),
    pins={"build": [PIP, EINOPS], "runtime": [EINOPS], "packages": [TORCH]},
)
BASE = StartImage(
    name="nvcr.io/nvidia/pytorch:24.10-py3",
    id=sha("a"),
    reference="nvcr.io/nvidia/pytorch:24.10-py3",
    digest=sha("c"),
    pinned=True,
)
BUILDER = "megatron-standin-base:cp311"
BUILT = StartImage(BUILDER, sha("b"), BUILDER, sha("b"), pinned=False)


def inputs_of(source: MegatronSource, **changes: object) -> Inputs:
    """What row 24.10 would be built from with this source."""
    patches = tuple(sorted((ROOT / "patches/0.9.0").glob("*.patch")))
    inputs = Inputs(RECIPE, "FROM base\n", BASE, BUILT, source, patches)
    return replace(inputs, **changes)  # type: ignore[arg-type]


def made(kind: Literal["git", "sdist", "path"] = "git", **changes: object) -> ImageRecord:
    """An image of row 24.10 with release 0.9.0 from this kind of source."""
    image = ImageRecord(
        name="megatron:24.10-0.9.0",
        id=IMAGE,
        inputs=inputs_of(SOURCES[kind]),
        wheel={"name": "megatron_core-0.9.0-cp310-cp310-linux_x86_64.whl", "sha256": WHEEL},
    )
    return replace(image, **changes)  # type: ignore[arg-type]
