"""A real image registry on loopback, for the tests and for the engine that they use."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import requests

from launcher.agent.ranks.command_line import free_port
from launcher.images.engine.private import packages
from launcher.images.oci.oci_layout import sha256
from launcher.images.oci.registry import INDEXES, MANIFESTS
from tests.e2e.site import until

SETTINGS = """\
version: 0.1
log: {{accesslog: {{disabled: true}}, level: warn}}
storage: {{filesystem: {{rootdirectory: {data}}}, delete: {{enabled: true}}}}
http: {{addr: "{address}", secret: the same for all who serve this folder}}
"""


@dataclass(frozen=True)
class Registry:
    """A registry that this process and the engine reach under the same name.

    address: 127.0.0.1 and a port, where engines speak plain HTTP
    data: the folder of its blobs and tags
    """

    address: str
    data: Path

    def blob(self, digest: str) -> Path:
        """The file of a blob or manifest, so that a test can damage it."""
        _, _, name = digest.partition(":")
        return self.data / "docker/registry/v2/blobs/sha256" / name[:2] / name / "data"

    def image(self, name: str, tag: str, platforms: Sequence[str], **config: Any) -> str:
        """Push an image without layers, an index of it for several platforms; its digest."""
        entries = []
        for platform in platforms:
            system, _, architecture = platform.partition("/")
            said = {"os": system, "architecture": architecture, **config}
            manifest = {"config": self._blob(name, said), "layers": []}
            entry = self._manifest(name, manifest, MANIFESTS[0])
            entries.append(entry | {"platform": {"os": system, "architecture": architecture}})
        if len(entries) == 1:
            only = Path(self.blob(entries[0]["digest"])).read_bytes()
            return str(self._manifest(name, json.loads(only), MANIFESTS[0], tag)["digest"])
        return str(self._manifest(name, {"manifests": entries}, INDEXES[0], tag)["digest"])

    def index(self, name: str, tag: str, images: Mapping[str, str]) -> None:
        """Put a tag on an index of images that were pushed: digests by platform."""
        entries = []
        for platform, digest in images.items():
            system, _, architecture = platform.partition("/")
            content = self.blob(digest).read_bytes()
            entry = {"mediaType": json.loads(content)["mediaType"], "size": len(content)}
            entry |= {"platform": {"os": system, "architecture": architecture}}
            entries.append(entry | {"digest": digest})
        self._manifest(name, {"manifests": entries}, INDEXES[0], tag)

    def _blob(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        content = json.dumps(value).encode()
        begun = requests.post(f"http://{self.address}/v2/{name}/blobs/uploads/", timeout=30)
        query = {"digest": sha256(content)}
        headers = {"Content-Type": "application/octet-stream"}
        requests.put(
            begun.headers["Location"], content, params=query, headers=headers, timeout=30
        ).raise_for_status()
        media = "application/vnd.oci.image.config.v1+json"
        return {"mediaType": media, "size": len(content), "digest": sha256(content)}

    def _manifest(
        self, name: str, value: dict[str, Any], media: str, tag: str = ""
    ) -> dict[str, Any]:
        content = json.dumps({"schemaVersion": 2, **value, "mediaType": media}).encode()
        at = f"http://{self.address}/v2/{name}/manifests/{tag or sha256(content)}"
        headers = {"Content-Type": media}
        requests.put(at, content, headers=headers, timeout=30).raise_for_status()
        return {"mediaType": media, "size": len(content), "digest": sha256(content)}


@contextmanager
def serving(cache: Path, folder: Path, engine_host: str = "") -> Iterator[Registry]:
    """Serve `folder` while the block runs, by the distribution's registry, unpacked in `cache`.

    An engine in a network of its own has another loopback than we: there a second process, on the
    same port and the same folder, answers for it.
    """
    program = packages.unpack(cache / "registry", ["docker-registry"]) / "usr/bin/docker-registry"
    registry = Registry(f"127.0.0.1:{free_port()}", folder / "data")
    settings = folder / "registry.yml"
    settings.write_text(SETTINGS.format(data=registry.data, address=registry.address))
    serve = [str(program), "serve", str(settings)]
    network = _other_network(engine_host) if engine_host else None
    with ExitStack() as stack:
        stack.enter_context(_running(serve, folder / "here.log"))
        if network:
            there = ["nsenter", f"--net={network}", *serve]
            stack.enter_context(_running(there, folder / "there.log"))
            enter = ["nsenter", f"--net={network}"]
            until(lambda: _listens_within(enter, registry.address), folder / "there.log")
        until(lambda: _answers(registry.address), folder / "here.log")
        yield registry


def listener(engine_host: str) -> int:
    """The process that listens on the socket of an engine on this machine."""
    scheme, _, path = engine_host.partition("://")
    if scheme != "unix":
        pytest.skip(f"the engine at {engine_host} may not be on this machine")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(path)
        peer = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", peer)[0]
    return pid


def _other_network(engine_host: str) -> Path | None:
    """The network namespace of an engine on a local socket, where it isn't this process's."""
    pid = listener(engine_host)
    network = Path(f"/proc/{pid}/ns/net")
    own = Path("/proc/self/ns/net")
    return None if pid == 1 or network.readlink() == own.readlink() else network


@contextmanager
def _running(argv: list[str], log: Path) -> Iterator[None]:
    with log.open("wb") as file:
        process = subprocess.Popen(argv, stdout=file, stderr=file)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    with suppress(URLError, OSError), urlopen(f"http://{address}/v2/", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def _listens_within(enter: list[str], address: str) -> bool:
    """Whether somebody takes connections at `address` in another network."""
    host, _, port = address.partition(":")
    connect = ["bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"]
    return not subprocess.run([*enter, *connect], capture_output=True, check=False).returncode
