"""matrix.lock: complete, stable, without URLs; what can't be reached keeps its pin."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.engine import registry
from launcher.engine.registry import Resolved
from launcher.errors import BuildError, EngineError
from launcher.matrix import lock
from launcher.matrix.load import load_lock, load_matrix
from launcher.matrix.schema import Lock
from launcher.settings import Settings

ROOT = Path(__file__).resolve().parents[2]


def test_the_lock_covers_the_matrix() -> None:
    matrix, locked = load_matrix(), load_lock()
    assert set(locked.needs) == set(matrix.builders)
    assert set(locked.packages) == {tag for tag, row in matrix.rows.items() if row.packages}
    for version, release in matrix.releases.items():
        git = locked.releases[version].git
        assert git is not None
        assert (git.commit, git.ref) == (release.git.commit, release.git.ref)
        assert (locked.releases[version].sdist is not None) == release.sdist


def test_it_holds_versions_and_hashes_and_no_urls() -> None:
    text = (ROOT / "matrix.lock").read_text()
    assert "://" not in text
    assert text == lock.dump(load_lock())


def test_needs_never_hold_what_belongs_to_the_base() -> None:
    for needs in load_lock().needs.values():
        names = {pin.partition("==")[0] for pin in needs.runtime}
        assert names.isdisjoint({"torch", "numpy", "transformer-engine", "apex"})


def unreachable(*_: object) -> None:
    raise BuildError("nothing can be reached")


@pytest.fixture(autouse=True)
def _no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(reference: str) -> Resolved:
        raise EngineError(f"{reference}: the registry can't be reached")

    monkeypatch.setattr(registry, "resolve", resolve)


def test_what_cannot_be_reached_keeps_its_pin_and_is_named(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    for name in ("_needs", "_resolve", "_lock_git", "_lock_sdist"):
        monkeypatch.setattr(lock, name, unreachable)
    said: list[str] = []
    locked = lock.lock(load_matrix(), load_lock(), site, said.append)
    assert locked == load_lock()
    assert any("needs of cp310" in line for line in said)
    assert any("0.9.0 from git" in line for line in said)


def test_without_an_old_pin_it_fails(monkeypatch: pytest.MonkeyPatch, site: Settings) -> None:
    monkeypatch.setattr(lock, "_needs", unreachable)
    with pytest.raises(BuildError, match="nothing can be reached"):
        lock.lock(load_matrix(), None, site, print)


def test_changed_needs_are_not_kept(monkeypatch: pytest.MonkeyPatch, site: Settings) -> None:
    monkeypatch.setattr(lock, "_needs", unreachable)
    matrix = load_matrix()
    needs = matrix.needs.model_copy(update={"runtime": [*matrix.needs.runtime, "zarr"]})
    with pytest.raises(BuildError):
        lock.lock(matrix.model_copy(update={"needs": needs}), load_lock(), site, print)


def test_a_release_whose_commit_was_changed_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, site: Settings
) -> None:
    data = yaml.safe_load((ROOT / "matrix.lock").read_text())
    data["releases"]["0.9.0"]["git"]["commit"] = "0" * 40
    for name in ("_needs", "_resolve", "_lock_git", "_lock_sdist"):
        monkeypatch.setattr(lock, name, unreachable)
    with pytest.raises(BuildError):
        lock.lock(load_matrix(), Lock.model_validate(data), site, lambda line: None)
