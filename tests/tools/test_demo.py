"""What the demo checks of its two runs, and that each check can fail."""

from __future__ import annotations

import io
import math
import socket
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.base.screen import Progress
from launcher.base.settings import settings
from launcher.images.builder import downloads
from launcher.images.builder.image import BuildRequest
from launcher.images.engine import connect
from launcher.images.engine.private import debian, private
from launcher.tools import demo
from launcher.tools.demo import DemoError, DemoLosses

FIRST = DemoLosses(training={10: 3.0, 20: 2.0}, held_out={20: 2.1})
RESUMED = DemoLosses(training={30: 1.9, 40: 1.8}, held_out={40: 1.9})
BUILDS = SimpleNamespace(recipe=lambda request: request, matrix=None, site=None, client=None)


@pytest.fixture(autouse=True)
def no_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_image", lambda client, name: None)


def test_two_runs_that_show_what_they_should_pass() -> None:
    demo._check(FIRST, RESUMED, entropy=3.0)


@pytest.mark.parametrize(
    ("first", "resumed", "entropy", "said"),
    [
        (FIRST, RESUMED, 2.0, "is not below 2.000"),
        (FIRST, DemoLosses({10: 3.0, 40: 1.8}, {40: 1.9}), 3.0, "no checkpoint was loaded"),
        (FIRST, DemoLosses({30: 1.9}, {30: 1.9}), 3.0, "did not go on to its last iteration"),
    ],
)
def test_each_check_can_fail(
    first: DemoLosses, resumed: DemoLosses, entropy: float, said: str
) -> None:
    with pytest.raises(DemoError, match=said) as caught:
        demo._check(first, resumed, entropy)
    assert caught.value.exit_code == 1


def in_place_of_the_launcher(folder: Path, program: str, patch: pytest.MonkeyPatch) -> None:
    (folder / "launcher").mkdir()
    (folder / "launcher/__init__.py").touch()
    (folder / "launcher/__main__.py").write_text(f"{program}\n")
    patch.chdir(folder)


@pytest.mark.parametrize(
    ("program", "said"), [("raise SystemExit(3)", "exit code 3"), ("", "printed no losses")]
)
def test_a_run_that_ends_badly_or_shows_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    in_place_of_the_launcher(tmp_path, program, monkeypatch)
    with pytest.raises(DemoError, match=said):
        demo.launch(tmp_path)


def test_the_losses_are_read_from_upstream_s_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        " iteration       10/      20 | consumed samples: 80 | lm loss: 3.000000E+00 | x",
        " validation loss at iteration 20 on validation set | lm loss value: 2.1E+00 | PPL",
    ]
    shown = f"print({chr(10).join(lines)!r})"  # and not among the user's own runs
    program = f"import os\nif os.environ['LAUNCHER_RUNS'] == '{tmp_path}/runs': {shown}\n"
    in_place_of_the_launcher(tmp_path, program, monkeypatch)
    assert demo.launch(tmp_path) == DemoLosses({10: 3.0}, {20: 2.1})


def test_the_entropy_of_two_equally_frequent_tokens_is_that_of_a_coin() -> None:
    assert demo.unigram_entropy([[1, 2], [2, 1]]) == pytest.approx(math.log(2))


def test_a_private_engine_that_others_keep_up_is_not_said_to_end() -> None:
    """It was said to, though DOCKER_HOST named the one of another terminal's `launcher engine`."""
    with tempfile.TemporaryDirectory(prefix="lp-", dir="/tmp") as folder:
        path = f"{folder}/docker.sock"
        with socket.socket(socket.AF_UNIX) as engine:
            engine.bind(path)
            engine.listen()
            assert demo.whereabouts(f"unix://{path}", 1.0).endswith(f"DOCKER_HOST=unix://{path}")
        assert "which has ended" in demo.whereabouts(f"unix://{path}", 1.0)
        Path(path).unlink()
        assert "which has ended" in demo.whereabouts(f"unix://{path}", 1.0)


@pytest.mark.parametrize(("there", "made"), [("", True), ("engine/packages/.complete", False)])
def test_the_base_is_made_while_an_engine_is_fetched(
    there: str, made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One after the other they were ten seconds more; an engine that is there may pull the base."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(connect, "_default_hosts", lambda env: [("unix:///nowhere", "a test")])
    monkeypatch.setattr(private, "unsupported", lambda: "")
    asked = list[object]()
    monkeypatch.setattr(debian, "debian_base", lambda client, *_, **__: asked.append(client))
    if there:
        (tmp_path / there).parent.mkdir(parents=True)
        (tmp_path / there).touch()
    site = replace(settings(), cache=tmp_path)
    demo._base_ahead(site, Progress(io.StringIO())).join()
    assert asked == [None] * made


def test_nothing_is_fetched_where_the_image_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second demo asked for 31 packages and a git repository that nothing needed."""
    asked = list[object]()
    monkeypatch.setattr(downloads, "fetch_all", lambda *_: asked.append(1))
    monkeypatch.setattr(demo, "find_image", lambda client, name: {"Id": name})
    with demo._fetching(BUILDS, "cpu", Progress(io.StringIO())):  # type: ignore[arg-type]
        pass
    assert not asked


def test_packages_are_fetched_while_the_base_is_made_and_the_rest_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One after the other they were ten seconds more, of which nobody saw anything."""
    begun, go_on, said = threading.Event(), threading.Event(), io.StringIO()
    asked = list[object]()

    def fetch_all(rows: list[tuple[object, BuildRequest]], *_: object) -> None:
        asked.append(rows[0][1].tag)
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(downloads, "fetch_all", fetch_all)
    progress = Progress(said)

    def step(text: str) -> None:
        Progress.step(progress, text)
        go_on.set()

    monkeypatch.setattr(progress, "step", step)
    with demo._fetching(BUILDS, "cpu", progress):  # type: ignore[arg-type]
        assert begun.wait(30)
    assert asked == ["cpu"]
    assert said.getvalue().startswith("fetch the source and the packages of cpu (")


def test_a_demo_that_fails_or_is_ended_does_not_wait_for_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C took as long as pip, and so did the reason why there is no base."""
    go_on, done, holding = threading.Event(), threading.Event(), list[bool]()

    def fetch_all(*_: object) -> None:
        go_on.wait(60)
        holding.append(not threading.current_thread().daemon)
        done.set()

    monkeypatch.setattr(downloads, "fetch_all", fetch_all)
    with (
        pytest.raises(KeyboardInterrupt),
        demo._fetching(BUILDS, "cpu", Progress(io.StringIO())),  # type: ignore[arg-type]
    ):
        raise KeyboardInterrupt
    assert not done.is_set()
    go_on.set()
    assert done.wait(60)
    assert holding == [False]  # else Python's own end waits for it
