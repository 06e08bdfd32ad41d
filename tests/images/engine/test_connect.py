"""Engines that answer, one that comes late or refuses, and the disk that images take."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import docker
import pytest
import requests
from docker.errors import APIError, DockerException

from launcher import cli
from launcher.base.errors import EngineError
from launcher.images.engine import connect as module
from launcher.images.engine import disk
from launcher.images.engine.connect import (
    Endpoint,
    buildkit,
    buildx,
    cli_environment,
    connect,
    endpoints,
    engine_host,
    no_engine,
    podman,
)
from launcher.images.oci import registry
from launcher.runs.records import record
from tests.tables import table

from .conftest import StandInHandler

Start = Callable[..., str]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No engine and no docker configuration but a test's own."""
    for name in list(os.environ):
        if name.startswith("DOCKER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(module, "_default_hosts", lambda env: iter(()))


def write_context(config: Path, name: str, endpoint: dict[str, object]) -> Path:
    """Write a docker context as the docker command does; its TLS folder."""
    key = hashlib.sha256(name.encode()).hexdigest()
    meta = config / "contexts" / "meta" / key / "meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))
    return config / "contexts" / "tls" / key / "docker"


def test_a_context_is_used_before_the_default_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sockets: Path, standin_engine: Start
) -> None:
    default = standin_engine(sockets / "default.sock")
    chosen = standin_engine(sockets / "context.sock")
    other = standin_engine(sockets / "other.sock")
    monkeypatch.setattr(module, "_default_hosts", lambda env: iter([(default, "default")]))
    write_context(tmp_path / "config", "lab", {"Host": chosen})
    write_context(tmp_path / "config", "other", {"Host": other})
    client = connect(timeout=33)
    assert (engine_host(client), client.api.timeout) == (default, 33)
    assert client.api.api_version == "1.41"
    (tmp_path / "config" / "config.json").write_text('{"currentContext": "lab"}')
    assert engine_host(connect()) == chosen
    monkeypatch.setenv("DOCKER_CONTEXT", "other")
    assert engine_host(connect()) == other
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert engine_host(connect()) == default


def test_a_context_with_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tls = write_context(tmp_path / "config", "far", {"Host": "tcp://far:2376"})
    tls.mkdir(parents=True)
    monkeypatch.setenv("DOCKER_CONTEXT", "far")
    (found,) = endpoints(os.environ)
    assert found == Endpoint("tcp://far:2376", "docker context far", True, tls, True)
    env = {"DOCKER_HOST": "tcp://one:1", "DOCKER_CONTEXT": "two", "DOCKER_CERT_PATH": "/keys"}
    (found,) = endpoints(env)
    assert found == Endpoint("tcp://one:1", "DOCKER_HOST", True, Path("/keys"), False)


@pytest.mark.parametrize(
    "meta",
    [{"Endpoints": [1]}, {"Endpoints": {"docker": "x"}}, {"Endpoints": {"docker": {"Host": 5}}}],
)
def test_a_context_of_another_shape_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, meta: object
) -> None:
    write_context(tmp_path / "config", "odd", {})
    (file,) = (tmp_path / "config" / "contexts" / "meta").glob("*/meta.json")
    file.write_text(json.dumps(meta))
    monkeypatch.setenv("DOCKER_CONTEXT", "odd")
    with pytest.raises(EngineError, match=r"docker context 'odd': .*names no engine"):
        connect()
    monkeypatch.setenv("DOCKER_CONTEXT", "gone")
    with pytest.raises(EngineError, match=r"docker context '.*names no engine") as caught:
        connect()
    assert "docker context ls" in caught.value.remedy


@pytest.mark.parametrize("raw", [b'\xff{"currentContext": "lab"}', b"[]", b"{"])
def test_a_configuration_that_can_not_be_read_is_no_leave_to_take_another_engine(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    sockets: Path,
    standin_engine: Start,
    raw: bytes,
) -> None:
    """The default engine was taken, though the user had chosen a context."""
    default = standin_engine(sockets / "default.sock")
    monkeypatch.setattr(module, "_default_hosts", lambda env: iter([(default, "default")]))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_bytes(raw)
    with pytest.raises(EngineError, match=r"config.json: no JSON object") as caught:
        connect()
    assert "DOCKER_HOST" in caught.value.remedy


def test_an_engine_that_answers_null_is_told(
    monkeypatch: pytest.MonkeyPatch, sockets: Path, standin_engine: Start
) -> None:
    """What used the answer failed with a traceback."""
    monkeypatch.setenv("DOCKER_HOST", standin_engine(sockets / "a.sock", otherwise=b"null"))
    client = connect()
    with pytest.raises(APIError, match=r"it answers null to /v1.41/info"):
        client.info()
    monkeypatch.setenv("DOCKER_HOST", standin_engine(sockets / "b.sock", version=b"null"))
    with pytest.raises(EngineError, match=r"it answers null to /version"):
        connect()


