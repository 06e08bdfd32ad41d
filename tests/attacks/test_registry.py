"""A hundred answers that no registry should give: each is told in words, or does no harm.

The digests are right where they can be, so nothing but the contents can tell.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.images.oci import registry
from launcher.images.oci.registry import resolve
from tests.images.oci import fake_registry
from tests.images.oci.fake_registry import Fake

from .conftest import bounded
from .test_saved import DEEP, changed

fake = fake_registry.fake
INDEX, MANIFEST = registry.INDEXES[0], registry.MANIFESTS[0]
NONE = [b"", b"null", b"[]", b"\xff", DEEP, b'"\\ud800"', b"[" + b"{}," * 500_000 + b"{}]"]


def head(status: str, **headers: str) -> bytes:
    """The beginning of an answer."""
    headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {status}", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def add(fake: Fake, kind: str, value: Any, *names: str) -> str:
    """Serve a document, as JSON or as bytes, by its digest and by names."""
    content = value if isinstance(value, bytes) else json.dumps(value).encode()
    return fake.add(kind, content, *names)


def documents() -> dict[str, Any]:
    """An image as it should be; digests are put in as it is served."""
    platform = {"os": "linux", "architecture": "amd64"}
    return {
        "config": {**platform, "rootfs": {"diff_ids": []}},
        "manifest": {"schemaVersion": 2, "mediaType": MANIFEST, "config": {}},
        "index": {"mediaType": INDEX, "manifests": [{"platform": platform}]},
    }


def serve(fake: Fake, of: str = "", change: Callable[[Any], Any] = lambda value: value) -> None:
    """Serve an image of which one document was changed; the others name it by its digest."""
    found = documents()

    def put(kind: str, name: str, *tags: str) -> str:
        return add(fake, kind, change(found[name]) if of == name else found[name], *tags)

    found["manifest"]["config"]["digest"] = put("blobs", "config")
    found["index"]["manifests"][0]["digest"] = put("manifests", "manifest")
    put("manifests", "index", "1")


def attack(fake: Fake) -> None:
    """Ask for the image."""
    with bounded(), suppress(LauncherError):
        resolve(f"{fake.address}/team/base:1")


def test_what_is_attacked_answers_unless_it_was_changed(fake: Fake) -> None:
    serve(fake)
    assert resolve(f"{fake.address}/team/base:1").digest.startswith("sha256:")


@pytest.mark.parametrize("number", range(14))
@pytest.mark.parametrize("of", ["index", "manifest", "config"])
def test_a_document_with_an_odd_value(fake: Fake, of: str, number: int) -> None:
    """An index's entry of null was a traceback."""
    dice = random.Random(13 + number)  # noqa: S311
    serve(fake, of, lambda value: changed(value, dice))
    attack(fake)


@pytest.mark.parametrize("content", NONE)
@pytest.mark.parametrize("of", ["index", "manifest", "config"])
def test_a_document_that_is_none(fake: Fake, of: str, content: bytes) -> None:
    serve(fake, of, lambda _: content)
    attack(fake)


GIVES = "http://ADDRESS/token"
CHALLENGES = """\
Basic
Bearer
Bearer \xff
Bearer realm=""
Bearer realm="http://["
Bearer realm="http://[::1"
Bearer realm="https://[::1"
Bearer realm="http://localhost:99999999/"
Bearer realm="http://localhost:x/"
Bearer realm="file:///etc/passwd\""""
ANSWERS = [
    b"",
    b"\x16\x03\x01 no HTTP\r\n\r\n",
    b"HTTP/1.1 999 \r\n\r\n",
    b"HTTP/1.1 -1 x\r\n\r\n",
    b"HTTP/1.1 200 \xff\x1b[2J\r\nContent-Length: x\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nA: " + b"b" * 100_000 + b"\r\n\r\n",
    head("200 OK", **{"Content-Length": "1000000000000"}) + b"{}",
    head("200 OK") + b"x" * (5 << 20),
    head("200 OK", **{"Content-Encoding": "gzip"}) + b"no gzip",
    head("200 OK", **{"Content-Encoding": "gzip, " * 20}) + b"no gzip",
    head("200 OK", **{"Transfer-Encoding": "chunked"}) + b"zz\r\n{}",
    head("200 OK", **{"Content-Type": "\xff;=;", "Content-Length": "2"}) + b"{}",
    head("200 OK", **{"Docker-Content-Digest": "\x1b]0;x\x07", "Content-Length": "2"}) + b"{}",
    head("500 \xe9", **{"Content-Length": "30"}) + b'{"message":"\x1b[2J\xff\\n\\n\\n\\n..."}',
    head("404 x", **{"Content-Length": "14"}) + b'{"message":" "',
    *(
        head("302 Found", Location=to, **{"Content-Length": "0"})
        for to in ("http://[", "http://[::1", "\xff", "file:///etc/passwd", "/v2/", "x:y", "//:x/")
    ),
    head("401 x", **{"Content-Length": "0"}),
    *(
        head("401 x", **{"Content-Length": "0", "WWW-Authenticate": challenge})
        for challenge in (*CHALLENGES.splitlines(), f'Bearer realm="{GIVES}",service="\xff"')
    ),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_none(fake: Fake, answer: bytes) -> None:
    fake.raw["/manifests/"] = answer
    attack(fake)


@pytest.mark.parametrize(
    "token",
    [
        *(b"", b"null", b"[]", b"{}", b"\xff", DEEP, b'{"token": null}', b'{"token": ["x"]}'),
        *(b'{"token": "a\\nb"}', b'{"token": "\xe2\x80\xa6"}', b'{"token": "\\ud800"}'),
        b'{"token": 1}',
    ],
)
def test_a_token_that_is_none(fake: Fake, token: bytes) -> None:
    """One with a character that no header can have was a traceback."""
    challenge = {"WWW-Authenticate": f'Bearer realm="{GIVES}"', "Content-Length": "0"}
    fake.raw["/manifests/"] = head("401 x", **challenge)
    fake.raw["/token"] = head("200 OK", **{"Content-Length": str(len(token))}) + token
    attack(fake)
