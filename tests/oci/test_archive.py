"""The archive for `docker load` is the same for the same input, and what an engine expects."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import time
from pathlib import Path

from launcher.oci import archive

LABELS = {"b": "2", "a": "1"}


def make_layer(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("./etc/os-release")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"ID\n"))
    return path


def test_same_input_same_bytes_and_same_image(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "layer.tar")
    first = archive.write(tmp_path / "1.tar", layer, 1_700_000_000, LABELS, "amd64")
    layer.touch()
    time.sleep(0.01)
    second = archive.write(
        tmp_path / "2.tar", layer, 1_700_000_000, dict(reversed(LABELS.items())), "amd64"
    )
    assert first == second
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()


def test_every_input_counts(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "layer.tar")
    out = tmp_path / "image.tar"
    usual = archive.write(out, layer, 1, LABELS, "amd64")
    assert archive.write(out, layer, 2, LABELS, "amd64") != usual
    assert archive.write(out, layer, 1, {}, "amd64") != usual
    assert archive.write(out, layer, 1, LABELS, "arm64") != usual


def test_the_archive_is_whole(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "layer.tar")
    identity = archive.write(tmp_path / "i.tar", layer, 1_700_000_000, LABELS, "amd64")
    with tarfile.open(tmp_path / "i.tar") as tar:
        members = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        contents = {name: file.read() for name, file in members.items() if file}
    (image,) = json.loads(contents["manifest.json"])
    config = json.loads(contents[image["Config"]])
    assert identity == f"sha256:{hashlib.sha256(contents[image['Config']]).hexdigest()}"
    assert identity == archive.image_id(tmp_path / "i.tar")
    assert image["RepoTags"] is None
    assert contents[image["Layers"][0]] == layer.read_bytes()
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    assert config["rootfs"] == {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    assert config["created"] == "2023-11-14T22:13:20Z"
    assert config["config"]["Labels"] == LABELS
