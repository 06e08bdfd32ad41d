"""The engine at a socket, asked without docker's SDK: the same answers, and the same errors."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from docker.errors import APIError, ImageNotFound, NotFound

from launcher.base.errors import EngineError
from launcher.images.engine import connect, direct
from launcher.images.engine.client import Api
from launcher.images.engine.direct import DirectApi
from launcher.runs.backends.container import DockerJob, words_of
from launcher.runs.plan.job import ConnectionLost

from .conftest import StandInHandler

Start = Callable[..., str]
ID = "6a" * 32
IMAGE = {"Id": f"sha256:{ID}", "Config": {"Labels": {"megatron-launchpad.megatron": "0.16.1"}}}
ENDED = {"State": {"Running": False, "Status": "exited", "ExitCode": 3}}


class RunHandler(StandInHandler):
    """An engine that runs containers which end at once with 3, and keeps what it was asked."""

    asked: list[str]
    started: threading.Event

    def answer(self, status: int, body: object = None) -> None:
        content = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Api-Version", "1.41")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def ask(self) -> str:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        what = self.path.partition("?")[0].removeprefix("/v1.41").replace(ID, "ID")
        self.asked.append(f"{self.command} {what}")
        return what

    def do_GET(self) -> None:
        what = self.ask()
        if what == "/info":
            self.answer(200, {"Name": "elsewhere", "ServerVersion": "27.0"})
        elif what.startswith("/images/"):
            self.answer(200, IMAGE)
        elif what == "/containers/ID/json":
            self.answer(200, ENDED)
        else:
            self.answer(404 if what.endswith("/archive") else 200, {"message": "not there"})

    def do_POST(self) -> None:
        what = self.ask()
        if what == "/containers/create":
            self.answer(201, {"Id": ID})
        elif what.endswith("/attach"):
            self.wfile.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\n\r\n")
            self.started.wait(60)
            for kind, text in ((1, b"out\n"), (2, b"err\n")):
                self.wfile.write(struct.pack(">BxxxL", kind, len(text)) + text)
            self.close_connection = True
        elif what.endswith("/start"):
            self.answer(204)
            self.started.set()
        else:
            self.answer(200, {"StatusCode": 3})

    def do_DELETE(self) -> None:
        self.ask()
        self.answer(204)


SDK = {"docker", "requests", "urllib3", "http.client", "ssl", "logging", "concurrent.futures"}
LAUNCH = f"""
import sys
from launcher.cli import main
code = main(["run", "gpt2-tiny.yaml", "--set", "image=site.example/own:1"])
print(code, len(sys.modules), *sorted({SDK!r} & {{*sys.modules}}))
"""
MOST_MODULES = 400
"""Python's own, pydantic's and yaml's among them; with the SDK and all that a run can use, 560."""


