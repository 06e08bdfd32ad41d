"""Carries a plan out right here: the same ranks in this environment, without a container."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from launcher.backends import Ended, Job, host, keeper
from launcher.errors import EngineError
from launcher.run.image import Facts
from launcher.run.plan import Plan
from launcher.run.program import SOURCE
from launcher.settings import ROOT, settings

KILLED = 137
POLL_SECONDS = 0.05
START_SECONDS = 30.0
CHUNK = 1 << 16
PROBE = """\
import importlib.metadata as metadata, importlib.util as util, json
try:
    release = metadata.version("megatron-core")
except metadata.PackageNotFoundError:
    release = None
print(json.dumps([release, util.find_spec("torch") is not None]))
"""


@dataclass(frozen=True)
class Request:
    """A process to start: its arguments, what it has beside this environment, and its folder."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None


def request(plan: Plan, environ: Mapping[str, str]) -> Request:
    """The process of `plan`, started where the variables are `environ`."""
    env = {name: value for name, value in plan.env if value is not None}
    path = [str(ROOT), env.get("PYTHONPATH") or environ.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    if not plan.gpus.everything:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(_devices(plan, environ))
    return Request(plan.argv, env, plan.workdir)


def _devices(plan: Plan, environ: Mapping[str, str]) -> list[str]:
    """The GPUs to show: those named, else the first of those that are visible here."""
    if plan.gpus.devices or not plan.gpus.count:
        return list(plan.gpus.devices)
    visible = _visible(environ) or [str(index) for index in range(plan.gpus.count)]
    return visible[: plan.gpus.count]


def _visible(environ: Mapping[str, str]) -> list[str]:
    return [one for one in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]


def show(asked: Request, folders: list[str]) -> str:
    """The request as commands that work when pasted into a shell."""
    lines = [["mkdir", "-p", "--", *folders]] if folders else []
    lines += [["cd", asked.cwd]] if asked.cwd else []
    variables = [f"{name}={value}" for name, value in sorted(asked.env.items())]
    lines.append(["env", *variables, *asked.argv])
    return "".join(f"{shlex.join(line)}\n" for line in lines)


@dataclass
class LocalJob:
    """A run's process and its files; `stdin` keeps a tied run's standard input open."""

    folder: Path
    pid: int
    started: str
    labels: Mapping[str, str]
    stdin: IO[bytes] | None = field(default=None, repr=False)

    backend = "local"

    @property
    def run(self) -> str:
        return self.folder.name

    @property
    def handle(self) -> str:
        return str(self.pid)

    def output(self, *, follow: bool = True) -> Iterator[tuple[bool, bytes]]:
        """What it has written since its beginning, and with `follow` until its end."""
        with (
            (self.folder / keeper.STDOUT).open("rb") as out,
            (self.folder / keeper.STDERR).open("rb") as err,
        ):
            while True:
                last = not follow or self.ended() is not None
                pieces = [(False, out.read(CHUNK)), (True, err.read(CHUNK))]
                yield from (piece for piece in pieces if piece[1])
                if not any(data for _, data in pieces):
                    if last:
                        return
                    time.sleep(POLL_SECONDS)

    def wait(self) -> Ended:
        while (ended := self.ended()) is None:
            time.sleep(POLL_SECONDS)
        return ended

    def ended(self) -> Ended | None:
        alive = keeper.started(self.pid) == self.started
        for _ in range(20):
            with suppress(FileNotFoundError):
                return Ended(int((self.folder / keeper.CODE).read_text()))
            if alive:
                return None
            time.sleep(POLL_SECONDS)  # the process has ended, and its keeper is about to write
        return Ended(KILLED)  # the keeper was killed with it

    def stop(self, grace: int) -> None:
        self._signal(signal.SIGTERM)
        until = time.monotonic() + grace
        while self.ended() is None and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        if keeper.started(self.pid) == self.started:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def remove(self) -> None:
        self.kill()
        self.wait()
        for name in keeper.FILES:
            (self.folder / name).unlink(missing_ok=True)
        if self.stdin:
            self.stdin.close()


def _start(plan: Plan, asked: Request) -> LocalJob:
    folder = settings().runs / plan.run
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    environment = os.environ | asked.env | _secrets(plan)
    python = shutil.which(asked.argv[0], path=environment.get("PATH"))
    if python is None:
        raise EngineError(f"there is no {asked.argv[0]} here", "Install Python 3.10 or later.")
    labels = json.dumps(dict(plan.labels))
    keep = [sys.executable, "-m", "launcher.backends.keeper", str(folder), labels]
    process = subprocess.Popen(
        [*keep, python, *asked.argv[1:]],
        env=environment,
        cwd=asked.cwd,
        stdin=subprocess.PIPE if plan.tie else subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + START_SECONDS
    while not (found := _job(folder)):
        if process.poll() is not None or time.monotonic() > until:
            raise EngineError("the run's process didn't start")
        time.sleep(POLL_SECONDS)
    found.stdin = process.stdin
    return found


def _secrets(plan: Plan) -> dict[str, str]:
    return {name: Path(path).read_text().removesuffix("\n") for name, path in plan.secrets}


def _job(folder: Path) -> LocalJob | None:
    try:
        told = json.loads((folder / keeper.PROCESS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return LocalJob(folder, told["pid"], told["started"], told["labels"])


@dataclass(frozen=True)
class LocalBackend:
    """Runs with this environment's `python3`, on this machine's files."""

    name = "local"
    contained = False

    def request(self, plan: Plan) -> Request:
        return request(plan, os.environ)

    def show(self, plan: Plan) -> str:
        folders = [mount.source for mount in plan.mounts if not mount.read_only]
        return show(self.request(plan), folders)

    def facts(self, image: str) -> Facts | None:
        """Of this environment: the image's name means nothing here. Raises EngineError."""
        try:
            told = subprocess.run(
                ["python3", "-c", PROBE], capture_output=True, text=True, check=True
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise EngineError("python3 doesn't run here") from error
        release, has_torch = json.loads(told.stdout)
        if not has_torch:
            raise EngineError(
                "python3 here has no torch",
                "Activate the environment that has it, or take --backend docker.",
            )
        return Facts(release, Path(SOURCE).is_dir())

    def rootless(self) -> bool:
        return False

    def count_gpus(self) -> int | None:
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            return len(_visible(os.environ)) or None
        return host.count_gpus()

    def start(self, plan: Plan, *, attach: bool) -> Job:
        return _start(plan, self.request(plan))

    def jobs(self) -> list[Job]:
        found = (_job(path.parent) for path in settings().runs.glob(f"*/{keeper.PROCESS}"))
        return [job for job in found if job]

    def shell(self, plan: Plan) -> list[str]:
        return list(plan.argv) or [os.environ.get("SHELL", "bash")]

    def inside(self, job: Job, argv: list[str], *, terminal: bool) -> list[str]:
        return argv

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


def backend() -> LocalBackend:
    """The backend of this environment."""
    return LocalBackend()
