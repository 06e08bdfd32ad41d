"""The archive for `docker load` is the same for the same input, and what an engine expects."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError
from hypothesis import given
from hypothesis import strategies as st

from launcher.engine.private.base import write_image
from launcher.errors import EngineError
from launcher.oci import archive

LABELS = {"b": "2", "a": "1"}


def make_layer(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("./etc/os-release")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"ID\n"))
    return path


def test_same_input_same_bytes_and_every_input_counts(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "layer.tar")
    usual = write_image(tmp_path / "1.tar", layer, 1, LABELS, "amd64")
    layer.touch()
    again = write_image(tmp_path / "2.tar", layer, 1, dict(reversed(LABELS.items())), "amd64")
    assert again == usual
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    others = ((2, LABELS, "amd64"), (1, {}, "amd64"), (1, LABELS, "arm64"))
    assert usual not in [write_image(tmp_path / "3.tar", layer, *other) for other in others]


def test_the_archive_is_whole(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "layer.tar")
    identity = write_image(tmp_path / "i.tar", layer, 1_700_000_000, LABELS, "amd64")
    with tarfile.open(tmp_path / "i.tar") as tar:
        members = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        contents = {name: file.read() for name, file in members.items() if file}
    (image,) = json.loads(contents["manifest.json"])
    config = json.loads(contents[image["Config"]])
    assert identity == f"sha256:{hashlib.sha256(contents[image['Config']]).hexdigest()}"
    assert image["RepoTags"] is None
    assert contents[image["Layers"][0]] == layer.read_bytes()
    digest = hashlib.sha256(layer.read_bytes()).hexdigest()
    assert config["rootfs"] == {"type": "layers", "diff_ids": [f"sha256:{digest}"]}
    assert config["created"] == "2023-11-14T22:13:20Z"
    assert config["config"]["Labels"] == LABELS


@given(st.lists(st.binary(max_size=1100), max_size=4))
def test_any_tar_can_read_it(contents: list[bytes]) -> None:
    entries = [
        block
        for number, content in enumerate(contents)
        for block in archive.entry(f"{number}", len(content), [content])
    ]
    written = b"".join(archive.archive(b"{}", ["a"], entries))
    with tarfile.open(fileobj=io.BytesIO(written)) as tar:
        held = [tar.extractfile(one).read() for one in tar]  # type: ignore[union-attr]
    assert held[:-2] == contents
    assert len(written) % tarfile.BLOCKSIZE == 0


def test_a_layer_of_more_than_8_gib_can_be_in_it() -> None:
    header = next(archive.entry("layer.tar", 9 << 30, ()))
    with tarfile.open(fileobj=io.BytesIO(header)) as tar:
        assert tar.next().size == 9 << 30  # type: ignore[union-attr]


@pytest.mark.parametrize("raised", [False, True])
def test_what_an_engine_tells_of_a_load(raised: bool) -> None:
    a, b = (f"sha256:{letter * 64}" for letter in "ab")
    told: Any = SimpleNamespace()
    engine: Any = SimpleNamespace(api=told)
    for line, id in ((f"Loaded image ID: {a}\n", a), (f"Loaded image: {b}\n", b)):
        told.load_image = lambda *_, **__: [{"stream": line}]  # noqa: B023
        assert archive.load_archive(engine, iter([b""])) == id
    told.load_image = lambda *_, **__: [{"stream": "Loaded image: x:1"}]
    with pytest.raises(EngineError, match="doesn't tell what it loaded: Loaded image: x:1"):
        archive.load_archive(engine, iter([b""]))

    def load_image(chunks: Any, quiet: bool) -> Any:
        if raised:
            raise APIError("500", explanation="no space left on device")
        yield {"error": "no space left on device"}

    client: Any = SimpleNamespace(api=SimpleNamespace(load_image=load_image))
    with pytest.raises(EngineError, match="no space left on device") as caught:
        archive.load_archive(client, iter([b""]))
    assert "docker system df" in caught.value.remedy
