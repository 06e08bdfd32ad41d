"""Pickles read as they stand: nothing that they name is imported or called."""

from __future__ import annotations

import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

ROOM = 256 << 20
"""Bytes that reading any pickle may take; the size of a large one counts some times more."""

TIMES = 64


class Ordered(dict[Any, Any]):
    """An OrderedDict, which may have attributes: a module's state has."""


PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): Ordered,
}
"""What is made of a few names in place of a `Named`."""


class Named:
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
        return PLAIN.get((module, name)) or type(name, (Named,), {"module": module})

    def persistent_load(self, pid: Any) -> Any:
        """A tensor's storage, which stands elsewhere: ("storage", type, key, place, elements)."""
        return pid


def load(stream: IO[bytes], size: int | None = None) -> Any:
    """What a pickle holds, of `size` bytes or of a file, by `Reader`.

    Raises what a damaged one gives, and `MemoryError` for one that would take far more than it has.
    """
    if size is None:
        try:
            size = os.fstat(stream.fileno()).st_size
        except OSError:  # an entry of an archive
            size = 0
    with bounded(size):
        return Reader(stream).load()


@contextmanager
def bounded(size: int) -> Iterator[None]:
    """Let this process have `ROOM` more memory while this lasts, and some for `size` bytes.

    A few bytes of a pickle can ask for gigabytes: for a place in its memo, say.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        most = used + ROOM + TIMES * size
        soft = most if before[0] == resource.RLIM_INFINITY else min(most, before[0])
        resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
    except OSError:  # no such system
        soft = before[0]
    try:
        yield
    finally:
        if soft != before[0]:
            resource.setrlimit(resource.RLIMIT_AS, before)
