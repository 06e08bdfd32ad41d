"""What rows read from outside is fetched; one row's failure keeps no other from being."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher import cli
from launcher.build import fetch, inputs, source
from launcher.build.image import Request
from launcher.engine import connect
from launcher.errors import BuildError, EngineError, UsageError
from launcher.matrix.load import load_lock, load_matrix
from launcher.matrix.recipe import recipe
from launcher.screen import Progress
from launcher.settings import Settings

MATRIX, LOCK = load_matrix(), load_lock()
CPU = recipe(MATRIX, LOCK, "cpu")


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
        (recipe(MATRIX, LOCK, "24.10"), Request("24.10")),
        (CPU, Request("cpu", base="gone:1")),
        (CPU, Request("cpu", base="No")),
        (CPU, Request("cpu")),
    ]
    out = io.StringIO()
    images: Any = StandInImages()
    fetched, failed = inputs.fetch_all(rows, images, empty_site, Progress(out))
    assert [one.recipe for one in fetched] == [CPU]
    assert fetched[0].files == (tmp_path / "a.whl", tmp_path / "b.tar.gz")
    assert list(fetched[0].images) == [*CPU.images]
    codes = [(row.tag, error.exit_code) for row, error in failed]
    assert codes == [("24.10", 122), ("cpu", 125), ("cpu", 2)]
    assert "24.10: 10 Python packages: failed" in out.getvalue()
    without, _ = inputs.fetch_all([(CPU, Request("cpu"))], None, empty_site, Progress(out))
    assert without[0].images == {}


def test_a_commit_is_named_by_its_publisher_s_url(
    empty_site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = recipe(MATRIX, LOCK, "24.10")
    assert row.locked.git is not None
    found = SimpleNamespace(revision=row.locked.git.commit, at=tmp_path)
    monkeypatch.setattr(fetch, "wheels", lambda *_: [])
    monkeypatch.setattr(source, "from_git", lambda *_: found)
    site = replace(empty_site, git_mirror="https://mirror.example/")
    (one,), _ = inputs.fetch_all([(row, Request("24.10"))], None, site, Progress(io.StringIO()))
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

    def fetch_all(rows: list[inputs.Wanted], *_: object) -> tuple[list[Any], list[Any]]:
        fetched.extend(one.platform for one, _ in rows)
        return [], []

    monkeypatch.setattr(connect, "connect", lambda timeout: engine)
    monkeypatch.setattr(inputs, "fetch_all", fetch_all)
    assert cli.main(["fetch", *options]) == (0 if platforms else 2)
    assert fetched == platforms
