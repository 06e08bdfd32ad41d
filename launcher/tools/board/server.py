"""Serves the page of all runs, and the files of their records, on this machine's loopback alone.

Every user of a machine reaches its loopback, and records are their owner's alone. So each path
begins with a secret, which is in the address that the launcher prints. The Host header is checked,
so that a foreign web page can't reach the server under a name of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import IO, Any
from urllib.parse import unquote

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.base.files import ForeignFileError
from launcher.base.settings import settings
from launcher.runs.records import record
from launcher.tools.board import board
from launcher.tools.board.cards import Cards

LOOPBACK = "127.0.0.1"
HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names under which a browser of this machine, or one at a tunnel's other end, asks for us."""

REFRESH = 5
"""Seconds after which the page asks again; in between, nothing is read anew."""

PIECE = 1 << 18
"""Bytes of a file that are sent at once."""

IDLE = 30
"""Seconds that a silent connection is kept open."""

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
TEXT = "text/plain; charset=utf-8"
SANDBOX = {"Content-Security-Policy": "default-src 'none'; sandbox"}
"""A file of a record is never a page."""

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class BoardServer(ThreadingHTTPServer):
    """The server, its secret, and what was read last. Raises OSError where the port is taken."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((LOOPBACK, port), Handler)
        self.secret = secrets.token_urlsafe(16)
        self._cards, self._lock = Cards(), Lock()
        self._data, self._mark, self._until = b"", "", 0.0

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/{self.secret}/"

    def data(self) -> tuple[bytes, str]:
        """The runs as JSON, and a mark that stays the same as long as nothing changes."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._data = board.data(self._cards, "runs/", REFRESH)
                whole = re.sub(rb'"written":"[^"]*"', b"", self._data, count=1)
                self._mark = f'"{hashlib.sha256(whole).hexdigest()[:32]}"'
                self._until = time.monotonic() + REFRESH / 2
            return self._data, self._mark

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback when a browser closes its connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD for the page, its data, and the files of records; nothing else."""

    server: BoardServer
    timeout = IDLE
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "launcher", ""

    def do_GET(self) -> None:
        """Answer with a body."""
        self._answer()

    do_HEAD = do_GET

    def __getattr__(self, name: str) -> Callable[[], None]:
        if name.startswith("do_"):  # any other method
            return lambda: self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, Allow="GET, HEAD")
        raise AttributeError(name)

    def _answer(self) -> None:
        host = re.sub(r":\d+$", "", self.headers.get("Host", ""))
        if host not in HOSTS:
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
        secret, *parts = map(unquote, self.path.partition("?")[0].removeprefix("/").split("/"))
        if not hmac.compare_digest(secret.encode(errors="replace"), self.server.secret.encode()):
            return self._refuse(HTTPStatus.NOT_FOUND)
        match parts:
            case [""]:
                return self._page()
            case ["data"]:
                return self._data()
            case ["runs", run, *names] if names:
                return self._file(run, names)
        return self._refuse(HTTPStatus.NOT_FOUND)

    def _page(self) -> None:
        text = board.as_html(self.server.data()[0], live=True).encode()
        self._send(text, {"Content-Type": "text/html; charset=utf-8"})

    def _data(self) -> None:
        found, mark = self.server.data()
        if self.headers.get("If-None-Match") == mark:
            return self._send(b"", {"ETag": mark}, HTTPStatus.NOT_MODIFIED)
        return self._send(found, {"ETag": mark, "Content-Type": "application/json"})

    def _file(self, run: str, names: list[str]) -> None:
        """A file of a record, as far as it was written by now."""
        folder = settings().runs
        if not all(map(NAME.fullmatch, (run, *names))) or not record.load(
            run, folder / run / record.FILE
        ):
            return self._refuse(HTTPStatus.NOT_FOUND)
        try:
            with files.open_foreign(folder.joinpath(run, *names), folder) as file:
                self._send_file(file)
        except (OSError, ForeignFileError):
            self._refuse(HTTPStatus.NOT_FOUND)

    def _send_file(self, file: IO[bytes]) -> None:
        size = os.fstat(file.fileno()).st_size
        self._head(HTTPStatus.OK, size, {"Content-Type": TEXT, **SANDBOX})
        while self.command == "GET" and size and (piece := file.read(min(size, PIECE))):
            size -= len(piece)
            self.wfile.write(piece)

    def _send(
        self, body: bytes, headers: dict[str, str], status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self._head(status, len(body), headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, **headers: str) -> None:
        self.close_connection = True  # what else it sent isn't read
        self._send(
            f"{status.phrase}\n".encode(), {"Content-Type": TEXT, **SANDBOX, **headers}, status
        )

    def _head(self, status: HTTPStatus, size: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (HEADERS | headers | {"Content-Length": str(size)}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests: the terminal is the user's."""


def serve(port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; `ready` is called with the address. Raises UsageError."""
    try:
        server = BoardServer(port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"port {port} of {LOOPBACK} can't be listened at: {error}",
            "--port 0 takes one that is free.",
        ) from error
    with server:
        ready(server.address)
        server.serve_forever()
