"""The differences of two ends: which axes, in which order, and the run at each point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.base.settings import ROOT
from launcher.images.matrix.matrix_file import load_matrix
from launcher.runs.runfile import origins
from launcher.tools.bisect import axes
from launcher.tools.bisect.axes import Axis, Differences
from launcher.tools.bisect.checkouts import Checkout
from launcher.tools.bisect.ends import End, RowBuild

MATRIX = load_matrix(ROOT / "matrix.yaml")
CHECKOUTS = [Checkout(Path("/m"), commit * 40) for commit in "abc"]


def end(build: RowBuild | None = None, image: Any = "cpu", **keys: Any) -> End:
    config = origins.made({"name": "a", "image": image, **keys}, "test")
    return End("test", config, "/here", build=build)


def between(good: End, bad: End, contained: bool = True, packages: Any = None) -> Differences:
    return axes.between(good, bad, MATRIX, [None], packages, contained=contained)


def test_causes_are_sought_in_the_promised_order() -> None:
    """Base, extras, release, commits, keys; those of a layout together, and last."""
    keys = {"processes": 2, "training": {"lr": 1.0, "micro_batch_size": 2}}
    bad = end(RowBuild("24.08", "0.10.0"), parallel={"tensor_model_parallel_size": 2}, **keys)
    good = end(RowBuild("24.06", "0.9.0"), model={"swiglu": True})
    packages = {"b": "1", "c": "1", "same": "3"}, {"a": "2", "b": "2", "same": "3"}
    found = axes.between(good, bad, MATRIX, CHECKOUTS, packages, contained=True)
    assert [(one.kind, one.name) for one in found.axes] == [
        ("base", ""),
        ("package", "a"),
        ("package", "b"),
        ("package", "c"),
        ("release", ""),
        ("commit", ""),
        ("key", "model.swiglu"),
        ("key", "training.lr"),
        ("key", "parallel.tensor_model_parallel_size"),
        ("key", "processes"),
        ("key", "training.micro_batch_size"),
    ]
    assert found.axes[0].values == ("24.06", "24.07", "24.08")
    assert found.end == (2, 1, 1, 1, 1, 2, 1, 1, 1, 1, 1)


def test_a_point_has_bads_values_as_far_as_it_has_gone() -> None:
    bad = end(RowBuild("24.08", "0.10.0"), training={"lr": 1.0, "seed": 3})
    good = end(RowBuild("24.06", "0.9.0"), model={"swiglu": True}, training={"seed": 3})
    packages = {"b": "1", "c": "1"}, {"a": "2", "b": "2"}
    found = axes.between(good, bad, MATRIX, CHECKOUTS, packages, contained=True)
    first, last = found.at((0,) * len(found.axes)), found.at(found.end)
    assert first.build == RowBuild("24.06", "0.9.0")
    assert (first.packages, first.config["model"]) == ({"b": "1", "c": "1"}, {"swiglu": True})
    assert last.build == RowBuild("24.08", "0.10.0")
    assert (last.packages, last.checkout) == ({"a": "2", "b": "2"}, CHECKOUTS[-1])
    assert last.config == {"name": "a", "model": {}, "training": {"lr": 1.0, "seed": 3}}
    half = found.at((1, 1, 0, 0, 0, 1, 0, 1))
    assert half.build == RowBuild("24.07", "0.9.0")
    assert half.packages == {"a": "2", "b": "1", "c": "1"}
    assert half.checkout == CHECKOUTS[1]
    assert half.config["model"] == {"swiglu": True}
    assert half.config["training"] == {"seed": 3, "lr": 1.0}


def test_no_image_is_built_where_none_differs() -> None:
    """A key's trials took as long as a build each."""
    build = RowBuild("cpu", "0.16.1")
    found = between(end(build), end(build, gpus=2))
    assert found.at((1,)).build is None
    assert found.at((1,)).image == {"tag": "cpu"}


def test_keys_that_say_the_same_are_no_difference() -> None:
    """A default that is written out, another name, and another folder to save to."""
    good = end(training={"lr": 1.0}, checkpoint={"save": "a"}, logging={"tensorboard_dir": "a"})
    bad = end(training={"lr": 1.0}, processes=1, checkpoint={"save": "b"}, profile={"steps": "1-2"})
    assert between(good, bad).axes == ()


