"""Extras: resolved against what a base has, refused with what clashes, kept in a lock."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.base import yamlfile
from launcher.base.errors import BuildError, UsageError
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.matrix.extras import PROTECTED, extras_of, normalised, suffix
from launcher.images.matrix.load import load_lock, load_matrix
from launcher.images.matrix.locked import ExtrasLock
from launcher.images.matrix.recipe import Recipe, recipe
from launcher.images.matrix.requirements import pinned_versions
from launcher.images.matrix.schema import Cap, Matrix
from launcher.images.sources import extras
from launcher.images.sources.extras import Ground, settled
from launcher.images.sources.resolve import clash_in

from .conftest import wheel
from .test_lock import links

__all__ = ["links"]

DIGEST, OTHER = (f"sha256:{one * 64}" for one in "ab")
BASE = {"numpy": "1.26.4", "regex": "2023.12.25", "torch": "2.5.0a0+e000cf0ad9.nv24.10"}
MATRIX = load_matrix()


def made(*names: str, tag: str = "24.10") -> Recipe:
    found = recipe(MATRIX, load_lock(), tag, extras=names)
    return replace(found, pins={**found.pins, "runtime": []})


def resolved(
    wanted: Recipe, site: Settings, matrix: Matrix = MATRIX, base: str = DIGEST, **changes: object
) -> tuple[list[str], str]:
    """The extras' versions, and what was said; `changes` are of a base that has BASE."""
    said = io.StringIO()
    on = Ground(base, BASE) if not changes else replace(Ground(base, BASE), **changes)  # type: ignore[arg-type]
    found = settled(wanted, matrix, lambda: on, site, Progress(said))
    return [pin.partition(" ")[0] for pin in found.pins["extras"]], said.getvalue()


@pytest.fixture
def index(links: Path) -> Path:
    """Packages of which the newest need more than BASE has."""
    wheel(links, "model", "1.0", "numpy<2", "torch", "helper")
    wheel(links, "model", "2.0", "numpy>=2", "helper")
    wheel(links, "helper", "1.0", "regex")
    wheel(links, "helper", "2.0", "regex>=2025")
    wheel(links, "numpy", "2.2.0")
    wheel(links, "regex", "2026.1.1")
    wheel(links, "torch", "2.11.0")
    return links


@pytest.mark.usefixtures("index")
def test_what_the_base_has_stays_as_it_is(empty_site: Settings) -> None:
    """The lock of a row's packages named numpy 2.2.6, which our own check of the image refused."""
    assert resolved(made("model"), empty_site)[0] == ["helper==1.0", "model==1.0"]
    newer = BASE | {"numpy": "2.1.0", "regex": "2025.2.1"}
    found, _ = resolved(made("model"), empty_site, packages=newer, base=OTHER)
    assert found == ["helper==2.0", "model==2.0"]


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["model>=2"], r"model>=2.0 needs numpy>=2, and the base has numpy 1.26.4"),
        (["helper>1"], r"helper>=2.0 needs regex>=2025, and the base has regex 2023.12.25"),
        (["numpy>=2"], r"this asks for numpy>=2, and the base has numpy 1.26.4"),
        (["model", "torch>=2.6"], "torch>=2.6, and the base has torch 2.5.0a0"),
        (["nothing-like-it"], "nothing-like-it"),
    ],
)
def test_what_cannot_be_met_names_both_that_clash(
    empty_site: Settings, names: list[str], told: str
) -> None:
    with pytest.raises(BuildError, match=told) as caught:
        resolved(made(*names), empty_site)
    assert "the extras of 24.10" in caught.value.problem
    assert not list(empty_site.extras.rglob("*.yaml"))


@pytest.mark.usefixtures("index")
def test_a_base_s_constraint_file_limits_what_it_has_not_installed(empty_site: Settings) -> None:
    """It names what is installed as well, in other versions at times: then that is what counts."""
    lines = ["helper<2  # as built", "numpy==9.9", "not a line!", "pillow @ file:///x", ""]
    newer = BASE | {"regex": "2025.2.1"}
    found, _ = resolved(made("helper"), empty_site, packages=newer, limits=lines)
    assert found == ["helper==1.0"]
    with pytest.raises(BuildError, match="helper>1, and here it is limited to helper<2"):
        resolved(made("helper>1"), empty_site, packages=newer, limits=lines)


