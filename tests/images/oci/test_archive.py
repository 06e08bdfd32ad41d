"""Images as archives and layouts, with their layers, packed ones too; times settled."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
from docker.errors import APIError, ImageNotFound
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.base import owned
from launcher.base.errors import EngineError, UsageError
from launcher.base.zstd import zstd
from launcher.images.carry.save import INCOMING, write_blob
from launcher.images.oci import archive, oci_layout, packed, settle
from launcher.images.oci.blocks import ChunkStream, read_small
from launcher.images.oci.oci_layout import BaseImage, Blob, LayoutFile, Listing

LABELS = {"b": "2", "a": "1"}


def make_layer(path: Path) -> Path:
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("./etc/os-release")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"ID\n"))
    return path


def test_same_input_same_bytes_and_every_input_counts(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "layer.tar")
    usual = settle.write_image(tmp_path / "1.tar", layer, 1, LABELS, "amd64")
    layer.touch()
    again = settle.write_image(
        tmp_path / "2.tar", layer, 1, dict(reversed(LABELS.items())), "amd64"
    )
    assert again == usual
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    others = ((2, LABELS, "amd64"), (1, {}, "amd64"), (1, LABELS, "arm64"))
    assert usual not in [settle.write_image(tmp_path / "3.tar", layer, *other) for other in others]


def test_the_archive_is_whole(tmp_path: Path) -> None:
    layer = make_layer(tmp_path / "layer.tar")
    identity = settle.write_image(tmp_path / "i.tar", layer, 1_700_000_000, LABELS, "amd64")
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
    with pytest.raises(EngineError, match="doesn't report what it loaded: Loaded image: x:1"):
        archive.load_archive(engine, iter([b""]))

    def load_image(chunks: Any, quiet: bool) -> Any:
        if raised:
            raise APIError("500", explanation="no space left on device")
        yield {"error": "no space left on device"}

    client: Any = SimpleNamespace(api=SimpleNamespace(load_image=load_image))
    with pytest.raises(EngineError, match="no space left on device") as caught:
        archive.load_archive(client, iter([b""]))
    assert "docker system df" in caught.value.remedy


def test_a_closed_pipe_while_an_image_is_sent_ends_it() -> None:
    """urllib3 took it for the engine's, and waited for the answer to half a request for ever."""

    def chunks() -> Iterator[bytes]:
        yield b"a part"
        raise BrokenPipeError(32, "Broken pipe")

    with socket.create_server(("127.0.0.1", 0)) as silent:  # it listens, and never answers
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        client = docker.DockerClient(base_url=url, version="1.41", timeout=5)
        with pytest.raises(BrokenPipeError):
            archive.load_archive(client, chunks())
        client.close()


A, B, C = (hashlib.sha256(text).hexdigest() for text in (b"a", b"b", b"c"))
LISTING = Listing(
    format=1,
    names=("megatron:24.10",),
    image=f"sha256:{A}",
    manifest=f"sha256:{B}",
    base=BaseImage(name="base:1", id=f"sha256:{C}", digests=(), layers=(f"sha256:{C}",)),
    files=(
        LayoutFile(path=f"blobs/sha256/{A}", size=1, sha256=A),
        LayoutFile(path=f"blobs/sha256/{B}", size=1, sha256=B),
        LayoutFile(path="documents/sbom.cdx.json", size=1, sha256=C),
    ),
)
TEXT = oci_layout.render(LISTING)


@given(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
def test_no_byte_of_it_can_be_another(place: int, flipped: int) -> None:
    changed = bytearray(TEXT)
    changed[place] ^= flipped
    assert oci_layout.parse(bytes(changed), Listing) is None


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "blobs/sha256/x", f"parts/{A}", "a\nb"])
def test_a_file_outside_of_the_layout_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        LayoutFile(path=path, size=1, sha256=A)
    wrong = LISTING.model_dump() | {
        "files": [LayoutFile(path=f"blobs/sha256/{A}", size=1, sha256=B)]
    }
    with pytest.raises(ValidationError, match="its name isn't its sha256"):
        Listing.model_validate(wrong)


DIGEST = f"sha256:{'1' * 64}"
SIZE = 20_000_000  # more than a thread takes at once: 8 MiB at level 3


