"""What a row needs by the lock, and that one row's failure keeps no other from being fetched."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import cli
from launcher.build import fetch, inputs, source
from launcher.build.image import Builds, Request, check_pins
from launcher.engine import connect
from launcher.errors import BuildError, EngineError, UsageError
from launcher.matrix.load import load_lock, load_matrix
from launcher.progress import Progress
from launcher.settings import Settings

MATRIX, LOCK = load_matrix(), load_lock()
CPU = inputs.needed(MATRIX, LOCK, Request("cpu"))


def test_a_row_needs_its_wheels_its_source_and_two_images() -> None:
    assert (CPU.release, CPU.python, CPU.kind) == ("0.16.1", "3.11", "sdist")
    needs = LOCK.needs["cp311"]
    assert set(CPU.pins) == {*needs.build, *needs.runtime, *LOCK.packages["cpu"]}
    assert len(CPU.pins) == len(set(CPU.pins))
    assert [name for name, _ in CPU.images] == [MATRIX.rows["cpu"].base, MATRIX.builders["cp311"]]


def test_a_release_without_an_sdist_is_taken_from_git() -> None:
    assert inputs.needed(MATRIX, LOCK, Request("cpu", "0.9.0")).kind == "git"
    assert inputs.needed(MATRIX, LOCK, Request("24.10")).kind == "git"


def test_images_in_place_of_the_row_s_are_kept_beside_their_names() -> None:
    chosen = inputs.needed(MATRIX, LOCK, Request("cpu", base="a:1", builder="b:1"))
    assert [one for _, one in chosen.images] == ["a:1", "b:1"]


def test_what_the_lock_lacks_is_told_at_once() -> None:
    empty = LOCK.model_copy(update={"needs": {}, "packages": {}, "releases": {}})
    with pytest.raises(UsageError) as caught:
        inputs.needed(MATRIX, empty, Request("cpu"))
    assert caught.value.problem == (
        "matrix.lock has no needs of cp311, no packages of cpu, no releases of 0.16.1"
    )
    assert "make lock" in caught.value.remedy
    with pytest.raises(UsageError, match="no tag 'cpux'"):
        inputs.needed(MATRIX, LOCK, Request("cpux"))


@pytest.mark.parametrize(
    ("change", "said", "remedy"),
    [
        (
            {"packages": ["numpy", "torch==2.14.0+cpu", "SciPy>=1"], "torch": "2.14.0+cpu"},
            "matrix.lock is older than the packages of cpu: "
            "torch==2.14.0+cpu (locked: 2.13.0+cpu), SciPy>=1 (not locked)",
            "Run `make lock`.",
        ),
        (
            {"torch": "2.14.0"},
            "cpu: the row says torch 2.14.0, and matrix.lock has 2.13.0+cpu",
            "Name the same torch in the row's `packages`, then run `make lock`.",
        ),
    ],
)
def test_packages_that_were_changed_and_not_locked_are_refused(
    empty_site: Settings, change: dict[str, Any], said: str, remedy: str
) -> None:
    row = MATRIX.rows["cpu"].model_copy(update=change)
    changed = MATRIX.model_copy(update={"rows": {**MATRIX.rows, "cpu": row}})
    building = Builds(SimpleNamespace(), empty_site, Progress(io.StringIO()))
    building.matrix = changed
    for ask in (
        lambda: inputs.needed(changed, LOCK, Request("cpu")),
        lambda: building._packages(Request("cpu")),
    ):
        with pytest.raises(UsageError) as caught:
            ask()
        assert (caught.value.problem, caught.value.remedy) == (said, remedy)


def test_needs_that_were_changed_and_not_locked_are_refused() -> None:
    needs = MATRIX.needs.model_copy(update={"runtime": [*MATRIX.needs.runtime, "NumPy>=2"]})
    changed = MATRIX.model_copy(update={"needs": needs})
    said = r"matrix\.lock is older than the matrix's runtime needs: NumPy>=2 \(not locked\)\n"
    with pytest.raises(UsageError, match=said):
        inputs.needed(changed, LOCK, Request("cpu"))


@pytest.mark.parametrize("tag", [tag for tag, row in MATRIX.rows.items() if row.packages])
def test_what_is_locked_is_taken_however_its_name_is_written(tag: str) -> None:
    row = MATRIX.rows[tag]
    check_pins(tag, row, LOCK.packages[tag])
    other = [one.upper().replace("-", "_") for one in row.packages]
    check_pins(tag, row.model_copy(update={"packages": other}), LOCK.packages[tag])


def test_what_a_bundle_lacks_is_named() -> None:
    files = {fetch.sha256_of_pin(pin) for pin in CPU.pins}
    assert CPU.locked.sdist is not None
    assert inputs.unmet(CPU, files, []) == ["Megatron 0.16.1"]
    files.add(CPU.locked.sdist.sha256)
    assert inputs.unmet(CPU, files, []) == []
    first = CPU.pins[0]
    assert inputs.unmet(CPU, files - {fetch.sha256_of_pin(first)}, []) == [first.split()[0]]
    row = inputs.needed(MATRIX, LOCK, Request("24.10"))
    files = {fetch.sha256_of_pin(pin) for pin in row.pins}
    assert inputs.unmet(row, files, ["a" * 40]) == ["Megatron 0.9.0"]
    assert row.locked.git is not None
    assert inputs.unmet(row, files, [row.locked.git.commit]) == []


def test_every_file_that_the_lock_names_is_one_that_prune_keeps() -> None:
    locked = inputs.locked_hashes(LOCK)
    for tag in MATRIX.rows:
        row = inputs.needed(MATRIX, LOCK, Request(tag))
        assert {fetch.sha256_of_pin(pin) for pin in row.pins} <= locked
    assert {one.sdist.sha256 for one in LOCK.releases.values() if one.sdist} <= locked


class StandInImages:
    """Finds every image but one."""

    def find(self, reference: str, chosen: str | None = None) -> Any:
        if chosen == "gone:1":
            raise EngineError("gone:1: the registry has no such image (404)")
        if chosen == "No":
            raise UsageError("No: not an image's name")
        return SimpleNamespace(id=f"sha256:{len(chosen or reference):064x}")


def test_a_row_that_fails_keeps_no_other_from_being_fetched(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wheels(pins: list[str], python: str, site: Settings, platform: str) -> list[Path]:
        if python == "3.10":
            raise BuildError("pip can't fetch it")
        return [tmp_path / "a.whl"]

    monkeypatch.setattr(fetch, "wheels", wheels)
    monkeypatch.setattr(source, "from_sdist", lambda *_: SimpleNamespace(at=tmp_path / "b.tar.gz"))
    rows = [
        inputs.needed(MATRIX, LOCK, Request("24.10")),
        inputs.needed(MATRIX, LOCK, Request("cpu", base="gone:1")),
        inputs.needed(MATRIX, LOCK, Request("cpu", base="No")),
        CPU,
    ]
    out = io.StringIO()
    images: Any = StandInImages()
    fetched, failed = inputs.fetch_all(rows, images, empty_site, Progress(out))
    assert [one.row for one in fetched] == [CPU]
    assert fetched[0].files == (tmp_path / "a.whl", tmp_path / "b.tar.gz")
    assert list(fetched[0].images) == [name for name, _ in CPU.images]
    codes = [(row.tag, error.exit_code) for row, error in failed]
    assert codes == [("24.10", 122), ("cpu", 125), ("cpu", 2)]
    assert "24.10: 10 Python packages: failed" in out.getvalue()
    without, _ = inputs.fetch_all([CPU], None, empty_site, Progress(out))
    assert without[0].images == {}


def test_a_commit_is_named_by_its_publisher_s_url(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = inputs.needed(MATRIX, LOCK, Request("24.10"))
    assert row.locked.git is not None
    found = SimpleNamespace(revision=row.locked.git.commit, at=tmp_path)
    monkeypatch.setattr(fetch, "wheels", lambda *_: [])
    monkeypatch.setattr(source, "from_git", lambda *_: found)
    site = replace(empty_site, git_mirror="https://mirror.example/")
    (one,), _ = inputs.fetch_all([row], None, site, Progress(io.StringIO()))
    assert one.commits == (
        inputs.Commit("https://github.com/NVIDIA/Megatron-LM.git", row.locked.git.commit, tmp_path),
    )


@pytest.mark.parametrize(
    ("options", "platforms"),
    [
        (["26.06", "24.10"], ["linux/arm64", "linux/amd64"]),
        (["26.06", "--no-images"], ["linux/amd64"]),
        (["26.06", "--no-images", "--platform", "linux/arm64"], ["linux/arm64"]),
        (["26.06", "--platform", "linux/amd64"], []),
    ],
)
def test_wheels_are_for_the_engine_whose_images_are_fetched(
    monkeypatch: pytest.MonkeyPatch, options: list[str], platforms: list[str]
) -> None:
    engine = SimpleNamespace(version=lambda: {"Os": "linux", "Arch": "arm64"})
    fetched: list[str] = []

    def fetch_all(rows: list[inputs.Needed], *_: object) -> tuple[list[Any], list[Any]]:
        fetched.extend(row.platform for row in rows)
        return [], []

    monkeypatch.setattr(connect, "connect", lambda timeout: engine)
    monkeypatch.setattr(inputs, "fetch_all", fetch_all)
    assert cli.main(["fetch", *options]) == (0 if platforms else 2)
    assert fetched == platforms


def test_a_row_of_two_platforms_needs_wheels_and_a_builder_of_the_one_that_is_named() -> None:
    amd64 = inputs.needed(MATRIX, LOCK, Request("26.06"))
    arm64 = inputs.needed(MATRIX, LOCK, Request("26.06"), "linux/arm64")
    assert (amd64.platform, arm64.platform) == ("linux/amd64", "linux/arm64")
    assert {*LOCK.needs["cp312-arm64"].runtime} <= {*arm64.pins}
    assert {*LOCK.needs["cp312"].runtime} <= {*amd64.pins}
    assert [name for name, _ in arm64.images] == [
        MATRIX.rows["26.06"].base,
        MATRIX.builders["cp312-arm64"],
    ]
    with pytest.raises(UsageError, match=r"24\.10: is not for linux/arm64") as caught:
        inputs.needed(MATRIX, LOCK, Request("24.10"), "linux/arm64")
    assert caught.value.remedy == "The row is for linux/amd64."
