"""What a registry says of a tag: digests of the bytes that came, tokens, credentials, refusals."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from launcher.engine import registry
from launcher.engine.registry import PLATFORM, Resolved, parse, resolve
from launcher.errors import EngineError

OCI_INDEX, LIST = registry.INDEXES
OCI_MANIFEST, MANIFEST = registry.MANIFESTS


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@dataclass
class Fake:
    """A registry that serves what it is given.

    files: by path below /v2/; types: of those; token: what it wants to be shown, "" for nothing;
    status: of every answer, 0 for the right one; challenge: of a 401; seen: what it was asked
    """

    files: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    token: str = ""
    status: int = 0
    challenge: str = ""
    called: str = ""
    address: str = ""
    seen: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, kind: str, content: bytes, *names: str, of_type: str = "") -> str:
        """Serve a manifest or a blob under its digest and under `names`."""
        for name in (digest_of(content), *names):
            self.files[f"team/base/{kind}/{name}"] = content
            self.types[f"team/base/{kind}/{name}"] = of_type
        return digest_of(content)

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

    @property
    def reference(self) -> str:
        return f"{self.address}/team/base"


class Handler(BaseHTTPRequestHandler):
    """Answers for the Fake that its server has."""

    def do_GET(self) -> None:
        """A token, a manifest or a blob."""
        fake: Fake = self.server.fake  # type: ignore[attr-defined]
        shown = self.headers.get("Authorization", "")
        fake.seen.append((self.command, self.path, shown))
        path = urlsplit(self.path).path
        if path == "/token":
            return self.answer(200, json.dumps({"token": fake.token}).encode())
        if fake.token and shown != f"Bearer {fake.token}":
            return self.answer(401, b"{}", {"WWW-Authenticate": fake.challenge})
        content = fake.files.get(path.removeprefix("/v2/"))
        if fake.status or content is None:
            said = b'{"errors":[{"code":"X","message":"no such thing"}]}'
            return self.answer(fake.status or 404, said)
        called = fake.called or digest_of(content)
        kind = fake.types.get(path.removeprefix("/v2/"), "")
        return self.answer(200, content, {"Docker-Content-Digest": called, "Content-Type": kind})

    def do_POST(self) -> None:
        """A token for another token."""
        fake: Fake = self.server.fake  # type: ignore[attr-defined]
        form = self.rfile.read(int(self.headers["Content-Length"])).decode()
        fake.seen.append((self.command, f"{self.path}?{form}", ""))
        self.answer(200, json.dumps({"access_token": fake.token}).encode())

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        """Send it."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """Serve `fake` on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.fake = fake  # type: ignore[attr-defined]
    fake.address = f"127.0.0.1:{server.server_address[1]}"
    fake.challenge = (
        f'Bearer realm="http://{fake.address}/token",service="registry",scope="repo:x:pull"'
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A registry with nothing in it, and a user with no credentials."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with serving(Fake()) as served:
        yield served


def log_in(folder: Path, registry: str, entry: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps({"auths": {registry: entry}}))


@pytest.mark.parametrize(
    ("reference", "registry", "repository", "target", "host"),
    [
        ("python", "docker.io", "library/python", "latest", "https://registry-1.docker.io"),
        ("pypa/x:1", "docker.io", "pypa/x", "1", "https://registry-1.docker.io"),
        ("docker.io/library/python:3", "docker.io", "library/python", "3", "https://registry-1."),
        ("nvcr.io/nvidia/pytorch:24.10-py3", "nvcr.io", "nvidia/pytorch", "24.10-py3", "https://n"),
        ("mirror:5000/a/b", "mirror:5000", "a/b", "latest", "https://mirror:5000/"),
        ("localhost:5000/a:1", "localhost:5000", "a", "1", "http://localhost:5000/"),
        ("127.1.2.3:5000/a:1", "127.1.2.3:5000", "a", "1", "http://127.1.2.3:5000/"),
        (f"a.b/c:1@sha256:{'0' * 64}", "a.b", "c", f"sha256:{'0' * 64}", "https://a.b/v2/c"),
    ],
)
def test_a_name_s_parts(
    reference: str, registry: str, repository: str, target: str, host: str
) -> None:
    found = parse(reference)
    assert (found.registry, found.repository, found.target) == (registry, repository, target)
    assert found.url.startswith(host)


@pytest.mark.parametrize("of_type", [MANIFEST, OCI_MANIFEST])
def test_an_image_without_an_index(fake: Fake, of_type: str) -> None:
    image = fake.image("1", of_type=of_type)
    assert resolve(f"{fake.reference}:1") == image
    assert resolve(f"{fake.reference}@{image.digest}") == image


@pytest.mark.parametrize("of_type", [OCI_INDEX, LIST])
def test_of_an_index_amd64_is_taken(fake: Fake, of_type: str) -> None:
    image = fake.index("1", of_type=of_type, archs=("arm64", "amd64"))
    assert resolve(f"{fake.reference}:1") == image
    assert len({image.digest, image.manifest, image.config}) == 3


def test_another_platform_is_refused_by_name(fake: Fake) -> None:
    fake.index("1", archs=("arm64", "s390x"))
    with pytest.raises(EngineError, match=f"has no {PLATFORM}, only .*linux/arm64, linux/s390x"):
        resolve(f"{fake.reference}:1")
    fake.image("2", arch="arm64")
    with pytest.raises(EngineError, match="is for linux/arm64"):
        resolve(f"{fake.reference}:2")


def test_an_anonymous_token_is_fetched_where_the_registry_wants_one(fake: Fake) -> None:
    """As Docker Hub and nvcr.io do; ~/.netrc doesn't take its place."""
    image, fake.token = fake.image("1"), "secret"
    Path.home().joinpath(".netrc").write_text("machine 127.0.0.1 login me password mine\n")
    assert resolve(f"{fake.reference}:1") == image
    (asked,) = [seen for seen in fake.seen if seen[1].startswith("/token")]
    assert parse_qs(urlsplit(asked[1]).query) == {
        "service": ["registry"],
        "scope": ["repo:x:pull"],
    }
    assert asked[2] == ""


def test_name_and_password_go_to_the_token_s_service(fake: Fake, tmp_path: Path) -> None:
    image, fake.token = fake.image("1"), "secret"
    login = base64.b64encode(b"$oauthtoken:key").decode()
    log_in(tmp_path, fake.address, {"auth": login})
    assert resolve(f"{fake.reference}:1") == image
    assert [shown for _, path, shown in fake.seen if path.startswith("/token")] == [
        f"Basic {login}"
    ]


def test_an_identity_token_is_traded_for_one(fake: Fake, tmp_path: Path) -> None:
    image, fake.token = fake.image("1"), "secret"
    log_in(tmp_path, fake.address, {"identitytoken": "long"})
    assert resolve(f"{fake.reference}:1") == image
    assert any("refresh_token=long" in path for verb, path, _ in fake.seen if verb == "POST")


def test_a_registry_that_takes_name_and_password(fake: Fake, tmp_path: Path) -> None:
    fake.image("1")
    fake.token, fake.challenge = "never", 'Basic realm="here"'
    with pytest.raises(EngineError, match="refuses access"):
        resolve(f"{fake.reference}:1")
    login = base64.b64encode(b"me:mine").decode()
    log_in(tmp_path, fake.address, {"auth": login})
    with pytest.raises(EngineError, match="refuses access"):
        resolve(f"{fake.reference}:1")
    assert fake.seen[-1][2] == f"Basic {login}"


def test_a_helper_is_asked_for_credentials(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, fake.token = fake.image("1"), "secret"
    helper = tmp_path / "docker-credential-ours"
    helper.write_text('#!/bin/sh\necho \'{"Username": "me", "Secret": "mine"}\'\n')
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text('{"credsStore": "ours"}')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert resolve(f"{fake.reference}:1") == image
    basic = f"Basic {base64.b64encode(b'me:mine').decode()}"
    assert basic in [shown for _, path, shown in fake.seen if path.startswith("/token")]


def test_a_password_never_goes_to_a_service_without_tls(fake: Fake, tmp_path: Path) -> None:
    fake.image("1")
    fake.token, fake.challenge = "secret", 'Bearer realm="http://auth.example/token"'
    with pytest.raises(EngineError, match=r"http://auth\.example/token.*isn't HTTPS"):
        resolve(f"{fake.reference}:1")


@pytest.mark.parametrize(
    ("status", "said"),
    [(403, "refuses access"), (404, "no such image"), (429, "pull limit"), (500, "pull failed")],
)
def test_a_refusal_is_told_in_the_words_of_a_pull(fake: Fake, status: int, said: str) -> None:
    fake.status = status
    with pytest.raises(EngineError, match=said) as caught:
        resolve(f"{fake.reference}:1")
    assert f"the registry says: {status}" in caught.value.problem
    assert "no such thing" in caught.value.problem
    assert caught.value.remedy


def test_nobody_there(fake: Fake) -> None:
    with pytest.raises(EngineError, match="can't be reached") as caught:
        resolve("127.0.0.1:1/team/base:1")
    assert "refused" in caught.value.problem
    assert "0x" not in caught.value.problem


def test_other_bytes_than_the_digest_says_are_refused_with_both(fake: Fake) -> None:
    image = fake.index("1", archs=("amd64",))
    path = f"team/base/manifests/{image.manifest}"
    changed = fake.files[path].replace(b"2", b"3", 1)
    fake.files[path] = changed
    with pytest.raises(EngineError) as caught:
        resolve(f"{fake.reference}:1")
    assert image.manifest in caught.value.problem
    assert digest_of(changed) in caught.value.problem


def test_a_header_that_names_another_digest_is_refused(fake: Fake) -> None:
    fake.image("1")
    fake.called = "sha256:" + "0" * 64
    with pytest.raises(EngineError, match="other bytes than it says"):
        resolve(f"{fake.reference}:1")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>", "sends no JSON"),
        (b"[]", "sends no object"),
        (b'{"mediaType": "text/x"}', "answers with text/x"),
        (b"{}", "answers with something else"),
        (f'{{"mediaType": "{MANIFEST}"}}'.encode(), "names no sha256 digest"),
        (f'{{"mediaType": "{MANIFEST}", "config": {{"digest": "md5:1"}}}}'.encode(), "md5:1"),
        (f'{{"mediaType": "{LIST}", "manifests": []}}'.encode(), f"has no {PLATFORM}"),
        (b" " * (registry.LARGEST + 2), "more than"),
    ],
)
def test_what_no_registry_should_answer(fake: Fake, content: bytes, said: str) -> None:
    fake.add("manifests", content, "1")
    with pytest.raises(EngineError, match=said):
        resolve(f"{fake.reference}:1")
