"""A private engine's processes, and .venv by the system's Python."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from launcher.images.engine.private import supervisor
from tests.images.builder.conftest import wheel

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "bootstrap.py"
Run = Callable[..., subprocess.CompletedProcess[str]]


def make_wheel(folder: Path, name: str) -> str:
    """A wheel of one empty module; its line for a requirements file."""
    made = wheel(folder, name, "1.0")
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(made.read_bytes()).hexdigest()}\n"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    """A requirements file of one package."""
    path = tmp_path / "requirements.txt"
    path.write_text(make_wheel(tmp_path, "first"))
    return path


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program for `tmp_path/venv`; pip asks no index and finds only our wheels."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "no-such-file"))

    def run(*requirements: Path) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, str(SCRIPT), "--venv", str(tmp_path / "venv")]
        argv += [str(path) for path in requirements]
        return subprocess.run(argv, capture_output=True, text=True, check=False)

    return run


def packages_in(venv: Path) -> set[str]:
    return {path.stem for path in venv.glob("lib/python*/site-packages/*.py")}


@pytest.mark.long  # `make dev` makes one in every fresh clone
def test_made_once_added_to_and_made_anew(bootstrap: Run, lock: Path, tmp_path: Path) -> None:
    """Scripts outside the checkout couldn't import the launcher with its environment's Python."""
    missing = bootstrap(tmp_path / "gone.txt")
    assert missing.returncode == 2
    assert "gone.txt: can't be read: No such file" in missing.stderr

    right = lock.read_text()
    lock.write_text(right[:-5] + "0000\n")
    failed = bootstrap(lock)
    assert failed.returncode == 2
    assert "HASHES" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert json.loads((tmp_path / "venv" / ".bootstrap").read_text()) == {}
    lock.write_text(right)

    first = bootstrap(lock)  # over what failed
    assert (first.returncode, first.stderr) == (0, "")
    assert [line.split()[0] for line in first.stdout.splitlines()] == ["creating", "installing"]
    assert "first" in packages_in(tmp_path / "venv")
    python = [tmp_path / "venv" / "bin" / "python", "-c"]
    code = "import importlib.util as util; print(util.find_spec('launcher').origin)"
    origin = subprocess.run([*python, code], cwd=tmp_path, capture_output=True, text=True)
    assert origin.stdout.strip() == str(SCRIPT.parents[1] / "launcher" / "__init__.py")

    again = bootstrap(lock)
    assert (again.returncode, again.stdout) == (0, "")

    more = tmp_path / "more.txt"
    more.write_text(make_wheel(tmp_path, "second"))
    added = bootstrap(lock, more)
    assert added.stdout == "installing 1 packages of more.txt\n"
    assert bootstrap(lock).stdout == ""

    more.write_text(make_wheel(tmp_path, "third"))
    anew = bootstrap(lock, more)
    assert anew.stdout.startswith("creating")
    assert packages_in(tmp_path / "venv") >= {"first", "third"}
    assert "second" not in packages_in(tmp_path / "venv")


def test_somebody_elses_folder_is_left_alone(bootstrap: Run, lock: Path, tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "theirs").touch()
    refused = bootstrap(lock)
    assert refused.returncode == 2
    assert "wasn't made by this program" in refused.stderr
    assert (tmp_path / "venv" / "theirs").exists()


@pytest.fixture
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_without_pip_and_without_apt_it_says_what_to_install(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(module.SetupError, match="no apt-get") as caught:
        module.download_pip(tmp_path / "root")
    assert "Install Python with venv and pip" in str(caught.value)
    (tmp_path / "dnf").touch(mode=0o755)
    assert module.packages_hint() == "Install it: sudo dnf install python3 python3-pip"


def test_an_old_python_is_refused(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module.sys, "version_info", (3, 9, 2))
    assert module.main([]) == 2
    assert "Python 3.10 or later is needed" in capsys.readouterr().err


@pytest.fixture
def listener(sockets: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(sockets / "control.sock"))
    listening.listen()
    return listening


def join(listener: socket.socket) -> socket.socket:
    user = socket.socket(socket.AF_UNIX)
    user.settimeout(5)
    user.connect(listener.getsockname())
    assert user.recv(1) == supervisor.HELLO
    return user


def test_it_ends_with_the_last_user(listener: socket.socket) -> None:
    waiting: list[socket.socket] = []
    counting = threading.Thread(target=lambda: waiting.extend(supervisor.count_users(listener)))
    counting.start()
    first, second, third = join(listener), join(listener), join(listener)
    first.shutdown(socket.SHUT_WR)
    assert first.recv(1) == supervisor.OTHERS_STAY
    second.close()  # as the kernel does for one that is killed
    fourth = join(listener)
    third.shutdown(socket.SHUT_WR)
    assert third.recv(1) == supervisor.OTHERS_STAY
    assert counting.is_alive()
    fourth.close()
    counting.join(5)
    assert not counting.is_alive()
    assert len(waiting) == 1


def test_the_last_user_is_kept_waiting_for_the_end(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[socket.socket] = []
    counting = threading.Thread(target=lambda: waiting.extend(supervisor.count_users(listener)))
    counting.start()
    user = join(listener)
    user.shutdown(socket.SHUT_WR)
    counting.join(5)
    assert len(waiting) == 1
    waiting[0].close()  # as when the supervisor ends
    assert user.recv(1) == b""
    monkeypatch.setattr(supervisor, "FIRST_USER_WITHIN", 0.05)
    assert supervisor.count_users(listener) == []  # nobody comes
