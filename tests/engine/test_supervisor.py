"""The engine lives exactly as long as it has users."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from launcher.engine.private import supervisor


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
