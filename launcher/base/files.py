"""Writes and opens files: atomically, and never through a symbolic link.

We run as root on people's machines. What is written stands aside, under a name that can't be
guessed, until all of it is on the disk, and takes its place by a rename. Whatever doesn't fit is
refused by an `OSError` that names it. `owned` makes and removes folders.

Standard library only: it travels with each run.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

ASIDE = ".aside"
UNLOCKABLE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""Errors of a file system without locks: there, other writers can't be noticed."""

OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LINK_ERRORS = (errno.ELOOP, errno.ENOTDIR)


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """Have an error of a disk say which path it is about: one that is full names none."""
    try:
        yield
    except OSError as error:
        _name(error, path)
        raise


def _name(error: object, path: str | Path) -> None:
    if isinstance(error, OSError) and error.errno in OF_A_DISK and error.filename is None:
        error.filename = str(path)


class ForeignFileError(PermissionError):
    """What isn't written or removed, since it isn't, or may not be, ours."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))


class PendingFile:
    """A new file that will be `target`; until then nobody finds or sees it.

    Its name has `token` in it: files that belong together have one. It is locked while it is open,
    so that what a killed process left can be recognised, and goes. What root writes
    in another user's folder, as under sudo, is that user's.
    """

    def __init__(self, target: Path, mode: int = 0o666, token: str = "") -> None:
        self.target = target
        self.token = token or os.urandom(8).hex()
        self.path = aside_path(target, self.token)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.file: IO[bytes] = open(os.open(self.path, flags, mode), "w+b")  # noqa: SIM115
        try_lock(self.file.fileno())
        folder = os.stat(target.parent)
        if os.geteuid() == 0 and folder.st_uid != 0:
            with suppress(PermissionError):  # of a file system that takes no orders from root
                os.chown(self.file.fileno(), folder.st_uid, folder.st_gid)

    def complete(self) -> None:
        """Bring it to the disk; it keeps its name."""
        self.file.flush()
        os.fsync(self.file.fileno())

    def publish(self) -> None:
        """Give it its name, in place of an older file, once it is on the disk."""
        self.complete()
        os.replace(self.path, self.target)
        self.file.close()
        sync(self.target.parent)

    def close(self) -> None:
        """Remove it, unless it was published."""
        if not self.file.closed:
            with suppress(FileNotFoundError):
                os.unlink(self.path)
            with suppress(OSError):  # what it still had to write isn't wanted
                self.file.close()

    def __enter__(self) -> PendingFile:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        _name(error, self.target)
        self.close()


def aside_path(target: Path, token: str, ending: str = ASIDE) -> Path:
    """Where what will be `target` is written."""
    return target.with_name(f".{target.name}.{token}{ending}")


def asides(target: Path, ending: str = ASIDE) -> dict[str, Path]:
    """What stands aside for `target`, by its token: by other processes, or left by killed ones."""
    shape = re.compile(rf"\.{re.escape(target.name)}\.([0-9a-f]{{16}}){re.escape(ending)}")
    with suppress(FileNotFoundError), os.scandir(target.parent) as entries:
        return {
            match[1]: Path(entry.path)
            for entry in entries
            if (match := shape.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
        }
    return {}


def sweep(target: Path) -> bool:
    """Remove what killed processes left aside for `target`; whether another one is writing it.

    On a file system without locks nothing is removed, and nobody is known to write.
    """
    busy = False
    for path in asides(target).values():
        # To be written, too: of NFS, no lock else.
        with suppress(FileNotFoundError), closing_handle(open_own(path, os.O_RDWR)) as handle:
            locked = try_lock(handle)
            busy = busy or locked is False
            if locked:
                os.unlink(path)
    return busy


def write(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Put `content` in the place of `path`: whatever happens, it is there whole, or the old is."""
    with PendingFile(path, mode) as new:
        new.file.write(content.encode() if isinstance(content, str) else content)
        new.publish()
    sweep(path)


