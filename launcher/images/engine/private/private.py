"""A container engine of our own, from the distribution's packages, in private namespaces."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import files, owned
from launcher.base.errors import EngineError
from launcher.base.files import closing_handle, open_own
from launcher.base.trust import require_trusted
from launcher.images.engine.private import packages, supervisor
from launcher.images.engine.private.packages import Say

if TYPE_CHECKING:
    from docker import DockerClient

WANTED = ["docker.io"]
OPTIONAL = ["docker-cli", "docker-buildx", "docker-compose-v2"]
IPTABLES = ("iptables", "iptables-nft")
"""A program and what it stands for: a link that installing makes, and unpacking doesn't."""

SOCKETS = re.compile(r"launchpad-[a-z0-9_]{8}")
"""The name of a folder for what ends with an engine, as `tempfile.mkdtemp` makes it."""

ALIVE = "alive"  # a file there, locked until the engine's first process has ended
START_WITHIN = 60.0
HELLO_WITHIN = 10.0
END_WITHIN = 2.0
LOG = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
ANSWER_WITHIN = 600  # a step of a build, a wait for a container
_START_YOURSELF = "Start an engine yourself and point DOCKER_HOST at it."


class _EndedEarlyError(EngineError):
    """The engine ended while it was being started."""


@dataclass(frozen=True)
class EnginePlace:
    """Where a private engine keeps its things.

    folder: what is kept for the next time: packages, images, log
    sockets: a short path (a socket's may have 107 bytes) for what ends with the engine
    """

    folder: Path
    sockets: Path

    @property
    def packages(self) -> Path:
        return self.folder / "packages"

    @property
    def log(self) -> Path:
        return self.folder / "engine.log"

    @property
    def control(self) -> Path:
        return self.sockets / "control.sock"

    @property
    def settings(self) -> Path:
        return self.sockets / "daemon.json"

    @property
    def host(self) -> str:
        return f"unix://{self.sockets / 'docker.sock'}"


@contextmanager
def private_engine(folder: Path, say: Say = lambda _: None) -> Iterator[DockerClient]:
    """An engine that lives while anybody uses it; `folder` keeps its packages and images.

    A second user of the same folder shares the engine; it ends when the last one leaves or dies.
    """
    from launcher.images.engine.client import Client

    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    require_trusted(folder)
    with _lock(folder / "start.lock", say, f"another launcher that starts {folder}"):
        place, connection = _join(folder) or _start(folder, say)
    try:
        with closing(Client(place.host, timeout=ANSWER_WITHIN)) as client:
            if client.info()["Driver"] == "vfs":
                say(
                    f"the file system of {folder} can't stack layers, so the engine copies them "
                    "(slow, much disk): a folder on ext4 or xfs is better"
                )
            yield client
    finally:
        _leave(place, connection)


def unsupported() -> str:
    """Why this system can't run a private engine, or an empty string where it can."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"it needs root, and this is user id {os.geteuid()}"
    missing = [t for t in ("apt-get", "apt-cache", "dpkg-deb", "unshare") if not shutil.which(t)]
    return f"it needs {missing[0]}, which isn't installed" if missing else ""


@contextmanager
def _lock(path: Path, say: Say, waiting_for: str) -> Iterator[int]:
    """Hold the lock `path`; a child that inherits its descriptor holds it too, beyond our end."""
    with closing_handle(open_own(path, os.O_RDWR | os.O_CREAT, 0o644)) as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for {waiting_for}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle


def _join(folder: Path) -> tuple[EnginePlace, socket.socket] | None:
    """Become one more user of the engine that runs for `folder`, if one does."""
    place = _recorded(folder)
    connection = _connect(place) if place else None
    return (place, connection) if place and connection else None


def _recorded(folder: Path) -> EnginePlace | None:
    """The place of the engine that was last started for `folder`; None where it isn't ours.

    What the file says is read by whoever will remove that folder: it has to be one that we made.
    """
    try:
        sockets = Path((folder / "sockets").read_text(encoding="utf-8"))
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    made = SOCKETS.fullmatch(sockets.name) and sockets.parent == _short_folder()
    return EnginePlace(folder, sockets) if made and owned.is_ours(sockets) else None


def _connect(place: EnginePlace) -> socket.socket | None:
    """A connection that counts as a user, or None when there's nobody to take it."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(HELLO_WITHIN)
        connection.connect(str(place.control))
        if connection.recv(1) == supervisor.HELLO:
            connection.settimeout(None)
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _start(folder: Path, say: Say) -> tuple[EnginePlace, socket.socket]:
    """Start the engine for `folder` and become its first user."""
    reason = unsupported()
    if reason:
        raise EngineError(f"no private engine can be started here: {reason}", _START_YOURSELF)
    if not (folder / "packages" / packages.COMPLETE).exists():
        say("fetching the distribution's container engine (unpacked privately, not installed)")
    packages.unpack(folder / "packages", WANTED, OPTIONAL)
    _link_iptables(folder / "packages" / "usr" / "sbin")
    with _lock(folder / "engine.lock", say, f"the engine of {folder} to end") as lock:
        crashed = _recorded(folder)
        if crashed:
            _clean(crashed)
        _sweep()
        try:
            return _start_with(folder, [], lock)
        except _EndedEarlyError:
            return _start_with(folder, ["--bridge=none"], lock)  # a kernel without bridges


def _sweep() -> None:
    """Remove what engines left whose last user was killed; an older launcher's have no lock."""
    for sockets in filter(lambda path: SOCKETS.fullmatch(path.name), _short_folder().iterdir()):
        with suppress(OSError), closing_handle(open_own(sockets / ALIVE, os.O_RDWR)) as alive:
            old = time.time() - sockets.stat().st_mtime > START_WITHIN
            if old and owned.is_ours(sockets) and files.try_lock(alive):
                _clean(EnginePlace(sockets, sockets))


