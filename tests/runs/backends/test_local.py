"""Runs without a container: what is asked for, and real processes from start to end."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import EngineError, UsageError
from launcher.base.settings import ROOT, settings
from launcher.runs.backends import keeper, local
from launcher.runs.plan.job import EndCause, ExitStatus, OutputPiece
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.values import Gpus, parse_gpus
from tests.disks import UNLIMITED, limited, mounted
from tests.e2e.site import program, until
from tests.tables import table

from .conftest import BARE


@table("gpus", "environ", "visible")
def test_the_gpus_are_those_asked_for(
    gpus: str, environ: dict[str, str], visible: str | None
) -> None:
    asked = parse_gpus(gpus)
    asked = replace(asked, count=2) if asked.everything else asked
    env = local.request(replace(BARE, gpus=asked), environ).env
    assert env.get("CUDA_VISIBLE_DEVICES") == visible


@pytest.mark.parametrize(
    ("variable", "count"), [("0,1", 2), ("4", 1), ("", None), ("-1", None), ("1,-1,2", 1)]
)
def test_all_gpus_are_those_that_are_visible(
    variable: str, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert local.backend().count_gpus() == count


@pytest.mark.parametrize("own", [None, "/mine:/yours"])
def test_a_runs_path_is_the_users_alone(own: str | None) -> None:
    """An installed launcher's folder has packages beside it, which may not be the run's."""
    env = (("A", "1"), ("B", None), *([("PYTHONPATH", own)] if own else []))
    asked = local.request(replace(BARE, env=env), {"PYTHONPATH": "/a"}).env
    assert (asked.get("PYTHONPATH"), asked["A"], "B" in asked) == (own, "1", False)


SAY = "import os; print(os.getcwd(), os.environ['A B'[0]], os.environ.get('API_KEY'), flush=True)"


def pasted(plan: Plan, **env: str) -> subprocess.CompletedProcess[str]:
    text = local.show(plan, local.request(plan, os.environ))
    assert "se cret" not in text
    return subprocess.run(
        ["sh", "-e"], input=text, env=os.environ | env, capture_output=True, text=True
    )


def test_the_shown_lines_work_and_keep_secrets_to_themselves(tmp_path: Path) -> None:
    there = tmp_path / "not yet there"
    mounts = (Mount(str(there), str(there), False, "resources.workdir"),)
    plan = replace(BARE, argv=("python3", "-c", SAY), workdir=str(there), mounts=mounts)
    plan = replace(plan, env=(("A", "it's $A"),))
    assert pasted(plan).stdout == f"{there} it's $A None\n"

    file = tmp_path / "a key"
    file.write_text("se cret\n")
    by_file = replace(plan, secrets=(("API_KEY", str(file)),))
    assert pasted(by_file).stdout == f"{there} it's $A se cret\n"

    literal = replace(plan, env=(*plan.env, ("API_KEY", "se cret")))
    assert pasted(literal, API_KEY="another").stdout == f"{there} it's $A another\n"
    assert "API_KEY: export it first: its value is not shown" in pasted(literal).stderr


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Starts a program; afterwards nothing of it may be left."""
    jobs: list[local.LocalJob] = []

    def start(text: str, **changes: Any) -> local.LocalJob:
        run = os.urandom(4).hex()
        argv = ("python3", "-u", "-c", text)
        labels = (("megatron-launchpad.run", run), ("megatron-launchpad.created", str(len(jobs))))
        plan = replace(BARE, run=run, argv=argv, labels=labels, **changes)
        job = local.backend().start(plan, attach=True)
        assert isinstance(job, local.LocalJob)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.remove()
        assert not keeper.alive(job.process)
        assert not job.folder.exists()


def written(job: local.LocalJob, *, follow: bool = True) -> tuple[bytes, bytes]:
    """What the job wrote to stdout and stderr."""
    pieces = list(job.output(follow=follow))
    out = b"".join(piece.data for piece in pieces if not piece.is_error)
    return out, b"".join(piece.data for piece in pieces if piece.is_error)


