"""What is asked of the engine, and what is made of its refusals; no engine is needed."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from docker import APIClient
from docker.errors import APIError, ImageNotFound, NotFound
from requests.exceptions import ConnectionError as Reset
from urllib3.exceptions import ProtocolError

from launcher.base.errors import EngineError
from launcher.runs.backends import container
from launcher.runs.backends.docker import docker, docker_job
from launcher.runs.plan.job import ConnectionLost, EndCause, ExitStatus
from launcher.runs.plan.plan import Plan
from tests.tables import table


def stream(*frames: tuple[int, bytes]) -> socket.socket:
    """A container's output as the engine frames it."""
    near, far = socket.socketpair()
    with far:
        for kind, text in frames:
            far.sendall(struct.pack(">BxxxL", kind, len(text)) + text)
    return near


class Api:
    """An engine that keeps what it was asked, and refuses what it is told to."""

    def __init__(self, **refusals: Callable[[dict[str, Any]], Exception | None]) -> None:
        self.calls: list[str] = []
        self.refusals = refusals
        self.body: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.labels: dict[str, str] = {}

    def _asked(self, name: str) -> None:
        self.calls.append(name)
        error = self.refusals.get(name, lambda body: None)(self.body)
        if error:
            raise error

    def create_container_from_config(self, body: dict[str, Any], name: str) -> dict[str, str]:
        self.body = body
        self._asked("create")
        return {"Id": "abc"}

    def attach_socket(self, container: str, params: dict[str, int]) -> socket.socket:
        self._asked("attach")
        return stream((1, b"out"), (2, b"err"))

    def start(self, container: str) -> None:
        self._asked("start")

    def wait(self, container: str) -> dict[str, int]:
        self._asked("wait")
        return {"StatusCode": 5}

    def inspect_container(self, container: str) -> dict[str, Any]:
        if error := self.refusals.get("inspect", lambda body: None)(self.body):
            raise error
        state = {"Running": False, "Status": "exited", "ExitCode": 5, **self.state}
        return {"State": state, "Config": {"Labels": self.labels}}

    def stop(self, container: str, timeout: int) -> None:
        self._asked(f"stop {timeout}")

    def kill(self, container: str) -> None:
        self._asked("kill")

    def remove_container(self, container: str, v: bool, force: bool) -> None:
        self._asked("remove")


def refused(text: str, code: int = 500) -> APIError:
    response: Any = SimpleNamespace(status_code=code, reason="", url="")
    return APIError("refused", response=response, explanation=text)


def limits(body: dict[str, Any]) -> set[str]:
    return {limit["Name"] for limit in body["HostConfig"]["Ulimits"]}


def no_memlock(body: dict[str, Any]) -> Exception | None:
    reason = "OCI runtime create failed: error setting rlimit type 8: operation not permitted"
    return refused(reason) if "memlock" in limits(body) else None


def test_it_attaches_before_it_starts_and_tells_the_streams_apart(bare: Plan) -> None:
    api = Api()
    job = docker_job.start(api, bare, attach=True)
    assert api.calls == ["create", "attach", "start"]
    assert list(job.output()) == [(False, b"out", 0), (True, b"err", 0)]
    assert job.wait() == ExitStatus(5)


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ({"Running": True, "Status": "running"}, None),
        ({"Running": True, "Status": "paused"}, None),
        ({"Running": False, "Status": "created"}, None),
        ({"Running": False, "Status": "restarting"}, None),
        ({"Status": "exited"}, ExitStatus(137)),
        ({"Status": "exited", "OOMKilled": True}, ExitStatus(137, EndCause.MEMORY)),
        ({"Status": "removing"}, ExitStatus(137, EndCause.REMOVED)),
        ({"Status": "dead"}, ExitStatus(137, EndCause.REMOVED)),
        (None, ExitStatus(137, EndCause.REMOVED)),
    ],
)
def test_the_end_by_the_engines_state(
    state: dict[str, Any] | None, ended: ExitStatus | None
) -> None:
    told = None if state is None else {"Running": False, "ExitCode": 137, **state}
    assert container.ended_as(told) == ended


