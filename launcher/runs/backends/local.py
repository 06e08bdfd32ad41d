"""The local backend: starts the ranks in this environment, without a container."""

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
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from launcher.agent import checkout
from launcher.agent.stall import stall
from launcher.base import files, owned
from launcher.base.errors import EngineError, UsageError
from launcher.base.settings import ROOT, settings
from launcher.runs.backends import host, keeper, shown
from launcher.runs.plan import needs
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.job import KILLED, Backend, EndCause, ExitStatus, Job, OutputPiece
from launcher.runs.plan.plan import Plan
from launcher.runs.plan.program import SOURCE
from launcher.runs.records import record
from launcher.runs.runfile.secrets import is_secret

VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_SECONDS = 0.05
START_SECONDS = 30.0
CHUNK = 1 << 16
PROBE = """\
import importlib.metadata as metadata, importlib.util as util, json, platform, sys
versions = {}
for name in ("torch", "megatron-core", "transformer-engine", "apex", "numpy"):
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
def spec(name):
    try:
        return util.find_spec(name)
    except ModuleNotFoundError:
        return None
core, found = spec("megatron.core"), [name for name in sys.argv[1:] if spec(name)]
has_torch = spec("torch") is not None
print(json.dumps([has_torch, versions, core and core.origin, platform.python_version(), found]))
"""
ENTER = """\
import os, sys
process, *command = sys.argv[1:]
with open(f"/proc/{process}/environ", "rb") as stream:
    variables = [variable.partition(b"=") for variable in stream.read().split(b"\\0")]
os.chdir(f"/proc/{process}/cwd")
try:
    os.execvpe(command[0], command, {name: value for name, equals, value in variables if equals})
except OSError as error:
    print(f"launcher: {command[0]}: {error.strerror}", file=sys.stderr)
    sys.exit(127)
"""
"""Becomes a command with the folder and the variables of a run's process."""

KEEP = """\
import sys
root, *arguments = sys.argv[1:]
sys.path.insert(0, root)
from launcher.runs.backends import keeper
keeper.main(arguments)
"""
"""Becomes the keeper of a run, whose variables, such as PYTHONPATH, are not the launcher's."""


@dataclass(frozen=True)
class ProcessRequest:
    """A process to start: its arguments, what it has beside this environment, and its folder."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None


def request(plan: Plan, environ: Mapping[str, str]) -> ProcessRequest:
    """The process of `plan`, started where the variables are `environ`."""
    env = {name: value for name, value in plan.env if value is not None}
    if not plan.gpus.everything:
        env[VISIBLE] = ",".join(_devices(plan, environ))
    return ProcessRequest(plan.argv, env, plan.workdir)


def _devices(plan: Plan, environ: Mapping[str, str]) -> list[str]:
    """The GPUs to show: those named, else the first of those that are visible here."""
    if plan.gpus.devices or not plan.gpus.count:
        return list(plan.gpus.devices)
    if VISIBLE in environ:
        return _visible(environ)[: plan.gpus.count]
    return [str(index) for index in range(plan.gpus.count)]


def _visible(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, which end at the first that is none."""
    named = [one.strip() for one in environ[VISIBLE].split(",")]
    return [*takewhile(lambda one: one not in ("", "-1"), named)]


def show(plan: Plan, asked: ProcessRequest) -> str:
    """The request of `plan` as commands that work when pasted into a shell, without secrets."""
    before = [["cd", "--", asked.cwd]] if asked.cwd else []
    known = {name: value for name, value in asked.env.items() if not is_secret(name, value)}
    words = ["env", *(shlex.quote(f"{name}={known[name]}") for name in sorted(known))]
    words += [f'{name}="$(cat -- {shlex.quote(path)})"' for name, path in plan.secrets]
    run = f"{' '.join(words)} {shown.joined(shown.by_name(asked.argv))}\n"
    return shown.folders(plan) + shown.lines(before) + shown.wanted(shown.secrets(plan)) + run