@pytest.mark.usefixtures("index")
def test_a_cap_of_the_row_s_torch_holds_and_says_why(empty_site: Settings) -> None:
    """A transformers that is too new turns torch off, with no more than a warning."""
    cap = Cap(torch_before="2.5.0", package="helper<2", because="it takes a0 for older")
    matrix = MATRIX.model_copy(update={"caps": [cap]})
    newer = BASE | {"regex": "2025.2.1"}
    found, _ = resolved(made("helper"), empty_site, matrix, packages=newer)
    assert found == ["helper==1.0"]
    with pytest.raises(BuildError) as caught:
        resolved(made("helper>1"), empty_site, matrix, packages=newer)
    assert "it takes a0 for older" in caught.value.remedy
    tried = resolved(made("helper", tag="26.06"), empty_site, matrix, packages=newer)
    assert tried[0] == ["helper==2.0"]  # of torch 2.13


def test_what_only_a_base_can_have_is_never_brought(links: Path, empty_site: Settings) -> None:
    wheel(links, "flash_attn", "2.0")
    wheel(links, "model", "1.0", "flash-attn")
    with pytest.raises(BuildError, match="need flash-attn, which the base hasn't"):
        resolved(made("model"), empty_site)


def test_a_lock_is_kept_and_holds_wherever_it_would_come_out_the_same(
    index: Path, empty_site: Settings
) -> None:
    """Else each build could give another image, or one that is locked couldn't be shared."""
    first, said = resolved(made("model"), empty_site)
    assert "the extras are locked in" in said
    wheel(index, "helper", "1.5", "regex")
    again, said = resolved(made("model"), empty_site)
    assert (again, said) == (first, "")
    elsewhere, said = resolved(made("model"), empty_site, base=OTHER, packages={**BASE, "x": "1"})
    assert (elsewhere, said) == (first, "")
    for changes in (
        {"packages": BASE | {"regex": "2024.1"}},  # what it rests on is another
        {"packages": BASE | {"helper": "1.0"}},  # by now the row or Megatron brings it
        {"glibc": 17},
    ):
        assert "resolve model" in resolved(made("model"), empty_site, **changes)[1]
        (path,) = empty_site.extras.rglob("*.yaml")
        path.unlink()
        resolved(made("model"), empty_site)


@pytest.mark.usefixtures("index")
def test_a_lock_of_other_requirements_is_resolved_anew(empty_site: Settings) -> None:
    cap = Cap(torch_before="9", package="helper<1", because="of a defect")
    matrix = MATRIX.model_copy(update={"caps": [cap]})
    resolved(made("helper"), empty_site)
    with pytest.raises(BuildError, match="helper<1"):  # a cap that is new in the matrix
        resolved(made("helper"), empty_site, matrix)
    (path,) = empty_site.extras.rglob("*.yaml")
    path.write_text(path.read_text().replace("- helper", "- other"))
    assert "resolve helper" in resolved(made("helper"), empty_site)[1]
    path.write_text("pins: 7\n")
    with pytest.raises(UsageError, match=r"helper\.amd64\.yaml"):
        resolved(made("helper"), empty_site)


def test_what_megatron_needs_is_there_unless_the_base_has_it() -> None:
    wanted = recipe(MATRIX, load_lock(), "24.10", extras=["hf"])
    seen = {"packaging": "23.2", "torch": "2.5"}
    on = extras.ground(DIGEST, seen, [], "2.35", wanted)
    assert on.packages["packaging"] == "23.2"
    assert on.packages["einops"]
    assert on.glibc == 35
    assert extras.ground(DIGEST, {}, [], "", wanted).glibc == 28
    cpu = recipe(MATRIX, load_lock(), "cpu")
    assert extras.ground(DIGEST, {}, [], "2.36", cpu).packages["torch"] == "2.13.0+cpu"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ""),
        (["wandb", "hf", "wandb"], "-hf-wandb"),
        (["Flash_Attn.x"], "-flash-attn-x"),
    ],
)
def test_an_image_is_named_by_its_extras(names: list[str], expected: str) -> None:
    assert suffix(names) == expected
    assert suffix(names[::-1]) == expected


