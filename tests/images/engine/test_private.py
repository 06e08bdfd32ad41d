"""A private engine starts, runs containers, is shared, and leaves nothing behind."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from docker import DockerClient

from launcher.base import owned
from launcher.base.errors import EngineError
from launcher.base.settings import settings
from launcher.images.engine.connect import engine_host
from launcher.images.engine.private import packages, private
from launcher.images.engine.private.debian import STANDIN_EPOCH, debian_base
from launcher.images.engine.private.private import private_engine

needs_root_and_apt = pytest.mark.skipif(
    bool(private.unsupported()), reason=f"private engine: {private.unsupported()}"
)
engine = pytest.mark.engine
NAME = "launchpad-test/base:cp311"


def debian(client: DockerClient) -> str:
    """The ID of a Debian base: made once, then from the launcher's cache."""
    return debian_base(client, NAME, STANDIN_EPOCH, cache=settings().cache / "bases")


def test_unsupported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private.sys, "platform", "darwin")
    assert private.unsupported() == "it needs Linux, and this is darwin"
    monkeypatch.setattr(private.sys, "platform", "linux")
    monkeypatch.setattr(private.os, "geteuid", lambda: 1000)
    assert private.unsupported() == "it needs root, and this is user id 1000"
    monkeypatch.setattr(private.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    lacking = private.unsupported()
    assert lacking == "it needs apt-get, which isn't installed"
    monkeypatch.undo()  # an ordinary user's folders aren't root's
    monkeypatch.setattr(private, "unsupported", lambda: lacking)
    with pytest.raises(EngineError, match="it needs apt-get") as caught, private_engine(tmp_path):
        pass
    assert caught.value.exit_code == 125
    assert "DOCKER_HOST" in caught.value.remedy


def test_a_kernel_without_bridges_gets_an_engine_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def start_with(folder: Path, options: list[str], lock: int) -> str:
        tried.append(options)
        if not options:
            raise private._EndedEarlyError("no bridge")
        return "started"

    monkeypatch.setattr(private, "unsupported", lambda: "")
    monkeypatch.setattr(private.packages, "unpack", lambda *_: tmp_path)
    monkeypatch.setattr(private, "_start_with", start_with)
    assert private._start(tmp_path, print) == "started"
    assert tried == [[], ["--bridge=none"]]


@pytest.mark.parametrize("told", ["", ".", "/run", "/home/user", "../..", "{folder}", "\xff"])
def test_a_state_file_makes_no_folder_ours(
    folder_in_use: Path, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left empty by a full disk it meant the current folder, and all in there was removed."""
    engine = folder_in_use / "engine"
    (engine / "sockets").write_text(told.format(folder=folder_in_use), encoding="latin-1")
    monkeypatch.setattr(private, "unsupported", lambda: "")
    monkeypatch.setattr(private.packages, "unpack", lambda *_: engine)
    monkeypatch.setattr(private, "_start_with", lambda *_: "started")
    assert private._join(engine) is None
    assert private._start(engine, print) == "started"
    assert (folder_in_use / "thesis").exists()


def test_a_folder_named_as_ours_is_removed_only_with_our_marker(
    folder_in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "_short_folder", lambda: folder_in_use)
    sockets = folder_in_use / "launchpad-abcd_123"
    sockets.mkdir()
    (folder_in_use / "engine/sockets").write_text(str(sockets))
    assert private._recorded(folder_in_use / "engine") is None
    owned.mark(sockets)
    place = private._recorded(folder_in_use / "engine")
    assert place is not None
    private._clean(place)
    assert not sockets.exists()


def test_what_dead_engines_left_goes_at_the_next_start(
    folder_in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their last user was killed, and their folder was gone: five stayed in /run within a day."""
    monkeypatch.setattr(private, "_short_folder", lambda: folder_in_use)
    made = {"dead": "alive", "live": "alive", "new": "alive", "old": "of an older launcher"}
    for name, file in made.items():
        made[name] = f"launchpad-{name:_<8}"
        (folder_in_use / made[name]).mkdir()
        owned.mark(folder_in_use / made[name])
        (folder_in_use / made[name] / file).touch()
        os.utime(folder_in_use / made[name], None if name == "new" else (1, 1))
    (folder_in_use / "launchpad-foreign1").mkdir()
    (folder_in_use / "launchpad-foreign1/alive").touch()
    os.utime(folder_in_use / "launchpad-foreign1", (1, 1))
    with (folder_in_use / made["live"] / "alive").open("rb+") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        private._sweep()
    left = [made[name] for name in ("live", "new", "old")]
    assert {path.name for path in folder_in_use.glob("launch*")} == {*left, "launchpad-foreign1"}


@needs_root_and_apt
def test_an_engine_is_known_as_living_until_its_first_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the engine something that sleeps; its launcher is dead, as is its folder."""
    monkeypatch.setattr(private, "_short_folder", lambda: tmp_path)
    monkeypatch.setattr(private, "_engine_argv", lambda place: ["sleep", "60"])
    monkeypatch.setattr(private, "_wait_until_up", lambda place, process: process)
    (tmp_path / "engine").mkdir()
    with (tmp_path / "lock").open("w") as lock:
        place, process = private._start_with(tmp_path / "engine", [], lock.fileno())
    until = time.monotonic() + 60
    while not place.control.exists() and time.monotonic() < until:
        time.sleep(0.02)
    os.utime(place.sockets, (1, 1))
    private._sweep()
    assert place.sockets.exists()
    process.kill()
    process.wait()
    while place.sockets.exists() and time.monotonic() < until:
        time.sleep(0.02)  # all in its namespaces ends a moment later
        private._sweep()
    assert not place.sockets.exists()


def test_a_full_disk_leaves_no_state_and_no_sockets(
    folder_in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(private, "_short_folder", lambda: folder_in_use)
    monkeypatch.setattr(private.files.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        private._start_with(folder_in_use / "engine", [], 0)
    assert sorted(path.name for path in folder_in_use.rglob("*")) == ["engine", "thesis"]


@pytest.fixture
def folder_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file of the user's and an engine's folder in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "thesis").touch()
    (tmp_path / "engine").mkdir()
    return tmp_path


def test_an_engine_that_says_nothing_is_not_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for without an end, and without a word."""
    monkeypatch.setattr(private, "HELLO_WITHIN", 0.2)
    place = private.EnginePlace(tmp_path, tmp_path)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(place.control))
        silent.listen()
        assert private._connect(place) is None


@engine
@needs_root_and_apt
def test_kept_up_by_hand_until_terminated(folder: Path) -> None:
    keeper, host = kept_up(folder)
    client = DockerClient(base_url=host)
    assert client.ping()
    client.close()
    keeper.terminate()
    assert keeper.wait(30) == 0
    assert_nothing_is_left(folder, host)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests here, so that the packages are fetched once."""
    return tmp_path_factory.mktemp("engine")


def kept_up(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """`launcher engine`, and the engine that it says it keeps up."""
    argv = [sys.executable, "-m", "launcher", "engine", str(folder)]
    keeper = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    said = next(line for line in keeper.stdout if line.startswith("export DOCKER_HOST="))
    return keeper, said.strip().removeprefix("export DOCKER_HOST=")


def processes_of(folder: Path) -> list[str]:
    """The command lines that name a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = process.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and "dockerd" in text:
            found.append(text)
    return found


def assert_nothing_is_left(folder: Path, host: str) -> None:
    sockets = Path(host.removeprefix("unix://")).parent
    assert processes_of(folder) == []
    assert str(folder) not in Path("/proc/mounts").read_text()
    assert not sockets.exists()
    assert not [*Path("/sys/fs/cgroup").glob(f"*/{sockets.name}")]


@engine
@needs_root_and_apt
def test_it_runs_containers_and_leaves_nothing(folder: Path) -> None:
    with private_engine(folder) as client:
        host = engine_host(client)
        image = debian(client)
        program = ["python3", "-c", "print(6 * 7)"]
        output = client.containers.run(image, program, network_mode="none", remove=True)
        assert output == b"42\n"
        loopback = "import socket as s; a = s.create_server(('127.0.0.1', 0)); "
        loopback += "s.create_connection(a.getsockname()); print('connected')"
        output = client.containers.run(
            image, ["python3", "-c", loopback], network_mode="host", remove=True
        )
        assert output == b"connected\n"
        client.containers.run(image, ["sleep", "600"], detach=True, network_mode="none")
    assert_nothing_is_left(folder, host)


@engine
@needs_root_and_apt
def test_a_later_start_is_quick_keeps_the_images_and_is_shared(folder: Path) -> None:
    with private_engine(folder) as client:
        image = debian(client)
    unpacked = (folder / "packages" / packages.COMPLETE).stat().st_mtime_ns
    with private_engine(folder) as client:
        assert (folder / "packages" / packages.COMPLETE).stat().st_mtime_ns == unpacked
        assert client.images.get(NAME).id == image
        host = engine_host(client)
        with private_engine(folder) as second:
            assert engine_host(second) == host
        assert client.ping()
    assert_nothing_is_left(folder, host)


@engine
@needs_root_and_apt
def test_an_engine_whose_user_was_killed_ends(folder: Path) -> None:
    keeper, host = kept_up(folder)
    assert Path(host.removeprefix("unix://")).exists()
    os.kill(keeper.pid, signal.SIGKILL)
    keeper.wait()
    deadline = time.monotonic() + 30
    while processes_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_of(folder) == []
    with private_engine(folder) as client:
        assert engine_host(client) != host
        assert client.ping()
    assert_nothing_is_left(folder, host)


@engine
@needs_root_and_apt
def test_one_that_does_not_start_shows_its_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = private._engine_argv
    monkeypatch.setattr(private, "_engine_argv", lambda place: [*usual(place), "--no-such-option"])
    with pytest.raises(EngineError, match="no-such-option") as caught, private_engine(folder):
        pass
    assert str(folder / "engine.log") in caught.value.remedy
    assert processes_of(folder) == []