def test_an_engine_that_names_its_version_is_not_asked_what_it_is_made_of(
    monkeypatch: pytest.MonkeyPatch, sockets: Path, standin_engine: Start
) -> None:
    """It asked runc and containerd for theirs, before each run."""
    host = standin_engine(sockets / "a.sock", named=b"1.40", version=b"null")
    monkeypatch.setenv("DOCKER_HOST", host)
    assert connect().api.api_version == "1.40"


def test_sockets_are_tried_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sockets: Path, standin_engine: Start
) -> None:
    monkeypatch.undo()
    runtime = {"XDG_RUNTIME_DIR": "/run/user/7"}
    hosts = [host for host, _ in module._default_hosts(runtime)]
    order = ["/run/user/7/docker.sock", "/run/user/7/podman/podman.sock", "/run/podman/podman.sock"]
    assert hosts[0] == "unix:///var/run/docker.sock"
    assert hosts[-3:] == [f"unix://{path}" for path in order]


def test_a_dead_socket_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, sockets: Path, standin_engine: Start
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(sockets / "dead.sock"))
    alive = standin_engine(sockets / "alive.sock")
    hosts = [(f"unix://{sockets}/dead.sock", "first"), (alive, "second")]
    monkeypatch.setattr(module, "_default_hosts", lambda env: iter(hosts))
    assert engine_host(connect()) == alive
    assert module.socket_fault(sockets / "dead.sock", 1.0).startswith("nobody listens")