def test_versions_give_a_name_that_a_tag_can_have() -> None:
    found = {suffix([one]) for one in ("a<5", "a<6", "a[x]", "a" * 80)}
    assert len(found) == 4
    assert all(one.replace("-", "").isalnum() and len(one) < 30 for one in found)


@pytest.mark.parametrize("name", ["git+https://x/y", "a @ file:///x", "a; os_name == 'nt'", "-r x"])
def test_what_is_no_package_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="neither a set"):
        normalised([name])


def test_a_set_is_what_it_stands_for_and_the_row_s_own_are_there() -> None:
    row = MATRIX.rows["24.10"].model_copy(update={"extras": ["wandb"]})
    found = extras_of(MATRIX, row, ["hf", "peft<1"])
    assert found.names == ("hf", "peft<1", "wandb")
    assert found.asked == ("hf", "peft<1")  # the image's name: the row's own are no news
    assert {"transformers", "datasets", "peft<1", "wandb"} <= {*found.packages}
    assert "hf" not in found.packages


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Because all versions of mamba-ssm have no usable wheels and you require mamba-ssm",
            "mamba-ssm has no wheel for this Python",
        ),
        ("Because foo was not found in the package registry", "no index has a package foo"),
        ("Because you require a<1 and you require a>2", None),
    ],
)
def test_what_uv_says_otherwise(said: str, told: str | None) -> None:
    found = clash_in(said, {})
    assert (found is None) if told is None else (found is not None and told in found)


SEEN = {"numpy": "1.26.4", "packaging": "23.2", "pyyaml": "6.0.1"}
"""Of a stand-in for the bases that no machine of ours reaches; their torch is the row's."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, one in MATRIX.extras.items() if one.packages])
@pytest.mark.parametrize("tag", ["24.02", "24.10", "25.12", "26.06", "cuda-12.8", "cpu"])
def test_a_set_resolves_on_a_row_or_is_refused_by_name(tag: str, name: str, site: Settings) -> None:
    """By the package index itself: what is new there can clash with a base that is old."""
    if MATRIX.extras[name].extensions and not MATRIX.rows[tag].cuda:
        with pytest.raises(UsageError, match="the row has no CUDA"):
            recipe(MATRIX, load_lock(), tag, extras=[name])
        return
    wanted = recipe(MATRIX, load_lock(), tag, extras=[name])
    seen = {} if wanted.row.packages else {**SEEN, "torch": wanted.row.torch}
    glibc = "2.35" if "22.04" in wanted.row.os else "2.39"
    on = extras.ground(DIGEST, seen, [], glibc, wanted)
    if name == "deepep":
        with pytest.raises(BuildError, match="deep-ep has no wheel"):
            extras.resolve_lock(wanted, MATRIX, on, site)
        return
    lock = extras.resolve_lock(wanted, MATRIX, on, site)
    assert extras.is_of(lock, wanted, extras.limits_of(wanted, MATRIX))
    assert extras.holds_on(lock, on)
    assert not {*pinned_versions(lock.pins)} & {*on.packages, *PROTECTED}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "extras").glob("*/*.yaml")), ids=lambda one: one.name
)
def test_a_lock_that_is_here_is_of_its_set(path: Path) -> None:
    """A set that was changed would be resolved anew at each user's, without a word."""
    lock = yamlfile.load(path, ExtrasLock)
    wanted = recipe(MATRIX, load_lock(), lock.tag, extras=[path.name.split(".")[0]])
    assert extras.is_of(lock, wanted, extras.limits_of(wanted, MATRIX))
    assert extras.path_of(wanted) == path.relative_to(ROOT / "extras")
    assert path.read_text() == extras.dump(lock)
