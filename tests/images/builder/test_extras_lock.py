"""Extras: resolved against what a base has, refused with what clashes, kept in a lock."""

from __future__ import annotations

import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from launcher.base import yamlfile
from launcher.base.errors import BuildError, UsageError
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.matrix.extras import PROTECTED, extras_of, normalised, suffix
from launcher.images.matrix.locked import ExtrasLock
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import Recipe, recipe
from launcher.images.matrix.requirements import pinned_versions
from launcher.images.matrix.schema import Cap, Matrix
from launcher.images.sources import clash, extras_lock
from launcher.images.sources.clash import clash_in, overlap
from launcher.images.sources.extras_lock import Ground, settled
from launcher.images.sources.index import Pip
from launcher.images.sources.uv import ResolvedSet
from tests.tables import table

from .conftest import wheel
from .test_lock import links

__all__ = ["links"]

DIGEST, OTHER = (f"sha256:{one * 64}" for one in "ab")
BASE = {"numpy": "1.26.4", "regex": "2023.12.25", "torch": "2.5.0a0+e000cf0ad9.nv24.10"}
BASE |= {"megatron-core": "0.9.0"}
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
    wheel(links, "bridge", "1.0", "megatron-core>=0.15")
    return links


@pytest.mark.usefixtures("index")
def test_what_the_base_has_stays_as_it_is(empty_site: Settings) -> None:
    """The lock of a row's packages named numpy 2.2.6, which our own check of the image refused."""
    assert resolved(made("model"), empty_site)[0] == ["helper==1.0", "model==1.0"]
    newer = BASE | {"numpy": "2.1.0", "regex": "2025.2.1"}
    found, _ = resolved(made("model"), empty_site, packages=newer, base=OTHER)
    assert found == ["helper==2.0", "model==2.0"]


@pytest.mark.usefixtures("index")
@table("names", "told")
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


@pytest.mark.parametrize("name", ["flash-attn", "torch"])
def test_what_only_a_base_can_have_is_never_brought(
    links: Path, empty_site: Settings, name: str
) -> None:
    wheel(links, name.replace("-", "_"), "2.0")
    wheel(links, "model", "1.0", name)
    with pytest.raises(BuildError, match=f"need {name}, which the base hasn't"):
        resolved(made("model"), empty_site, packages={"numpy": "1.26.4"})


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
    on = extras_lock.ground(DIGEST, seen, [], "2.35", wanted)
    assert on.packages["packaging"] == "23.2"
    assert on.packages["einops"]
    assert on.glibc == 35
    assert extras_lock.ground(DIGEST, {}, [], "", wanted).glibc == 28
    assert on.packages["megatron-core"] == "0.9.0"
    cpu = recipe(MATRIX, load_lock(), "cpu")
    assert extras_lock.ground(DIGEST, {}, [], "2.36", cpu).packages["torch"] == "2.13.0+cpu"


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


@table("names", "told")
def test_what_is_no_package_is_refused(names: list[str], told: str) -> None:
    with pytest.raises(UsageError, match="neither a set") as caught:
        normalised(names)
    assert told in caught.value.remedy


def test_a_set_has_no_versions_unless_it_is_called_as_a_package() -> None:
    """hf<2 would be another project, which an index has."""
    for name in ("hf<2", "Hf[x]", "mamba==2"):
        with pytest.raises(UsageError, match="is a set of matrix"):
            extras_of(MATRIX, MATRIX.rows["24.10"], [name])
    assert extras_of(MATRIX, MATRIX.rows["24.10"], ["wandb<1"]).packages == ("wandb<1",)


def test_a_set_is_what_it_stands_for_and_the_row_s_own_are_there() -> None:
    row = MATRIX.rows["24.10"].model_copy(update={"extras": ["wandb"]})
    found = extras_of(MATRIX, row, ["hf", "peft<1"])
    assert found.names == ("hf", "peft<1", "wandb")
    assert found.asked == ("hf", "peft<1")  # the image's name: the row's own are no news
    assert {"transformers", "datasets", "peft<1", "wandb"} <= {*found.packages}
    assert "hf" not in found.packages


THERE = {"numpy": "1.26.4", "onnx": "1.16.2", "fsspec": "2024.9.0", "engine": "1.11.0+4df"}
CLASHES = yaml.safe_load(Path(__file__).with_name("clashes.yaml").read_text())


@pytest.mark.parametrize("case", CLASHES.values(), ids=CLASHES)
def test_the_two_that_clash_are_named_in_a_sentence(case: dict[str, str]) -> None:
    found = clash_in(case["said"], THERE | {"python": "3.10"}, ["model<5.20"])
    assert found == case["told"]