def test_a_launch_asks_the_engine_ten_times_and_imports_no_sdk(
    sockets: Path, standin_engine: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SDK was a third of a launch, and the image was asked for three times."""
    asked = list[str]()
    kind = type("Engine", (RunHandler,), {"asked": asked, "started": threading.Event()})
    monkeypatch.setenv("DOCKER_HOST", standin_engine(sockets / "e.sock", kind))
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))
    done = subprocess.run([sys.executable, "-c", LAUNCH], capture_output=True, text=True)
    assert "err\n" in done.stderr, done.stderr
    out, told = done.stdout.splitlines()
    code, modules, *imported = told.split()
    assert (out, code, imported) == ("out", "3", [])
    assert int(modules) < MOST_MODULES
    image, container = "/images/site.example/own:1", "/containers/ID"
    assert sorted(asked) == sorted(
        [
            "GET /_ping",
            f"GET {image}/json",
            "GET /info",
            "POST /containers/create",
            *(f"POST {container}/{what}" for what in ("attach", "start", "wait")),
            f"GET {container}/archive",
            f"GET {container}/json",
            f"DELETE {container}",
        ]
    )


def test_a_stop_lists_all_backends_runs_without_the_sdk(
    sockets: Path, standin_engine: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One module of compose's took it in again for every `ps`, `stop` and `logs`."""

    class Empty(StandInHandler):
        otherwise, named = b"[]", b"1.41"

    monkeypatch.setenv("DOCKER_HOST", standin_engine(sockets / "e.sock", Empty))
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    code = LAUNCH.replace('"run", "gpt2-tiny.yaml", "--set", "image=site.example/own:1"', '"ps"')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    code, _, *imported = done.stdout.splitlines()[-1].split()
    assert (code, {*imported} & {"docker", "requests"}) == ("0", set()), done


def api_of(host: str, kind: type[Any], seconds: float = 20.0) -> Any:
    return kind(host, **{"version" if kind is Api else "api_version": "1.41"}, timeout=seconds)


class ShortHandler(StandInHandler):
    """An engine that breaks off in its answer."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100")
        self.end_headers()
        self.wfile.write(b'{"Id":')


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b'{"message": "No such image: x"}', ImageNotFound),
        (404, b'{"message": "No such container"}', NotFound),
        (500, b'{"message": "it is broken"}', APIError),
        (400, b"no JSON", APIError),
        (200, b"null", APIError),
        (200, b"no JSON", requests.RequestException),
    ],
)
def test_what_an_engine_refuses_is_the_sdks_error_with_its_words(
    sockets: Path, standin_engine: Start, status: int, body: bytes, kind: type[Exception]
) -> None:
    class Refusing(StandInHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    host = standin_engine(sockets / "e.sock", Refusing)
    told = list[Any]()
    for each in (Api, DirectApi):
        with pytest.raises(kind) as caught:
            api_of(host, each).inspect_image("x")
        told.append((type(caught.value), getattr(caught.value, "status_code", None)))
        if status >= 400:
            told[-1] = (*told[-1], words_of(caught.value))
    assert status == 200 or told[0] == told[1]


def test_an_answer_that_breaks_off_or_never_ends_is_a_lost_engine(
    sockets: Path, standin_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on each read alone would wait for ever for one byte after the other."""
    monkeypatch.setattr(direct, "WORK_SECONDS", 0.1)

    class Trickling(StandInHandler):
        def do_GET(self) -> None:
            with suppress(OSError):
                for _ in range(600):
                    self.wfile.write(b"H")
                    time.sleep(0.1)

        do_POST = do_GET

    short = DockerJob(api_of(standin_engine(sockets / "s.sock", ShortHandler), DirectApi), ID, {})
    with pytest.raises(ConnectionLost, match="breaks off"):
        short.inspected()
    late = api_of(standin_engine(sockets / "t.sock", Trickling), DirectApi, 0.3)
    work = (lambda: late.start(ID), lambda: late.attach_socket(ID, {}))
    for seconds, ask in ((0.3, late.info), *((0.4, each) for each in work)):
        with pytest.raises(requests.ReadTimeout, match=f"no answer within {seconds} s"):
            ask()
    gone = DockerJob(api_of(f"unix://{sockets}/none.sock", DirectApi), ID, {})
    with pytest.raises(EngineError, match="No such file or directory"):
        gone.inspected()


def test_an_attach_that_is_refused_says_why(sockets: Path, standin_engine: Start) -> None:
    class Refusing(StandInHandler):
        def do_POST(self: BaseHTTPRequestHandler) -> None:
            body = b'{"message": "container is marked for removal"}'
            self.send_response(409)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

    api = api_of(standin_engine(sockets / "e.sock", Refusing), DirectApi)
    with pytest.raises(APIError) as caught:
        api.attach_socket(ID, {"stdout": 1})
    assert (caught.value.status_code, words_of(caught.value)) == (
        409,
        "container is marked for removal",
    )


def test_it_asks_what_the_sdk_asks(sockets: Path, standin_engine: Start) -> None:
    """A wrong path or query would be another request: all containers' names, a kept volume."""

    class Listening(RunHandler):
        def ask(self) -> str:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            address = urlsplit(self.path)
            upgrade = [self.headers.get(name) for name in ("Connection", "Upgrade")]
            asked.append(
                (self.command, address.path, parse_qs(address.query), body or b"{}", upgrade)
            )
            return self.path.partition("?")[0].removeprefix("/v1.41").replace(ID, "ID")

    def calls(api: Any) -> list[Any]:
        asked.clear()
        api.info()
        api.inspect_image("site.example:5000/own/a b:1")
        api.containers(all=True, filters={"label": "megatron-launchpad.run"})
        api.create_container_from_config({"Image": "é", "Env": []}, "a-1")
        api.attach_socket(ID, params={"stdout": 1, "stderr": 1, "stream": 1}).close()
        api.start(ID)
        api.inspect_container(ID)
        api.wait(ID)
        api.remove_container(ID, v=True, force=True)
        return [*asked]

    asked = list[Any]()
    kind = type("Engine", (Listening,), {"asked": [], "started": threading.Event()})
    host = standin_engine(sockets / "e.sock", kind)
    sdks, ours = calls(api_of(host, Api)), calls(api_of(host, DirectApi))
    assert len(sdks) == len(ours) == 9
    for sdk, own in zip(sdks, ours, strict=True):
        assert sdk[:2] == own[:2]
        assert own[2].items() <= sdk[2].items()
        assert sdk[2].keys() - own[2].keys() <= {"limit", "size", "trunc_cmd", "link"}
        assert json.loads(sdk[3]) == json.loads(own[3])
    assert sdks[4][4] == ours[4][4] == ["Upgrade", "tcp"]


def test_what_a_run_doesnt_ask_is_the_sdks(sockets: Path, standin_engine: Start) -> None:
    client = direct.DirectClient(standin_engine(sockets / "e.sock"), "1.41", 20.0)
    assert client.version()["Version"] == "20.10.24"
    assert client.api.version()["Version"] == "20.10.24"


def test_what_connects_beside_a_run_is_for_that_run_alone(
    sockets: Path, standin_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a refused run left would be the next run's engine, or its failure."""
    asked = list[str]()
    kind = type("Engine", (RunHandler,), {"asked": asked, "started": threading.Event()})
    first, second = (standin_engine(sockets / f"{name}.sock", kind) for name in "ab")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{sockets}/none.sock")
    with connect.connecting(), pytest.raises(EngineError, match="no such socket"):
        connect.connected()
    monkeypatch.setenv("DOCKER_HOST", first)
    with connect.connecting():
        client = connect.connected()
        client.api.info()
        assert asked.count("GET /info") == 1  # asked beside the run, and kept
        assert connect.engine_host(client) == first
    with connect.connecting():
        pass
    monkeypatch.setenv("DOCKER_HOST", second)
    assert connect.engine_host(connect.connected()) == second
