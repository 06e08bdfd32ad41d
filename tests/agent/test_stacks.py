"""A rank's stacks: written from inside any call, read as they were written."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.ranks import stacks
from launcher.agent.ranks.stacks import Frame, Stack
from tests.e2e.site import until

from .conftest import python, start_rank

# As CPython 3.11 wrote it in a rank that waited in a collective, beside a thread of its own.
WRITTEN = """\
Thread 0x00007fbf2a7fc640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/usr/lib/python3.11/queue.py", line 180 in get
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007fbf3fb65040 (most recent call first):
  File "/opt/packages/lib/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/opt/packages/lib/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/opt/megatron/lib/megatron/core/distributed/finalize_model_grads.py", line 270 in finalize
  File "/home/me/mine.py", line 12 in <module>
  File "<frozen runpy>", line 88 in _run_code
  File "<frozen runpy>", line 198 in _run_module_as_main
"""

HANGS = {
    "sleep": "time.sleep(600)",
    "lock": "l = threading.Lock(); l.acquire(); l.acquire()",
    "socket": "a, b = socket.socketpair(); a.recv(1)",
    "C, with the interpreter's lock": "ctypes.PyDLL(None).read(os.pipe()[0], ctypes.c_long(), 1)",
    "C, without it": "ctypes.CDLL(None).read(os.pipe()[0], ctypes.c_long(), 1)",
    "loop": "while True: pass",
    "deaf": "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); time.sleep(600)",
}


def test_threads_are_read_as_they_were_written() -> None:
    """A main thread whose beginning is cut off is the last."""
    waiting, main = stacks.parse(f"a line of something else\n{WRITTEN}")
    assert [frame.function for frame in waiting] == ["wait", "get", "_bootstrap"]
    assert main[0].place == "distributed_c10d.py:2806"
    assert [frame.is_library for frame in main] == [True, True, False, False, True, True]
    assert stacks.main_thread([main, waiting]) == stacks.main_thread([waiting, main]) == main
    assert stacks.main_thread([waiting, main[:3]]) == main[:3]
    assert stacks.main_thread([]) == ()


NAMES = st.text(
    st.characters(codec="ascii", exclude_characters='\r\n\v\f\x1c\x1d\x1e"'), min_size=1
)
FRAMES = st.builds(Frame, NAMES, st.integers(1, 10**6), NAMES)


@given(st.lists(st.lists(FRAMES, max_size=5).map(tuple), max_size=4))
def test_any_frames_are_read_back(threads: list[Stack]) -> None:
    text = "".join(
        "Thread 0x00007f00 (most recent call first):\n"
        + "".join(f'  File "{f.file}", line {f.line} in {f.function}\n' for f in thread)
        for thread in threads
    )
    assert stacks.parse(text) == threads


@pytest.mark.parametrize("program", HANGS.values(), ids=HANGS.keys())
def test_a_rank_writes_its_stacks_wherever_it_hangs(
    program: str, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    processes.append(start_rank(tmp_path, 3, program))
    file = stacks.path(tmp_path, 3)
    for written in (1, 2):  # and goes on hanging
        time.sleep(0.2)
        processes[0].send_signal(stacks.SIGNAL)
        until(lambda: file.read_text().count("_run_module_as_main") >= written)  # noqa: B023
        assert processes[0].poll() is None
    main = stacks.main_thread(stacks.parse(file.read_text()))
    assert [(frame.place, frame.function) for frame in main if not frame.is_library] == [
        ("program-3.py:4", "hang"),
        ("program-3.py:5", "<module>"),
    ]


def ran(script: Path, text: str, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A program run as a rank is."""
    script.write_text(text)
    return python("-m", "launcher.agent.ranks.stacks", str(script), *argv, **env)


def test_a_program_is_run_as_it_would_be_without(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("FOUND = 7\n")
    text = "import sys, beside\nprint(__name__, __file__ == sys.argv[0], sys.argv[1:])\n"
    done = ran(tmp_path / "program.py", f"{text}sys.exit(beside.FOUND)", "-x", "--", "y")
    assert (done.returncode, done.stdout) == (7, "__main__ True ['-x', '--', 'y']\n")


SPAWNS = """
import multiprocessing as m
def double(n):
    return 2 * n
if __name__ == '__main__':
    with m.get_context('spawn').Pool(1) as pool:
        print(pool.map(double, [1, 2]))
"""


def test_spawned_processes_import_the_program_and_write_nothing(tmp_path: Path) -> None:
    done = ran(tmp_path / "program.py", SPAWNS, RANK="0", **{stacks.FOLDER: str(tmp_path)})
    assert done.stdout == "[2, 4]\n", done.stderr
    assert stacks.path(tmp_path, 0).read_bytes() == b""


def test_a_crash_shows_its_stack(tmp_path: Path) -> None:
    text = "import os, signal\ndef crash():\n    os.kill(os.getpid(), signal.SIGBUS)\ncrash()"
    done = ran(tmp_path / "program.py", text)
    assert done.returncode == -signal.SIGBUS
    found = stacks.main_thread(stacks.parse(done.stderr))
    assert (found[0].place, found[0].function) == ("program.py:3", "crash")
    assert os.path.basename(found[0].file) == "program.py"
