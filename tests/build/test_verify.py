"""What is refused of a base and of an image made from it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest

from launcher.build import verify
from launcher.build.verify import (
    Facts,
    check_base,
    check_extensions,
    check_image,
    check_layers,
    check_platform,
    check_torch,
)
from launcher.errors import BuildError
from launcher.matrix.load import load_matrix

ROWS = load_matrix().rows
ROW, CUDA, BOTH = ROWS["24.10"], ROWS["cuda-12.4"], ROWS["26.06"]
OLDER = CUDA.model_copy(update={"torch": "2.4.0"})
BASE = Facts("3.10", {"torch": "2.5.0a0+e000cf0ad9.nv24.10", "numpy": "1.24.4", "psutil": "5.9"})
ADDED = BASE.packages | {"psutil": "7.2.2", "megatron-core": "0.9.0"}


def having(name: str, version: str) -> Facts:
    return Facts("3.10", BASE.packages | {name: version}, training=True)


def torch(version: str | None) -> Facts:
    return Facts("3.10", {"torch": version} if version else {})


@pytest.mark.parametrize(
    ("check", "said"),
    [
        (partial(check_base, BASE, ROW, "base", standin=False), ""),
        (
            partial(check_base, Facts("3.12", BASE.packages), ROW, "base", standin=True),
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
        (partial(check_extensions, having("transformer-engine", "1"), ["transformer_engine"]), ""),
        (partial(check_extensions, having("transformer-engine", "1"), ["transformer.engine"]), ""),
        (partial(check_extensions, BASE, ["apex"]), "finds no apex"),
        (partial(check_image, BASE, Facts("3.10", ADDED, training=True), {"psutil"}, True), ""),
        (partial(check_image, BASE, having("torch", "9.9"), {"torch"}, True), " -> 9.9"),
        (partial(check_image, BASE, having("numpy", "9.9"), {"numpy"}, True), " -> 9.9"),
        (
            partial(check_image, BASE, torch(BASE.packages["torch"]), set(), False),
            "numpy 1.24.4 -> missing, psutil 5.9 -> missing",
        ),
        (
            partial(check_image, BASE, Facts("3.10", BASE.packages, "no symbol"), set(), False),
            "no symbol",
        ),
        (partial(check_image, BASE, Facts("3.10", BASE.packages), set(), True), "training can't"),
    ],
)
def test_what_is_refused_of_bases_and_images(check: Callable[[], None], said: str) -> None:
    with pytest.raises(BuildError) if said else nullcontext() as caught:
        check()
    assert not caught or said in str(caught.value)


@pytest.mark.parametrize(
    ("created_by", "is_ours"),
    [
        ("COPY /stage/ / # buildkit", True),
        ("/bin/sh -c #(nop) COPY dir:0a1b in / ", True),
        ("COPY /stage/ /opt # buildkit", False),
        ("/bin/sh -c #(nop) COPY dir:0a1b in /opt ", False),
        ("/bin/sh -c #(nop) COPY file:0a1b in / ", False),
        ("ENV PATH=/", False),
    ],
)
def test_our_layers_are_told_apart_by_the_history(created_by: str, is_ours: bool) -> None:
    assert bool(verify.ADDED.search(created_by)) is is_ours


@pytest.mark.parametrize(
    ("lines", "is_ours"),
    [
        (["ENV PYTHONPATH=/opt/megatron/lib", "COPY /stage/ / # buildkit", "FROM x"], True),
        (["/bin/sh -c #(nop)  LABEL a=b", "/bin/sh -c #(nop)  ENV PYTHONPATH=/o"], False),
        (["/bin/sh -c #(nop)  LABEL a=b", "/bin/sh -c #(nop) COPY dir:0a in / "], True),
        (["RUN pip install x", "ENV PYTHONPATH=/o", "COPY /stage/ / # buildkit"], False),
        (['CMD ["bash"]', "ENV PYTHONPATH=/o", "COPY /stage/ / # buildkit"], False),
        ([], False),
        ([None], False),
    ],
)
def test_what_was_made_from_one_of_ours_is_not_ours(lines: list[str | None], is_ours: bool) -> None:
    assert verify.is_ours([{"CreatedBy": line} for line in lines]) is is_ours
