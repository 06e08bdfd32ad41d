"""The agent that runs a node's part of a Slurm job: what files in the run's folder ask of it."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from launcher.agent import node
from tests.e2e.site import until

SLEEPS = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
SLEEPS += "open(sys.argv[1], 'w').close()\ntime.sleep(60)\n"


def started(folder: Path, *words: str, start: str = "0") -> subprocess.Popen[bytes]:
    """The agent as a script starts it, of the second node."""
    argv = [sys.executable, node.__file__, str(folder), start, *words]
    environ = {**os.environ, "SLURM_NODEID": "1", "SLURMD_NODENAME": "n1"}
    return subprocess.Popen(argv, env=environ, stderr=subprocess.PIPE)


def sleeping(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """The agent with a command that goes on, once that is up."""
    up = folder / "up"
    found = started(folder, *words, "--", sys.executable, "-c", SLEEPS, str(up))
    until(up.exists)
    return found


def test_an_old_python_can_read_it() -> None:
    """With docker it is the node's own that runs it: 3.6 in RHEL 8, 3.9 in RHEL 9."""
    text = Path(node.__file__).read_text()
    ast.parse(text, feature_version=(3, 6))
    assert not re.search(r"^(from|import) launcher", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["stop", "limit-0"])
def test_a_file_asks_the_command_alone_to_stop(tmp_path: Path, name: str) -> None:
    """scancel's signals reach all processes: the agent outlives one, and so does the command."""
    agent = sleeping(tmp_path)
    agent.send_signal(signal.SIGTERM)
    (tmp_path / name).touch()
    assert agent.wait(20) == 7
    begun, code, at = (tmp_path / "node-1.end").read_text().split()
    assert (begun, code, float(at) > 0) == ("begun", "7", True)
    assert (tmp_path / "failed-0").exists()


def test_another_nodes_failure_ends_it_once_it_had_time_to_fail_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier start of the job left counts no more."""
    monkeypatch.setattr(node, "SETTLE_SECONDS", 0.6)
    monkeypatch.setattr(node, "POLL_SECONDS", 0.05)
    (tmp_path / "failed-0").touch()
    (tmp_path / "failed-1").touch()
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert node.watch_command(node.NodeFiles(str(tmp_path), "1", "0"), words, []) == 137
    ends = [sys.executable, "-c", "import time; time.sleep(1)"]
    assert node.watch_command(node.NodeFiles(str(tmp_path), "2", "0"), ends, []) == 0


def test_a_question_is_answered_once_by_a_report(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("told")
    agent = sleeping(tmp_path, "--report", f"tar -C '{tmp_path}' -cf - file")
    (tmp_path / "ask").write_text("17\n")
    answer = tmp_path / "node-1.17.tar"
    until(answer.exists)
    with tarfile.open(answer) as found:
        assert found.getnames() == ["file"]
    (tmp_path / "stop").touch()
    assert agent.wait(20) == 7


@pytest.mark.parametrize("asked", [b"../../x", b"\xff\n", b"", b"1" * 1000])
def test_what_is_no_question_is_passed_over(tmp_path: Path, asked: bytes) -> None:
    """A question becomes part of a path, and text that can't be read ended the run's watching."""
    (tmp_path / "ask").write_bytes(asked)
    question = node.NodeFiles(str(tmp_path), "0", "1").question()
    assert re.fullmatch(r"\d{0,30}", question)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--needs", "/", "/nowhere", "--", "true"], b"launcher: there is no /nowhere on n1: "),
        (["--", "/nowhere"], b"launcher: /nowhere: No such file or directory"),
    ],
)
def test_what_a_node_lacks_is_reported(tmp_path: Path, words: list[str], said: bytes) -> None:
    """A node that doesn't see a disk waited for the others until their own time was over."""
    agent = started(tmp_path, *words)
    _, error = agent.communicate(timeout=300)
    assert (agent.returncode, said in error) == (121, True), error
    assert (tmp_path / "failed-0").exists()


def test_a_folder_that_takes_no_change_ends_no_run(tmp_path: Path) -> None:
    """A full disk's traceback stood where the run's own end should."""
    agent = started(tmp_path / "gone", "--", "sh", "-c", "exit 3")
    _, error = agent.communicate(timeout=300)
    assert agent.returncode == 3
    assert b"launcher: can't write " in error
    assert b"Traceback" not in error
