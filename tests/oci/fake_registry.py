"""A registry in this process, which answers as it is told to, wrongly as well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from launcher.oci import registry
from launcher.oci.layout import sha256
from launcher.oci.registry import Resolved
from tests.build.conftest import serving as on_loopback

OCI_INDEX, LIST = registry.INDEXES
OCI_MANIFEST, MANIFEST = registry.MANIFESTS


@dataclass
class Fake:
    """A registry that serves what it is given.

    files: by path below /v2/; types: of those; token: what it wants to be shown, "" for nothing;
    status: of every answer, 0 for the right one; challenge: of a 401; seen: what it was asked
    lists: by its subject what refers to a manifest; uploads: where it takes blobs
    takes: anything at all; push_token: what it wants to be shown for that
    raw: whole answers, by a part of the path that is asked for, with ADDRESS for its own
    """

    files: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    token: str = ""
    status: int = 0
    challenge: str = ""
    called: str = ""
    address: str = ""
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    lists: bool = False
    uploads: str = "/uploads/1?state=x"
    takes: bool = True
    push_token: str = ""
    raw: dict[str, bytes] = field(default_factory=dict)

    def add(self, kind: str, content: bytes, *names: str, of_type: str = "") -> str:
        """Serve a manifest or a blob under its digest and under `names`."""
        for name in (sha256(content), *names):
            self.files[f"team/base/{kind}/{name}"] = content
            self.types[f"team/base/{kind}/{name}"] = of_type
        return sha256(content)

    def image(self, *tags: str, of_type: str = MANIFEST, arch: str = "amd64") -> Resolved:
        """Serve an image for one platform."""
        settings = json.dumps({"os": "linux", "architecture": arch, "n": len(self.files)})
        config = self.add("blobs", settings.encode())
        manifest = {"schemaVersion": 2, "config": {"digest": config}}
        if of_type == MANIFEST:
            manifest["mediaType"] = of_type
        digest = self.add("manifests", json.dumps(manifest).encode(), *tags, of_type=of_type)
        return Resolved(digest, digest, config)

    def index(self, *tags: str, of_type: str = OCI_INDEX, archs: tuple[str, ...]) -> Resolved:
        """Serve an index of images; what it names for amd64."""
        images = {arch: self.image(arch=arch) for arch in archs}
        entries = [
            {"digest": one.manifest, "platform": {"os": "linux", "architecture": arch}}
            for arch, one in images.items()
        ]
        attested = {"digest": "sha256:" + "0" * 64, "platform": {"os": "unknown"}}
        index = {"mediaType": of_type, "manifests": [attested, *entries]}
        digest = self.add("manifests", json.dumps(index).encode(), *tags, of_type=of_type)
        one = images.get("amd64", Resolved("", "", ""))
        return Resolved(digest, one.manifest, one.config)

    def referrers(self, digest: str) -> bytes:
        """The index of the manifests with this subject, as the registry itself lists them."""
        listed = []
        for name, content in self.files.items():
            if self.types[name] == OCI_MANIFEST and name.endswith(sha256(content)):
                manifest = json.loads(content)
                if manifest.get("subject", {}).get("digest") == digest:
                    said = {key: manifest[key] for key in ("artifactType", "annotations")}
                    listed.append({"digest": sha256(content), "size": len(content), **said})
        return json.dumps({"mediaType": OCI_INDEX, "manifests": listed}).encode()

    @property
    def reference(self) -> str:
        return f"{self.address}/team/base"


class Handler(BaseHTTPRequestHandler):
    """Answers for a Fake."""

    fake: Fake

    def do_GET(self) -> None:
        """A token, a manifest, a blob, or what refers to a manifest."""
        for part, answer in self.fake.raw.items():
            if part in self.path:
                with suppress(OSError):
                    self.wfile.write(answer.replace(b"ADDRESS", self.fake.address.encode()))
                return None
        if urlsplit(self.path).path == "/token":
            self.note()
            for_push = "push" in parse_qs(urlsplit(self.path).query)["scope"][0]
            token = self.fake.push_token if for_push else self.fake.token
            return self.answer(200, json.dumps({"token": token}).encode())
        if not self.is_let_in():
            return None
        name = urlsplit(self.path).path.removeprefix("/v2/")
        content = self.fake.files.get(name)
        if self.fake.lists and "/referrers/" in name and not self.fake.status:
            listed = self.fake.referrers(name.rpartition("/")[2])
            return self.answer(200, listed, {"Content-Type": OCI_INDEX})
        if self.fake.status or content is None:
            said = b'{"errors":[{"code":"X","message":"no such thing"}]}'
            return self.answer(self.fake.status or 404, said)
        called = self.fake.called or sha256(content)
        kind = self.fake.types.get(name, "")
        return self.answer(200, content, {"Docker-Content-Digest": called, "Content-Type": kind})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A token for another token, or the place for an upload."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if urlsplit(self.path).path == "/token":
            self.note(f"?{content.decode()}")
            return self.answer(200, json.dumps({"access_token": self.fake.token}).encode())
        if self.is_let_in():
            self.answer(202, b"", {"Location": self.fake.uploads})
        return None

    def do_PUT(self) -> None:
        """Take a blob or a manifest."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.is_let_in():
            return None
        if not self.fake.takes:
            return self.answer(403, b"{}")
        asked = urlsplit(self.path)
        if asked.path == urlsplit(self.fake.uploads).path:
            self.fake.add("blobs", content)
            assert parse_qs(asked.query)["digest"] == [sha256(content)]
            return self.answer(201, b"")
        self.fake.add(
            "manifests",
            content,
            asked.path.rpartition("/")[2],
            of_type=self.headers["Content-Type"],
        )
        subject = json.loads(content).get("subject")
        listed = self.fake.lists and subject is not None
        return self.answer(201, b"", {"OCI-Subject": subject["digest"]} if listed else {})

    def note(self, more: str = "") -> None:
        """What was asked."""
        shown = self.headers.get("Authorization", "")
        self.fake.seen.append((self.command, self.path + more, shown))

    def is_let_in(self) -> bool:
        """Whether the token is shown; else that it is wanted has been answered."""
        self.note()
        shown, challenge = self.headers.get("Authorization", ""), self.fake.challenge
        wanted = {self.fake.token, self.fake.push_token}
        if self.command in ("POST", "PUT") and self.fake.push_token:
            wanted, challenge = {self.fake.push_token}, challenge.replace("pull", "pull,push")
        if not self.fake.token or shown.removeprefix("Bearer ") in wanted - {""}:
            return True
        self.answer(401, b"{}", {"WWW-Authenticate": challenge})
        return False

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        """Send it."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Serve `fake` on loopback."""
    with on_loopback(type("Own", (Handler,), {"fake": fake})) as fake.address:
        token = f'realm="http://{fake.address}/token"'
        fake.challenge = f'Bearer {token},service="registry",scope="repo:x:pull"'
        yield fake


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A registry with nothing in it, and a user with no credentials."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with serving(Fake()) as served:
        yield served
