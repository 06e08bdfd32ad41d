"""A container engine of our own, from the distribution's packages, in private namespaces."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.engine import packages, supervisor
from launcher.errors import EngineError

if TYPE_CHECKING:
    from docker import DockerClient

WANTED = ["docker.io"]
OPTIONAL = ["docker-cli", "docker-buildx"]
START_WITHIN = 60.0
Say = Callable[[str], None]
_START_YOURSELF = "Start an engine yourself and point DOCKER_HOST at it."


class _EndedEarlyError(EngineError):
    """The engine ended while it was being started."""


@dataclass(frozen=True)
class Place:
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
    import docker

    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / "start.lock", say):
        place, connection = _join(folder) or _start(folder, say)
    try:
        client = docker.DockerClient(base_url=place.host)
        try:
            yield client
        finally:
            client.close()
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
def _lock(path: Path, say: Say) -> Iterator[None]:
    """Hold `path` locked; say so when another process makes us wait."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another launcher that starts the engine in {path.parent}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _join(folder: Path) -> tuple[Place, socket.socket] | None:
    """Become one more user of the engine that runs for `folder`, if one does."""
    record = folder / "sockets"
    if not record.exists():
        return None
    place = Place(folder, Path(record.read_text(encoding="utf-8").strip()))
    connection = _connect(place)
    if connection is None:
        _clean(place)
        return None
    return place, connection


def _connect(place: Place) -> socket.socket | None:
    """A connection that counts as a user, or None when there's nobody to take it."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(place.control))
        if connection.recv(1) == supervisor.HELLO:
            return connection
    except OSError:
        pass
    connection.close()
    return None


def _start(folder: Path, say: Say) -> tuple[Place, socket.socket]:
    """Start the engine for `folder` and become its first user."""
    reason = unsupported()
    if reason:
        raise EngineError(f"no private engine can be started here: {reason}", _START_YOURSELF)
    if not (folder / "packages" / packages.COMPLETE).exists():
        say("fetching the distribution's container engine (unpacked privately, not installed)")
    packages.unpack(folder / "packages", WANTED, OPTIONAL)
    try:
        return _start_with(folder, [])
    except _EndedEarlyError:
        return _start_with(folder, ["--bridge=none"])  # for a kernel that has no bridges


def _start_with(folder: Path, options: list[str]) -> tuple[Place, socket.socket]:
    """Start the engine with `options`; nothing is left of one that doesn't come up."""
    place = Place(folder, Path(tempfile.mkdtemp(prefix="launchpad-", dir=_short_folder())))
    (folder / "sockets").write_text(str(place.sockets), encoding="utf-8")
    (place.sockets / "packages").symlink_to(place.packages)
    place.settings.write_text("{}", encoding="utf-8")  # not the settings of the system's engine
    process = _spawn(place, options)
    try:
        return place, _wait_until_up(place, process)
    except BaseException:
        process.kill()  # with it goes everything in its namespaces
        process.wait()
        _clean(place)
        raise


def _short_folder() -> str | None:
    return "/run" if os.access("/run", os.W_OK) else None


def _spawn(place: Place, options: list[str]) -> subprocess.Popen[bytes]:
    """The engine's first process, in namespaces of its own.

    Processes: the kernel ends all of them with the first one, so none can be left over.
    Mounts: private, so they vanish with it; the host's still come in.
    Network: its own, since an engine may take down another one's bridge.
    """
    namespaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--mount"]
    argv = ["unshare", *namespaces, "--propagation", "slave", sys.executable, "-I"]
    argv += [str(supervisor.__file__), str(place.control), *_engine_argv(place), *options]
    with place.log.open("wb") as log:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=packages.environment(place.packages),
            start_new_session=True,  # Ctrl-C is for the launcher, which then leaves in order
        )


def _engine_argv(place: Place) -> list[str]:
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


def _wait_until_up(place: Place, process: subprocess.Popen[bytes]) -> socket.socket:
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
    raise (_EndedEarlyError if ended else EngineError)(
        f"the private container engine doesn't start: {why}\n{_last_lines(place.log)}",
        f"Its log is {place.log}. {_START_YOURSELF}",
    )


def _answers(place: Place) -> bool:
    """True when the engine takes requests: its socket is there well before that."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(5)
            probe.connect(place.host.removeprefix("unix://"))
            probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
            return b" 200 " in probe.recv(64)
    except OSError:
        return False


def _last_lines(log: Path, count: int = 12) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  | {line}" for line in lines[-count:])


def _leave(place: Place, connection: socket.socket) -> None:
    """Stop using the engine; the last user waits until all of it is gone."""
    with connection:
        try:
            connection.shutdown(socket.SHUT_WR)
            others_stay = connection.recv(1) == supervisor.OTHERS_STAY
        except OSError:
            others_stay = False
    if not others_stay:
        _clean(place)


def _clean(place: Place) -> None:
    """Remove what an ended engine leaves: its sockets and its empty control groups."""
    shutil.rmtree(place.sockets, ignore_errors=True)
    for tree in sorted(Path("/sys/fs/cgroup").glob(f"**/{place.sockets.name}")):
        for group in sorted((g for g in tree.rglob("*") if g.is_dir()), reverse=True):
            group.rmdir()
        tree.rmdir()
