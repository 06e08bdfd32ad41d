"""The calling user (under sudo the one before root), and the files and folders of a plan."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import UsageError, nearest
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan


@dataclass(frozen=True)
class Caller:
    """A user's id, group, and other groups."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def caller() -> Caller:
    """The user of this process, or the one whom sudo names."""
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
    while not os.path.exists(path):
        yield path
        path = path.parent


def missing(plan: Plan) -> list[str]:
    """One line for every file or folder that the run reads and that isn't there."""
    return [
        f"{mount.key}: no such file or folder: {mount.source}"
        for mount in plan.mounts
        if mount.read_only and not os.path.exists(mount.source)
    ]


def require(plan: Plan) -> None:
    """Raises UsageError where something that the run reads isn't there."""
    if lacking := missing(plan):
        data = [one.source for one in plan.mounts if one.key == "data.path"]
        absent = (Path(source) for source in data if not os.path.exists(source))
        remedy = next((near_data(path.with_suffix("")) for path in absent), "")
        raise UsageError("\n".join(lacking), remedy)


def near_data(prefix: Path) -> str:
    """The remedy for data that isn't there: what else its folder has, the nearest name first."""
    if prefix.is_file() and prefix.suffix not in (".bin", ".idx"):
        return f"For text, use data.text in place of data.path: --set 'data.text=[{prefix}]'"
    near = sorted({path.stem for path in prefix.parent.glob("*.idx")} - {prefix.name})
    known = f" {nearest(prefix.name, near)}" if near else ""
    return f"data.path is the path without .bin and .idx.{known}"


def prepare(plan: Plan) -> None:
    """Make the folders the run writes to, as the calling user. Raises UsageError."""
    for mount in plan.mounts:
        if not mount.read_only:
            _make_folder(mount)


def _make_folder(mount: Mount) -> None:
    try:
        if not os.path.exists(mount.source):  # a mount of the user's own may be a file
            make_folder(Path(mount.source))
    except OSError as error:
        raise UsageError(
            f"{mount.key}: can't make the folder {mount.source}: {error.strerror}",
            "Give a folder you may write to.",
        ) from error
    if mount.key != "mounts" and not os.path.isdir(mount.source):
        raise UsageError(
            f"{mount.key}: {mount.source} is a file, and has to be a folder",
            "Give another folder.",
        )
    if not os.access(mount.source, os.W_OK):
        raise UsageError(
            f"{mount.key}: {mount.source} isn't yours to write to",
            "Give another folder, or change its owner.",
        )
