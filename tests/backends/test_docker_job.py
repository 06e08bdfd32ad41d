"""What is asked of the engine, and what is made of its refusals; no engine is needed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound, NotFound
from requests.exceptions import ConnectionError as Reset

from launcher.backends import Cause, Ended, Lost, docker, docker_job
from launcher.errors import EngineError
from launcher.run.plan import Plan


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
        return {"State": {"Running": False, "Status": "exited", "ExitCode": 5, **self.state}}

    def remove_container(self, container: str, v: bool, force: bool) -> None:
        self._asked("remove")


def refused(text: str) -> APIError:
    response: Any = SimpleNamespace(status_code=500, reason="", url="")
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
    assert list(job.output()) == [(False, b"out"), (True, b"err")]
    assert job.wait() == Ended(5)


def test_detached_it_is_not_attached(bare: Plan) -> None:
    api = Api()
    job = docker_job.start(api, bare, attach=False)
    assert api.calls == ["create", "start"]
    assert (job.run, job.handle) == ("0a1b2c3d", "abc")


def test_an_end_for_want_of_memory_is_told_apart(bare: Plan) -> None:
    api = Api()
    api.state = {"OOMKilled": True, "ExitCode": 137}
    assert docker_job.start(api, bare, attach=False).ended() == Ended(137, Cause.MEMORY)


def test_a_running_job_has_not_ended(bare: Plan) -> None:
    api = Api()
    api.state = {"Running": True, "Status": "running", "ExitCode": 0}
    assert docker_job.start(api, bare, attach=False).ended() is None


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


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', "Container Toolkit"),
        ("error setting rlimit type 3: operation not permitted", "error setting rlimit"),
        ("no space left on device", "no space left on device"),
    ],
)
def test_a_refusal_leaves_no_container(bare: Plan, reason: str, said: str) -> None:
    api = Api(start=lambda body: refused(reason))
    with pytest.raises(EngineError, match=said):
        docker_job.start(api, bare, attach=True)
    assert api.calls == ["create", "attach", "start", "remove"]


def test_an_image_that_went_meanwhile_is_told(bare: Plan) -> None:
    api = Api(create=lambda body: ImageNotFound("gone"))
    with pytest.raises(EngineError, match="no image some/image:1"):
        docker_job.start(api, bare, attach=True)


def test_a_lost_engine_is_no_end(bare: Plan) -> None:
    api = Api(wait=lambda body: Reset("reset by peer"))
    job = docker_job.start(api, bare, attach=False)
    with pytest.raises(Lost, match="reset by peer"):
        job.wait()
    assert "remove" not in api.calls


def test_a_container_that_was_removed_is_told(bare: Plan) -> None:
    api = Api(wait=lambda body: NotFound("gone"))
    assert docker_job.start(api, bare, attach=False).wait() == Ended(137, Cause.REMOVED)


def test_a_variable_without_value_is_resolved_or_left_out(
    bare: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    monkeypatch.delenv("NOT_SET", raising=False)
    api = Api()
    env = (("A", ""), ("NOT_SET", None), ("TOKEN", None))
    docker_job.start(api, replace(bare, env=env), attach=False)
    assert api.body["Env"] == ["A=", "TOKEN=secret"]


def test_the_body_that_is_shown_is_the_one_that_is_sent(full: Plan) -> None:
    full = replace(full, env=tuple(pair for pair in full.env if pair[1] is not None))
    api = Api()
    docker_job.start(api, full, attach=False)
    assert api.body == docker.request(full).body


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ([{"ID": "nvidia.com/gpu=0"}, {"ID": "nvidia.com/gpu=1"}, {"ID": "nvidia.com/gpu=all"}], 2),
        ([{"ID": "vendor.example/nic=0"}], None),
        (None, None),
    ],
)
def test_gpus_that_the_engine_knows_of(listed: Any, count: int | None) -> None:
    api: Any = SimpleNamespace(
        base_url="http://far.example:2375", info=lambda: {"DiscoveredDevices": listed}
    )
    client: Any = SimpleNamespace(api=api)
    assert docker.DockerBackend(connect=lambda: client).count_gpus() == count
