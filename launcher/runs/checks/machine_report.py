"""The report on a machine alone, without a run: `launcher doctor`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from launcher.runs.checks import checks
from launcher.runs.checks.gather import SHM
from launcher.runs.checks.machine import GB, UNLIMITED, Engine, Finding, Machine
from launcher.runs.runfile.values import Gpus

OK, WARNING, REFUSED = "ok", "warning", "refused"
CACHE = 10**9
"""Bytes below which the cache folder's disk is worth a warning: an image's downloads and wheels."""


@dataclass(frozen=True)
class Line:
    """One fact: its name, its state, what was found, and the mend where there is one."""

    name: str
    state: str
    found: str
    mend: str = ""


def lines(
    machine: Machine,
    cuda: str | None,
    cache: tuple[str, int | None],
    *,
    asked: Gpus | None = None,
) -> list[Line]:
    """Every fact of a machine.

    `cuda` is the version in the image asked about; `cache` the cache folder and its free bytes;
    `asked` the GPUs that must be there, None for whichever there are.
    """
    found = list(_engine(machine.engine))
    if asked is None or asked.count != 0:
        found += _gpus(machine, cuda, asked)
    if machine.engine is None or machine.engine.local:
        found += _memory(machine)
    return [*found, _disk(*cache)]


def _engine(engine: Engine | None) -> Iterator[Line]:
    if engine is None:
        return
    kind = "rootless" if engine.rootless else "rootful"
    yield Line("engine", OK, f"{engine.version} at {engine.host}, {kind}, cgroup {engine.cgroup}")
    if not engine.local:
        yield Line("machine", OK, "the engine is elsewhere: only what it reports itself is below")


def _gpus(machine: Machine, cuda: str | None, asked: Gpus | None) -> Iterator[Line]:
    there = machine.gpus or ()
    if machine.engine is None or machine.engine.local:
        if asked:
            yield from _judged("GPUs", "", checks.gpus_are_there(asked, there))
        elif not there:
            yield Line("GPUs", OK, "no GPU: CPU runs only")
        if not there:
            return
    for gpu in there:
        able = ".".join(map(str, gpu.capability)) if gpu.capability else "unknown"
        text = f"{gpu.name}, {gpu.total / GB:.1f} GB, compute capability {able}"
        yield from _judged(f"GPU {gpu.index}", text, checks.gpus_are_free([gpu], machine.uses))
    if there:
        beside = f", for CUDA {cuda}" if cuda else ""
        yield from _judged(
            "driver", f"{there[0].driver}{beside}", checks.driver_carries(there, cuda)
        )
    if machine.engine:
        given = "the engine gives GPUs to containers"
        yield from _judged("toolkit", given, checks.gpus_are_given(machine.engine))


def _judged(name: str, good: str, findings: Iterable[Finding]) -> Iterator[Line]:
    """A line for each finding, or that all is well; none where there is nothing to say of it."""
    lines = [
        Line(name, REFUSED if one.refuse else WARNING, f"{one.what}\n{one.why}", one.mend)
        for one in findings
    ]
    yield from lines or ([Line(name, OK, good)] if good else [])


def _memory(machine: Machine) -> Iterator[Line]:
    """Shared and locked memory: what several GPUs need, and the CPU hardly."""
    state = WARNING if machine.gpus else OK
    if machine.shm is not None:
        text = f"{machine.shm >> 20} MiB free"
        if machine.shm >= checks.SHM:
            yield Line(SHM, OK, text)
        else:
            mend = f"mount -o remount,size=8g {SHM}: NVIDIA asks for 1024 MiB"
            yield Line(SHM, state, text, mend)
    if machine.memlock is None:
        yield Line("memlock", OK, "the engine reports it when it is asked; a run goes on without")
    elif machine.memlock == UNLIMITED:
        yield Line("memlock", OK, "unlimited")
    else:
        mend = "ulimit -l unlimited: NCCL needs it over InfiniBand"
        yield Line("memlock", state, f"{machine.memlock >> 10} KiB", mend if machine.gpus else "")


def _disk(path: str, free: int | None) -> Line:
    if free is None:
        return Line("cache", OK, path)
    small = free < CACHE
    return Line(
        "cache",
        WARNING if small else OK,
        f"{free / GB:.1f} GB free for {path}",
        "Free some, or set LAUNCHER_CACHE to another folder." if small else "",
    )


def table(found: Sequence[Line]) -> str:
    """The facts, one a line, each mend below its own."""
    width = max(len(line.name) for line in found)
    margin = " " * (11 + width)
    rows = []
    for line in found:
        mend = f"\n→ {line.mend}" if line.mend else ""
        text = f"{line.found}{mend}".replace("\n", f"\n{margin}")
        rows.append(f"{line.state:<8} {line.name:<{width}}  {text}\n")
    return "".join(rows)
