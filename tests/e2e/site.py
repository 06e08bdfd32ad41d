"""A folder in which the launcher is used as a person does, on one engine; and what is run there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from launcher.base.settings import ROOT
from launcher.images.engine.connect import engine_host

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

WITHIN = 600.0  # seconds, on a machine that is busy with other things
ONE_THREAD = {"OMP_NUM_THREADS": 1}
"""Of a tiny model's training on a busy machine: two wait for each other in each operator, and a
step took seconds."""
RUNNER = """\
#!/usr/bin/env python3
# Stands in for the runner, which needs torch: starts the program in its own place.
import os, sys
program = sys.argv[sys.argv.index("--") + 1 :]
os.execv(sys.executable, [sys.executable, *program])
"""
FAULTS = """\
# Put into a rank's Python: at a line of output that a line of /faults/at names it kills the
# rank, or holds it until /faults/go is there. Each line of that file counts once.
import os, signal, sys, time

AT, GO = "/faults/at", "/faults/go"

class Output:
    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text):
        written = self.stream.write(text)
        what, _, where = open(AT).readline().rstrip("\\n").partition(" ")
        if where and where in text:
            self.stream.flush()
            rest = open(AT).readlines()[1:]
            open(AT, "w").writelines(rest)
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while not os.path.exists(GO):
                time.sleep(0.05)
        return written

if "RANK" in os.environ:
    sys.stdout = Output(sys.stdout)
"""


def until(happened: Callable[[], Any], what: object = "it never happened") -> Any:
    """What it gives, as soon as that is true; `what` is told where it never is."""
    deadline = time.monotonic() + WITHIN
    while not (found := happened()):
        assert time.monotonic() < deadline, str(what)
        time.sleep(0.02)
    return found


def living_with(variable: str) -> list[int]:
    """The processes that have this among their variables, as `NAME=value`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended
            if variable.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def killed_with(variable: str) -> list[int]:
    """Kill those processes; which they were."""
    for process in (found := living_with(variable)):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return found


class Started:
    """A launcher that was started, and what it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.kept = {process.stdout: bytearray(), process.stderr: bytearray()}
        self.readers = [
            threading.Thread(target=self._read, args=(stream,), daemon=True)
            for stream in self.kept
            if stream
        ]
        for reader in self.readers:
            reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        while data := os.read(stream.fileno(), 1 << 16):
            self.kept[stream] += data

    @property
    def out(self) -> str:
        return self.kept[self.process.stdout].decode()

    @property
    def err(self) -> str:
        return self.kept[self.process.stderr].decode()

    def said(self, text: str) -> None:
        """Wait until it has said that, on either stream."""

        def found() -> bool:
            over = self.process.poll() is not None
            if over:
                self._complete()
            said = text in self.out + self.err
            assert said or not over, self
            return said

        until(found, self)

    def _complete(self) -> None:
        for reader in self.readers:
            reader.join(WITHIN)

    def ends(self, within: float = WITHIN) -> int:
        """Its exit code, once all it has written is here."""
        code = self.process.wait(within)
        self._complete()
        return code

    def told(self) -> list[str]:
        """The launcher's own lines, but for warnings, waits, and where the record is."""
        lines = [line.partition("launcher: ") for line in self.err.splitlines()]
        told = [text for before, name, text in lines if name and not before]
        told = [text for text in told if not text.startswith(("warning: ", "waiting for "))]
        return [text for text in told if "record: " not in text]

    def __repr__(self) -> str:
        return f"{self.out[-2000:]}\n{self.err[-4000:]}"


