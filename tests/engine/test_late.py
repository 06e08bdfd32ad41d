"""Engines that answer late, by single bytes, or never: each question ends at one deadline."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from launcher import cli
from launcher.engine.connect import connect
from launcher.errors import EngineError
from launcher.oci import registry
from launcher.records import record

from .conftest import VERSION

WITHIN = 0.3
SOON = 10.0
"""Seconds that nothing here may take, whatever the machine does beside."""

Serve = Callable[[str, str], str]


def drip(connection: socket.socket, stop: threading.Event) -> None:
    """Begin an answer, and go on with a byte at a time, each before a read's time-out."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
    while not stop.wait(WITHIN / 3):
        connection.sendall(b" ")


@pytest.fixture
def late(sockets: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Serve]:
    """Serves an engine that DOCKER_HOST names: it answers what doesn't end in `path` at once.

    What does is followed by silence, drips, or is answered after twice the deadline.
    """
    stop = threading.Event()
    listener = socket.socket(socket.AF_UNIX)
    host = f"unix://{sockets}/engine.sock"
    for name, value in {
        "DOCKER_HOST": host,
        "LAUNCHER_ANSWER_WITHIN": str(WITHIN),
        "LAUNCHER_RUNS": str(tmp_path / "runs"),
        "LAUNCHER_SETTINGS": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)

    def answer(connection: socket.socket, path: str, how: str) -> None:
        with connection, suppress(OSError):
            while request := connection.recv(1 << 16):
                asked = request.split()[1].decode().partition("?")[0]
                if asked.endswith(path) and how != "is slow":
                    return drip(connection, stop) if how == "drips" else void(stop.wait())
                if asked.endswith(path):
                    stop.wait(2 * WITHIN)
                body = json.dumps(VERSION if asked.endswith("/version") else []).encode()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body))
                connection.sendall(body)

    def accept(path: str, how: str) -> None:
        with suppress(OSError):
            while True:
                arguments = listener.accept()[0], path, how
                threading.Thread(target=answer, args=arguments, daemon=True).start()

    def serve(path: str, how: str) -> str:
        listener.bind(host.removeprefix("unix://"))
        listener.listen()
        threading.Thread(target=accept, args=(path, how), daemon=True).start()
        return host

    yield serve
    stop.set()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@contextmanager
def soon() -> Iterator[None]:
    """Fail where it takes longer."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < SOON


def void(value: object) -> None:
    """Nothing of it."""


@pytest.mark.parametrize("how", ["is silent", "drips"])
def test_the_search_for_an_engine_ends(late: Serve, how: str) -> None:
    """A read's time-out alone is begun anew by each byte, and the search never ended."""
    late("/version", how)
    with soon(), pytest.raises(EngineError, match=r"no answer within 0\.3 s"):
        connect()


@pytest.mark.parametrize("how", ["is silent", "drips"])
@pytest.mark.parametrize("path", ["/version", "/containers/json"])
def test_ps_names_the_engine_that_does_not_answer_and_fails(
    late: Serve, path: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It took two minutes, told neither host nor reason, and ended with 0."""
    host = late(path, how)
    with soon():
        assert cli.main(["ps"]) == 125
    told = capfd.readouterr()
    assert told.out.startswith("RUN ")
    assert host in told.err
    assert "no answer within 0.3 s" in told.err


@pytest.mark.parametrize("path", ["/version", "/json"])
def test_a_dry_run_needs_no_engine(
    late: Serve, path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It waited a minute for the engine's word of the image, and failed."""
    late(path, "is silent")
    with soon():
        assert cli.main(["run", "gpt2-tiny.yaml", "--dry-run"]) == 0
    assert "docker run " in capfd.readouterr().out


def test_work_is_waited_for(late: Serve) -> None:
    """The deadline is for questions: a container may take longer to start, or to write a line."""
    late("/start", "is slow")
    begun = time.monotonic()
    connect().api.start("run")
    assert time.monotonic() - begun > 2 * WITHIN


def test_what_is_read_as_it_comes_is_waited_for(late: Serve) -> None:
    """The log of a run that is silent for longer than an answer may take."""
    late("/logs", "is slow")
    api = connect().api
    address = f"{api.base_url}/v{api.api_version}/containers/run/logs"
    with api.get(address, stream=True, timeout=api.timeout) as log:
        assert log.content == b"[]"


def test_a_named_engine_that_is_not_there_fails_ps_and_runs(
    late: Serve, capfd: pytest.CaptureFixture[str], sockets: Path
) -> None:
    """They ended with 0, and told neither host nor reason."""
    for command in ("ps", "runs"):
        assert cli.main([command]) == 125
        told = capfd.readouterr()
        assert told.out.startswith("RUN ")
        assert f"DOCKER_HOST (unix://{sockets}/engine.sock): there is no such socket" in told.err


def test_a_run_that_may_still_go_on_is_not_resumed_elsewhere(
    late: Serve, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The engine that may have it wasn't heard, and two would have saved to one folder."""
    config = {"name": "a", "image": "cpu", "checkpoint": {"save": str(tmp_path / "saved")}}
    record.write(
        record.Record("0a1b2c3d", "a", "2025", "docker", str(tmp_path), "a.yaml", config, (), 1)
    )
    assert cli.main(["resume", "0a1b2c3d", "--backend", "local"]) == 125
    assert "whether run 0a1b2c3d still goes on can't be asked" in capfd.readouterr().err


def test_where_no_engine_was_ever_named_ps_lists_what_runs_without(
    late: Serve,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sockets: Path,
) -> None:
    """A machine without an engine isn't at fault; one whose engine is dead is."""
    absent = f"unix://{sockets}/none.sock"
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONFIG", str(sockets))
    monkeypatch.setattr("launcher.engine.connect._default_hosts", lambda env: [(absent, "default")])
    assert cli.main(["ps"]) == 0
    assert capfd.readouterr().err == "launcher: docker, compose: no container engine answers\n"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(absent.removeprefix("unix://"))
    assert cli.main(["ps"]) == 125
    assert f"default ({absent}): nobody listens" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["is silent", "drips"])
def test_a_registry_is_not_followed_for_ever(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One byte before each read's time-out kept it for as long as the registry liked."""
    monkeypatch.setenv("LAUNCHER_ANSWER_WITHIN", str(WITHIN))
    stop = threading.Event()

    def answer() -> None:
        with listener.accept()[0] as connection, suppress(OSError):
            connection.recv(1 << 16)
            drip(connection, stop) if how == "drips" else stop.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, daemon=True).start()
        with soon(), pytest.raises(EngineError, match=r"no answer within 0\.3 s"):
            registry.resolve(f"127.0.0.1:{listener.getsockname()[1]}/team/base:1")
        stop.set()