@pytest.fixture(scope="module")
def content() -> bytes:
    """Words in no order: it packs, and no two places in it are alike."""
    dice = random.Random(1)  # noqa: S311 - no secret
    words = [dice.randbytes(5) for _ in range(2000)]
    return b"".join(dice.choices(words, k=SIZE // 5))


def blocks(content: bytes, length: int) -> Iterator[bytes]:
    return (content[at : at + length] for at in range(0, len(content), length))


def packed_by(
    content: bytes, monkeypatch: pytest.MonkeyPatch, cores: int | None, length: int
) -> str:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    sha256 = hashlib.sha256()
    for chunk in packed.pack(blocks(content, length), len(content)):
        sha256.update(chunk)
    return sha256.hexdigest()


def test_it_is_the_same_with_any_number_of_cores(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {packed_by(content, monkeypatch, cores, 1 << 16) for cores in (None, 2, 200)}
    found.add(packed_by(content, monkeypatch, 3, 1_000_003))
    assert len(found) == 1


def without_size(content: bytes) -> bytes:
    """A frame that doesn't tell how much is in it, as of a stream."""
    packer = zstd.ZstdCompressor()
    return packer.compress(content) + packer.flush()


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no program zstd here")
def test_zstd_itself_reads_it(content: bytes) -> None:
    """Its program, which says how many bytes the frame has, too."""
    stored = b"".join(packed.pack(blocks(content, 1 << 16), len(content)))
    assert len(stored) < len(content) / 2
    unpacked = subprocess.run(["zstd", "-dc"], input=stored, capture_output=True, check=True)
    assert unpacked.stdout == content
    size, again = packed.unpack(DIGEST, blocks(stored, 7_919))
    assert (size, b"".join(again)) == (SIZE, content)


def test_memory_is_bounded_where_much_comes_of_little() -> None:
    zeros = bytes(SIZE)
    stored = b"".join(packed.pack(blocks(zeros, 1 << 16), SIZE))
    assert len(stored) < SIZE / 1000
    _, again = packed.unpack(DIGEST, iter([stored]))
    assert max(map(len, again)) <= packed.ROOM


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: b"",
        lambda stored: stored[:3],
        lambda stored: b"no zstd" * 10,
        lambda stored: stored[:-1],
        lambda stored: stored + b"more",
        lambda stored: stored + stored,
        lambda stored: stored[:4] + bytes([stored[4] ^ 255]) + stored[5:],
        lambda stored: without_size(b"1"),
    ],
)
@pytest.mark.parametrize("length", [1, 5, 1 << 16])
def test_what_is_not_one_whole_frame_is_told(damage: Callable[[bytes], bytes], length: int) -> None:
    content = hashlib.shake_128(b"").digest(1000) + bytes(200_000)
    stored = b"".join(packed.pack(blocks(content, 1 << 16), len(content)))
    with pytest.raises(UsageError, match=f"{DIGEST}: a layer that isn't as `image save` packs it"):
        assert content != b"".join(packed.unpack(DIGEST, blocks(damage(stored), length))[1])


contents = st.binary(max_size=400)


def written(folder: Path, content: bytes, packing: str | None) -> tuple[Blob, bytes]:
    """A blob, and what is in its file; a save that was killed has left something aside."""
    owned.make_folder(folder / INCOMING)
    (folder / INCOMING / "blob").write_bytes(b"left")
    blob = write_blob(io.BytesIO(content), len(content), folder, packing)
    assert not [*(folder / INCOMING).glob("[!.]*")]
    stored = read_small(folder, blob.file.path, blob.size)
    assert blob.digest == f"sha256:{hashlib.sha256(stored).hexdigest()}"
    return blob, stored


@given(st.one_of(contents, contents.map(lambda some: some * 1000)))
def test_what_is_written_comes_back_and_what_is_packed_comes_back_unpacked(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        plain, as_it_is = written(Path(one), content, "")
        blob, stored = written(Path(other), content, None)
    assert (plain.unpacked, as_it_is) == (None, content)
    assert blob.unpacked == f"sha256:{hashlib.sha256(content).hexdigest()}"
    size, blocks = packed.unpack(blob.digest, iter([stored]))
    assert (size, b"".join(blocks)) == (len(content), content)


@given(st.lists(st.binary(max_size=5), max_size=20), st.lists(st.integers(1, 7), max_size=100))
def test_a_stream_gives_what_its_chunks_are(chunks: list[bytes], sizes: list[int]) -> None:
    stream = ChunkStream(iter(chunks))
    found = [stream.read(size) for size in sizes]
    assert all(len(block) <= size for block, size in zip(found, sizes, strict=True))
    assert not stream.read(0)
    found += iter(partial(stream.read, 3), b"")
    assert b"".join(found) == b"".join(chunks)
    assert not stream.read(1)


LAYERS = ["sha256:" + "1" * 64, "sha256:" + "2" * 64]
FOUND: dict[str, Any] = {
    "Architecture": "amd64",
    "Author": "",
    "Os": "linux",
    "Created": "2026-11-22T02:43:42.413311286Z",
    "Config": {"Env": ["A=b"], "Labels": {"b": "2", "a": "1"}},
    "RootFS": {"Type": "layers", "Layers": LAYERS},
}


def step(by: str, size: int = 0, created: int = 1795315422) -> dict[str, Any]:
    return {"CreatedBy": by, "Size": size, "Created": created, "Comment": "buildkit.dockerfile.v0"}


HISTORY = [step("ENV A=b"), step("COPY /stage/ / # buildkit", 7), step("base", 9, 1735689600)]


@pytest.mark.parametrize("tags", [["a:1"], []])
def test_the_build_s_time_is_the_source_s_and_the_base_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch, tags: list[str]
) -> None:
    """An engine stands in: the base's history is the last step of the image's.

    Without a name, another build of the same had removed the image: both builds were to succeed.
    """

    def remove_image(image: str) -> None:
        assert not tags
        raise ImageNotFound(image)

    api = SimpleNamespace(
        inspect_image=lambda image: {**FOUND, "Created": "2026-11-22", "RepoTags": tags},
        history=lambda image: HISTORY[2:] if image == "base" else HISTORY,
        remove_image=remove_image,
    )
    loaded: list[bytes] = []
    monkeypatch.setattr(settle, "archive", lambda content, names: loaded.append(content))
    monkeypatch.setattr(settle, "load_archive", lambda client, content: None)
    monkeypatch.setattr(settle, "find_image", lambda client, image: image)
    client: Any = SimpleNamespace(api=api)
    settled = settle.settle(client, "image", "base", 1700000000)
    assert settled == f"sha256:{hashlib.sha256(loaded[0]).hexdigest()}"
    written = json.loads(loaded[0])
    assert written["created"] == "2023-11-14T22:13:20Z"
    assert [one["created"] for one in written["history"]] == [
        "2025-01-01T00:00:00Z",
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20Z",
    ]
    assert [one.get("empty_layer", False) for one in written["history"]] == [False, False, True]
    assert written["config"] == FOUND["Config"]
    assert written["rootfs"] == {"type": "layers", "diff_ids": LAYERS}
    assert (written["architecture"], written["os"]) == ("amd64", "linux")
    assert "author" not in written


steps = st.one_of(
    st.tuples(
        st.sampled_from(["ENV A=b", "LABEL a=b", '/bin/sh -c #(nop)  CMD ["sh"]']), st.just(0)
    ),
    st.tuples(st.sampled_from(["RUN true # buildkit", "COPY a b"]), st.integers(0, 5)),
    st.tuples(st.sampled_from(["WORKDIR /x", "/bin/sh -c #(nop) WORKDIR /x"]), st.integers(0, 1)),
)


@given(st.lists(steps, max_size=12), st.data())
def test_which_steps_made_a_layer_is_told_right_or_not_at_all(
    told: list[tuple[str, int]], data: st.DataObject
) -> None:
    """A WORKDIR whose folder was there makes none, and the engine tells sizes alone."""
    truth = [
        size > 0 or by.startswith(("RUN", "COPY")) or ("WORKDIR" in by and data.draw(st.booleans()))
        for by, size in told
    ]
    found = settle.with_layers([step(by, size) for by, size in told], sum(truth))
    assert found in (truth, None)
    sizes_tell = sum(size > 0 for _, size in told) == sum(truth)
    if sizes_tell or not any("WORKDIR" in by for by, _ in told):
        assert found == truth