def open_own(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of a file of ours, such as a log or a lock, made where `flags` say so.

    Raises ForeignFileError for a symbolic link, a file that has another name as well, a pipe or a
    device.
    """
    refusal = ForeignFileError(path, "is no file of ours: it isn't a regular file")
    handle = open_regular_at(path, flags & ~os.O_TRUNC, refusal, mode=mode)
    try:
        if os.fstat(handle).st_nlink > 1:
            raise ForeignFileError(path, "is no file of ours: it has another name as well")
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def open_regular_at(
    path: Path | str,
    flags: int,
    refusal: ForeignFileError,
    mode: int = 0o600,
    folder: int | None = None,
) -> int:
    """A descriptor of a regular file; raises `refusal` for a link, and for what may have no end."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags, mode, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise refusal from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise refusal
    return handle


@contextmanager
def closing_handle(handle: int) -> Iterator[int]:
    try:
        yield handle
    finally:
        os.close(handle)


def try_lock(handle: int, *, wait: bool = False) -> bool | None:
    """Take the lock of an open file; False where another one has it, None where there are none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in UNLOCKABLE:
            return None
        raise
    return True


@contextmanager
def folder_lock(path: Path) -> Iterator[None]:
    """Let one process of ours at a time change what lies in a folder, where locks are to be had."""
    with closing_handle(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
        try_lock(handle, wait=True)
        yield


def rename(source: Path, target: Path) -> Path:
    """Rename, and bring that to the disk; `target`."""
    os.rename(source, target)
    sync(target.parent)
    if source.parent != target.parent:
        sync(source.parent)
    return target


def sync(path: Path) -> None:
    """Bring a folder's list of names, or a file, to the disk; where a file system can't, go on."""
    with closing_handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as handle:
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in UNLOCKABLE:
                raise


def sync_tree(folder: Path) -> None:
    """Bring all files below `folder` to the disk, and the names of them."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(root, name)
            if path.is_file() and not path.is_symlink():
                sync(path)
        sync(Path(root))


def open_foreign(path: Path, below: Path) -> IO[bytes]:
    """A regular file `below` a folder that came from elsewhere, to be read, without a buffer.

    Raises ForeignFileError for what a link leads to, and for anything else: a pipe would be waited
    for, and a device may have no end.
    """
    with parent_handle(path, below) as (parent, name):
        refusal = ForeignFileError(path, "isn't read: it is no regular file")
        handle = open_regular_at(name, os.O_RDONLY, refusal, folder=parent)
    return open(handle, "rb", buffering=0)


def open_regular(path: Path) -> IO[bytes]:
    """A file that is there, to be read, wherever links lead to it.

    Raises ForeignFileError for a pipe, which would be waited for, and for a device, which may have
    no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ForeignFileError(path, "isn't read: it is no regular file")
    return open(handle, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """What is in a file of up to `most` bytes. Raises as `open_regular`, and for a larger one."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ForeignFileError(path, f"isn't read: it has more than {most} bytes")
    return content


def copy_foreign(path: Path, below: Path, target: Path) -> None:
    """Copy a file out of a folder that came from elsewhere; nobody may read it who couldn't before.

    A link may lead within `below`, or where that is a snapshot of Hugging Face's cache, to the
    blobs beside. Raises ForeignFileError for any other, which could lead to a secret of this
    user's.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(below))
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    place = next((each for each in (home, blobs) if each in real.parents), None)
    if place is None:
        raise ForeignFileError(path, f"isn't read: it leads out of {below}, to {real}")
    with open_foreign(real, place) as source:
        mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(FileNotFoundError):  # one that we have just written
            os.unlink(target)
        with open(os.open(target, flags, mode), "wb") as copy:
            while part := source.read(1 << 20):
                copy.write(part)


def write_new(path: Path, text: str) -> None:
    """Write a user's new file, whole or not at all. Raises FileExistsError, OSError."""
    with named(path), path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def parts_below(path: Path, below: Path) -> tuple[str, ...]:
    """The names that lead from `below` to `path`."""
    if not (path.is_absolute() and below.is_absolute()):
        raise ForeignFileError(path, "isn't touched: it is no absolute path")
    try:
        parts = path.relative_to(below).parts
    except ValueError:
        raise ForeignFileError(path, f"isn't touched: it doesn't lie below {below}") from None
    if not parts or ".." in parts:
        raise ForeignFileError(path, f"isn't touched: it doesn't lie below {below}")
    return parts


@contextmanager
def parent_handle(path: Path, below: Path) -> Iterator[tuple[int, str]]:
    """The opened folder that `path` lies in, and its name there."""
    *between, name = parts_below(path, below)
    folder = os.open(below, FOLDER_FLAGS & ~os.O_NOFOLLOW)
    try:
        for part in between:
            try:
                inner = os.open(part, FOLDER_FLAGS, dir_fd=folder)
            except OSError as error:
                if error.errno in LINK_ERRORS:
                    raise ForeignFileError(path, "isn't touched: a link leads there") from None
                raise
            os.close(folder)
            folder = inner
        yield folder, name
    finally:
        os.close(folder)