@dataclass
class LocalJob(host.FolderJob):
    """A run's process and its files; `stdin` keeps a tied run's standard input open."""

    process: tuple[int, str]
    keeper: tuple[int, str]
    pump: tuple[int, str]
    labels: Mapping[str, str]
    stdin: IO[bytes] | None = field(default=None, repr=False)

    backend = "local"
    poll_seconds = POLL_SECONDS

    @property
    def handle(self) -> str:
        return str(self.process[0])

    def output(self, *, follow: bool = True) -> Iterator[OutputPiece]:
        """What it has written since its beginning, and with `follow` until its end.

        While its output is lost, as on a full disk, there are empty pieces: it goes on.
        """
        lost = dict[str, Any]()
        warned = False
        with (
            (self.folder / keeper.STDOUT).open("rb") as out,
            (self.folder / keeper.STDERR).open("rb") as err,
        ):
            while True:
                last = not follow or self.ended() is not None
                pieces = [OutputPiece(False, out.read(CHUNK)), OutputPiece(True, err.read(CHUNK))]
                yield from (piece for piece in pieces if piece.data)
                if any(piece.data for piece in pieces):
                    continue
                before, lost = lost, self._lost()
                if lost != before:
                    yield OutputPiece(True, b"" if warned else self._warning(lost))
                    warned = True
                elif last:
                    return
                else:
                    time.sleep(POLL_SECONDS)

    def _lost(self) -> dict[str, Any]:
        """Why output is being lost, by its file's name, and how many bytes of it are."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.folder / keeper.LOST).read_bytes()))
        return {}

    def _warning(self, lost: Mapping[str, Any]) -> bytes:
        name, (why, _) = next(iter(lost.items()))
        path = self.folder / name
        return f"launcher: the log can't be written: {path}: {why}; the run goes on\n".encode()

    def ended(self) -> ExitStatus | None:
        code = self._code()  # first, as another who follows the run may remove it meanwhile
        there = (self.folder / keeper.PROCESS).exists()  # else its keeper is about to leave, too
        if any(map(keeper.alive, (self.process, *((self.keeper, self.pump) if there else ())))):
            return None
        return (
            code
            or self._code()
            or ExitStatus(KILLED, EndCause.ITSELF if there else EndCause.REMOVED)
        )

    def _code(self) -> ExitStatus | None:
        code = host.number(self.folder / keeper.CODE)
        return None if code is None else ExitStatus(code)

    def state(self) -> str:
        return "paused" if keeper.held(self.process) else "running"

    def ask(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, signum: signal.Signals) -> None:
        if keeper.alive(self.process):
            with suppress(ProcessLookupError):
                os.kill(self.process[0], signum)

    def diagnose(self) -> dict[str, bytes]:
        return stall.ask(self.process[0]) if keeper.alive(self.process) else {}

    def remove(self) -> None:
        self.kill()
        self.wait()
        _remove_files(self.folder)
        if self.stdin:
            self.stdin.close()


def _remove_files(folder: Path) -> None:
    """Remove what the keeper wrote, and the folder where nothing else is in it."""
    with suppress(OSError):
        for name in keeper.FILES:
            owned.remove_file(folder / name, folder, missing_ok=True)
            files.sweep(folder / name)
        if os.listdir(folder) == [owned.MARKER]:
            owned.remove_folder(folder, folder.parent)


def _start(plan: Plan, asked: ProcessRequest) -> LocalJob:
    environment = os.environ | asked.env | _secrets(plan)
    python = shutil.which(asked.argv[0], path=environment.get("PATH"))
    if python is None:
        raise EngineError(f"there is no {asked.argv[0]} here", "Install Python 3.10 or later.")
    folder = record.make(plan.run)
    labels = json.dumps(dict(plan.labels))
    keep = [sys.executable, "-c", KEEP, str(ROOT), str(folder), labels]
    try:
        process = subprocess.Popen(
            [*keep, python, *asked.argv[1:]],
            env=environment,
            cwd=asked.cwd,
            stdin=subprocess.PIPE if plan.tie else subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # else whoever reads the launcher's would wait for the run
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        _remove_files(folder)
        raise EngineError(f"the run's process didn't start: {error}") from error
    job = _started(process, folder)
    job.stdin = process.stdin
    return job


def _started(process: subprocess.Popen[bytes], folder: Path) -> LocalJob:
    """The job, as soon as its keeper has started it. Raises EngineError where it doesn't."""
    assert process.stderr
    with process.stderr:
        until = time.monotonic() + START_SECONDS
        going = True
        while going and time.monotonic() < until:
            going = process.poll() is None  # asked first: it may be done before it is looked at
            if found := _job(folder):
                return found
            time.sleep(POLL_SECONDS)
        process.kill()
        reason = process.stderr.read().decode(errors="replace").strip()
    process.wait()
    _remove_files(folder)
    raise EngineError(f"the run's process didn't start: {reason or 'no reason given'}")


