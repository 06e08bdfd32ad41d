"""Start a program's ranks on this node, forward signals to them, pass on their exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from launcher.agent import diverged, start
from launcher.agent.checkpoints import folders, lineage
from launcher.agent.checkpoints.hold import FolderHeldError, Hold
from launcher.agent.checkpoints.retention import Retention
from launcher.agent.ranks import bus, driver, oom, rank, signals, stacks
from launcher.agent.ranks.command_line import (
    DeviceCheck,
    MismatchError,
    NodeRanks,
    RunnerRefusal,
    parse,
    read_secrets,
)
from launcher.agent.ranks.peers import PeerNodes, RanksRefused, RemoteFailure
from launcher.agent.stall import stall
from launcher.agent.words import ASK, DIVERGED, REFUSES, STOPPED, say

if TYPE_CHECKING:
    from launcher.agent.ranks.alike import LinkedNodes

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
"""Those that ask a run to stop; SIGHUP not where it was ignored from the beginning (nohup)."""

SETTLE_SECONDS = 1.0
"""How long ranks that outlive a failed one have to fail, and say why, by themselves."""

ASK_SECONDS, CHECK_SECONDS = 120.0, 60.0
"""How long Megatron has to judge its options; and a rank's end waits for the check of its GPUs."""

TERMINATION_SECONDS = 5.0
"""How long they then have between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Exit:
    """A rank has ended; `code` is negative for a signal, as in `subprocess`."""

    local_rank: int
    code: int


@dataclass(frozen=True)
class SignalRequest:
    """Somebody asked the runner to stop or, by `stacks.SIGNAL`, to say where its ranks are.

    `why` says so where it was by another way than a signal.
    """

    signum: int
    why: str = ""


WatchEvent = Exit | SignalRequest | RemoteFailure


def _start(
    ranks: NodeRanks, environ: Mapping[str, str], log_dir: str, more: Mapping[str, str]
) -> dict[int, subprocess.Popen[bytes]]:
    """Start the ranks, each in a process group, with `more` variables; processes by local rank."""
    become = ("-I", "-S", rank.__file__)
    before = (*become, str(os.getpid()))
    under = {
        n: (*ranks.tracer(n), sys.executable, *become, str(_own(log_dir, n)))
        for n in range(ranks.processes)
        if ranks.traces(n)
    }
    secrets = read_secrets(ranks.secrets)
    cpus = len(os.sched_getaffinity(0))
    if cpus < ranks.processes:
        say(
            f"warning: {ranks.processes} ranks share {cpus} CPU{'s'[: cpus != 1]}, all that this "
            "process may use: ask the scheduler, or the engine, for more"
        )
    return {
        n: subprocess.Popen(
            [sys.executable, *before, *under.get(n, ()), *ranks.command()],
            env={**os.environ, **secrets, **ranks.environment(n, environ, cpus), **more},
            start_new_session=True,
        )
        for n in range(ranks.processes)
    }


def _own(log_dir: str, local_rank: int) -> Path:
    """Where a rank that nsys starts says its process id."""
    return Path(log_dir, f"{local_rank}.pid")


@dataclass
class RankWatch:
    """Waits for a node's ranks, and decides when to ask and when to force them to end."""

    ranks: NodeRanks
    processes: Mapping[int, subprocess.Popen[bytes]]
    events: queue.SimpleQueue[WatchEvent]
    collector: stall.Collector | None = None
    peers: PeerNodes | None = None
    log_dir: str = ""
    check: DeviceCheck | None = None

    def __post_init__(self) -> None:
        self.elsewhere: RemoteFailure | None = None
        self.reporting = threading.Lock()
        self.running = set(self.processes)
        self.first_failure: Exit | None = None
        self.memory = oom.read()
        self.data = bus.sizes(self.ranks.program)
        self.stopping = False
        self.deadline: float | None = None
        self.at_deadline: Callable[[], None] = lambda: None

    def wait(self) -> int:
        """Wait for all ranks; the exit code of the first that failed, the shell's, or 0."""
        for each in self.processes.items():
            threading.Thread(target=self._reap, args=each, daemon=True).start()
        while self.running:
            left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            try:
                event = self.events.get(timeout=left)
            except queue.Empty:
                self.deadline = None
                self.at_deadline()
            else:
                self._handle(event)
        self._signal_all(signal.SIGKILL, self.processes)  # what the ranks left behind
        if self.first_failure is None:
            return self.elsewhere.code if self.elsewhere else 0
        for line in self.collector.after_failure() if self.collector else ():
            say(line)
        code = self.first_failure.code
        return 128 - code if code < 0 else code

    def _reap(self, local_rank: int, process: subprocess.Popen[bytes]) -> None:
        # One blocking wait per rank: the queue's order is the order in which they ended.
        self.events.put(Exit(local_rank, process.wait()))

    def _handle(self, event: WatchEvent) -> None:
        if isinstance(event, Exit):
            self._ended(event)
        elif isinstance(event, RanksRefused):
            self._refused(event)
        elif isinstance(event, RemoteFailure):
            self._missed(event)
        elif event.signum == stacks.SIGNAL:
            pids = {self.ranks.rank(n): self._pid(n) for n in sorted(self.running)}
            threading.Thread(target=self._report, args=(pids,), daemon=True).start()
        elif not self.stopping:
            self._ask_to_stop(_name(event))
        elif event.signum == signal.SIGINT:
            self._kill("interrupted a second time")
        else:  # several may ask, and one that lost its engine asks again
            say(f"{_name(event)}: asked to stop already")

    def _ended(self, event: Exit) -> None:
        self.running.discard(event.local_rank)
        if self.check and not self.stopping:  # it may know why, and counts also where all is done
            self.check.join(CHECK_SECONDS)
            if self.check.unfit:
                self._refused(RanksRefused(self.check.unfit))
            self.check = None
        if event.code == 0 or self.first_failure or self.elsewhere:
            return
        self.first_failure = event
        code, why = event.code, ""
        how = f"exited with code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by signal {-code} ({name}), exit code {128 - code}"
        if code == -signal.SIGKILL and (blamed := oom.blame(self.memory, oom.read())):
            why = f": {blamed}"
        if code == -signal.SIGBUS and (blamed := bus.blame(self.data)):
            why = f": {blamed}"
        told = f"rank {self.ranks.rank(event.local_rank)} {how}{why}"
        say(told)
        if self.peers:
            self.peers.failed(told, 128 - code if code < 0 else code)
        self._later(SETTLE_SECONDS, self._terminate)

    def _missed(self, other: RemoteFailure) -> None:
        """End the ranks, which wait for those of a node that has failed; the first one counts."""
        say(other.why)
        if not (self.first_failure or self.elsewhere):
            self.elsewhere = other
            self._later(SETTLE_SECONDS, self._terminate)

    def _refused(self, refusal: RanksRefused) -> None:
        """Kill the ranks: on SIGTERM they would save."""
        if refusal == self.elsewhere:
            return
        say(refusal.why)
        self.elsewhere = self.elsewhere or refusal
        if self.peers:
            self.peers.failed(refusal.why, refusal.code)
        if self.running:
            self._kill("they may not go on")

    def _report(self, pids: Mapping[int, int]) -> None:
        """Say where the ranks are; meanwhile they may end, and be asked to stop."""
        if not (pids and self.collector and self.reporting.acquire(blocking=False)):
            return
        with contextlib.suppress(OSError):  # the folder goes when the ranks have ended
            for line in self.collector.report(pids):
                say(line)
        self.reporting.release()

    def _terminate(self) -> None:
        self._signal_all(signal.SIGTERM, self.running)
        self._later(TERMINATION_SECONDS, lambda: self._kill("outlived a failed rank"))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.deadline = time.monotonic() + seconds
        self.at_deadline = action

    def _ask_to_stop(self, told: str) -> None:
        # SIGTERM also for an interrupt: it is what training programs save a checkpoint on.
        say(f"{told}: asked {len(self.running)} ranks to stop, waiting {self.ranks.grace:g} s")
        self.stopping = True
        if not (self.first_failure or self.elsewhere):
            self._later(self.ranks.grace, lambda: self._kill("grace period over"))
        for local_rank in self.running:
            process = self.processes[local_rank]
            if (pid := self._pid(local_rank)) == process.pid:
                process.send_signal(signal.SIGTERM)
            else:
                os.kill(pid, signal.SIGTERM)

    def _pid(self, local_rank: int) -> int:
        """The rank's process, also where it was nsys that started it."""
        with contextlib.suppress(OSError, ValueError):
            found = int(_own(self.log_dir, local_rank).read_text())
            if f"\0LOCAL_RANK={local_rank}\0" in Path(f"/proc/{found}/environ").read_text():
                return found  # and no other's that came after it
        return self.processes[local_rank].pid

    def _kill(self, why: str) -> None:
        killed = ", ".join(str(self.ranks.rank(n)) for n in sorted(self.running))
        say(f"killing rank {killed}: {why}")
        self._signal_all(signal.SIGKILL, self.running)

    def _signal_all(self, signum: signal.Signals, local_ranks: Iterable[int]) -> None:
        for local_rank in local_ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.processes[local_rank].pid, signum)