@dataclass
class Site:
    """A folder in which the launcher is used, on one engine."""

    folder: Path
    client: DockerClient
    name: str
    started: list[Started] = field(default_factory=list)

    def write(self, config: dict[str, Any], program: str = "") -> None:
        (self.folder / "run.yaml").write_text(json.dumps({"name": self.name, **config}))
        (self.folder / "program.py").write_text(program)

    @property
    def environment(self) -> dict[str, str]:
        own = {"LAUNCHER_RUNS": str(self.folder / "runs"), "TMPDIR": str(self.folder / "tmp")}
        host = {"DOCKER_HOST": engine_host(self.client), "PYTHONPATH": str(ROOT)}
        return {**os.environ, **own, **host}

    def start(self, *arguments: str, **options: Any) -> Started:
        """Start the launcher; its output is read as it comes."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *arguments],
            cwd=self.folder,
            env=self.environment,
            **{**pipes, "stdin": subprocess.DEVNULL, **options},
        )
        self.started.append(Started(process))
        return self.started[-1]

    def launch(self, config: dict[str, Any], program: str, *arguments: str) -> Started:
        """The launcher of a run of that program, started."""
        self.write(config, program)
        return self.start("run", "run.yaml", *arguments)

    def done(self, *arguments: str) -> Started:
        """The launcher, ended."""
        started = self.start(*arguments)
        started.ends()
        return started

    def containers(self) -> list[Container]:
        """All of the runs that were started here."""
        wanted = {"label": f"megatron-launchpad.name={self.name}"}
        found: list[Container] = self.client.containers.list(
            all=True, filters=wanted, ignore_removed=True
        )
        return found

    def container(self) -> Container:
        """The one that was started, running."""
        running = until(
            lambda: [one for one in self.containers() if one.status == "running"], "no container"
        )
        return running[0]

    def run(self) -> str:
        """The id of the run that goes on."""
        label: str = self.container().labels["megatron-launchpad.run"]
        return label

    def end(self) -> list[str]:
        """End what still goes on; what was left, by name, which should be nothing."""
        for one in self.started:
            if one.process.poll() is None:
                one.process.kill()
                one.process.wait()
        left = [f"container {one.name} ({one.status})" for one in self.containers()]
        for one in self.containers():
            one.remove(force=True)
        left += [f"file {path}" for path in (self.folder / "tmp").iterdir()]
        left += [f"file {path}" for path in (self.folder / "runs").rglob("*.partial")]
        killed = killed_with(f"LAUNCHER_RUNS={self.folder / 'runs'}")
        return left + [f"process {pid}" for pid in killed]


def leaves_to_others(site: Site, *start: str, run: Callable[[], str], first: str) -> Started:
    """Kill the launcher of a run that says `first`: others list, follow, enter and stop it."""
    launcher = site.start("run", "run.yaml", *start)
    launcher.said(first)
    launcher.process.kill()
    assert launcher.ends() == -signal.SIGKILL
    found, backend = run(), start[-1] if start else "docker"
    assert re.search(rf"^{found} +{site.name} +running +{backend} ", site.done("ps").out, re.M)
    follower, logs = site.start("attach", found), site.start("logs", "-f", found)
    for each in (follower, logs):
        each.said(first)
    assert site.done("exec", found, "--", "sh", "-c", "echo in $((1 + 1))").out == "in 2\n"
    assert site.done("stop", found).process.returncode == 0
    assert (follower.ends(), logs.ends()) == (7, 0)
    printed = [sorted(each.out.splitlines()) for each in (follower, logs)]
    assert printed[0] == printed[1], {*printed[0]} ^ {*printed[1]}
    assert re.match(rf"run {found} stopped, exit code 7", follower.told()[-1])
    assert found not in site.done("ps", "-q").out.split()
    return follower


def make_site(folder: Path, client: DockerClient) -> Site:
    for part in ("standin", "tmp", "runs", "faults"):
        (folder / part).mkdir(parents=True)
    program(folder / "standin/python3", RUNNER)
    (folder / "faults/sitecustomize.py").write_text(FAULTS)
    (folder / "faults/at").write_text("")
    return Site(folder, client, f"faults-{os.urandom(3).hex()}")


def program(path: Path, text: str) -> None:
    """A file that can be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def standin(image: str, **resources: Any) -> dict[str, Any]:
    """A run of ./program.py with the stand-in runner."""
    limits = {"network": "none", "ipc": "private", "ulimits": {}, "stop_grace": 60, **resources}
    return {
        "image": {"name": image, "python": "/standin/python3"},
        "program": "./program.py",
        "gpus": 0,
        "mounts": [{"source": "standin", "target": "/standin"}],
        "resources": limits,
    }


def script(image: str, processes: int = 2, **resources: Any) -> dict[str, Any]:
    """A run of ./program.py on several ranks."""
    limits = {"network": "none", "stop_grace": 60, **resources}
    here = {"program": "./program.py", "gpus": 0, "processes": processes}
    return {"image": {"name": image}, **here, "resources": limits}