def _secrets(plan: Plan) -> dict[str, str]:
    """The variables of the plan's secrets. Raises UsageError for a file that can't be one."""
    found = {}
    for name, path in plan.secrets:
        content = Path(path).read_bytes().removesuffix(b"\n")
        if b"\0" in content:
            raise UsageError(f"secrets.{name}: {path} is binary, and no variable can hold it")
        found[name] = os.fsdecode(content)
    return found


def _job(folder: Path) -> LocalJob | None:
    try:
        told = json.loads((folder / keeper.PROCESS).read_text(encoding="utf-8"))
        if told["machine"] != keeper.machine():  # the same home folder, seen from another one
            return None
        told = {"pump": told["keeper"]} | told  # an older launcher's run has none
        process, kept, pump = (tuple(told[name]) for name in ("process", "keeper", "pump"))
        return LocalJob(folder, process, kept, pump, told["labels"])
    except (OSError, ValueError, KeyError):  # there is none, or another version's
        return None


@dataclass(frozen=True)
class LocalBackend(Backend):
    """Runs with this environment's `python3`, on this machine's files."""

    name = "local"
    contained = False
    shares_files = True

    def request(self, plan: Plan) -> ProcessRequest:
        return request(plan, os.environ)

    def show(self, plan: Plan, *, full: bool = False) -> str:
        return show(plan, self.request(plan))

    def facts(self, image: str) -> ImageFacts | None:
        """Of this environment: the image's name means nothing here. Raises EngineError."""
        has_torch, versions, core, _, found = self._probed
        if not has_torch:
            raise EngineError(
                "python3 here has no torch",
                "Put the environment that has it first on PATH; activating it may hide launcher:\n"
                "    export PATH=ENVIRONMENT/bin:$PATH\n"
                "  or take --backend docker, or install it in this one:\n"
                f"    python3 -m pip install {self._index()}torch megatron-core psutil",
            )
        release = versions.get("megatron-core")
        if core:  # a checkout on PYTHONPATH wins over what is installed
            release = checkout.release(Path(core).parents[2]) or release
        modules = needs.modules()
        packages = frozenset(modules[name] for name in found)
        return ImageFacts(release, Path(SOURCE).is_dir(), packages=packages)

    def _index(self) -> str:
        """Where pip finds a torch without CUDA, for a machine without GPUs."""
        index = "" if self.count_gpus() else settings().torch_index
        return f"--extra-index-url {index} " if index else ""

    def identity(self, image: str) -> Mapping[str, Any]:
        """The versions of Python and of the packages that matter; the image's name is none."""
        _, versions, _, python, _ = self._probed
        told = " ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        return {"name": "this environment", "id": f"python {python} {told}".strip()}

    @cached_property
    def _probed(self) -> tuple[bool, dict[str, str], str | None, str, list[str]]:
        """Whether torch is there, versions by package, where megatron.core is, Python's
        version, and which of the modules are there that needs.yaml asks for.

        Raises EngineError.
        """
        try:
            told = subprocess.run(
                ["python3", "-c", PROBE, *needs.modules()],
                capture_output=True,
                text=True,
                check=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise EngineError("python3 doesn't run here") from error
        return tuple(json.loads(told.stdout))

    def rootless(self) -> bool:
        return False

    def count_gpus(self) -> int | None:
        if VISIBLE in os.environ:
            return len(_visible(os.environ)) or None
        return host.count_gpus()

    def start(self, plan: Plan, *, attach: bool) -> Job:
        return _start(plan, self.request(plan))

    def jobs(self) -> list[Job]:
        found = (_job(path.parent) for path in settings().runs.glob(f"*/{keeper.PROCESS}"))
        return [*host.newest_first(job for job in found if job)]

    def shell(self, plan: Plan) -> list[str]:
        variables = [f"{name}={value}" for name, value in self.request(plan).env.items()]
        return ["env", *variables, *(plan.argv or [os.environ.get("SHELL", "bash")])]

    def inside(self, job: Job, argv: list[str], *, terminal: bool) -> list[str]:
        return [sys.executable, "-c", ENTER, job.handle, *argv]

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


def backend() -> LocalBackend:
    """The backend of this environment."""
    return LocalBackend()
