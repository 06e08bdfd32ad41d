"""A registry in this process, which answers as it is told to, wrongly as well; a container."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from docker.errors import NotFound

from launcher.images.oci import registry
from launcher.images.oci.oci_layout import sha256
from launcher.images.oci.registry import ImageDigests
from tests.images.builder.conftest import serving as on_loopback

OCI_INDEX, LIST = registry.INDEXES
OCI_MANIFEST, MANIFEST = registry.MANIFESTS


@dataclass
class Fake:
    """A registry that serves what it is given.

    files: by path below /v2/; types: of those; token: what it wants to be shown, "" for nothing;
    status: of every answer, 0 for the right one; challenge: of a 401; seen: what it was asked
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
    raw: dict[str, bytes] = field(default_factory=dict)

    def add(self, kind: str, content: bytes, *names: str, of_type: str = "") -> str:
        """Serve a manifest or a blob under its digest and under `names`."""
        for name in (sha256(content), *names):
            self.files[f"team/base/{kind}/{name}"] = content
            self.types[f"team/base/{kind}/{name}"] = of_type
        return sha256(content)

    def image(self, *tags: str, of_type: str = MANIFEST, arch: str = "amd64") -> ImageDigests:
        """Serve an image for one platform."""
        settings = json.dumps({"os": "linux", "architecture": arch, "n": len(self.files)})
        config = self.add("blobs", settings.encode())
        manifest = {"schemaVersion": 2, "config": {"digest": config}}
        if of_type == MANIFEST:
            manifest["mediaType"] = of_type
        digest = self.add("manifests", json.dumps(manifest).encode(), *tags, of_type=of_type)
        return ImageDigests(digest, digest, config)

    def index(self, *tags: str, of_type: str = OCI_INDEX, archs: tuple[str, ...]) -> ImageDigests:
        """Serve an index of images; what it names for amd64."""
        images = {arch: self.image(arch=arch) for arch in archs}
        entries = [
            {"digest": one.manifest, "platform": {"os": "linux", "architecture": arch}}
            for arch, one in images.items()
        ]
        attested = {"digest": "sha256:" + "0" * 64, "platform": {"os": "unknown"}}
        index = {"mediaType": of_type, "manifests": [attested, *entries]}
        digest = self.add("manifests", json.dumps(index).encode(), *tags, of_type=of_type)
        one = images.get("amd64", ImageDigests("", "", ""))
        return ImageDigests(digest, one.manifest, one.config)

    @property
    def reference(self) -> str:
        return f"{self.address}/team/base"


class Handler(BaseHTTPRequestHandler):
    """Answers for a Fake."""

    fake: Fake

    def do_GET(self) -> None:
        """A token, a manifest, or a blob."""
        for part, answer in self.fake.raw.items():
            if part in self.path:
                with suppress(OSError):
                    self.wfile.write(answer.replace(b"ADDRESS", self.fake.address.encode()))
                return None
        if urlsplit(self.path).path == "/token":
            self.note()
            return self.answer(200, json.dumps({"token": self.fake.token}).encode())
        if not self.is_let_in():
            return None
        name = urlsplit(self.path).path.removeprefix("/v2/")
        content = self.fake.files.get(name)
        if self.fake.status or content is None:
            said = b'{"errors":[{"code":"X","message":"no such thing"}]}'
            return self.answer(self.fake.status or 404, said)
        called = self.fake.called or sha256(content)
        kind = self.fake.types.get(name, "")
        return self.answer(200, content, {"Docker-Content-Digest": called, "Content-Type": kind})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """A token for another token."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.note(f"?{content.decode()}")
        self.answer(200, json.dumps({"access_token": self.fake.token}).encode())

    def note(self, more: str = "") -> None:
        """What was asked."""
        shown = self.headers.get("Authorization", "")
        self.fake.seen.append((self.command, self.path + more, shown))

    def is_let_in(self) -> bool:
        """Whether the token is shown; else that it is wanted has been answered."""
        self.note()
        shown = self.headers.get("Authorization", "")
        if not self.fake.token or shown.removeprefix("Bearer ") == self.fake.token:
            return True
        self.answer(401, b"{}", {"WWW-Authenticate": self.fake.challenge})
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


def holding(**members: tuple[bytes, bytes]) -> Any:
    """A container with these: content and type of each entry."""

    def get_archive(path: str) -> Any:
        if path not in members:
            raise NotFound(path)
        file, (content, kind) = io.BytesIO(), members[path]
        with tarfile.open(fileobj=file, mode="w") as tar:
            entry = tarfile.TarInfo(path)
            entry.size, entry.type = len(content), kind
            tar.addfile(entry, io.BytesIO(content))
        return (file.getvalue()[at : at + 700] for at in range(0, len(file.getvalue()), 700)), None

    return SimpleNamespace(get_archive=get_archive)
