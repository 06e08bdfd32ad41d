"""Checks that nobody else can change a folder before we write to it.

We run as root on people's machines, and what another user can put into a folder is another user's.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from launcher.base.files import ForeignFileError

MOST_PLACES = 4096
"""On a way that goes on: links can lead in a circle."""


def require_trusted(path: Path) -> None:
    """Raise ForeignFileError where another user owns or can write `path`, or a folder above it.

    root is trusted, and under sudo the user who called. A folder where each removes only their
    own, as /tmp, may lead there. What LAUNCHER_TRUSTED names, folders with ":" between them, a
    site's shared disk say, is trusted with all below.
    """
    places = [*_places(path)]
    for each in reversed(places):
        if not _is_named(each):
            with suppress(FileNotFoundError):
                if why := _distrust(each, leads=each != places[-1]):
                    raise _refused(each, why)


def require_own_links(path: Path) -> None:
    """Raise ForeignFileError where another user's link is on the way to `path`.

    It could lead what root writes to any other place.
    """
    for each in _places(path):
        with suppress(FileNotFoundError):
            if each.is_symlink() and not _is_named(each) and (why := _distrust(each, leads=True)):
                raise _refused(each, f"is a link and {why}")


def _refused(path: Path, why: str) -> ForeignFileError:
    return ForeignFileError(
        path,
        f"{why}, and so could change what we do there. Take another place, or "
        f"say that you trust it: export LAUNCHER_TRUSTED={path}",
    )


def _is_named(path: Path) -> bool:
    """Whether LAUNCHER_TRUSTED names it, or a folder above it."""
    named = os.environ.get("LAUNCHER_TRUSTED", "").split(":")
    return any(path.is_relative_to(each) for each in named if each)


def _places(path: Path) -> Iterator[Path]:
    """All that the system looks at on the way to `path`: folders, links and what these lead to."""
    at, left = "/", [*reversed(path.absolute().parts[1:])]
    yield Path(at)
    for _ in range(MOST_PLACES):
        if not left:
            return
        part = left.pop()
        here = os.path.dirname(at) if part == ".." else os.path.join(at, part)
        if part != ".." and os.path.islink(here):
            yield Path(here)
            target = Path(os.readlink(here))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = "/" if target.is_absolute() else at
        else:
            at = here
            yield Path(at)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def _distrust(path: Path, leads: bool) -> str:
    status = os.lstat(path)
    ours = {0, os.geteuid()}
    if os.geteuid() == 0 and os.environ.get("SUDO_UID", "").isdecimal():
        ours.add(int(os.environ["SUDO_UID"]))
    if status.st_uid not in ours:
        return f"belongs to {_user(status.st_uid)}"
    kept = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)  # /dev/null keeps nothing
    if not kept or (leads and status.st_mode & stat.S_ISVTX):
        return ""
    if status.st_mode & stat.S_IWOTH:
        return "can be written by everybody"
    if status.st_mode & stat.S_IWGRP:  # of a file with an ACL this is the mask: acl(5)
        if _has_acl(path):
            return "can be written by those in its access control list"
        if not _is_private(status.st_gid, status.st_uid):
            return "can be written by a group"
    return ""


def _has_acl(path: Path) -> bool:
    try:
        return "system.posix_acl_access" in os.listxattr(path)
    except OSError:  # a file system that keeps none
        return False


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user id {number}"


def _is_private(group: int, owner: int) -> bool:
    """Whether nobody but the owner and root is in the group, by its own list."""
    if group == 0:
        return True
    try:
        account = pwd.getpwuid(owner)
        return account.pw_gid == group and not {*grp.getgrgid(group).gr_mem} - {account.pw_name}
    except KeyError:
        return False
