"""Runs in a real container: output, exit code, signals, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.site import RUNNER, program

from .test_local import ASKED

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
RUN_FILE = """\
name: launch-test
image: {{name: {image}, python: /standin/python3}}
program: ./program.py
gpus: 0
mounts:
  - {{source: standin, target: /standin}}
resources: {{network: none, ipc: private, ulimits: {{}}, stop_grace: 20, workdir: out put}}
"""

Launch = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def launch(engine: DockerClient, python_image: str, tmp_path: Path) -> Iterator[Launch]:
    """Starts the launcher on a program; afterwards no container of it may be left."""
    (tmp_path / "standin").mkdir()
    program(tmp_path / "standin/python3", RUNNER)
    (tmp_path / "run.yaml").write_text(RUN_FILE.format(image=python_image), encoding="utf-8")
    started: list[subprocess.Popen[bytes]] = []

    def launch(program: str, *arguments: str) -> subprocess.Popen[bytes]:
        (tmp_path / "program.py").write_text(program, encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", "run", "run.yaml", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "LAUNCHER_RUNS": str(tmp_path / "runs")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert remove_all(engine) == []


def remove_all(client: DockerClient) -> list[str]:
    """The names of the containers that were left, now removed."""
    left = client.containers.list(
        all=True, filters={"label": "megatron-launchpad.name=launch-test"}
    )
    names = [container.name for container in left]
    for container in left:
        container.remove(force=True)
    return names


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes, bytes]:
    """Its exit code and output, but for the lines of the launcher that name the record."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, re.sub(rb"launcher: [^\n]*record: [^\n]*\n", b"", err)


def wait_for(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == line


def test_output_is_passed_on_as_it_is(launch: Launch) -> None:
    program = "import os\nos.write(1, b'out\\xff\\r no newline')\nos.write(2, b'err\\x00')\n"
    code, out, err = finish(launch(f"{program}os._exit(255)"))
    assert (code, out) == (255, b"out\xff\r no newline")
    assert err.startswith(b"err\x00")


def test_a_signal_is_heard_where_the_launcher_was_started_deaf(launch: Launch) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        process = launch(ASKED)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    wait_for(process, b"ready\n")
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 7


@pytest.mark.parametrize(
    "delay", [0.3, *(pytest.param(at, marks=pytest.mark.long) for at in (0.05, 0.5, 0.7))]
)
def test_a_signal_at_any_moment_leaves_nothing(launch: Launch, delay: float) -> None:
    process = launch("import time\ntime.sleep(60)\n")
    time.sleep(delay)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] in (-signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_lost_reader_leaves_nothing(launch: Launch) -> None:
    process = launch("while True: print('x' * 1000)\n")
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(60) == 128 + signal.SIGTERM  # the run was asked to stop


SEEN = """\
import os
from pathlib import Path
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
shm = os.statvfs("/dev/shm")
Path("made").touch()
print(status["NoNewPrivs"].strip(), shm.f_blocks * shm.f_frsize >> 30, os.getuid(), os.getgid())
"""


def test_a_run_gets_no_new_privileges_and_memory_of_its_own_to_share(launch: Launch) -> None:
    """A setuid program made it root, and it shared memory with all of the host's processes."""
    program = SEEN.replace('Path("made").touch()', "")
    process = launch(program, "--set", "resources.ipc=null", "--set", 'resources.user="12345:100"')
    assert finish(process) == (0, b"1 8 12345 100\n", b"")


def test_under_sudo_what_the_run_writes_belongs_to_who_called(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.getuid():
        pytest.skip("needs root, as sudo gives it")
    monkeypatch.setenv("SUDO_UID", "12345")
    monkeypatch.setenv("SUDO_GID", "23456")
    code, out, err = finish(launch(SEEN))
    assert (code, out.split()[2:], err) == (0, [b"12345", b"23456"], b"")
    for path in (tmp_path / "out put", tmp_path / "out put/made"):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 23456)


def test_a_missing_image_is_told_with_how_to_make_it(launch: Launch) -> None:
    code, out, err = finish(launch("", "--tag", "24.02"))
    assert (code, out) == (125, b"")
    assert err == b"launcher: no image megatron:24.02\n  make image TAG=24.02\n"
