"""`launcher shell` and `launcher exec`, with a terminal and without, in real containers."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.settings import ROOT

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.engine

LABEL = "megatron-launchpad.name"
WAITS = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path("mine").touch()
print("ready", flush=True)
while True:  # a signal just before one long sleep would be acted on after it
    time.sleep(0.05)
"""


@pytest.fixture
def folder(engine: DockerClient, tmp_path: Path) -> Iterator[Path]:
    """Where the shell is opened; afterwards no container of this test may be left."""
    yield tmp_path
    left = []
    for name in ("shell", "exec-test"):
        left += engine.containers.list(all=True, filters={"label": f"{LABEL}={name}"})
    for container in left:
        container.remove(force=True)
    assert left == []


def start(folder: Path, *args: str, **streams: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "launcher", *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "LAUNCHER_RUNS": str(folder / "runs")},
        **streams,
    )


def piped(folder: Path, *args: str, given: bytes = b"") -> tuple[int, str]:
    """The exit code and output of a launcher without a terminal."""
    pipe = subprocess.PIPE
    process = start(folder, *args, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
    out, _ = process.communicate(given, timeout=120)
    return process.returncode, out.decode()


def typed(folder: Path, *args: str, lines: bytes) -> tuple[int, str]:
    """The exit code and output of a launcher on a terminal where `lines` are typed."""
    ours, theirs = pty.openpty()
    process = start(folder, *args, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, lines)
    seen = bytearray()
    until = time.monotonic() + 120
    while time.monotonic() < until and select.select([ours], [], [], 120)[0]:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return process.wait(60), seen.decode(errors="replace").replace("\r", "")


def test_a_command_in_an_image_has_this_folder_and_passes_its_code_on(
    folder: Path, image: str
) -> None:
    script = "id -u; pwd; cat; touch made; test -t 0 && echo terminal; exit 5"
    code, out = piped(folder, "shell", image, "--", "sh", "-c", script, given=b"typed\n")
    assert (code, out) == (5, f"{os.getuid()}\n/work\ntyped\n")
    assert (folder / "made").stat().st_uid == os.getuid()


def test_a_shell_has_a_terminal(folder: Path, image: str) -> None:
    lines = b"tty && echo terminal $((40 + 2))\npython3 -c 'import megatron.core'\nexit 7\n"
    code, out = typed(folder, "shell", image, lines=lines)
    assert code == 7, out
    assert "/dev/pts/" in out
    assert "terminal 42" in out


def test_a_checkout_is_seen_in_a_shell(folder: Path, image: str) -> None:
    core = folder / "checkout" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    script = "ls /opt/megatron/checkout/megatron; touch /opt/megatron/checkout/x"
    code, out = piped(folder, "shell", image, "--source", "checkout", "--", "sh", "-c", script)
    assert code == 1
    assert out.startswith("core\n")
    assert "Read-only file system" in out


@pytest.fixture
def run(folder: Path, image: str) -> Iterator[str]:
    """The id of a run that goes on."""
    (folder / "wait.py").write_text(WAITS)
    (folder / "run.yaml").write_text(
        f"name: exec-test\nimage: {{name: '{image}'}}\nprogram: ./wait.py\ngpus: 0\n"
        "env: {LEVEL: 3}\nresources: {network: none, workdir: work}\n"
    )
    code, out = piped(folder, "run", "run.yaml", "--detach")
    assert code == 0, out
    found = out.strip()
    until = time.monotonic() + 60
    while not (folder / "work/mine").exists() and time.monotonic() < until:
        time.sleep(0.1)
    yield found
    assert piped(folder, "stop", found)[0] == 0  # asked to
    assert piped(folder, "stop", found)[0] == 0  # and removed


def test_a_command_runs_where_a_run_goes_on(folder: Path, run: str) -> None:
    script = 'id -u; pwd; ls; echo "$LEVEL"; cat; test -t 0 && echo terminal; exit 5'
    code, out = piped(folder, "exec", run, "--", "sh", "-c", script, given=b"typed\n")
    assert (code, out) == (5, f"{os.getuid()}\n/work\nmine\n3\ntyped\n")
    code, out = typed(folder, "exec", "exec-test", lines=b"tty; echo $LEVEL$LEVEL\nexit 7\n")
    assert code == 7, out
    assert "/dev/pts/" in out
    assert "\n33\n" in out


def test_a_run_that_is_not_there_is_told(folder: Path, engine: DockerClient) -> None:
    code, out = piped(folder, "exec", "nosuch", "--", "true")
    assert code == 2
    assert "launcher: no run 'nosuch'" in out
