"""A hundred answers that no registry should give: each is told in words, or does no harm.

The digests are right where they can be, so nothing but the contents can tell.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.build import beside
from launcher.errors import LauncherError
from launcher.images import referrers
from launcher.images.remote import Carried
from launcher.oci import registry
from launcher.oci.registry import resolve
from launcher.screen import Progress
from launcher.settings import Settings
from tests.build.made import IMAGE, WHEEL, made
from tests.oci import fake_registry
from tests.oci.fake_registry import Fake

from .conftest import bounded
from .test_saved import DEEP, ODD, changed

fake = fake_registry.fake
INDEX, MANIFEST = registry.INDEXES[0], registry.MANIFESTS[0]
BARELY = b'{"mediaType": "%s", "manifests": [' % INDEX.encode() + b"[" * 970 + b"]" * 970 + b"]}"
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


@pytest.fixture
def pulled(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Carried:
    """An image of ours that the registry has, and no document beside it."""
    record = {"wheel": {"sha256": WHEEL}}
    monkeypatch.setattr(beside, "record", lambda client, image, name: record)
    digest = add(fake, "manifests", {"schemaVersion": 2, "mediaType": MANIFEST}, "1")
    return Carried(f"{fake.address}/team/base:1", digest, IMAGE)


def ask_for_documents(pulled: Carried, site: Settings) -> None:
    """What `image pull` does at its end, and `image push`."""
    history = [{"CreatedBy": "COPY /stage/ / # buildkit"}]
    engine: Any = SimpleNamespace(api=SimpleNamespace(history=lambda image: history))
    with bounded():
        referrers.pull(engine, pulled, site, Progress(io.StringIO()))
        referrers.push(pulled, {beside.SBOM: b"{}"}, Progress(io.StringIO()))


@pytest.mark.parametrize("listed", [*ODD, [{"digest": IMAGE, "artifactType": "x"}] * 20_000])
def test_a_list_of_documents_that_is_odd(
    fake: Fake, pulled: Carried, empty_site: Settings, listed: object
) -> None:
    tag = pulled.digest.replace(":", "-")
    add(fake, "manifests", {"mediaType": INDEX, "manifests": listed}, tag)
    ask_for_documents(pulled, empty_site)
    assert beside.texts(IMAGE, empty_site) == {}


@pytest.mark.parametrize("content", [*NONE, BARELY])
def test_a_list_of_documents_that_is_none(
    fake: Fake, pulled: Carried, empty_site: Settings, content: bytes
) -> None:
    """What is nested just so deep that it is read can't be written again."""
    add(fake, "manifests", content, pulled.digest.replace(":", "-"))
    ask_for_documents(pulled, empty_site)


@pytest.mark.parametrize("number", range(14))
def test_documents_that_are_odd(
    fake: Fake, pulled: Carried, empty_site: Settings, number: int
) -> None:
    """Of the artifact, and of the document in it, which is right but for a value."""
    dice = random.Random(13 + number)  # noqa: S311
    beside.keep(made(), empty_site)
    text = json.loads(beside.texts(IMAGE, empty_site)[beside.SBOM])
    for path in beside.folder(IMAGE, empty_site).iterdir():
        path.unlink()
    odd_text, odd_artifact = number % 2 == 0, number % 2 == 1
    layer = {
        "digest": add(fake, "blobs", changed(text, dice) if odd_text else text),
        "annotations": {referrers.TITLE: beside.SBOM},
    }
    kind = referrers.TYPES[beside.SBOM]
    artifact = {"artifactType": kind, "subject": {"digest": pulled.digest}, "layers": [layer]}
    digest = add(fake, "manifests", changed(artifact, dice) if odd_artifact else artifact)
    listed = {"mediaType": INDEX, "manifests": [{"digest": digest, "artifactType": kind}]}
    add(fake, "manifests", listed, pulled.digest.replace(":", "-"))
    ask_for_documents(pulled, empty_site)
