"""A small stand-in for a Megatron checkout, wheels with nothing in them, and servers of them."""

from __future__ import annotations

import base64
import subprocess
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from launcher.base.errors import EngineError
from launcher.images.oci import registry
from launcher.images.oci.registry import ImageDigests
from launcher.images.sources import megatron_source

INFO = "MAJOR = 0\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that passes for Megatron 0.9.0 by its package_info.py."""
    path = tmp_path / "Megatron-LM"
    (path / "megatron/core").mkdir(parents=True)
    (path / "megatron/core/package_info.py").write_text(INFO.format(minor=9, patch=0))
    (path / "setup.py").write_text("print('setup')\n")
    return path


def commit_all(path: Path) -> str:
    """Commit all in `path`, a git repository of which any commit may be fetched; the commit."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    fetched = ["config", "uploadpack.allowAnySHA1InWant", "true"]
    for command in (["init", "-q"], fetched, ["add", "-A"], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(path), *command], check=True)
    return megatron_source.git(path, "rev-parse", "HEAD").strip()


def wheel(folder: Path, name: str, version: str, *needs: str, text: str = "") -> Path:
    """A wheel of one module, which is empty or has the text, with what it needs."""
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {one}" for one in needs]
    files = {
        f"{name}.py": text,
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    made = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": record}).items():
            archive.writestr(path, text)
    return made


@contextmanager
def serving(handler: Callable[..., Any]) -> Iterator[str]:
    """A server on loopback; its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


@dataclass
class Place:
    """A server on loopback of a folder's files, and of pages by their path, with their type.

    login: a name and a password that it asks for; came_in: what was asked for with it
    seen: the command lines of all processes while it was asked
    """

    folder: Path
    login: str = ""
    host: str = ""
    pages: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    came_in: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"http://{self.host}"

    @property
    def login_address(self) -> str:
        return f"http://{quote(self.login, safe=':')}@{self.host}"

    @property
    def token(self) -> str:
        return base64.b64encode(self.login.encode()).decode()


class PlaceHandler(SimpleHTTPRequestHandler):
    """Answers for a Place, and looks who asks."""

    def __init__(self, *args: object, place: Place) -> None:
        self.place = place
        super().__init__(*args, directory=str(place.folder))  # type: ignore[arg-type]

    def do_GET(self) -> None:
        place = self.place
        place.asked.append(self.path)
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                place.seen.append(file.read_bytes().replace(b"\0", b" ").decode())
        if place.login and self.headers.get("Authorization") != f"Basic {place.token}":
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="a"')
            self.end_headers()
            return
        place.came_in.append(self.path)
        if self.path not in place.pages:
            super().do_GET()
            return
        kind, content = place.pages[self.path]
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A server of tmp_path/www, which lets everybody in."""
    found = Place(tmp_path / "www")
    found.folder.mkdir()
    with serving(partial(PlaceHandler, place=found)) as found.host:
        yield found


@pytest.fixture
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No registry can be reached."""

    def resolve(reference: str, platform: str, **_: bool) -> ImageDigests:
        raise EngineError(f"{reference}: the registry can't be reached")

    monkeypatch.setattr(registry, "resolve", resolve)
