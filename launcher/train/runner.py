"""Start a program's ranks on this node, forward signals to them, pass on their exit code."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import inspect
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from launcher.train.checkpoints import folders, lineage
from launcher.train.checkpoints.retention import Retention
from launcher.train.ranks import devices, oom, rank, signals, stacks
from launcher.train.stall import stall
from launcher.train.words import SAYS, STOPPED

USAGE = 2
"""Exit code of a refusal before any rank was started, for what was asked."""

PREFLIGHT = 121
"""Exit code of one for what is there: too few GPUs, too old ones, another run's checkpoints."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Those that ask a run to stop."""

SETTLE_SECONDS = 1.0
"""How long ranks that outlive a failed one have to fail, and say why, by themselves."""

TERMINATION_SECONDS = 5.0
"""How long they then have between SIGTERM and SIGKILL."""

LONGEST_VARIABLE = 128 * 1024
"""Bytes of a variable that the kernel passes on, with its name and an end (MAX_ARG_STRLEN)."""


class Refused(Exception):
    """The ranks can't be started as asked; the text says why and how to mend it."""

    code = USAGE


class Unable(Refused):
    """What is there doesn't fit: the GPUs, or another run's checkpoints."""

    code = PREFLIGHT


@dataclass(frozen=True)
class Job:
    """The ranks of one node, and where they meet those of the other nodes."""

    program: tuple[str, ...]
    processes: int
    nodes: int
    node_rank: int
    master_addr: str
    master_port: int
    cpu: bool
    grace: float
    keep: int | None = None
    checkpoints: Path | None = None
    secrets: Path = Path("/run/secrets")
    checkout: str | None = None
    tie: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    def rank(self, local_rank: int) -> int:
        """The rank among all nodes; every node has the same number of processes."""
        return self.node_rank * self.processes + local_rank


@dataclass(frozen=True)
class Exit:
    """A rank has ended; `code` is negative for a signal, as in `subprocess`."""

    local_rank: int
    code: int


@dataclass(frozen=True)
class Stop:
    """Somebody asked the runner to stop, by a signal or, then `why` says so, by another way."""

    signum: int
    why: str = ""

    @property
    def told(self) -> str:
        return self.why or signal.Signals(self.signum).name


@dataclass(frozen=True)
class Stalled:
    """Somebody asked where the ranks are, since the run doesn't go on."""


Event = Exit | Stop | Stalled


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m launcher.train.runner",
        usage="%(prog)s --processes-per-node N [options] -- PROGRAM [ARGS ...]",
        description="PROGRAM is a script's path or -m MODULE. Exit code: the first failing "
        "rank's (128 + S when signal S killed it), 0 when all succeed, 2 or, for what is there, "
        "GPUs and checkpoints, 121 when refused.",
    )
    add = parser.add_argument
    add("--processes-per-node", type=int, required=True, help="ranks to start on this node")
    add("--nodes", type=int, default=environ.get("PET_NNODES", "1"))
    add("--node-rank", type=int, default=environ.get("PET_NODE_RANK", "0"))
    add("--master-addr", default=environ.get("PET_MASTER_ADDR", ""), help="where rank 0 listens")
    add("--master-port", type=int, default=environ.get("PET_MASTER_PORT", "0"))
    add("--cpu", action="store_true", help="run CUDA calls on the CPU, over gloo")
    add("--grace", type=float, default=600.0, help="seconds between a signal and the kill")
    add("--keep", type=int, help="the newest N complete checkpoints, and remove older ones")
    add("--checkpoints", type=Path, help="the folder of those")
    add("--secrets", type=Path, default="/run/secrets", help="files that become variables")
    add("--checkout", help="a Megatron-LM folder, first on PYTHONPATH, to run with")
    add("--tie", action="store_true", help="stop when standard input ends")
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Job:
    """The job that `argv` asks for, with `environ` (a cluster's, say) giving the defaults.

    Raises `Refused` where the values can't work together.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = _parser(environ).parse_args(argv[:end])
    program = tuple(argv[end + 1 :])
    if program in ((), ("-m",)):
        raise Refused("no program to run: give a script or -m MODULE after --")
    if arguments.processes_per_node < 1 or arguments.nodes < 1:
        raise Refused("--processes-per-node and --nodes must be at least 1")
    if not 0 <= arguments.node_rank < arguments.nodes:
        raise Refused(f"--node-rank {arguments.node_rank} is not in 0..{arguments.nodes - 1}")
    if arguments.nodes > 1 and not (arguments.master_addr and arguments.master_port):
        raise Refused("with several nodes, give --master-addr and --master-port of node 0")
    if (arguments.keep is None) != (arguments.checkpoints is None):
        raise Refused("--keep and --checkpoints go together")
    if arguments.keep is not None and arguments.keep < 1:
        raise Refused("--keep must be at least 1")
    return Job(
        program=program,
        processes=arguments.processes_per_node,
        nodes=arguments.nodes,
        node_rank=arguments.node_rank,
        master_addr=arguments.master_addr or "127.0.0.1",
        master_port=arguments.master_port or _free_port(),
        cpu=arguments.cpu,
        grace=arguments.grace,
        keep=arguments.keep,
        checkpoints=arguments.checkpoints,
        secrets=arguments.secrets,
        checkout=arguments.checkout,
        tie=arguments.tie,
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def check_devices(job: Job, visible: int) -> None:
    """Raises `Unable` unless there is one visible CUDA device per process, or `--cpu`.

    Upstream's quickstart takes the device count for the world size: with fewer processes
    than visible devices it waits for ever for ranks that nobody starts.
    """
    if job.cpu or visible == job.processes:
        return
    if visible == 0:
        raise Unable("no CUDA device is visible: give --cpu to run on the CPU")
    raise Unable(
        f"{job.processes} processes on {visible} visible CUDA devices: make them equal, "
        f"by --processes-per-node {visible} or by CUDA_VISIBLE_DEVICES"
    )


def check_architectures(job: Job) -> None:
    """Raises `Unable` where torch has no code for a visible GPU, or CUDA doesn't start."""
    if job.cpu:
        return
    try:
        problem = devices.problem(*devices.look())
    except RuntimeError as error:
        problem = f"CUDA can't be started: {error}"
    if problem:
        raise Unable(problem)