def wait_for(job: local.LocalJob, text: bytes) -> bytes:
    """Its stdout, as soon as `text` is in it."""
    until(lambda: text in written(job, follow=False)[0], f"{text!r} never came")
    return written(job, follow=False)[0]


@pytest.mark.parametrize("code", [0, 3, 125, 255])
def test_output_and_exit_code_are_the_programs(start: Callable[..., Any], code: int) -> None:
    job = start(f"import os; os.write(1, b'o\\xff\\r'); os.write(2, b'e\\x00'); os._exit({code})")
    assert written(job) == (b"o\xff\r", b"e\x00")
    assert job.wait() == job.ended() == ExitStatus(code)


@pytest.fixture(params=["tmpfs", "limit"])
def small_disk(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Lets files of records have 64 KiB; the words of what goes beyond."""
    if request.param == "limit":
        with limited(1 << 16):
            yield os.strerror(errno.EFBIG)
        return
    if os.geteuid():
        pytest.skip("needs root to mount a small disk")
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    with mounted(tmp_path, 1 << 16):
        yield os.strerror(errno.ENOSPC)


MUCH = "import os\nfor n in range(100_000): os.write(1 + n % 2, b'%d\\n' % n)\n"


@pytest.mark.parametrize("code", [0, 3])
def test_a_full_disk_of_records_ends_no_run(
    small_disk: str, start: Callable[..., Any], code: int
) -> None:
    """The program died of the error as it wrote, and there was no room for its exit code."""
    job = start(f"{MUCH}os._exit({code})")
    assert job.wait() == ExitStatus(code)
    out, err = written(job)
    assert b"".join(b"%d\n" % n for n in range(0, 100_000, 2)).startswith(out)
    warning = rf"launcher: the log can't be written: .*/std(out|err): {small_disk}; the run goes on"
    assert len(re.findall(warning.encode(), err)) == 1


SPEAKS = """\
import os, time
said, until = 0, time.monotonic() + 60
while not os.path.exists(os.environ["GO"]) and time.monotonic() < until:
    said += os.write(1, b"x" * 9999)
    time.sleep(0.01)
print(f"said {said}", flush=True)
"""


def test_a_run_whose_output_is_lost_goes_on_and_what_is_missing_is_said_when_there_is_room(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    """It looked like one that hangs, which the watchdog may end."""
    with limited(1 << 16):
        job = start(SPEAKS, env=(("GO", str(tmp_path / "go")),))
    errors = (piece for piece in job.output() if piece.is_error)
    assert b"/stdout: File too large; the run goes on\n" in next(errors).data
    assert [next(errors), next(errors)] == [OutputPiece(True, b"")] * 2
    resource.prlimit(job.pump[0], resource.RLIMIT_FSIZE, UNLIMITED)
    (tmp_path / "go").touch()
    assert job.wait() == ExitStatus(0)
    out, err = written(job)
    said = int(out.split()[-1])
    gap = re.search(rb"\nlauncher: (\d+) bytes are missing here, which couldn't be written\n", out)
    assert gap
    assert (gap.start(), out.count(b"x") + int(gap[1]), err) == (1 << 16, said, b"")


ASKED = """\
import signal, sys, time
def stop(signum, frame):
    print("saved", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
while True:  # a signal just before one long sleep would be acted on after it
    time.sleep(0.05)
"""
DEAF = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("held", [[], [signal.SIGTERM]])
def test_it_is_asked_to_stop(start: Callable[..., Any], held: list[signal.Signals]) -> None:
    """It hears what its launcher held back as it started, too."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        job = start(ASKED)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    wait_for(job, b"ready")
    assert job.ended() is None
    job.stop(60)
    assert job.ended() == ExitStatus(7)
    assert written(job)[0] == b"ready\nsaved\n"


def test_the_grace_ends(start: Callable[..., Any]) -> None:
    job = start(DEAF)
    wait_for(job, b"ready")
    job.stop(0)
    assert job.ended() == ExitStatus(137)


def test_nothing_that_it_started_outlives_it(start: Callable[..., Any]) -> None:
    daemon = "import os,time; os.setsid() if not os.fork() else os._exit(0); os.fork(); "
    daemon += "os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"  # print may write twice
    job = start(
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {daemon!r}])\n"
        "import time; time.sleep(600)\n"
    )
    until(lambda: written(job, follow=False)[0].count(b"\n") == 2)
    pids = written(job, follow=False)[0].split()
    job.kill()
    assert job.wait() == ExitStatus(137)
    assert [pid for pid in pids if Path(f"/proc/{int(pid)}").exists()] == []


