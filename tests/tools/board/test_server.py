"""The served page: who may ask for it, by which names and methods, and which files it hands out."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import UsageError
from launcher.tools.board import server
from tests.runs.record_samples import several, steps
from tests.tables import table


@pytest.fixture
def runs(folder: Path) -> Path:
    """Some records."""
    several(folder)
    return folder


@pytest.fixture
def served(runs: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[server.BoardServer]:
    """A server of them, which reads anew for each who asks."""
    monkeypatch.setattr(server, "REFRESH", 0)
    with server.BoardServer(0) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


Answer = tuple[int, dict[str, str], bytes]


def ask(served: server.BoardServer, path: str, method: str = "GET", **headers: str) -> Answer:
    """What is answered for a path below the secret, or another one that begins with /."""
    connection = http.client.HTTPConnection("127.0.0.1", served.server_port, timeout=30)
    whole = path if path.startswith("/") else f"/{served.secret}/{path}"
    connection.request(method, whole, headers={k.replace("_", "-"): v for k, v in headers.items()})
    answer = connection.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    connection.close()
    return found


def talk(served: server.BoardServer, sent: bytes) -> bytes:
    """All that comes back for some bytes, until the server ends the connection."""
    found = b""
    with (
        suppress(OSError),  # the server may have heard enough
        socket.create_connection(("127.0.0.1", served.server_port), timeout=30) as other,
    ):
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        while piece := other.recv(1 << 16):
            found += piece
    return found


def test_the_page_and_what_is_new(served: server.BoardServer, runs: Path) -> None:
    status, headers, page = ask(served, "")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"connect-src 'self'" in page
    assert headers["x-frame-options"] == "DENY"
    status, headers, found = ask(served, "data")
    assert status == 200
    assert len(json.loads(found)["runs"]) == 6
    assert ask(served, "data", If_None_Match=headers["etag"])[0] == 304
    with (runs / "bbbb0001/metrics.jsonl").open("a") as file:
        file.write(json.dumps(steps([1501])[0]) + "\n")
    status, newer, found = ask(served, "data", If_None_Match=headers["etag"])
    assert (status, b"1501" in found) == (200, True)
    assert newer["etag"] != headers["etag"]
    assert ask(served, "", "HEAD")[2] == b""


def test_it_listens_on_the_loopback_alone(served: server.BoardServer) -> None:
    assert served.socket.getsockname()[0] == "127.0.0.1"
    assert served.address.startswith("http://127.0.0.1:")
    with pytest.raises(UsageError, match="can't be listened at"):
        server.serve(served.server_port, lambda address: None)


OTHERS = ["evil.example", "127.0.0.1.evil.example", "localhost.", "", "127.0.0.2", "a@localhost"]


@pytest.mark.parametrize("host", [*OTHERS, "localhost:9999", "127.0.0.1", "[::1]:80"])
def test_a_name_of_somebody_elses_is_refused(served: server.BoardServer, host: str) -> None:
    """A page elsewhere could have its own name lead here, and read what is served.

    A tunnel may end at another port.
    """
    assert ask(served, "data", Host=host)[0] == (421 if host in OTHERS else 200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO"])
def test_other_methods_are_refused(served: server.BoardServer, method: str) -> None:
    status, headers, _ = ask(served, "data", method)
    assert (status, headers["allow"]) == (405, "GET, HEAD")


def test_who_has_no_secret_sees_nothing(served: server.BoardServer) -> None:
    """Every user of a machine reaches its loopback; records are their owner's alone."""
    for path in (
        "/",
        "/data",
        "/x/data",
        f"/{served.secret[:-1]}/",
        "/runs/aaaa0001/log",
        "/%C3%A9/",
    ):
        assert ask(served, path)[0] == 404
    assert served.secret.encode() not in ask(served, "/")[2]


def test_a_file_of_a_record_is_text_whatever_is_in_it(
    served: server.BoardServer, runs: Path
) -> None:
    (runs / "aaaa0001/log").write_text("<script>alert(1)</script>")
    status, headers, found = ask(served, "runs/aaaa0001/log")
    assert (status, found) == (200, b"<script>alert(1)</script>")
    assert headers["content-type"].startswith("text/plain")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["content-security-policy"] == "default-src 'none'; sandbox"
    (runs / "aaaa0001/stalled-1").mkdir()
    (runs / "aaaa0001/stalled-1/rank-0.txt").write_text("waits")
    assert ask(served, "runs/aaaa0001/stalled-1/rank-0.txt")[2] == b"waits"


@table("path")
def test_what_lies_elsewhere_is_not_handed_out(
    served: server.BoardServer, runs: Path, path: str
) -> None:
    (runs.parent / "secret").write_text("secret")
    for folder in ("nobody", ".payloads"):
        (runs / folder).mkdir()
    (runs / "nobody/secret").write_text("secret")
    (runs / ".payloads/x").write_text("secret")
    (runs / "aaaa0001/.hidden").write_text("secret")
    (runs / "aaaa0001/link").symlink_to("../../secret")
    (runs / "aaaa0001/folder").symlink_to("../bbbb0001")
    os.mkfifo(runs / "aaaa0001/pipe")
    assert ask(served, path)[::2] == (404, b"Not Found\n")


def test_what_is_no_request_ends_no_server(
    served: server.BoardServer, capfd: pytest.CaptureFixture[str]
) -> None:
    host = b"\r\nHost: localhost\r\n\r\n"
    for sent in (
        b"\r\n",
        b"GET",
        b"GET http://[/ HTTP/1.1" + host,
        b"GET * HTTP/1.1" + host,
        b"\xff" * 99999,
    ):
        assert b" 200 " not in talk(served, sent)
    assert ask(served, "")[0] == 200
    assert capfd.readouterr().err == ""


def test_a_log_that_grows_is_sent_as_far_as_was_announced(
    served: server.BoardServer, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than that would be taken for the next answer of the connection."""
    log, real = runs / "bbbb0001/log", os.fstat

    def growing(handle: int) -> Any:
        found = real(handle)
        with log.open("ab") as file:
            file.write(b"more\n")
        return found

    monkeypatch.setattr(server.os, "fstat", growing)
    asked = f"GET /{served.secret}/runs/bbbb0001/log HTTP/1.0\r\nHost: localhost\r\n\r\n"
    head, _, body = talk(served, asked.encode()).partition(b"\r\n\r\n")
    assert body.startswith(b"a log\n")
    assert f"Content-Length: {len(body)}\r\n".encode() in head
