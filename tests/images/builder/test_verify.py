"""What is looked for in a base and in an image: Megatron's import, and what a release refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from launcher.base.errors import BuildError
from launcher.images.builder import verify
from launcher.images.builder.verify import (
    BuildFacts,
    check_base,
    check_extensions,
    check_image,
    check_layers,
    check_needs,
    check_platform,
    check_torch,
)
from launcher.images.matrix.matrix_file import load_matrix
from launcher.images.matrix.schema import Row
from tests.tables import table

MATRIX = load_matrix()
NGC, CPU = MATRIX.rows["26.06"], MATRIX.rows["cpu"]
LIBCUDA = "ImportError: libcuda.so.1: cannot open shared object file: No such file"


def looked(folder: Path, core: str, training: str = "", seconds: int = 60) -> BuildFacts:
    """What LOOK prints where these are the texts of megatron.core and megatron.training."""
    for name, text in (("torch", ""), ("megatron/core", core), ("megatron/training", training)):
        module = folder / name / "__init__.py"
        module.parent.mkdir(parents=True)
        module.write_text(text)
    command = [sys.executable, "-c", verify.LOOK, verify.IMPORT, str(seconds), "megatron.core.x"]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert len(done.stdout.splitlines()) == 1, "the import's own words are no answer"
    return BuildFacts(**json.loads(done.stdout))


@table("core", "training", "seen")
def test_megatron_is_imported_in_the_image(
    tmp_path: Path, core: str, training: str, seen: list[str]
) -> None:
    """An image whose Megatron can't be imported was given a name."""
    assert looked(tmp_path, core, training).unimported == seen


def test_an_import_that_never_ends_ends_the_look(tmp_path: Path) -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '20']); time.sleep(600)"
    assert looked(tmp_path, child, seconds=1).unimported == ["megatron.core", "no answer"]


MISSING = "ModuleNotFoundError: No module named"


@pytest.mark.parametrize(
    ("row", "error", "refused"),
    [
        *(
            (NGC, error, True)
            for error in (
                "AssertionError: Minimum required nvidia-resiliency-ext package version is 0.6.0.",
                f"{MISSING} 'yaml'",
                f"{MISSING} 'triton'",
                "ImportError: cannot import name 'x' from 'torch'",
            )
        ),
        (CPU, f"{MISSING} 'triton'", False),  # CPU torch has none; megatron.training imports it
        *(
            (NGC, error, False)
            for error in (
                LIBCUDA,
                "RuntimeError: Found no NVIDIA driver on your system.",
                "AssertionError: CUDA driver initialization failed",
                "RuntimeError: 0 active drivers ([]). There should only be one.",
                "no answer",
            )
        ),
    ],
)
def test_what_a_gpu_would_mend_is_a_note_and_the_rest_is_refused(
    row: Row, error: str, refused: bool
) -> None:
    facts = BuildFacts("3.12", {}, unimported=["megatron.core", error])
    if not refused:
        assert error in str(verify.check_imports(facts, row))
        return
    with pytest.raises(
        BuildError, match=r"megatron\.core can't be imported in the image"
    ) as caught:
        verify.check_imports(facts, row)
    assert error in caught.value.problem
    assert ('EXTRAS="' in caught.value.remedy) == (MISSING in error)


ROWS, RELEASES = MATRIX.rows, MATRIX.releases
ROW, CUDA, BOTH = ROWS["24.10"], ROWS["cuda-12.4"], ROWS["26.06"]
OLDER = CUDA.model_copy(update={"torch": "2.4.0"})
BASE = BuildFacts(
    "3.10", {"torch": "2.5.0a0+e000cf0ad9.nv24.10", "numpy": "1.24.4", "psutil": "5.9"}
)
ADDED = BASE.packages | {"psutil": "7.2.2", "megatron-core": "0.9.0"}


def having(name: str, version: str) -> BuildFacts:
    return BuildFacts("3.10", BASE.packages | {name: version}, training=True)