def test_without_memlock_it_goes_on_and_says_so_once(
    full: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    api = Api(start=no_memlock)
    docker_job.start(api, full, attach=False)
    assert api.calls == ["create", "start", "remove", "create", "start"]
    assert limits(api.body) == {"stack"}
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "memlock" in told[0]


def test_a_variable_without_value_is_the_launchers_own(
    full: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "se cret")
    api = Api()
    docker_job.start(api, replace(full, env=(*full.env, ("NOT_SET", None))), attach=False)
    assert {"TOKEN=se cret", "NOT_SET"} <= {*api.body["Env"]}


@table("reason", "said")
def test_a_refusal_leaves_no_container(bare: Plan, reason: str, said: str) -> None:
    api = Api(start=lambda body: refused(reason))
    with pytest.raises(EngineError, match=said):
        docker_job.start(api, bare, attach=True)
    assert api.calls == ["create", "attach", "start", "remove"]


@pytest.mark.parametrize("state", [{}, {"Status": "removing"}, None])
def test_the_attempt_before_is_waited_for_while_it_is_removed(
    bare: Plan, monkeypatch: pytest.MonkeyPatch, state: dict[str, Any] | None
) -> None:
    left = [refused("the name is in use", 409)] * 3
    gone = NotFound("gone") if state is None else None
    api = Api(create=lambda body: left.pop() if left else None, inspect=lambda body: gone)
    api.state, api.labels = state or {}, dict(bare.labels)
    monkeypatch.setattr(docker_job, "RETRY_SECONDS", 0)
    assert docker_job.start(api, bare, attach=False).handle == "abc"
    assert api.calls == ["create"] * 4 + ["start"]


@table("labels", "state", "said", "tries")
def test_a_name_that_stays_taken_is_told(
    bare: Plan,
    monkeypatch: pytest.MonkeyPatch,
    labels: dict[str, str] | None,
    state: dict[str, Any],
    said: str,
    tries: int,
) -> None:
    api = Api(create=lambda body: refused("the name is in use", 409))
    api.state, api.labels = state, dict(bare.labels) if labels is None else labels
    monkeypatch.setattr(docker_job, "REMOVAL_SECONDS", 0.01)
    monkeypatch.setattr(docker_job, "RETRY_SECONDS", 0.02)
    with pytest.raises(EngineError) as caught:
        docker_job.start(api, bare, attach=False)
    assert str(caught.value).startswith(said)
    assert api.calls == ["create"] * tries


def test_only_a_taken_name_is_asked_after(bare: Plan) -> None:
    """Whoever has lost the engine would wait for a second answer, and report that one's failure."""
    api = Api(create=lambda body: Reset("reset"), inspect=lambda body: AssertionError("asked"))
    with pytest.raises(EngineError, match="reset"):
        docker_job.start(api, bare, attach=False)


def test_an_image_that_went_meanwhile_is_told(bare: Plan) -> None:
    api = Api(create=lambda body: ImageNotFound("gone"))
    with pytest.raises(EngineError, match="no image some/image:1"):
        docker_job.start(api, bare, attach=True)


def test_a_lost_engine_is_no_end(bare: Plan) -> None:
    api = Api(wait=lambda body: Reset("reset by peer"))
    job = docker_job.start(api, bare, attach=False)
    with pytest.raises(ConnectionLost, match="reset by peer"):
        job.wait()
    assert "remove" not in api.calls


def test_one_that_its_follower_removed_meanwhile_keeps_its_exit_code(
    bare: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(inspect=lambda body: NotFound("gone"))
    job = docker_job.start(api, bare, attach=False)
    for code, ended in (
        (5, ExitStatus(5)),
        (0, ExitStatus(0)),
        (137, ExitStatus(137, EndCause.REMOVED)),
    ):
        monkeypatch.setattr(api, "wait", lambda container, code=code: {"StatusCode": code})
        assert job.wait() == ended
    gone = Api(wait=lambda body: NotFound("gone"))
    assert docker_job.start(gone, bare, attach=False).wait() == ExitStatus(137, EndCause.REMOVED)


def test_a_stop_leaves_a_running_one_to_its_follower_and_removes_an_unstarted_one(
    bare: Plan,
) -> None:
    api = Api()
    job = docker_job.start(api, bare, attach=False)
    job.stop(20)
    job.kill()
    assert api.calls == ["create", "start", "stop 20", "kill"]
    api.state = {"Status": "created"}
    for end in (lambda: job.stop(20), job.kill):
        end()
        assert api.calls[4:].count("remove") == 1
        del api.calls[4:]


@pytest.mark.parametrize(("status", "told"), [(409, 0), (500, 1)])
def test_what_somebody_else_is_removing_is_not_told_as_left(
    bare: Plan, capsys: pytest.CaptureFixture[str], status: int, told: int
) -> None:
    error = refused("removal of container abc is already in progress")
    error.response.status_code = status
    docker_job.start(Api(remove=lambda body: error), bare, attach=False).remove()
    assert capsys.readouterr().err.count("docker rm -f abc") == told


class CutLog(BaseHTTPRequestHandler):
    """An engine that goes away after a piece of a log."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        frame = struct.pack(">BxxxL", 1, 100) + b"half"
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%s" % (len(frame) + 50, frame))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        return


class NoLog(CutLog):
    """An engine whose log driver keeps nothing."""

    def do_GET(self) -> None:
        body = b'{"message": "configured logging driver does not support reading"}'
        self.send_response(501)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize(
    ("handler", "error", "said"),
    [
        (CutLog, ConnectionLost, "lost"),
        (NoLog, EngineError, "log that can be read: configured logging"),
    ],
)
def test_an_engine_whose_log_isnt_whole_is_told(
    handler: type[BaseHTTPRequestHandler], error: type[EngineError], said: str
) -> None:
    """501 is no loss, which would be waited for."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        api = APIClient(f"http://127.0.0.1:{server.server_port}", version="1.41")
        with pytest.raises(EngineError, match=said) as caught:
            list(docker_job.DockerJob(api, "abc", {}).output())
        assert type(caught.value) is error
        api.close()


@pytest.mark.parametrize("address", ["http://far.example:2375", "http+docker://ssh"])
@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ([{"ID": "nvidia.com/gpu=0"}, {"ID": "nvidia.com/gpu=1"}, {"ID": "nvidia.com/gpu=all"}], 2),
        ([{"ID": "vendor.example/nic=0"}], None),
        (None, None),
    ],
)
def test_gpus_that_an_engine_elsewhere_knows_of(
    listed: Any, count: int | None, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker.host, "count_gpus", lambda: 8)
    api: Any = SimpleNamespace(base_url=address, info=lambda: {"DiscoveredDevices": listed})
    client: Any = SimpleNamespace(api=api)
    assert docker.DockerBackend(connect=lambda: client).count_gpus() == count


def test_the_systems_word_is_found_below_the_sdks() -> None:
    below = FileNotFoundError(2, "No such file or directory")
    error = Reset(ProtocolError("Connection aborted.", below))
    assert container.words_of(error) == "No such file or directory"