def test_it_is_asked_to_stop_where_its_keeper_is_killed(start: Callable[..., Any]) -> None:
    job = start(ASKED)
    wait_for(job, b"ready")
    os.kill(job.keeper[0], signal.SIGKILL)
    assert job.wait() == ExitStatus(137)  # nobody was there to see another code
    assert written(job)[0] == b"ready\nsaved\n"


def test_what_is_left_behind_holds_up_no_end_where_its_keeper_is_killed(
    start: Callable[..., Any],
) -> None:
    """It has the run's output open: who waited for its end would wait for ever."""
    job = start(
        "import os, time\nleft = os.fork()\nif not left: os.setsid()\n"
        "if left: os.write(1, b'%d\\n' % left)\ntime.sleep(600)\n"
    )
    left = int(wait_for(job, b"\n"))
    os.kill(job.keeper[0], signal.SIGKILL)
    try:
        assert until(job.ended) == ExitStatus(137)
    finally:
        os.kill(left, signal.SIGKILL)


def test_it_has_ended_when_its_keeper_has_left(start: Callable[..., Any]) -> None:
    """Which has written the exit code before: of an ended run no process is left."""
    job = start("import time; time.sleep(600)")
    os.kill(job.keeper[0], signal.SIGSTOP)
    try:
        (job.folder / keeper.CODE).write_text("137")
        os.kill(job.process[0], signal.SIGKILL)
        while keeper.alive(job.process):
            time.sleep(0.01)
        assert job.ended() is None
    finally:
        os.kill(job.keeper[0], signal.SIGCONT)
    assert job.wait() == ExitStatus(137)
    assert not keeper.alive(job.keeper)


def test_its_keeper_stays_where_a_whole_group_is_asked_to_stop(start: Callable[..., Any]) -> None:
    job = start(ASKED)
    wait_for(job, b"ready")
    os.killpg(job.keeper[0], signal.SIGTERM)
    assert job.wait() == ExitStatus(7)


def test_it_ends_with_its_launcher_where_it_is_tied(start: Callable[..., Any]) -> None:
    job = start("import sys; sys.stdin.read(); print('closed')", tie=True)
    assert job.ended() is None
    assert job.stdin
    job.stdin.close()
    assert written(job)[0] == b"closed\n"


def test_another_launcher_finds_it_newest_first(start: Callable[..., Any]) -> None:
    first, second = start(ASKED), start(ASKED)
    found = [job for job in local.backend().jobs() if job.run in (first.run, second.run)]
    assert [job.run for job in found] == [second.run, first.run]
    assert found[0].labels["megatron-launchpad.run"] == second.run
    assert isinstance(found[0], local.LocalJob)
    wait_for(found[0], b"ready")


def test_one_that_a_signal_holds_is_paused(start: Callable[..., Any]) -> None:
    """It was listed as running."""
    job = start("import time; time.sleep(60)")
    assert job.state() == "running"
    os.kill(job.process[0], signal.SIGSTOP)
    until(lambda: job.state() == "paused")
    assert job.ended() is None


def test_one_whose_number_another_process_has_now_has_ended(start: Callable[..., Any]) -> None:
    job = start("pass")
    job.wait()
    (job.folder / keeper.CODE).unlink()
    other = (os.getpid(), str(int(keeper.identity(os.getpid())[1]) + 1))
    later = replace(job, process=other, keeper=other)
    assert later.ended() == ExitStatus(137)
    later.kill()  # hits nobody


def test_one_that_was_removed_is_told_so(start: Callable[..., Any]) -> None:
    job = start("pass")
    job.wait()
    job.remove()
    assert replace(job, keeper=keeper.identity(os.getpid())).ended() == ExitStatus(
        137, EndCause.REMOVED
    )