def torch(version: str | None) -> BuildFacts:
    return BuildFacts("3.10", {"torch": version} if version else {})


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (partial(check_base, BASE, ROW, "base", standin=False), ""),
        (
            partial(check_base, BuildFacts("3.12", BASE.packages), ROW, "base", standin=True),
            "base: has Python 3.12, and the row needs 3.10",
        ),
        (partial(check_base, torch(None), ROW, "base", standin=True), ""),
        (partial(check_base, torch(None), ROW, "base", standin=False), "base: has torch missing"),
        (partial(check_base, torch("2.4.0"), ROW, "base", standin=True), ""),
        (partial(check_base, torch("2.4.0"), ROW, "base", standin=False), "base: has torch 2.4.0"),
        (partial(check_platform, "linux/amd64", ROW, "base"), ""),
        (partial(check_platform, "linux/arm64", BOTH, "base"), ""),
        (
            partial(check_platform, "linux/arm64", ROW, "base"),
            "base: is for linux/arm64, and the row is for linux/amd64\n",
        ),
        (partial(check_platform, "linux/s390x", BOTH, "base"), "--platform linux/amd64 base"),
        (partial(check_torch, torch("2.5.1+cu124"), CUDA, standin=False), ""),
        (
            partial(check_torch, torch("2.5.1"), OLDER, standin=False),
            "the image has torch 2.5.1, and the row says 2.4.0",
        ),
        (partial(check_torch, torch("2.5.1"), OLDER, standin=True), "the row says 2.4.0"),
        (partial(check_torch, torch("9.9"), ROW, standin=False), ""),  # it is the base's
        (partial(check_layers, ["a", "b"], ["a", "b", "c"]), ""),
        (partial(check_layers, ["a", "b"], ["a", "x", "c"]), "another base"),
        *(
            (partial(check_needs, having("nvidia-resiliency-ext", has), RELEASES[one], "base"), "")
            for one, has in (("0.19.0", "0.6.0"), ("0.19.0", "0.6.1.dev2"), ("0.16.1", "0.5.0"))
        ),
        (partial(check_needs, BASE, RELEASES["0.19.0"], "base"), ""),
        (
            partial(
                check_needs, having("nvidia-resiliency-ext", "0.5.0"), RELEASES["0.19.0"], "base"
            ),
            "base: has nvidia-resiliency-ext 0.5.0: ",
        ),
        (partial(check_extensions, having("transformer-engine", "1"), ["transformer_engine"]), ""),
        (partial(check_extensions, having("transformer-engine", "1"), ["transformer.engine"]), ""),
        (partial(check_extensions, BASE, ["apex"]), "finds no apex"),
        (
            partial(check_image, BASE, BuildFacts("3.10", ADDED, training=True), {"psutil"}, True),
            "",
        ),
        (partial(check_image, BASE, having("torch", "9.9"), {"torch"}, True), " -> 9.9"),
        (partial(check_image, BASE, having("numpy", "9.9"), {"numpy"}, True), " -> 9.9"),
        (
            partial(check_image, BASE, torch(BASE.packages["torch"]), set(), False),
            "numpy 1.24.4 -> missing, psutil 5.9 -> missing",
        ),
        (
            partial(
                check_image, BASE, BuildFacts("3.10", BASE.packages, "no symbol"), set(), False
            ),
            "no symbol",
        ),
        (
            partial(check_image, BASE, BuildFacts("3.10", BASE.packages), set(), True),
            "training can't",
        ),
    ],
)
def test_what_is_refused_of_bases_and_images(check: Callable[[], None], said: str) -> None:
    with pytest.raises(BuildError) if said else nullcontext() as caught:
        check()
    assert not caught or said in str(caught.value)


@table("lines", "is_ours")
def test_what_was_made_from_one_of_ours_is_not_ours(lines: list[str | None], is_ours: bool) -> None:
    assert verify.is_ours([{"CreatedBy": line} for line in lines]) is is_ours
