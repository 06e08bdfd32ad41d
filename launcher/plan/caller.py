"""Who called: under sudo the user before it, to whom the files of a run belong."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Caller:
    """A user's id, group, and other groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def caller() -> Caller:
    """The user of this process, or the one whom sudo tells of."""
    uid, gid, groups = os.getuid(), os.getgid(), os.getgroups()
    told = [os.environ.get(name, "") for name in ("SUDO_UID", "SUDO_GID")]
    if uid == 0 and all(one.isdecimal() for one in told):
        uid, gid = map(int, told)
        groups = _groups(uid, gid)
    return Caller(uid, gid, tuple(sorted({*groups} - {gid})) if uid else ())


def _groups(uid: int, gid: int) -> list[int]:
    """A user's groups as the system lists them; one that it doesn't know is in none."""
    with suppress(KeyError):
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    return []


def make_folder(path: Path) -> None:
    """Make a folder and those that lead to it, the caller's own. Raises `OSError`."""
    made = [*_missing(path)]
    path.mkdir(parents=True, exist_ok=True)
    who = caller()
    if os.getuid() != who.uid:
        for each in made:
            os.chown(each, who.uid, who.gid, follow_symlinks=False)


def _missing(path: Path) -> Iterator[Path]:
    """The folders that aren't there, the innermost first."""
    while not path.exists():
        yield path
        path = path.parent