@table("host", "reason")
def test_a_wrong_docker_host_gives_no_traceback(
    monkeypatch: pytest.MonkeyPatch, host: str, reason: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    with pytest.raises(EngineError) as caught:
        connect()
    assert caught.value.exit_code == 125
    assert reason in caught.value.problem
    assert "unset DOCKER_HOST" in caught.value.remedy


def test_permission_denied_has_its_own_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    reason = module.socket_fault(Path("/var/run/docker.sock"), 1.0)
    error = no_engine([(Endpoint("unix:///var/run/docker.sock", "default socket"), reason)])
    assert "default socket (unix:///var/run/docker.sock): permission denied" in error.problem
    assert "usermod -aG docker" in error.remedy


def test_command_line_tools_get_the_same_engine(
    monkeypatch: pytest.MonkeyPatch, sockets: Path, standin_engine: Start
) -> None:
    monkeypatch.setenv("DOCKER_HOST", standin_engine(sockets / "a.sock"))
    client = connect()
    monkeypatch.setenv("DOCKER_CONTEXT", "elsewhere")
    monkeypatch.setenv("BUILDX_BUILDER", "elsewhere")
    env = cli_environment(client)
    assert env["DOCKER_HOST"] == f"unix://{sockets}/a.sock"
    assert env["DOCKER_BUILDKIT"] == "1"
    assert not {"DOCKER_CONTEXT", "BUILDX_BUILDER"} & env.keys()


def write_cli(path: Path, answers: str) -> None:
    """A stand-in for the docker program: a shell script of the branches of a `case`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\ncase "$*" in\n{answers}\n*) exit 1;;\nesac\n')
    path.chmod(0o755)


@table("answers", "with_buildx", "with_buildkit")
def test_buildkit_is_found(
    monkeypatch: pytest.MonkeyPatch,
    sockets: Path,
    standin_engine: Start,
    answers: str,
    with_buildx: list[str] | None,
    with_buildkit: list[str] | None,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", standin_engine(sockets / "a.sock"))
    cli = sockets / "bin" / "docker"
    write_cli(cli, answers)
    monkeypatch.setenv("PATH", f"{cli.parent}:{os.environ['PATH']}")
    client = connect()
    assert buildx(client) == ([str(cli), *with_buildx] if with_buildx else None)
    assert buildkit(client) == ([str(cli), *with_buildkit] if with_buildkit else None)


@pytest.mark.parametrize(
    ("name", "answers", "found"),
    [
        ("Podman Engine", "*version*) echo 4.3.1;;", True),
        ("Podman Engine", "*version*) echo refused >&2; exit 125;;", False),
        ("Engine", "*version*) echo 4.3.1;;", False),
    ],
)
def test_podman_is_driven_by_its_own_program_on_the_same_engine(
    monkeypatch: pytest.MonkeyPatch,
    sockets: Path,
    standin_engine: Start,
    name: str,
    answers: str,
    found: bool,
) -> None:
    host = standin_engine(sockets / "a.sock")
    monkeypatch.setenv("DOCKER_HOST", host)
    program = sockets / "bin" / "podman"
    write_cli(program, answers)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    client = connect()
    monkeypatch.setattr(client, "version", lambda: {"Components": [{"Name": name}]})
    assert podman(client) == ([str(program), "--url", host] if found else None)


def test_a_private_engine_brings_its_own_tools(
    monkeypatch: pytest.MonkeyPatch, sockets: Path, standin_engine: Start
) -> None:
    monkeypatch.setenv("DOCKER_HOST", standin_engine(sockets / "docker.sock"))
    plugin = sockets / "packages" / module.PLUGIN
    write_cli(plugin, "'inspect default') echo Status: running;;")
    client = connect()
    assert buildx(client) == [str(plugin)]
    assert buildkit(client) == [str(plugin), "build"]


WITHIN = 0.3
SOON = 45.0
"""Seconds that nothing here may take, whatever the machine does beside: it took a minute or two."""

Serve = Callable[[str, str], str]


def drip(connection: socket.socket, stop: threading.Event) -> None:
    """Begin an answer, and go on with a byte at a time, each before a read's time-out."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
    while not stop.wait(WITHIN / 3):
        connection.sendall(b" ")


class LateHandler(StandInHandler):
    """Leaves a question whose path ends in `late` without an answer, or lets it wait for one."""

    late, how, stop, otherwise = "", "", threading.Event(), b"[]"

    def do_GET(self) -> None:
        is_late = self.path.partition("?")[0].endswith(self.late)
        with suppress(OSError):
            if is_late and self.how == "drips":
                return drip(self.connection, self.stop)
            if is_late and self.stop.wait(2 * WITHIN if self.how == "is slow" else None):
                return None
            return super().do_GET()

    do_POST = do_GET


@pytest.fixture
def late(
    sockets: Path, standin_engine: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Serve]:
    """Serves an engine that DOCKER_HOST names: it answers what doesn't end in `path` at once.

    What does is followed by silence, drips, or is answered after twice the deadline.
    """
    stop = threading.Event()
    for name, value in {
        "DOCKER_HOST": f"unix://{sockets}/engine.sock",
        "LAUNCHER_ANSWER_WITHIN": str(WITHIN),
        "LAUNCHER_RUNS": str(tmp_path / "runs"),
        "LAUNCHER_SETTINGS": "/dev/null",
    }.items():
        monkeypatch.setenv(name, value)

    def serve(path: str, how: str) -> str:
        late = type("Late", (LateHandler,), {"late": path, "how": how, "stop": stop})
        return standin_engine(sockets / "engine.sock", late)

    yield serve
    stop.set()


@contextmanager
def soon() -> Iterator[None]:
    """Fail where it takes longer."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < SOON


@pytest.mark.parametrize(
    ("path", "how"), [("/version", "is silent"), ("/version", "drips"), ("/_ping", "is silent")]
)
def test_the_search_for_an_engine_ends(late: Serve, path: str, how: str) -> None:
    """A read's time-out alone is begun anew by each byte, and the search never ended."""
    late(path, how)
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
    late: Serve,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    sockets: Path,
    standin_engine: Start,
) -> None:
    """They ended with 0, and told neither host nor reason. No other engine is taken instead."""
    other = standin_engine(sockets / "default.sock")
    monkeypatch.setattr(module, "_default_hosts", lambda env: iter([(other, "default")]))
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
    """A machine without an engine isn't at fault, and nothing is said; one whose engine is dead is.

    Each list of those who run without one ended with "no container engine answers".
    """
    absent = f"unix://{sockets}/none.sock"
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONFIG", str(sockets))
    monkeypatch.setattr(
        "launcher.images.engine.connect._default_hosts", lambda env: [(absent, "default")]
    )
    assert cli.main(["ps"]) == 0
    assert capfd.readouterr().err == ""
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


def answering(df: Callable[[], dict[str, Any]]) -> docker.DockerClient:
    api = SimpleNamespace(timeout=600)
    return cast("docker.DockerClient", SimpleNamespace(df=df, api=api))


@pytest.mark.parametrize(
    "error",
    [
        APIError("a disk usage operation is already running"),
        DockerException("TLS"),
        requests.exceptions.ReadTimeout("it takes too long"),
    ],
)
def test_what_an_engine_does_not_tell_is_unknown_and_no_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSES", (0.0, 0.0))

    def df() -> dict[str, Any]:
        assert client.api.timeout == disk.ANSWER_WITHIN
        raise error

    client = answering(df)
    assert (disk.used(client), disk.cached(client)) == (None, None)
    assert client.api.timeout == 600
    answers = iter([error, {"LayersSize": 12, "BuildCache": [{"ID": "gone", "Shared": False}]}])

    def busy() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    again = answering(busy)
    if isinstance(error, APIError):  # it is asked again
        assert (disk.cached(again) or {}).keys() == {"gone"}
    without = answering(lambda: {"BuildCache": None})
    assert (disk.used(without), disk.cached(without)) == (None, {})