def read_secrets(folder: Path) -> dict[str, str]:
    """Variables from the files in a folder, by their names; one newline at the end is left out.

    Files whose names can't be a variable's are left alone; a folder that isn't there has none.
    One that can't be passed on as a variable is named, and stays a file.
    """
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", path.name) or not path.is_file():
            continue
        try:
            content = path.read_bytes().removesuffix(b"\n")
        except OSError as error:
            _say(f"{path} is no variable: {error.strerror}")
            continue
        if b"\0" in content or len(path.name) + len(content) + 2 > LONGEST_VARIABLE:
            _say(f"{path} is no variable: it is binary, or longer than 128 KiB")
            continue
        found[path.name] = os.fsdecode(content)
    return found


def command(job: Job) -> list[str]:
    """What each rank runs: this Python, unbuffered so that logs don't lag."""
    redirection = ["-m", "launcher.train.cpu"] if job.cpu else []
    checkout = ["-m", "launcher.train.ranks.checkout", job.checkout] if job.checkout else []
    telling = ["-m", "launcher.train.ranks.stacks"]
    return [sys.executable, "-u", *telling, *redirection, *checkout, *job.program]


def environment(job: Job, local_rank: int, environ: Mapping[str, str], cpus: int) -> dict[str, str]:
    """The variables that `local_rank` gets on top of the runner's own."""
    ranks = {
        "RANK": job.rank(local_rank),
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": job.world_size,
        "LOCAL_WORLD_SIZE": job.processes,
        "NODE_RANK": job.node_rank,
        "GROUP_RANK": job.node_rank,
        "MASTER_ADDR": job.master_addr,
        "MASTER_PORT": job.master_port,
    }
    defaults: dict[str, object] = {
        "OMP_NUM_THREADS": max(1, min(8, cpus // job.processes)),
        # Megatron overlaps communication by launch order, which one queue preserves.
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
    }
    if job.cpu and job.nodes == 1:
        # Without a network, gloo's look-up of the host name fails, and torch warns of its own.
        defaults |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    kept = {name: environ.get(name, value) for name, value in defaults.items()}
    return {name: str(value) for name, value in {**ranks, **kept}.items()}


def _start(
    job: Job, environ: Mapping[str, str], log_dir: str, more: Mapping[str, str]
) -> dict[int, Any]:
    """Start the ranks, with `more` variables; handlers (`.proc`, `.close(signal)`) by local rank.

    torch 2.3 replaced `log_dir` by `logs_specs`; its previews in NGC images come before.
    """
    from torch.distributed.elastic import multiprocessing

    if "logs_specs" in inspect.signature(multiprocessing.start_processes).parameters:
        logs: dict[str, Any] = {"logs_specs": multiprocessing.DefaultLogsSpecs(log_dir=log_dir)}
    else:
        logs = {"log_dir": log_dir}
    arguments = ("-I", "-S", rank.__file__, str(os.getpid()), *command(job))
    secrets = read_secrets(job.secrets)
    cpus = len(os.sched_getaffinity(0))
    local_ranks = range(job.processes)
    context = multiprocessing.start_processes(
        name="rank",
        entrypoint=sys.executable,
        args={local_rank: arguments for local_rank in local_ranks},
        envs={n: {**secrets, **environment(job, n, environ, cpus), **more} for n in local_ranks},
        **logs,
    )
    handlers: dict[int, Any] = context.subprocess_handlers
    return handlers


def exit_code(code: int) -> int:
    """The shell's exit code for one of `subprocess`: 128 + S when signal S killed it."""
    return 128 - code if code < 0 else code


def _end(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name}), exit code {128 - code}"


def stopped(ranks: int) -> str:
    """The last line where the runner was asked to stop and all ranks ended with 0.

    Its beginning is `STOPPED`, by which the launcher tells a stopped run from a finished one.
    """
    return f"{STOPPED}all {ranks} ranks ended after SIGTERM"


def _say(text: str) -> None:
    print(f"{SAYS}{text}", file=sys.stderr, flush=True)


class Watch:
    """Waits for a node's ranks, and decides when to ask and when to force them to end."""

    def __init__(
        self,
        job: Job,
        handlers: Mapping[int, Any],
        events: queue.SimpleQueue[Event],
        collector: stall.Collector | None = None,
    ) -> None:
        self.job = job
        self.handlers = handlers
        self.events = events
        self.collector = collector
        self.reporting = threading.Lock()
        self.running = set(handlers)
        self.first_failure: Exit | None = None
        self.memory = oom.read()
        self.stopping = False
        self.deadline: float | None = None
        self.at_deadline: Callable[[], None] = lambda: None

    def wait(self) -> int:
        """Wait for all ranks; the exit code of the first that failed, or 0."""
        for local_rank, handler in self.handlers.items():
            arguments = (local_rank, handler.proc)
            threading.Thread(target=self._reap, args=arguments, daemon=True).start()
        while self.running:
            self._handle(self._next_event())
        self._signal_all(signal.SIGKILL, self.handlers)  # what the ranks left behind
        if self.first_failure and self.collector:
            for line in self.collector.after_failure():
                _say(line)
        return exit_code(self.first_failure.code) if self.first_failure else 0

    def _reap(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        # One blocking wait per rank: the queue's order is the order in which they ended.
        self.events.put(Exit(local_rank, process.wait()))

    def _next_event(self) -> Event | None:
        timeout = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        try:
            return self.events.get(timeout=timeout)
        except queue.Empty:
            return None

    def _handle(self, event: Event | None) -> None:
        if event is None:
            self.deadline = None
            self.at_deadline()
        elif isinstance(event, Exit):
            self._ended(event)
        elif isinstance(event, Stalled):
            threading.Thread(target=self._report, args=(self._ranks(),), daemon=True).start()
        elif not self.stopping:
            self._ask_to_stop(event)
        elif event.signum == signal.SIGINT:
            self._kill("interrupted a second time")
        else:  # several may ask, and one that lost its engine asks again
            _say(f"{event.told}: asked to stop already")

    def _ended(self, event: Exit) -> None:
        self.running.discard(event.local_rank)
        if event.code == 0 or self.first_failure:
            return
        self.first_failure = event
        killed = event.code == -signal.SIGKILL
        why = oom.blame(self.memory, oom.read()) if killed else ""
        told = f"rank {self.job.rank(event.local_rank)} {_end(event.code)}"
        _say(f"{told}: {why}" if why else told)
        self._later(SETTLE_SECONDS, self._terminate)

    def _ranks(self) -> list[stall.Rank]:
        return [
            stall.Rank(self.job.rank(n), self.handlers[n].proc.pid) for n in sorted(self.running)
        ]

    def _report(self, ranks: list[stall.Rank]) -> None:
        """Say where the ranks are; meanwhile they may end, and be asked to stop."""
        if not (ranks and self.collector and self.reporting.acquire(blocking=False)):
            return
        with contextlib.suppress(OSError):  # the folder goes when the ranks have ended
            for line in self.collector.report(ranks):
                _say(line)
        self.reporting.release()

    def _terminate(self) -> None:
        self._signal_all(signal.SIGTERM, self.running)
        self._later(TERMINATION_SECONDS, lambda: self._kill("outlived a failed rank"))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.deadline = time.monotonic() + seconds
        self.at_deadline = action

    def _ask_to_stop(self, event: Stop) -> None:
        # SIGTERM also for an interrupt: it is what training programs save a checkpoint on.
        _say(f"{event.told}: asked {len(self.running)} ranks to stop, waiting {self.job.grace:g} s")
        self.stopping = True
        if not self.first_failure:
            self._later(self.job.grace, lambda: self._kill("grace period over"))
        for local_rank in self.running:
            self.handlers[local_rank].proc.send_signal(signal.SIGTERM)

    def _kill(self, why: str) -> None:
        ranks = ", ".join(str(self.job.rank(n)) for n in sorted(self.running))
        _say(f"killing rank {ranks}: {why}")
        self._signal_all(signal.SIGKILL, self.running)

    def _signal_all(self, signum: signal.Signals, local_ranks: Any) -> None:
        for local_rank in local_ranks:
            with contextlib.suppress(ProcessLookupError):
                self.handlers[local_rank].close(signum)


def run(job: Job, environ: Mapping[str, str]) -> int:
    """Run the job's ranks to their end; the exit code to pass on.

    Raises `Refused` before any rank is started when the devices don't fit.
    """
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    faulthandler.register(stacks.SIGNAL)  # until there are ranks, it is the runner that is stuck
    signals.Ear(SIGNALS, lambda signum: events.put(_event(signum)))
    if job.tie:
        threading.Thread(target=_read_to_the_end, args=(events,), daemon=True).start()
    import torch
    from torch.distributed.elastic.multiprocessing import SignalException

    check_devices(job, torch.cuda.device_count())
    check_architectures(job)
    if not events.empty():
        return 128 + events.get().signum
    with _retention(job, environ), tempfile.TemporaryDirectory(prefix="ranks-") as log_dir:
        whole = job.nodes == 1
        collector = stall.Collector(Path(log_dir), environ, cpu=job.cpu, whole=whole)
        try:  # torch installs handlers that raise
            handlers = _start(job, environ, log_dir, collector.variables)
            signals.catch((*SIGNALS, stacks.SIGNAL))
        except SignalException as asked:
            signals.catch(SIGNALS)
            return 128 + asked.sigval  # the ranks that it had started end with this process
        watch = Watch(job, handlers, events, collector)
        code = watch.wait()
    if watch.stopping and code == 0:
        print(stopped(len(handlers)), file=sys.stderr, flush=True)
    return code


def _retention(job: Job, environ: Mapping[str, str]) -> contextlib.AbstractContextManager[Any]:
    """Claim the folder that the run saves to, and see to what comes there.

    Several nodes share it, so the first one does. Raises `Unable` where another run's checkpoints
    lie there. Without a launcher the runner is a run of its own, which goes on.
    """
    wish = lineage.wish(environ)
    if wish is None and job.checkpoints:
        wish = lineage.Wish(os.urandom(4).hex(), str(job.checkpoints), on=True, overwrite=True)
    if wish is None or job.node_rank:
        return contextlib.nullcontext()
    root = Path(wish.folder)
    line = wish.run
    try:
        line = folders.line_of(root, wish.run, on=wish.on)
        why = "" if wish.overwrite else folders.refusal(root, line, on=wish.on)
        if why:
            raise Unable(why)
        root.mkdir(parents=True, exist_ok=True)
        lineage.claim(root, wish.run, line, overwrite=wish.overwrite)
    except OSError as error:
        _say(f"can't note in {root} whose its checkpoints are: {error.strerror}")
    return Retention(root, line, job.keep, _say)


def _event(signum: int) -> Event:
    return Stalled() if signum == stacks.SIGNAL else Stop(signum)


def _read_to_the_end(events: queue.SimpleQueue[Event]) -> None:
    """Ask to stop when standard input ends, which is when the launcher that holds it does."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
    events.put(Stop(signal.SIGTERM, "the launcher has gone"))


def main(argv: Sequence[str]) -> NoReturn:
    try:
        sys.exit(run(parse(argv, os.environ), os.environ))
    except Refused as refusal:
        _say(str(refusal))
        sys.exit(refusal.code)


if __name__ == "__main__":
    main(sys.argv[1:])
