"""Images that were never built, for what is written about images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from launcher.build.attest import Made, Origin
from launcher.build.context import Inputs
from launcher.build.source import MegatronSource
from launcher.settings import ROOT

COMMIT, TREE, SDIST = "1" * 40, "2" * 40, "3" * 64
IMAGE, WHEEL = "sha256:" + "4" * 64, "5" * 64
EINOPS = f"einops==0.8.2 --hash=sha256:{'6' * 64}"
TORCH = f"torch==2.13.0+cpu --hash=sha256:{'7' * 64}"
PIP = f"pip==26.3 --hash=sha256:{'8' * 64}"

SOURCES = {
    "git": MegatronSource("git", "0.9.0", TREE, COMMIT, True, 1700000000, Path("/git")),
    "sdist": MegatronSource("sdist", "0.9.0", SDIST, "megatron-core 0.9.0", False, 1, Path("/s")),
    "path": MegatronSource("path", "0.9.0", SDIST, COMMIT + "+edited", True, 2, Path("/home/me")),
}


def made(kind: Literal["git", "sdist", "path"] = "git", **changes: object) -> Made:
    """An image of row 24.10 with release 0.9.0 from this kind of source."""
    inputs = Inputs(
        dockerfile="FROM base\n",
        base="sha256:" + "a" * 64,
        base_digest="sha256:" + "c" * 64,
        builder="sha256:" + "b" * 64,
        builder_digest="sha256:" + "b" * 64,
        source=SOURCES[kind],
        extension="megatron.core.datasets.helpers",
        version="0.9.0",
        patches=tuple(sorted((ROOT / "patches/0.9.0").glob("*.patch"))),
        pins={"build": [PIP, EINOPS], "runtime": [EINOPS], "packages": [TORCH]},
    )
    image = Made(
        name="megatron:24.10-0.9.0",
        id=IMAGE,
        row="24.10",
        url="https://github.com/NVIDIA/Megatron-LM.git",
        base=Origin("nvcr.io/nvidia/pytorch:24.10-py3", "sha256:" + "c" * 64, pinned=True),
        builder=Origin("megatron-standin-base:cp311", inputs.builder, pinned=False),
        inputs=inputs,
        wheel={"name": "megatron_core-0.9.0-cp310-cp310-linux_x86_64.whl", "sha256": WHEEL},
    )
    return replace(image, **changes)  # type: ignore[arg-type]