def _link_iptables(programs: Path) -> None:
    """Let the engine find iptables: it has containers ask it for each other's names by that."""
    name, target = IPTABLES
    if (programs / target).exists() and not (programs / name).exists():
        (programs / name).symlink_to(target)


def _start_with(folder: Path, options: list[str], lock: int) -> tuple[EnginePlace, socket.socket]:
    """Start the engine with `options`; nothing is left of one that doesn't come up."""
    place = EnginePlace(folder, Path(tempfile.mkdtemp(prefix="launchpad-", dir=_short_folder())))
    process = None
    try:
        owned.mark(place.sockets)
        files.write(folder / "sockets", str(place.sockets))
        (place.sockets / "packages").symlink_to(place.packages)
        files.write(place.settings, "{}")  # not the settings of the system's engine
        with closing_handle(open_own(place.sockets / ALIVE, os.O_RDWR | os.O_CREAT)) as alive:
            files.try_lock(alive)
            process = _spawn(place, options, [lock, alive])
        return place, _wait_until_up(place, process)
    except BaseException:
        if process:
            process.kill()  # with it goes everything in its namespaces
            process.wait()
        _clean(place)
        raise


def _short_folder() -> Path:
    return Path("/run" if os.access("/run", os.W_OK) else tempfile.gettempdir())


def _spawn(place: EnginePlace, options: list[str], locks: list[int]) -> subprocess.Popen[bytes]:
    """The engine's first process, in namespaces of its own.

    Processes: the kernel ends all of them with the first one, so none can be left over.
    Mounts: private, so they vanish with it; the host's still come in.
    Network: its own, since an engine may take down another one's bridge.
    """
    namespaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--mount"]
    argv = ["unshare", *namespaces, "--propagation", "slave", sys.executable, "-I"]
    argv += [str(supervisor.__file__), str(place.control), *_engine_argv(place), *options]
    with open(open_own(place.log, LOG), "wb") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=packages.environment(place.packages),
            pass_fds=locks,  # held until the last process has gone
            start_new_session=True,  # Ctrl-C is for the launcher, which then leaves in order
        )


def _engine_argv(place: EnginePlace) -> list[str]:
    return [
        "dockerd",
        f"--host={place.host}",
        f"--data-root={place.folder / 'data'}",
        f"--exec-root={place.sockets / 'exec'}",
        f"--pidfile={place.sockets / 'engine.pid'}",
        f"--config-file={place.settings}",
        f"--cgroup-parent=/{place.sockets.name}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--iptables=false",  # nothing to reach outside, and not every kernel has them
        "--shutdown-timeout=5",
    ]


def _wait_until_up(place: EnginePlace, process: subprocess.Popen[bytes]) -> socket.socket:
    """The first user's connection, once the engine answers."""
    deadline = time.monotonic() + START_WITHIN
    connection = None
    while process.poll() is None and time.monotonic() < deadline:
        connection = connection or _connect(place)
        if connection and _answers(place):
            return connection
        time.sleep(0.02)
    ended = process.returncode is not None
    why = f"it ended with exit code {process.returncode}" if ended else "it doesn't answer"
    lines = place.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
    raise (_EndedEarlyError if ended else EngineError)(
        "\n  | ".join([f"the private container engine doesn't start: {why}", *lines]),
        f"Its log is {place.log}. {_START_YOURSELF}",
    )


def _answers(place: EnginePlace) -> bool:
    """True when the engine takes requests: its socket is there well before that."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5)
            probe.connect(place.host.removeprefix("unix://"))
            probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
            return b" 200 " in probe.recv(64)
    except OSError:
        return False


def _leave(place: EnginePlace, connection: socket.socket) -> None:
    """Stop using the engine; the last user waits until all of it is gone."""
    with connection:
        try:
            connection.shutdown(socket.SHUT_WR)
            others_stay = connection.recv(1) == supervisor.OTHERS_STAY
        except OSError:
            others_stay = False
    if not others_stay:
        _wait_for_end(place)
        _clean(place)


def _wait_for_end(place: EnginePlace) -> None:
    """Wait until the engine's last process has gone, or another engine took the folder over."""
    with closing_handle(open_own(place.folder / "engine.lock", os.O_RDWR | os.O_CREAT)) as lock:
        until = time.monotonic() + END_WITHIN
        while files.try_lock(lock) is False and time.monotonic() < until:
            time.sleep(0.01)


def _clean(place: EnginePlace) -> None:
    """Remove what an ended engine leaves: its sockets and its empty control groups."""
    with suppress(FileNotFoundError):
        owned.remove_folder(place.sockets, place.sockets.parent)
    hierarchies, name = Path("/sys/fs/cgroup"), place.sockets.name
    for tree in (*hierarchies.glob(name), *hierarchies.glob(f"*/{name}")):
        groups = [tree, *(group for group in tree.rglob("*") if group.is_dir())]
        for group in sorted(groups, reverse=True):
            with suppress(OSError):  # a busy one is somebody's
                group.rmdir()


def keep_up(folder: Path, say: Say) -> None:
    """Keep the engine of `folder` up until interrupted, for what is started meanwhile."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with private_engine(folder, say):
            place = _recorded(folder.resolve())
            assert place is not None
            print(f"export DOCKER_HOST={place.host}", flush=True)
            while True:  # a signal just before a longer wait would be acted on after it
                time.sleep(1)
    except KeyboardInterrupt:
        return
