"""Which engine is used, and what is said where there is none."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from docker.errors import APIError

from launcher.engine import connect as module
from launcher.engine.connect import (
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
from launcher.errors import EngineError

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


def test_docker_host_that_does_not_answer_ends_the_search(
    monkeypatch: pytest.MonkeyPatch, sockets: Path, standin_engine: Start
) -> None:
    answering = standin_engine(sockets / "default.sock")
    monkeypatch.setattr(module, "_default_hosts", lambda env: iter([(answering, "default")]))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sockets}/none.sock")
    with pytest.raises(EngineError) as caught:
        connect()
    assert caught.value.exit_code == 125
    assert "DOCKER_HOST" in caught.value.problem
    assert "there is no such socket" in caught.value.problem
    assert "default" not in caught.value.problem
    assert "unset DOCKER_HOST" in caught.value.remedy


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


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("tcp://127.0.0.1:1", "connection refused"),
        ("nonsense", "nonsense"),
        ("ftp://somewhere", "ftp"),
        ("unix://{}/silent.sock", "no answer within"),
    ],
)
def test_a_wrong_docker_host_gives_no_traceback(
    monkeypatch: pytest.MonkeyPatch, sockets: Path, host: str, reason: str
) -> None:
    monkeypatch.setenv("LAUNCHER_ANSWER_WITHIN", "0.2")
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(sockets / "silent.sock"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", host.format(sockets))
        with pytest.raises(EngineError) as caught:
            connect()
    assert reason in caught.value.problem


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


@pytest.mark.parametrize(
    ("answers", "with_buildx", "with_buildkit"),
    [
        ('"buildx inspect default") echo "Status: running";;', ["buildx"], ["buildx", "build"]),
        ('"buildx inspect default") echo "Status: inactive";;', None, None),
        ("version*) echo 20.10.24;;", None, ["build"]),
        ("version*) echo 28.0.1;;", None, None),
    ],
)
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
