"""Pickles read as they stand: nothing that they name is imported or called."""

from __future__ import annotations

import pickle
from typing import Any


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
