"""Folders that this project made: creates, marks, locks, sweeps and removes them, and no others.

We run as root on people's machines. What is removed lies below a folder that was named, is reached
by no symbolic link, and, a folder, holds our marker. Whatever doesn't fit is refused by an
`OSError` that names it.

Standard library only: it travels with each run.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from launcher.base.files import (
    FOLDER_FLAGS,
    LINK_ERRORS,
    ForeignFileError,
    aside_path,
    closing_handle,
    named,
    open_own,
    open_regular_at,
    parent_handle,
    parts_below,
    rename,
    try_lock,
)

MARKER = ".megatron-launchpad"
"""Lies in each folder that we make and may remove."""

MADE = b"Made by Megatron Launchpad, which may remove this folder with all that is in it.\n"
SCRATCH = "scratch-"
REMOVED = ".removed"
_LEFT = re.compile(
    r"(\..+\.[0-9a-f]{16}\.aside|\.?scratch-[0-9a-f]{16})(\.[0-9a-f]{16}\.removed)*", re.DOTALL
)
_LONGEST = 1 << 10
"""Bytes that are read of a marker: `MADE`, and the kernel that it was written on."""

MINUTE, DAY = 60, 86400


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """`path`, made as a folder of ours, with its marker from the start. Raises FileExistsError."""
    with locked_folder(path, mode):
        return path


@contextmanager
def locked_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """As `make_folder`, with the marker locked while this lasts: `sweep_folders` leaves it."""
    new = aside_path(path, os.urandom(8).hex())
    with ExitStack() as held:
        os.mkdir(new, mode)
        try:
            held.enter_context(closing_handle(_mark(new)))
            if os.path.lexists(path):  # else an empty folder of another one would give way
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            rename(new, path)
        except OSError:
            with suppress(FileNotFoundError):
                os.unlink(new / MARKER)
            os.rmdir(new)
            raise
        yield path


def sweep_folders(below: Path) -> None:
    """Remove the scratch and the folders aside that killed processes left in `below`.

    The name, the marker in it, and the lock that can be had of that show that one is ours and that
    its process is dead. Of a process on another machine, which may not see our locks, and of one
    that was killed before it wrote the marker, the age shows it as well.
    """
    for name in filter(_LEFT.fullmatch, os.listdir(below)):
        with suppress(OSError):
            _sweep_folder(below / name, below)


def _sweep_folder(path: Path, below: Path) -> None:
    with suppress(FileNotFoundError), closing_handle(open_own(path / MARKER, os.O_RDWR)) as marker:
        if content := os.read(marker, _LONGEST):
            here = content == MADE + kernel().encode()
            if content.startswith(MADE) and (here or _age(path) > DAY) and try_lock(marker):
                remove_folder(path, below)
            return
    if _age(path) > MINUTE and {*os.listdir(path)} <= {MARKER}:
        with suppress(FileNotFoundError):
            os.unlink(path / MARKER)
        os.rmdir(path)


def _age(folder: Path) -> float:
    """Seconds since something in a folder was changed."""
    return time.time() - max(os.lstat(at).st_mtime for at in (folder, *folder.rglob("*")))


@contextmanager
def scratch(below: Path) -> Iterator[Path]:
    """A folder of ours while this lasts, in `below`, which is made and swept first."""
    below.mkdir(parents=True, exist_ok=True)
    sweep_folders(below)
    with locked_folder(below / f"{SCRATCH}{os.urandom(8).hex()}", 0o700) as path:
        try:
            with named(path):
                yield path
        finally:
            remove_folder(path.absolute(), below.absolute())


def mark(path: Path) -> None:
    """Say that an empty folder, or one that this process has made, is ours."""
    os.close(_mark(path))


def _mark(path: Path) -> int:
    """The marker, locked before there is anything in it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
    with named(path / MARKER):
        handle = open_own(path / MARKER, flags, 0o644)
        try:
            try_lock(handle)
            content = MADE + kernel().encode()
            if os.write(handle, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(handle)
        except BaseException:
            os.close(handle)
            raise
    return handle


@cache
def kernel() -> str:
    """An id of the running kernel; "" where the system has none."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def is_ours(path: Path) -> bool:
    """Whether our marker lies in the folder `path`, which is no symbolic link."""
    with suppress(OSError), closing_handle(os.open(path, FOLDER_FLAGS)) as handle:
        return _marked(handle)
    return False


def _marked(folder: int, proof: str = MARKER) -> bool:
    refusal = ForeignFileError(proof, "is no regular file")
    with (
        suppress(OSError),
        closing_handle(open_regular_at(proof, os.O_RDONLY, refusal, folder=folder)) as marker,
    ):
        return proof != MARKER or os.read(marker, len(MADE)) == MADE
    return False


def real_folder(path: Path, below: Path, *, make: bool = True) -> Path:
    """The folder `path`; no part of it `below` the named one is a link.

    It is made where it is missing, unless asked not to. Raises ForeignFileError where one is a
    link.
    """
    at = below
    for part in parts_below(path, below):
        at /= part
        if make:
            with suppress(FileExistsError):
                at.mkdir()
        if (make or os.path.lexists(at)) and not stat.S_ISDIR(os.lstat(at).st_mode):
            raise ForeignFileError(at, "isn't written to: it is a link, or no folder")
    return path


def remove_folder(path: Path, below: Path, proof: str = MARKER) -> None:
    """Remove a folder of ours that lies `below` another one, which the user named or we made.

    `proof` is the file in it by which it is known as ours, and which goes last: our marker, another
    one that the caller has read, or "" where the caller knows it by what lies beside. It is taken
    out of its place first: nothing that looks whole is left of one whose removal was cut off, and
    the next removal there takes what is. Links to `below` are followed, and none after it. Raises
    FileNotFoundError, and ForeignFileError for a folder without that file, reached by a link, with
    something mounted in it, or in which this process or its user lives.
    """
    with parent_handle(path, below) as (parent, name):
        doomed = f".{name}.{os.urandom(8).hex()}{REMOVED}"
        _refuse_foreign(parent, name, path, proof)
        os.rename(name, doomed, src_dir_fd=parent, dst_dir_fd=parent)
        _remove_tree(parent, doomed, proof)
        shape = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}{re.escape(REMOVED)}")
        for left in filter(shape.fullmatch, os.listdir(parent) if proof else ()):
            with suppress(FileNotFoundError, ForeignFileError):
                _refuse_foreign(parent, left, path.with_name(left), proof)
                _remove_tree(parent, left, proof)
            with suppress(OSError):  # it was cut off when nothing but itself was left
                os.rmdir(left, dir_fd=parent)


def remove_file(path: Path, below: Path, *, missing_ok: bool = False) -> None:
    """Remove a file of ours `below` a folder, under a name that only we give.

    Raises FileNotFoundError unless `missing_ok`, and ForeignFileError where a link leads there, or
    for what is neither a file nor a link.
    """
    missing = (FileNotFoundError,) if missing_ok else ()
    with suppress(*missing), parent_handle(path, below) as (parent, name):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise ForeignFileError(path, "isn't removed: it isn't a file")
        os.unlink(name, dir_fd=parent)


def _refuse_foreign(parent: int, name: str, path: Path, proof: str) -> None:
    """Raise ForeignFileError unless `name` is a folder that we may remove."""
    try:
        folder = os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except OSError as error:
        if error.errno in LINK_ERRORS:
            raise ForeignFileError(path, "isn't removed: it is a link, or no folder") from None
        raise
    with closing_handle(folder):
        mine = os.fstat(folder)
        real = os.path.realpath(f"/proc/self/fd/{folder}")
        known = not proof or _marked(folder, proof)
    for lived in (Path("/"), Path.cwd(), Path(os.path.expanduser("~"))):
        if any(_is(each, mine) for each in (lived, *lived.parents)):
            raise ForeignFileError(path, f"isn't removed: {lived} is, or lies in, it")
    if not known:
        raise ForeignFileError(
            path, f"isn't removed: we didn't make it, as there is no {proof} in it"
        )
    if mounted := [at for at in _mounts() if f"{at}/".startswith(f"{real}/")]:
        raise ForeignFileError(path, f"isn't removed: something is mounted at {mounted[0]}")


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def _mounts() -> list[str]:
    """Where file systems are mounted, as far as the system knows."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            places = [line.split(" ")[4] for line in file]
    except OSError:
        return []
    return [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), at) for at in places]


def _remove_tree(parent: int, name: str, proof: str) -> None:
    """Remove a folder with all in it, following no link; what shows that it is ours goes last."""
    with closing_handle(os.open(name, FOLDER_FLAGS, dir_fd=parent)) as top:
        # Each folder is empty when its turn comes, but for the proof in the topmost.
        for root, folders, names, at in os.fwalk(".", topdown=False, dir_fd=top):
            for each in names:
                if root != "." or each != proof:
                    os.unlink(each, dir_fd=at)
            for each in folders:
                if stat.S_ISLNK(os.stat(each, dir_fd=at, follow_symlinks=False).st_mode):
                    os.unlink(each, dir_fd=at)
                else:
                    os.rmdir(each, dir_fd=at)
        if proof:
            os.unlink(proof, dir_fd=top)
    os.rmdir(name, dir_fd=parent)
