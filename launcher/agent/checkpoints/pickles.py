"""Reads pickles without importing or calling anything that they name.

A few bytes of a pickle can ask for gigabytes (a place in its memo) or for years (nested tuples as
a key). So a process of its own reads it first, and may take memory and time by what it has read.
"""

from __future__ import annotations

import io
import os
import pickle
import resource
import sys
from typing import IO, Any

ROOM = 256 << 20
"""Bytes of memory that reading any pickle may take."""

TIMES = 24
"""Bytes of memory for each byte that has been read, beside that."""

PACE = 1 << 19
"""Bytes that are read for each second of the processor, beside the first."""

WANTED = (
    *("use_distributed_optimizer", "no_save_optim", "tensor_model_parallel_size"),
    *("pipeline_model_parallel_size", "expert_model_parallel_size"),
)
"""What `arguments` gives."""


class AttributedDict(dict[Any, Any]):
    """An OrderedDict, which may have attributes: a module's state has."""


PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): AttributedDict,
}
"""What is made of a few names in place of a `PickledObject`."""


class PickledObject:
    """Stands in for what a pickle names: it keeps `args`, attributes and state, and does nothing.

    Each name has a class of its own, which is called so; `module` says where it is from.
    """

    module = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def _ignore(self, *args: Any) -> None:
        """What a pickle puts into a container that isn't a plain one is left out."""

    append = extend = add = __setitem__ = _ignore


class Reader(pickle.Unpickler):
    """Reads a pickle's structure."""

    def find_class(self, module: str, name: str) -> Any:
        return PLAIN.get((module, name)) or type(name, (PickledObject,), {"module": module})

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage, which stands elsewhere: ("storage", type, key, place, elements)."""
        return pid


def load(stream: IO[bytes]) -> Any:
    """What a pickle holds, by `Reader`; `stream` is at its beginning. Raises `UnpicklingError`."""
    look(stream)
    stream.seek(0)
    return Reader(stream).load()


def look(stream: IO[bytes], what: str = "nothing") -> Any:
    """What a function of `LOOKS` gives of a pickle, which another process reads.

    Raises `pickle.UnpicklingError` for one that is damaged, or takes far more than its size.
    """
    import json  # the other process needs none of these
    import shutil
    import subprocess
    from contextlib import suppress

    try:
        given: int | IO[bytes] = stream.fileno()
    except OSError:  # no file: an entry of an archive
        given = subprocess.PIPE
    argv = [sys.executable, "-I", "-S", __file__, what]
    with subprocess.Popen(
        argv, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        if process.stdin and process.stdout:
            with suppress(BrokenPipeError), process.stdin:
                shutil.copyfileobj(stream, process.stdin)
        told = process.stdout.read() if process.stdout else b""
    if process.returncode:
        raise pickle.UnpicklingError("it is damaged, or takes far more than its size")
    return json.loads(told)


def storage(index: Any) -> dict[str, int]:
    """The bytes that each file of a checkpoint must have at least, by its `.metadata`."""
    needed: dict[str, int] = {}
    for item in index.storage_data.values():
        end, name = int(item.offset) + int(item.length), str(item.relative_path)
        needed[name] = max(end, needed.get(name, 0))
    return needed


def arguments(saved: Any) -> dict[str, int | None]:
    """Those of upstream's command line that say which files there must be."""
    found = vars(saved["args"]) if saved.get("args") else {}
    return {name: found[name] for name in WANTED if isinstance(found.get(name), int)}


LOOKS = {"nothing": lambda _: None, "storage": storage, "arguments": arguments}


class _BudgetedInput(io.RawIOBase):
    """Standard input; this process may take more memory and time as it is read."""

    def __init__(self) -> None:
        with open("/proc/self/statm", encoding="ascii") as file:
            self.used = int(file.read().split()[0]) * resource.getpagesize()
        self.count = 0
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._allow()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.read(0, len(buffer))
        buffer[: len(data)] = data
        self.count += len(data)
        self._allow()
        return len(data)

    def _allow(self) -> None:
        for kind, wanted in (
            (resource.RLIMIT_AS, self.used + ROOM + TIMES * self.count),
            (resource.RLIMIT_CPU, 1 + self.count // PACE),
        ):
            _, most = resource.getrlimit(kind)
            soft = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
            resource.setrlimit(kind, (soft, most))


def main() -> None:
    """Print what a function of `LOOKS` gives of the pickle on standard input, as JSON."""
    found = Reader(io.BufferedReader(_BudgetedInput(), 1 << 20)).load()
    shown = LOOKS[sys.argv[1]](found)
    os.close(0)  # the rest isn't read
    import json

    print(json.dumps(shown), flush=True)
    os._exit(0)  # taking it all apart would take as long


if __name__ == "__main__":
    main()