def test_runs_of_another_version_or_machine_are_passed_over() -> None:
    folder = settings().runs / "ffffffff"
    folder.mkdir(parents=True)
    elsewhere = {"machine": "elsewhere", "process": [1, "1"], "keeper": [1, "1"], "labels": {}}
    for text in ("{", "{}", json.dumps({"pid": 1}), json.dumps(elsewhere)):
        (folder / keeper.PROCESS).write_text(text)
        assert "ffffffff" not in [job.run for job in local.backend().jobs()]
    (folder / keeper.PROCESS).unlink()
    folder.rmdir()


def test_a_pipe_that_the_launcher_writes_to_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import dataclasses, sys; from launcher.runs.backends import local;"
        "from tests.runs.backends.conftest import BARE;"
        "argv = ('python3', '-c', 'import time; time.sleep(600)');"
        "plan = dataclasses.replace(BARE, argv=argv);"
        "print(local.backend().start(plan, attach=False).handle)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env=os.environ | {"LAUNCHER_RUNS": str(tmp_path)},
        capture_output=True,
        timeout=300,
    )
    job = local._job(tmp_path / BARE.run)
    assert job
    try:
        assert job.handle == done.stdout.decode().strip()
        assert job.ended() is None
    finally:
        job.remove()


def run_inside(job: local.LocalJob, *argv: str) -> subprocess.CompletedProcess[str]:
    command = local.backend().inside(job, [*argv], terminal=False)
    return subprocess.run(command, capture_output=True, text=True)


def test_a_command_runs_where_the_run_goes_on(start: Callable[..., Any], tmp_path: Path) -> None:
    job = start(ASKED, workdir=str(tmp_path), env=(("A", "it's $A"),), gpus=Gpus(2, ("5", "7")))
    until(lambda: b"A=it's" in Path(f"/proc/{job.handle}/environ").read_bytes())
    done = run_inside(job, "sh", "-c", 'echo "$PWD $A $CUDA_VISIBLE_DEVICES"; exit 5')
    assert (done.returncode, done.stdout) == (5, f"{tmp_path} it's $A 5,7\n")
    done = run_inside(job, "no-such-command")
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    assert "no-such-command: No such file" in done.stderr


def test_a_secret_that_is_no_text_is_passed_on_and_one_that_is_no_variable_refused(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    secrets = (("API_KEY", str(tmp_path / "key")),)
    job = start("import os; print(os.environb[b'API_KEY'])", secrets=secrets)
    assert written(job)[0] == b"b'\\xff\\xfe'\n"
    (tmp_path / "key").write_text("se cret\n")
    job = start("import os; print(repr(os.environ['API_KEY']))", secrets=secrets)
    assert written(job)[0] == b"'se cret'\n"
    assert "se cret" not in (job.folder / keeper.PROCESS).read_text()
    (tmp_path / "key").write_bytes(b"a\0b")
    with pytest.raises(UsageError, match=r"secrets\.API_KEY: .* is binary"):
        local.backend().start(replace(BARE, secrets=secrets), attach=True)
    assert not (settings().runs / BARE.run).exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workdir": "/no/such/folder"}, "No such file or directory: '/no/such/folder'"),
        ({"argv": ("python3", "-c", "x" * 200_000)}, "Argument list too long"),
        ({"argv": ("no-such-python",)}, "there is no no-such-python here"),
        ({"env": (("PATH", "."),)}, "didn't start: .*python3: No such file or directory$"),
    ],
)
def test_what_cannot_start_is_told_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    program(tmp_path / "python3", "#!/no/such/interpreter\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(EngineError, match=said):
        local.backend().start(replace(BARE, **changes), attach=True)
    assert not (settings().runs / BARE.run).exists()


def test_an_environment_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PROBE", "print('[false, {}, null, null, []]')")
    with pytest.raises(EngineError, match="no torch"):
        local.backend().facts("any")


def test_a_checkout_on_the_path_tells_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (tmp_path / "torch.py").touch()
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 12\nPATCH = 3\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = local.backend().facts("any")
    assert found.release == "0.12.3"
