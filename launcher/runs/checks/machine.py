"""Facts about a machine, and the findings of checks. None, or nothing, is what isn't known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.runs.plan.program_options import Value

GB = 1e9
UNLIMITED = -1


@dataclass(frozen=True)
class Finding:
    """What is wrong, with its value and place; why that can't work; the smallest mend.

    `refuse` False is a warning: the run may start.
    """

    what: str
    why: str
    mend: str
    refuse: bool = True

    def __str__(self) -> str:
        return f"{self.what}\n  {self.why}\n  {self.mend}"


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi lists it; memory in bytes, a total of 0 where it lists none."""

    index: int
    uuid: str
    name: str
    total: int
    used: int
    capability: tuple[int, int] | None
    driver: str


def find_gpu(device: str, there: Sequence[Gpu]) -> Gpu | None:
    """The GPU of an index, a UUID, or a UUID's beginning that fits one alone."""
    if device.isdecimal():
        return next((gpu for gpu in there if gpu.index == int(device)), None)
    fitting = [gpu for gpu in there if gpu.uuid.startswith(device)]
    return fitting[0] if len(fitting) == 1 else None


@dataclass(frozen=True)
class Use:
    """A process that computes on a GPU; `memory` in bytes, None where the driver has none."""

    gpu: str
    pid: int
    memory: int | None

    def __str__(self) -> str:
        return f"process {self.pid}" + (f" ({self.memory / GB:.1f} GB)" if self.memory else "")


@dataclass(frozen=True)
class Engine:
    """A container engine. `gpus` says whether it can give GPUs to a container."""

    version: str
    host: str
    local: bool
    rootless: bool
    cgroup: str
    gpus: bool | None
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Dataset:
    """A .bin and .idx; `problem` is "" where they fit each other and can be read by the run.

    `greatest` is the greatest of its first tokens; `documents` are what a split divides.
    """

    prefix: str
    problem: str
    tokens: int | None = None
    greatest: int = 0
    documents: int | None = None


@dataclass(frozen=True)
class SavedCheckpoints:
    """The checkpoints in a folder: the newest complete one's iteration, and the broken newer ones.

    `broken` holds (folder, problem) of those newer than `newest`, oldest first; `options` are what
    the run that began its line had, where that has a record here.
    """

    newest: int | None
    broken: tuple[tuple[str, str], ...] = ()
    options: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Folder:
    """A folder that is written to; `problem` is "" where the run's user may write there.

    `free` counts bytes of the file system, for users that aren't root.
    """

    path: str
    key: str
    problem: str = ""
    free: int | None = None


@dataclass(frozen=True)
class Machine:
    """The machine that a run is for, as far as it is known here.

    gpus: those of the driver, in its order; empty where the driver has none
    shm: bytes of /dev/shm; memlock: bytes that may be locked, UNLIMITED, or None
    port: whether the master port is free here; resolves: whether the master's address is known
    unseen: keys and paths of the run's mounts that aren't the same file or folder to the engine
    load, save: the checkpoints in the folders that are read from and written to
    """

    gpus: tuple[Gpu, ...] | None = None
    uses: tuple[Use, ...] = ()
    engine: Engine | None = None
    shm: int | None = None
    memlock: int | None = None
    port: bool | None = None
    resolves: bool | None = None
    datasets: tuple[Dataset, ...] = ()
    folders: tuple[Folder, ...] = ()
    unseen: tuple[tuple[str, str], ...] = ()
    load: SavedCheckpoints | None = None
    save: SavedCheckpoints | None = None
