"""Writes a root file system as an archive for `docker load`, the same bytes for the same input."""

# `docker import` would stamp the current time into the image, so its ID would always be another.

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def write(
    archive: Path,
    layer: Path,
    epoch: int,
    labels: Mapping[str, str],
    architecture: str,
) -> str:
    """Write `archive`, an image without a name of the one layer `layer` (a tar); its image ID."""
    digest = _sha256(layer)
    config = _json(_config(digest, epoch, labels, architecture))
    name = hashlib.sha256(config).hexdigest()
    manifest = [{"Config": f"{name}.json", "RepoTags": None, "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, "manifest.json", _json(manifest), epoch)
        _add(tar, f"{name}.json", config, epoch)
        with layer.open("rb") as file:
            member = _member(f"{digest}/layer.tar", layer.stat().st_size, epoch)
            tar.addfile(member, file)
    return f"sha256:{name}"


def image_id(archive: Path) -> str:
    """The ID that the image in `archive` gets in an engine."""
    with tarfile.open(archive) as tar:
        manifest = tar.extractfile("manifest.json")
        assert manifest is not None
        config: str = json.load(manifest)[0]["Config"]
    return f"sha256:{config.removesuffix('.json')}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _config(
    digest: str, epoch: int, labels: Mapping[str, str], architecture: str
) -> dict[str, object]:
    created = datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "architecture": architecture,
        "os": "linux",
        "created": created,
        "config": {
            "Env": [f"PATH={SEARCH_PATH}"],
            "Cmd": ["/bin/bash"],
            "Labels": dict(sorted(labels.items())),
        },
        "history": [{"created": created, "created_by": "megatron-launchpad: Debian stand-in base"}],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _member(name: str, size: int, epoch: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size, epoch, 0o644
    return member


def _add(tar: tarfile.TarFile, name: str, content: bytes, epoch: int) -> None:
    tar.addfile(_member(name, len(content), epoch), io.BytesIO(content))
