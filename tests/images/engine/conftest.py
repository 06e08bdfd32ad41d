"""A stand-in for an engine: a socket at which only /_ping and /version are answered."""

from __future__ import annotations

import json
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

VERSION = {"Version": "20.10.24", "ApiVersion": "1.41", "MinAPIVersion": "1.12"}


class StandInHandler(BaseHTTPRequestHandler):
    """Answers as an engine does when asked who it is."""

    version, otherwise, named = json.dumps(VERSION).encode(), b"OK", b""

    def do_GET(self) -> None:
        body = self.version if self.path.endswith("/version") else self.otherwise
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/json")
        if self.named:
            self.send_header("Api-Version", self.named.decode())
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "client"  # a unix socket's peer has no address to print

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="lp-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def standin_engine() -> Iterator[Callable[..., str]]:
    """Starts a stand-in at a path and gives its DOCKER_HOST; it may have answers of its own."""
    servers = []

    def start(path: Path, of: type[StandInHandler] = StandInHandler, **answers: bytes) -> str:
        handler = type("Handler", (of,), answers)
        path.parent.mkdir(parents=True, exist_ok=True)
        server = socketserver.ThreadingUnixStreamServer(str(path), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        servers.append(server)
        return f"unix://{path}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