def _name(request: SignalRequest) -> str:
    return request.why or signal.Signals(request.signum).name


def run(ranks: NodeRanks, environ: Mapping[str, str]) -> int:
    """Run the ranks to their end; the exit code. Raises `RunnerRefusal` before any is started."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    faulthandler.register(stacks.SIGNAL)  # until there are ranks, it is the runner that is stuck
    asking: Sequence[signal.Signals] = SIGNALS
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        asking = SIGNALS[:-1]
    signals.SignalListener(asking, lambda signum: events.put(SignalRequest(signum)))
    if ranks.tie:
        threading.Thread(target=_read_to_the_end, args=(events,), daemon=True).start()
    with contextlib.ExitStack() as held:
        saver, met = _ready(ranks, environ, events, held)
        if not events.empty():
            first = events.get()
            return first.code if isinstance(first, RanksRefused) else 128 + first.signum
        written: Any = None
        if ranks.profile:  # what reads traces takes a while to import
            from launcher.agent import traces

            written = traces.Traces(ranks.profile)
        peers = PeerNodes(met.rendezvous, events.put) if met else None
        ranks, found = (met.ranks, met.variables) if met else (ranks, {})
        log_dir = held.enter_context(tempfile.TemporaryDirectory(prefix="ranks-"))
        whole = ranks.nodes == 1
        collector = stall.Collector(Path(log_dir), environ, cpu=ranks.cpu, whole=whole)
        with contextlib.suppress(OSError):
            found = {**found, **driver.for_triton(environ, Path(log_dir, "driver"))}
        processes = _start(ranks, environ, log_dir, {**found, **collector.variables, **saver})
        signals.catch([stacks.SIGNAL])
        alone = not (met or ranks.cpu)
        check = DeviceCheck(ranks, lambda why: events.put(RanksRefused(why))) if alone else None
        watch = RankWatch(ranks, processes, events, collector, peers, log_dir, check)
        code = watch.wait()
        own = diverged.noted(log_dir)
    if peers and code == 0 and (first := peers.done(own)) and not own:
        say(DIVERGED.format(first))  # the launcher here has no line of it
    pids = {ranks.rank(n): process.pid for n, process in processes.items()}
    for line in written.told(pids, ranks.nsys) if written else ():
        say(line)
    if code and not (watch.stopping or watch.elsewhere):
        _say_refusal(ranks, environ)
    if watch.stopping and code == 0:
        say(f"all {len(processes)} ranks ended after SIGTERM", STOPPED)
    return code


def _say_refusal(ranks: NodeRanks, environ: Mapping[str, str]) -> None:
    """Say so where upstream's program has failed since its Megatron refuses the options.

    That is asked where the launcher couldn't ask before the start: on a scheduler's machines.
    """
    words = list(ranks.program)
    if ranks.node_rank or not environ.get(ASK) or not re.search(r"/pretrain_\w+\.py$", words[0]):
        return
    command = [sys.executable, start.__file__, "validate", "--world-size"]
    command += [str(ranks.nodes * ranks.processes), *words]
    with contextlib.suppress(OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        done = subprocess.run(command, env=environ, capture_output=True, timeout=ASK_SECONDS)
        answer = json.loads(done.stdout.splitlines()[-1])
        if "refused" in answer:
            say(f"{REFUSES}: {answer['refused']} ({answer['where']})")


def _ready(
    ranks: NodeRanks,
    environ: Mapping[str, str],
    events: queue.SimpleQueue[Any],
    held: contextlib.ExitStack,
) -> tuple[Mapping[str, str], LinkedNodes | None]:
    """The signal for ranks to save, and for the other nodes, where there are any.

    The folder that is saved to is `held`. Raises `RunnerRefusal` where this node, or another one,
    can't start its ranks.
    """
    saver: Mapping[str, str] = {}
    refusal, visible = "", 0
    try:
        ranks.check_packages(environ)
        if not ranks.cpu:
            if why := driver.unused_compatibility(environ):
                say(why)
            if ranks.nodes > 1:  # a single one checks them beside its ranks' start
                visible = ranks.check_devices()
        if any(map(ranks.traces, range(ranks.processes))) and not shutil.which("nsys"):
            raise MismatchError(
                "nsys isn't in this image: NVIDIA's have it, or profile.tool: torch"
            )
        saver = _hold(ranks, environ, lambda why: events.put(RanksRefused(why)), held)
    except MismatchError as unable:
        if ranks.nodes == 1:
            raise
        refusal = str(unable)
    if ranks.nodes == 1:
        return saver, None
    from launcher.agent.ranks import alike  # with all that nodes meet by

    return saver, alike.look(ranks, environ, visible, lambda: not events.empty(), refusal)


def _hold(
    ranks: NodeRanks,
    environ: Mapping[str, str],
    lost: Callable[[str], None],
    held: contextlib.ExitStack,
) -> Mapping[str, str]:
    """Hold and claim the folder that the run saves to, and see to what comes there.

    Several nodes share it, so the first one does. The variables of the ranks that say who they save
    for. `lost` is called where another run takes the folder. Raises `MismatchError` where another
    run saves there, or its checkpoints lie there. Without a launcher the runner is a run of its
    own, which goes on.
    """
    request = lineage.save_request(environ)
    if request is None and ranks.checkpoints:
        request = lineage.SaveRequest(
            os.urandom(4).hex(), str(ranks.checkpoints), on=True, overwrite=True
        )
    if request is None or ranks.node_rank:
        return {}
    root = Path(request.folder)
    try:
        hold = Hold(root, request.run, say)
        held.callback(hold.release)
        line = folders.lineage_of(root, request.run, on=request.on)
        if not request.overwrite and (why := folders.refusal(root, line, on=request.on)):
            raise MismatchError(why)
        note = hold.claim(line, overwrite=request.overwrite)
    except FolderHeldError as other:
        raise MismatchError(str(other)) from None
    except OSError as error:
        say(f"can't note in {root} whose its checkpoints are: {error.strerror}")
        return {}
    hold.watch(lost)
    held.enter_context(Retention(root, line, ranks.keep, say, note.holder))
    return {lineage.HOLDER: str(note)}


def _read_to_the_end(events: queue.SimpleQueue[WatchEvent]) -> None:
    """Ask to stop when standard input ends, which is when the launcher that holds it does."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
    events.put(SignalRequest(signal.SIGTERM, "the launcher has gone"))


def main(argv: Sequence[str]) -> NoReturn:
    try:
        sys.exit(run(parse(argv, os.environ), os.environ))
    except RunnerRefusal as refusal:
        say(str(refusal))
        sys.exit(refusal.code)


if __name__ == "__main__":
    main(sys.argv[1:])