LONG = 1 << 17
HOSTILE = [
    "a" * LONG,
    "you require a<1 and " * (LONG // 20),
    "a[" * (LONG // 2),
    "a{" * (LONG // 2),
    "a<1" + ",<1" * (LONG // 3),
    "a<1" + " a<1" * (LONG // 4),
    "all versions of " * (LONG // 16),
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("said", HOSTILE, ids=[one[:20] for one in HOSTILE])
def test_a_long_text_is_read_in_no_more_than_its_length(said: str) -> None:
    """What begins anew at each letter takes minutes for these; they take a tenth of a second.

    The cause is the last of all, behind them.
    """
    cause = ". Because model>=1 depends on numpy>=2 and numpy==1.26.4, we can conclude"
    found = clash_in(said + cause, THERE)
    assert found == "model>=1 needs numpy>=2, and the base has numpy 1.26.4"


def test_a_claim_is_compared_with_a_few_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package whose every version is named would be compared with all others."""
    compared = []
    monkeypatch.setattr(clash, "overlap", lambda *pair: compared.append(pair) or True)
    clash_in("".join(f"a{n} depends on b>{n} and " for n in range(300)), {})
    assert 300 <= len(compared) <= 300 * clash.RIVALS


@table("one", "other", "both")
def test_two_specifiers_that_no_version_meets(one: str, other: str, both: bool) -> None:
    assert overlap(one, other) == overlap(other, one) == both


def test_what_a_base_s_packages_need_in_turn_is_the_base_s_affair(
    links: Path, empty_site: Settings
) -> None:
    """NGC ships packages that pip check refuses; an extra that needs one was refused for that."""
    board = wheel(links, "board", "2.9", "regex<2000")
    board.rename(board.with_name("board-2.9-cp310-cp310-manylinux_2_17_x86_64.whl"))
    wheel(links, "light", "1.0", "board[fast]")
    found, _ = resolved(made("light"), empty_site, packages=BASE | {"board": "2.9"})
    assert found == ["light==1.0"]
    with pytest.raises(BuildError, match=r"board\S* needs regex<2000"):
        resolved(made("board[fast]"), empty_site, packages=BASE | {"board": "2.9"})


def test_an_old_release_is_refused_where_the_newest_has_no_wheel(
    links: Path, empty_site: Settings
) -> None:
    """Without a word, deepspeed became 0.3.1.dev3 of 2020: the last one with a wheel."""
    wheel(links, "speed", "0.3")
    for name in ("speed-0.19.tar.gz", "speed-0.20rc1.tar.gz", "speedier-9.tar.gz", "notes.txt"):
        (links / name).touch()
    with pytest.raises(BuildError, match=r"speed 0\.19, the newest, has no wheel") as caught:
        resolved(made("speed"), empty_site)
    assert "the newest with one is 0.3" in caught.value.problem
    assert "pip wheel --no-deps -w wheels 'speed==0.19'" in caught.value.remedy
    assert resolved(made("speed==0.3"), empty_site)[0] == ["speed==0.3"]
    wheel(links, "speed", "0.19")
    found, said = resolved(made("speed"), empty_site)
    assert found == ["speed==0.19"]
    assert said.rstrip().endswith(".yaml: speed 0.19")


def test_a_dependency_that_is_years_behind_its_newest_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a word, datasets 1.1.1 of 2020 stood beside trl of today: the base kept it back."""
    newest = {"sets": ("4.0", True), "six": ("1.1", True), "held": ("2.0", False)}
    monkeypatch.setattr(
        extras_lock.index,
        "newest_release",
        lambda name, *_: (Version(newest[name][0]), newest[name][1]) if name in newest else None,
    )
    times = {"trl": 2026, "sets": 2020, "six": 2021, "held": 2020, "gone": 2020, "near": 2024}
    found = ResolvedSet(
        [f"{one}==1.1" for one in (*times, "timeless")],
        {},
        {one: datetime(year, 1, 1) for one, year in times.items()},
    )
    pip = Pip({})
    assert extras_lock.left_behind(found, made("trl"), pip) == ["sets 1.1 (newest: 4.0)"]
    assert extras_lock.left_behind(found, made("trl", "sets<2"), pip) == []  # as was asked
    assert extras_lock.left_behind(replace(found, times={}), made("trl"), pip) == []


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
    on, pip = extras_lock.ground(DIGEST, seen, [], glibc, wanted), Pip.configured(site)
    if name == "deepep":
        with pytest.raises(BuildError, match="deep-ep has no wheel"):
            extras_lock.resolve_extras(wanted, MATRIX, on, site, pip)
        return
    lock = extras_lock.lock_of(
        wanted, on, extras_lock.resolve_extras(wanted, MATRIX, on, site, pip)
    )
    assert extras_lock.is_of(lock, wanted, extras_lock.limits_of(wanted, MATRIX))
    assert extras_lock.holds_on(lock, on)
    assert not {*pinned_versions(lock.pins)} & {*on.packages, *PROTECTED}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "extras").glob("*/*.yaml")), ids=lambda one: one.name
)
def test_a_lock_that_is_here_is_of_its_set(path: Path) -> None:
    """A set that was changed would be resolved anew at each user's, without a word."""
    lock = yamlfile.load(path, ExtrasLock)
    wanted = recipe(MATRIX, load_lock(), lock.tag, extras=[path.name.split(".")[0]])
    assert extras_lock.is_of(lock, wanted, extras_lock.limits_of(wanted, MATRIX))
    assert extras_lock.path_of(wanted) == path.relative_to(ROOT / "extras")
    assert path.read_text() == extras_lock.dump(lock)
