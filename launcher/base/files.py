"""Files as this project writes and removes them: all or nothing, and nothing that isn't its own.

We run as root on people's machines. What is written stands aside, under a name that can't be
guessed, until all of it is on the disk, and takes its place by a rename. What is removed lies below
a folder that was named, is reached by no symbolic link, and, a folder, holds our marker. Whatever
doesn't fit is refused by an `OSError` that names it.

Standard library only: it is in the images, too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

MARKER = ".megatron-launchpad"
"""Lies in each folder that we make and may remove."""

MADE = b"Made by Megatron Launchpad, which may remove this folder with all that is in it.\n"
ASIDE = ".aside"
SCRATCH = "scratch-"
REMOVED = ".removed"
UNLOCKABLE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL, errno.EBADF)
"""What a file system answers that has no locks: there nobody can tell that another one writes."""

OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LINK = (errno.ELOOP, errno.ENOTDIR)
_LEFT = re.compile(
    r"(\..+\.[0-9a-f]{16}\.aside|\.?scratch-[0-9a-f]{16})(\.[0-9a-f]{16}\.removed)*", re.DOTALL
)
_LONGEST = 1 << 10
"""Bytes that are read of a marker: `MADE`, and the kernel that it was written on."""

MINUTE, DAY = 60, 86400


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


class Refused(PermissionError):
    """What isn't written or removed, since it isn't, or may not be, ours."""

    def __init__(self, path: Path | str, why: str) -> None:
        super().__init__(errno.EPERM, why, str(path))


# Written


class Aside:
    """A new file that will be `target`; until then nobody finds or sees it.

    Its name has `token` in it: files that belong together have one. It is locked while it is open,
    so that one that was left by a process that was killed can be told, and goes. What root writes
    in another user's folder, as under sudo, is that user's.
    """

    def __init__(self, target: Path, mode: int = 0o666, token: str = "") -> None:
        self.target = target
        self.token = token or secrets.token_hex(8)
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

    def __enter__(self) -> Aside:
        return self

    def __exit__(self, _: object, error: object, __: object) -> None:
        _name(error, self.target)
        self.close()


def aside_path(target: Path, token: str) -> Path:
    """Where what will be `target` is written."""
    return target.with_name(f".{target.name}.{token}{ASIDE}")


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
        with suppress(FileNotFoundError), _closing(open_own(path, os.O_RDWR)) as handle:
            locked = try_lock(handle)
            busy = busy or locked is False
            if locked:
                os.unlink(path)
    return busy


def write(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Put `content` in the place of `path`: whatever happens, it is there whole, or the old is."""
    with Aside(path, mode) as new:
        new.file.write(content.encode() if isinstance(content, str) else content)
        new.publish()
    sweep(path)


