"""`launcher shell` and `launcher exec`, with a terminal and without, in real containers."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.e2e.site import Site, script, until

pytestmark = pytest.mark.engine

WAITS = """\
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path("mine").touch()
print("ready", flush=True)
while True:  # a signal just before one long sleep would be acted on after it
    time.sleep(0.05)
"""


@pytest.fixture(autouse=True)
def _no_shell_left(here: Site) -> Iterator[None]:
    yield
    wanted = {"label": "megatron-launchpad.name=shell"}
    assert here.client.containers.list(all=True, filters=wanted) == []


def piped(site: Site, *args: str) -> tuple[int, str]:
    """The exit code and output of a launcher without a terminal, which is given a line."""
    pipe = subprocess.PIPE
    started = site.start(*args, stdin=pipe, stderr=subprocess.STDOUT)
    assert started.process.stdin
    started.process.stdin.write(b"typed\n")
    started.process.stdin.close()
    return started.ends(), started.out


def typed(site: Site, *args: str, lines: bytes) -> tuple[int, str]:
    """The exit code and output of a launcher on a terminal where `lines` are typed."""
    ours, theirs = pty.openpty()
    started = site.start(*args, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    os.write(ours, lines)
    seen = bytearray()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and select.select([ours], [], [], 120)[0]:
        try:
            seen += os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    return started.ends(), seen.decode(errors="replace").replace("\r", "")


def test_a_command_in_an_image_has_this_folder_and_passes_its_code_on(
    here: Site, image: str
) -> None:
    script = "id -u; pwd; cat; touch made; test -t 0 && echo terminal; exit 5"
    code, out = piped(here, "shell", image, "--", "sh", "-c", script)
    assert (code, out) == (5, f"{os.getuid()}\n/work\ntyped\n")
    assert (here.folder / "made").stat().st_uid == os.getuid()


def test_a_shell_has_a_terminal(here: Site, image: str) -> None:
    lines = b"tty && echo terminal $((40 + 2))\npython3 -c 'import megatron.core'\nexit 7\n"
    code, out = typed(here, "shell", image, lines=lines)
    assert code == 7, out
    assert "/dev/pts/" in out
    assert "terminal 42" in out


def test_a_checkout_is_seen_in_a_shell(here: Site, image: str) -> None:
    core = here.folder / "checkout" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    script = "ls /opt/megatron/checkout/megatron; touch /opt/megatron/checkout/x"
    code, out = piped(here, "shell", image, "--source", "checkout", "--", "sh", "-c", script)
    assert code == 1
    assert "core" in out.splitlines()  # the two streams come in any order
    assert "Read-only file system" in out


@pytest.fixture
def run(here: Site, image: str) -> Iterator[str]:
    """The id of a run that goes on."""
    asked = script(image, 1, workdir="work") | {"env": {"LEVEL": 3}}
    here.write(asked, WAITS)
    found = here.done("run", "run.yaml", "--detach").out.strip()
    until((here.folder / "work/mine").exists, found)
    yield found
    assert here.done("stop", found).ends() == 0  # asked to
    assert here.done("stop", found).ends() == 0  # and removed


def test_a_command_runs_where_a_run_goes_on(here: Site, run: str) -> None:
    script = 'id -u; pwd; ls; echo "$LEVEL"; cat; test -t 0 && echo terminal; exit 5'
    code, out = piped(here, "exec", run, "--", "sh", "-c", script)
    assert (code, out) == (5, f"{os.getuid()}\n/work\nmine\n3\ntyped\n")
    code, out = typed(here, "exec", here.name, lines=b"tty; echo $LEVEL$LEVEL\nexit 7\n")
    assert code == 7, out
    assert "/dev/pts/" in out
    assert "\n33\n" in out
