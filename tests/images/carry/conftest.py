"""An engine in memory that gives and takes images as real ones do, in their formats."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import ImageNotFound

from launcher.base.screen import Progress
from launcher.images.oci.saved import chain_ids

EMPTY_CONFIG = {"Hostname": "", "Env": None, "Cmd": None}  # not in the order of the alphabet


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def on_hub(name: str) -> str:
    """A name in full, as engines understand it: python:3.11 is docker.io/library/python:3.11."""
    host, slash, _ = name.partition("/")
    if slash and "." in host:
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"


def layer(name: str, size: int) -> bytes:
    """A layer with one file in it, whose bytes are the same every time and can't be packed."""
    content = hashlib.shake_128(name.encode()).digest(size)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        add(tar, name, content)
    return file.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


@dataclass
class Held:
    """An image in the engine."""

    config: bytes
    names: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        return sha256(self.config)

    @property
    def diff_ids(self) -> list[str]:
        found: list[str] = json.loads(self.config)["rootfs"]["diff_ids"]
        return found


class Engine:
    """What `launcher.images.carry` uses of docker.DockerClient.

    form: how images are saved: legacy (docker 20), oci (25 on), packed (its containerd store) or
    podman; lazy: takes an image without the layers that it has; ends: bytes after which a save ends
    histories: what was done to an image, by its ID, the last first
    """

    def __init__(self, form: str = "legacy", lazy: bool = True) -> None:
        self.form, self.lazy = form, lazy
        self.ends: int | None = None
        self.images: dict[str, Held] = {}
        self.layers: dict[str, bytes] = {}
        self.loads = 0
        self.histories: dict[str, list[str]] = {}
        self.api = SimpleNamespace(
            inspect_image=self.inspect,
            history=lambda image: [{"CreatedBy": one} for one in self.histories.get(image, ())],
            images=lambda all=False: [
                {"Id": one.id, "RepoTags": one.names} for one in self.images.values()
            ],
            get_image=self.save,
            load_image=self.load,
            tag=self.tag,
            remove_image=self.remove,
        )

    def add(self, name: str, layers: Iterable[bytes], **labels: str) -> Held:
        """A new image."""
        contents = [(sha256(content), content) for content in layers]
        self.layers |= dict(contents)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Labels": labels},
            "rootfs": {"type": "layers", "diff_ids": [one for one, _ in contents]},
        }
        held = Held(json.dumps(config).encode(), [name])
        self.images[held.id] = held
        return held

    def has(self, layers: list[str]) -> bool:
        """Whether some image begins with these layers: a layer counts with all below it."""
        return any(one.diff_ids[: len(layers)] == layers for one in self.images.values())

    def info(self) -> dict[str, Any]:
        return {"DriverStatus": []}

    def find(self, name: str) -> Held:
        for one in self.images.values():
            if name == one.id or on_hub(name) in map(on_hub, one.names):
                return one
        raise ImageNotFound(name)

    def inspect(self, name: str) -> dict[str, Any]:
        found = self.find(name)
        return {
            "Id": found.id,
            "RepoTags": list(found.names),
            "RepoDigests": [],
            "RootFS": {"Layers": found.diff_ids},
            "Config": json.loads(found.config).get("config"),
        }

    def tag(self, image: str, repository: str, tag: str) -> None:
        name = f"{repository}:{tag}"
        for one in self.images.values():
            one.names = [other for other in one.names if other != name]
        self.images[image].names.append(name)

    def remove(self, name: str) -> None:
        """Take a name away; with the last one the image goes."""
        held = self.find(name)
        held.names = [one for one in held.names if name not in (one, held.id)]
        if not held.names:
            del self.images[held.id]

    def save(self, name: str, chunk_size: int) -> Iterator[bytes]:
        held = self.find(name)
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            {
                "legacy": self._legacy,
                "oci": self._oci,
                "packed": self._oci,
                "podman": self._podman,
            }[self.form](tar, held)
        content = stream.getvalue()[: self.ends]
        for start in range(0, len(content), chunk_size):
            yield content[start : start + chunk_size]

    def _legacy(self, tar: tarfile.TarFile, held: Held) -> None:
        """docker 20: folders in the order of their names, a layer that is there twice linked."""
        parent, names = "", []
        members: dict[str, bytes] = {}
        links: dict[str, str] = {}
        first: dict[str, str] = {}
        for number, chain in enumerate(chain_ids(held.diff_ids)):
            top = number == len(held.diff_ids) - 1
            value = {"created": "1970-01-01T00:00:00Z", "container_config": EMPTY_CONFIG}
            if top:
                value |= json.loads(held.config)["config"]
            inputs = value | {"layer_id": chain}
            if parent:
                inputs["parent"] = f"sha256:{parent}"
            text = json.dumps(dict(sorted(inputs.items())), separators=(",", ":"))
            own = hashlib.sha256(text.encode()).hexdigest()
            legacy = {"id": own, **({"parent": parent} if parent else {}), **value, "os": "linux"}
            members[f"{own}/VERSION"] = b"1.0"
            members[f"{own}/json"] = json.dumps(legacy).encode()
            diff_id = held.diff_ids[number]
            if diff_id in first:
                links[f"{own}/layer.tar"] = f"../{first[diff_id]}/layer.tar"
            else:
                members[f"{own}/layer.tar"] = self.layers[diff_id]
                first[diff_id] = own
            names.append(f"{own}/layer.tar")
            parent = own
        for name in sorted({**members, **links}):
            if name in links:
                entry = tarfile.TarInfo(name)
                entry.type, entry.linkname = tarfile.SYMTYPE, links[name]
                tar.addfile(entry)
            else:
                add(tar, name, members[name])
        config = f"{held.id[7:]}.json"
        add(tar, config, held.config)
        self._manifest(tar, config, names)
        add(tar, "repositories", b"{}")

    def _oci(self, tar: tarfile.TarFile, held: Held) -> None:
        blobs = [self.layers[one] for one in held.diff_ids]
        if self.form == "packed":
            blobs = [gzip.compress(content, mtime=0) for content in blobs]
        paths = [f"blobs/sha256/{sha256(content)[7:]}" for content in blobs]
        config = f"blobs/sha256/{held.id[7:]}"
        members = dict(zip(paths, blobs, strict=True)) | {config: held.config}
        for path in sorted(members):
            add(tar, path, members[path])
        add(tar, "index.json", b"{}")
        self._manifest(tar, config, paths)
        add(tar, "oci-layout", b"{}")

    def _podman(self, tar: tarfile.TarFile, held: Held) -> None:
        names = [f"{one[7:]}.tar" for one in held.diff_ids]
        for name, one in zip(names, held.diff_ids, strict=True):
            add(tar, name, self.layers[one])
        config = f"{held.id[7:]}.json"
        add(tar, config, held.config)
        self._manifest(tar, config, names)

    def _manifest(self, tar: tarfile.TarFile, config: str, layers: list[str]) -> None:
        value = [{"Config": config, "RepoTags": None, "Layers": layers}]
        add(tar, "manifest.json", json.dumps(value).encode())

    def load(self, archive: Iterator[bytes], quiet: bool) -> Iterator[dict[str, str]]:
        assert quiet
        self.loads += 1
        with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
            names = tar.getnames()
            assert len(names) == len({*names})
            members = {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]
        if "manifest.json" not in members:
            yield {"error": "no manifest.json"}
            return
        (manifest,) = json.loads(members["manifest.json"])
        held = Held(members[manifest["Config"]])
        layers = zip(manifest["Layers"], held.diff_ids, strict=True)
        for number, (name, diff_id) in enumerate(layers):
            below = held.diff_ids[: number + 1]
            if name not in members and not (self.lazy and self.has(below)):
                yield {"error": f"open {name}: no such file or directory"}
                return
            if name in members:
                content = members[name]
                content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
                if sha256(content) != diff_id:
                    yield {"error": f"{name}: another layer than {diff_id}"}
                    return
                self.layers[diff_id] = content
        self.images.setdefault(held.id, held)
        yield {"stream": f"Loaded image ID: {held.id}\n"}


EMPTY = layer("empty", 0)
FORMS = ("legacy", "oci", "packed", "podman")
BASE_LAYERS = (layer("base", 40_000), EMPTY, layer("libraries", 3_000))
OWN_LAYERS = (layer("packages", 21_000), EMPTY, layer("megatron", 9_000))  # one of the base again


def filled(form: str = "legacy") -> Engine:
    """An engine with a base of three layers and an image with three more."""
    engine = Engine(form)
    engine.add("base:1", BASE_LAYERS)
    held = engine.add("megatron:24.10", (*BASE_LAYERS, *OWN_LAYERS))
    held.names.append("megatron:24.10-0.9.0")
    return engine


@pytest.fixture
def progress() -> Progress:
    """Progress into the void."""
    return Progress(io.StringIO())