def open_own(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of a file of ours, such as a log or a lock, made where `flags` say so.

    Raises Refused for a symbolic link, a file that has another name as well, a pipe or a device.
    """
    refusal = Refused(path, "is no file of ours: it isn't a regular file")
    handle = _open_regular(path, flags & ~os.O_TRUNC, refusal, mode=mode)
    try:
        if os.fstat(handle).st_nlink > 1:
            raise Refused(path, "is no file of ours: it has another name as well")
        if flags & os.O_TRUNC:
            os.ftruncate(handle, 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _open_regular(
    path: Path | str, flags: int, refusal: Refused, mode: int = 0o600, folder: int | None = None
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
def _closing(handle: int) -> Iterator[int]:
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
    with _closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as handle:
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
    with _closing(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as handle:
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


# Read


def open_foreign(path: Path, below: Path) -> IO[bytes]:
    """A regular file `below` a folder that came from elsewhere, to be read, without a buffer.

    Raises Refused for what a link leads to, and for anything else: a pipe would be waited for, and
    a device may have no end.
    """
    with _parent(path, below) as (parent, name):
        refusal = Refused(path, "isn't read: it is no regular file")
        handle = _open_regular(name, os.O_RDONLY, refusal, folder=parent)
    return open(handle, "rb", buffering=0)


def open_regular(path: Path) -> IO[bytes]:
    """A file that is there, to be read, wherever links lead to it.

    Raises Refused for a pipe, which would be waited for, and for a device, which may have no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise Refused(path, "isn't read: it is no regular file")
    return open(handle, "rb")


def read_regular(path: Path, most: int) -> bytes:
    """What is in a file of up to `most` bytes. Raises as `open_regular`, and for a larger one."""
    with open_regular(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Refused(path, f"isn't read: it has more than {most} bytes")
    return content


def copy_foreign(path: Path, below: Path, target: Path) -> None:
    """Copy a file out of a folder that came from elsewhere; nobody may read it who couldn't before.

    A link may lead within `below`, or where that is a snapshot of Hugging Face's cache, to the
    blobs beside. Raises Refused for any other, which could lead to a secret of this user's.
    """
    real, home = Path(os.path.realpath(path)), Path(os.path.realpath(below))
    blobs = home.parents[1] / "blobs" if home.parent.name == "snapshots" else home
    place = next((each for each in (home, blobs) if each in real.parents), None)
    if place is None:
        raise Refused(path, f"isn't read: it leads out of {below}, to {real}")
    with open_foreign(real, place) as source:
        mode = stat.S_IMODE(os.fstat(source.fileno()).st_mode) & 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(FileNotFoundError):  # one that we have just written
            os.unlink(target)
        with open(os.open(target, flags, mode), "wb") as copy:
            while part := source.read(1 << 20):
                copy.write(part)


# Folders of ours


def write_new(path: Path, text: str) -> None:
    """Write a user's file that isn't there yet; of one that can't be written nothing is left.

    Raises FileExistsError, and OSError with the path.
    """
    with named(path), path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """A new folder of ours, its marker in it from the first moment on; `path`.

    Raises FileExistsError where there is something of that name.
    """
    with locked_folder(path, mode):
        return path


@contextmanager
def locked_folder(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """As `make_folder`, with the marker locked while this lasts: `sweep_folders` leaves it."""
    new = aside_path(path, secrets.token_hex(8))
    with ExitStack() as held:
        os.mkdir(new, mode)
        try:
            held.enter_context(_closing(_mark(new)))
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
    with suppress(FileNotFoundError), _closing(open_own(path / MARKER, os.O_RDWR)) as marker:
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
    """A folder of ours while this lasts, in `below`, which is made where it isn't there.

    What killed processes left of such folders goes first.
    """
    below.mkdir(parents=True, exist_ok=True)
    sweep_folders(below)
    with locked_folder(below / f"{SCRATCH}{secrets.token_hex(8)}", 0o700) as path:
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
    with suppress(OSError), _closing(os.open(path, _FOLDER)) as handle:
        return _marked(handle)
    return False


def _marked(folder: int, proof: str = MARKER) -> bool:
    refusal = Refused(proof, "is no regular file")
    with (
        suppress(OSError),
        _closing(_open_regular(proof, os.O_RDONLY, refusal, folder=folder)) as marker,
    ):
        return proof != MARKER or os.read(marker, len(MADE)) == MADE
    return False


def real_folder(path: Path, below: Path, *, make: bool = True) -> Path:
    """The folder `path`; no part of it `below` the named one is a link.

    It is made where it isn't there, unless told otherwise. Raises Refused where one is a link.
    """
    at = below
    for part in _parts(path, below):
        at /= part
        if make:
            with suppress(FileExistsError):
                at.mkdir()
        if (make or os.path.lexists(at)) and not stat.S_ISDIR(os.lstat(at).st_mode):
            raise Refused(at, "isn't written to: it is a link, or no folder")
    return path


# Removed


def remove_folder(path: Path, below: Path, proof: str = MARKER) -> None:
    """Remove a folder of ours that lies `below` another one, which the user named or we made.

    `proof` is the file in it by which it is known as ours, and which goes last: our marker, another
    one that the caller has read, or "" where the caller knows it by what lies beside. It is taken
    out of its place first: nothing that looks whole is left of one whose removal was cut off, and
    the next removal there takes what is. Links to `below` are followed, and none after it. Raises
    FileNotFoundError, and Refused for a folder without that file, reached by a link, with something
    mounted in it, or in which this process or its user lives.
    """
    with _parent(path, below) as (parent, name):
        doomed = f".{name}.{secrets.token_hex(8)}{REMOVED}"
        _refuse_foreign(parent, name, path, proof)
        os.rename(name, doomed, src_dir_fd=parent, dst_dir_fd=parent)
        _remove_tree(parent, doomed, proof)
        shape = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{16}}{re.escape(REMOVED)}")
        for left in filter(shape.fullmatch, os.listdir(parent) if proof else ()):
            with suppress(FileNotFoundError, Refused):
                _refuse_foreign(parent, left, path.with_name(left), proof)
                _remove_tree(parent, left, proof)
            with suppress(OSError):  # it was cut off when nothing but itself was left
                os.rmdir(left, dir_fd=parent)


def remove_file(path: Path, below: Path, *, missing_ok: bool = False) -> None:
    """Remove a file of ours `below` a folder, under a name that only we give.

    Raises FileNotFoundError unless `missing_ok`, and Refused where a link leads there, or for what
    is neither a file nor a link.
    """
    missing = (FileNotFoundError,) if missing_ok else ()
    with suppress(*missing), _parent(path, below) as (parent, name):
        status = os.stat(name, dir_fd=parent, follow_symlinks=False)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise Refused(path, "isn't removed: it isn't a file")
        os.unlink(name, dir_fd=parent)


def _parts(path: Path, below: Path) -> tuple[str, ...]:
    """The names that lead from `below` to `path`."""
    if not (path.is_absolute() and below.is_absolute()):
        raise Refused(path, "isn't touched: it is no absolute path")
    try:
        parts = path.relative_to(below).parts
    except ValueError:
        raise Refused(path, f"isn't touched: it doesn't lie below {below}") from None
    if not parts or ".." in parts:
        raise Refused(path, f"isn't touched: it doesn't lie below {below}")
    return parts


@contextmanager
def _parent(path: Path, below: Path) -> Iterator[tuple[int, str]]:
    """The opened folder that `path` lies in, and its name there."""
    *between, name = _parts(path, below)
    folder = os.open(below, _FOLDER & ~os.O_NOFOLLOW)
    try:
        for part in between:
            try:
                inner = os.open(part, _FOLDER, dir_fd=folder)
            except OSError as error:
                if error.errno in _LINK:
                    raise Refused(path, "isn't touched: a link leads there") from None
                raise
            os.close(folder)
            folder = inner
        yield folder, name
    finally:
        os.close(folder)


def _refuse_foreign(parent: int, name: str, path: Path, proof: str) -> None:
    """Raise Refused unless `name` is a folder that we may remove."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in _LINK:
            raise Refused(path, "isn't removed: it is a link, or no folder") from None
        raise
    with _closing(folder):
        mine = os.fstat(folder)
        real = os.path.realpath(f"/proc/self/fd/{folder}")
        known = not proof or _marked(folder, proof)
    for lived in (Path("/"), Path.cwd(), Path(os.path.expanduser("~"))):
        if any(_is(each, mine) for each in (lived, *lived.parents)):
            raise Refused(path, f"isn't removed: {lived} is, or lies in, it")
    if not known:
        raise Refused(path, f"isn't removed: we didn't make it, as there is no {proof} in it")
    if mounted := [at for at in _mounts() if f"{at}/".startswith(f"{real}/")]:
        raise Refused(path, f"isn't removed: something is mounted at {mounted[0]}")


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def _mounts() -> list[str]:
    """Where file systems are mounted, as far as the system tells."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            places = [line.split(" ")[4] for line in file]
    except OSError:
        return []
    return [re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), at) for at in places]


def _remove_tree(parent: int, name: str, proof: str) -> None:
    """Remove a folder with all in it, following no link; what shows that it is ours goes last."""
    with _closing(os.open(name, _FOLDER, dir_fd=parent)) as top:
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
