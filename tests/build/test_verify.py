"""What is refused of a base and of an image made from it."""

from __future__ import annotations

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

ROW = load_matrix().rows["24.10"]
BASE = Facts("3.10", {"torch": "2.5.0a0+e000cf0ad9.nv24.10", "numpy": "1.24.4", "psutil": "5.9"})


def test_the_base_of_the_row_is_taken_by_its_torch_prefix() -> None:
    check_base(BASE, ROW, "base", standin=False)


def test_another_python_is_refused() -> None:
    with pytest.raises(BuildError, match=r"has Python 3\.12, and the row needs 3\.10"):
        check_base(Facts("3.12", BASE.packages), ROW, "base", standin=True)


@pytest.mark.parametrize("packages", [{}, {"torch": "2.4.0"}])
def test_another_torch_or_none_is_refused_unless_it_is_a_stand_in(packages: dict[str, str]) -> None:
    facts = Facts("3.10", packages)
    with pytest.raises(BuildError, match="torch"):
        check_base(facts, ROW, "base", standin=False)
    check_base(facts, ROW, "base", standin=True)


def test_a_base_for_other_machines_is_refused() -> None:
    check_platform("linux/amd64", ROW, "base")
    with pytest.raises(BuildError, match=r"base: is for linux/arm64, and the row is for linux/am"):
        check_platform("linux/arm64", ROW, "base")
    both = load_matrix().rows["26.06"]
    check_platform("linux/arm64", both, "base")
    with pytest.raises(BuildError, match="is for linux/s390x") as caught:
        check_platform("linux/s390x", both, "base")
    assert "--platform linux/amd64 base" in caught.value.remedy


@pytest.mark.parametrize("name", ["transformer_engine", "transformer.engine"])
def test_an_extension_is_found_however_its_name_is_written(name: str) -> None:
    check_extensions(Facts("3.10", {"transformer-engine": "1.13.0", "apex": "0.1"}), [name, "apex"])
    with pytest.raises(BuildError, match=f"finds no {name}$"):
        check_extensions(Facts("3.10", {"apex": "0.1"}), [name, "apex"])


@pytest.mark.parametrize("torch", ["2.5.1", "2.5.1+cu124"])
def test_a_row_with_packages_has_its_torch(torch: str) -> None:
    row = load_matrix().rows["cuda-12.4"]
    check_torch(Facts("3.10", {"torch": torch}), row, standin=False)
    older = row.model_copy(update={"torch": "2.4.0"})
    for standin in (False, True):
        with pytest.raises(BuildError, match=r"has torch 2\.5\.1.*, and the row says 2\.4\.0"):
            check_torch(Facts("3.10", {"torch": torch}), older, standin)


def test_the_torch_of_a_row_without_packages_is_its_base_s() -> None:
    check_torch(Facts("3.10", {"torch": "9.9"}), ROW, standin=False)


def test_an_image_lies_on_the_base_that_was_looked_into() -> None:
    check_layers(["a", "b"], ["a", "b", "c"])
    with pytest.raises(BuildError, match="another base"):
        check_layers(["a", "b"], ["a", "x", "c"])


def test_an_image_that_only_adds_is_right() -> None:
    packages = BASE.packages | {"psutil": "7.2.2", "megatron-core": "0.9.0"}
    check_image(BASE, Facts("3.10", packages, training=True), {"psutil"}, whole=True)


@pytest.mark.parametrize("name", ["torch", "numpy"])
def test_a_changed_torch_or_numpy_is_refused_even_if_we_added_it(name: str) -> None:
    changed = Facts("3.10", BASE.packages | {name: "9.9"}, training=True)
    with pytest.raises(BuildError, match=rf"{name} .* -> 9\.9"):
        check_image(BASE, changed, {name}, whole=True)


def test_a_package_that_went_is_refused() -> None:
    left = {name: version for name, version in BASE.packages.items() if name != "psutil"}
    with pytest.raises(BuildError, match=r"psutil 5\.9 -> missing"):
        check_image(BASE, Facts("3.10", left), set(), whole=False)


def test_an_extension_that_does_not_load_and_a_missing_training_are_refused() -> None:
    with pytest.raises(BuildError, match="undefined symbol"):
        check_image(BASE, Facts("3.10", BASE.packages, "undefined symbol: x"), set(), whole=False)
    with pytest.raises(BuildError, match=r"megatron\.training"):
        check_image(BASE, Facts("3.10", BASE.packages), set(), whole=True)


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