def test_a_section_that_is_there_on_one_side_differs_in_its_keys() -> None:
    bad = end(megatron={"as": "0.16"}, resources={"ulimits": {"core": 0}})
    found = between(end(), bad)
    assert [one.name for one in found.axes] == ["megatron.as", "resources.ulimits"]
    assert found.at(found.end).config["megatron"] == {"as": "0.16"}
    assert found.at(found.end).config["resources"] == {"ulimits": {"core": 0}}


def test_where_runs_start_and_what_stands_behind_them_differ_too() -> None:
    good, bad = end(), end()
    bad = End("bad", bad.config, "/there", ("--x", "1"))
    found = between(good, bad)
    assert [one.kind for one in found.axes] == ["arguments", "folder"]
    assert (found.at((1, 0)).rest, found.at((1, 0)).cwd) == (("--x", "1"), "/here")
    assert (found.at((0, 1)).rest, found.at((0, 1)).cwd) == ((), "/there")


def test_without_images_their_differences_cannot_be_tried_and_are_named() -> None:
    """`--backend local` said that the two didn't differ."""
    bad = end(RowBuild("24.08", "0.10.0", ("hf",)), gpus=2)
    found = between(end(RowBuild("24.06", "0.10.0")), bad, contained=False)
    assert [one.name for one in found.axes] == ["gpus"]
    reason = "this backend runs no image"
    assert found.untried == (f"base 24.06 → 24.08: {reason}", f"extras  → hf: {reason}")


def test_images_that_are_not_ours_differ_as_wholes() -> None:
    found = between(end(image={"name": "x:1"}), end(image={"name": "x:2", "python": "/p"}))
    (axis,) = found.axes
    assert (axis.kind, found.at((1,)).image) == ("image", {"name": "x:2", "python": "/p"})


@pytest.mark.parametrize(
    ("key", "value"), [("env.HF_TOKEN", "hf_abc"), ("megatron_args.wandb_api_key", "abc")]
)
def test_a_secret_is_not_shown(key: str, value: str) -> None:
    """What is shown goes into a file, and into questions to others."""
    section, _, name = key.partition(".")
    found = between(end(), end(**{section: {name: value}}))
    assert value not in found.told(found.end) + str([one.told(1) for one in found.axes])
    assert found.axes[0].told(1) == "(hidden)" or "hidden" in found.axes[0].told(1).lower()


@pytest.mark.parametrize(
    ("first", "last", "rows"),
    [
        ("24.02", "24.05", "24.02 24.03 24.04 24.05"),
        ("24.05", "24.03", "24.05 24.04 24.03"),
        ("cpu", "24.03", "cpu 24.03"),
        ("cuda-12.4", "cuda-13.0", "cuda-12.4 cuda-13.0"),
    ],
)
def test_rows_between_are_those_of_ngc(first: str, last: str, rows: str) -> None:
    assert axes.rows_between(first, last, MATRIX) == tuple(rows.split())


def test_releases_go_by_their_versions() -> None:
    """0.9.0 comes before 0.10.0; and a release that isn't in the matrix has its place."""
    assert axes.releases_between("0.9.0", "0.11.0", MATRIX) == ("0.9.0", "0.10.0", "0.11.0")
    assert axes.releases_between("0.11.0", "0.10.1", MATRIX) == ("0.11.0", "0.10.1")


def test_a_point_is_told_by_what_it_has_of_bad() -> None:
    kinds = [Axis("commit", "", tuple("abcd")), Axis("key", "x", (1, 2)), Axis("key", "y", (1, 2))]
    found = Differences(between(end(), end(gpus=2)).start, tuple(kinds))
    told = {point: found.told(point) for point in [(0, 0, 0), (3, 1, 1), (2, 0, 0), (3, 0, 1)]}
    assert [*told.values()] == [
        "GOOD",
        "BAD",
        "GOOD with 2 of BAD's 3 commits, up to c",
        "GOOD with 3 of BAD's 3 commits, up to d, BAD's key y 2",
    ]
