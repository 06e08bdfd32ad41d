"""A bundle: all inputs of some rows in one tar, checked whole before anything of it is used.

Members, in this order: files of the cache by their sha256, a pack of each source's commit, images
as an engine saves them, in parts; then `bundle.json`, which lists them, and the seal, which has the
sha256 of all bytes before it. The same inputs give the same bytes: names are sorted, times are 0.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from launcher import files
from launcher.build import fetch, inputs, source
from launcher.build.image import Request
from launcher.build.inputs import Commit, Fetched
from launcher.errors import BuildError, EngineError, UsageError
from launcher.images.images import id_of
from launcher.images.load import names_by_manifest, stream
from launcher.matrix.load import load_lock, load_matrix
from launcher.matrix.schema import (
    AMD64,
    Digest,
    GitUrl,
    Reference,
    Release,
    Sha256,
    Tag,
)
from launcher.oci import saved
from launcher.oci.layout import sha256
from launcher.progress import Progress
from launcher.settings import Settings

if TYPE_CHECKING:
    from docker import DockerClient

INDEX, SEAL = "bundle.json", "bundle.seal"
BLOCK = 512
"""A tar is made of blocks of so many bytes."""
END = bytes(2 * BLOCK)
TAIL = 4 * BLOCK
"""The seal: its header, its text, and the end of a tar."""
PART = 32 << 20
"""Bytes of an image in one member: what is held in memory."""
READ = 1 << 20
LARGEST_INDEX = 64 << 20

FilePath = Annotated[str, Field(pattern=r"^sha256/[0-9a-f]{64}/\w[\w.+!-]*$")]
PackPath = Annotated[str, Field(pattern=r"^git/[0-9a-f]{40}\.pack$")]
PartPath = Annotated[str, Field(pattern=r"^images/[0-9a-f]{64}/\d{5}$")]
Size = Annotated[int, Field(ge=0)]
Member = tuple[str, int, str]
"""Path, bytes and sha256 of one member."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PackedRow(_Strict):
    """A row whose inputs are in the bundle."""

    tag: Tag
    megatron: Release
    platform: str = AMD64


class PackedCommit(_Strict):
    """A commit of the repository at `url`, as a pack without history."""

    url: GitUrl
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    path: PackPath


class PackedImage(_Strict):
    """An image, by its ID in the engine that it was saved from, and the names it gets back."""

    id: Digest
    names: list[Reference]
    parts: list[PartPath]


class Index(_Strict):
    """What is in a bundle, in the order in which it lies there."""

    format: Literal[1] = 1
    rows: list[PackedRow]
    files: list[FilePath]
    commits: list[PackedCommit]
    images: list[PackedImage]
    members: list[tuple[FilePath | PackPath | PartPath, Size, Sha256]]

    @model_validator(mode="after")
    def _lists_agree(self) -> Index:
        hashes = {path: digest for path, _, digest in self.members}
        packs = [commit.path for commit in self.commits]
        parts = [part for image in self.images for part in image.parts]
        for path in [*self.files, *packs, *parts]:
            if path not in hashes:
                raise ValueError(f"{path} is not among the members")
        for path in self.files:
            if path.split("/")[1] != hashes[path]:
                raise ValueError(f"{path} is not named by its sha256")
        return self


@dataclass(frozen=True)
class Seal:
    """The last member: the sha256 of all before it, that of the index, and where the index is."""

    sha256: str
    index: str
    offset: int

    def __bytes__(self) -> bytes:
        text = f"{self.sha256} {self.index} {self.offset:020d}\n".encode()
        return _header(SEAL, len(text)) + _padded(text) + END


def pack(
    out: IO[bytes],
    rows: Iterable[PackedRow],
    files: Iterable[Path],
    commits: Iterable[Commit],
    images: Mapping[str, Sequence[str]],
    save: Callable[[str], Iterator[bytes]],
    progress: Progress,
) -> str:
    """Write a bundle to `out`; its sha256. `images` are names by ID, `save` gives one's bytes.

    Raises BuildError for a file of the cache whose bytes are others than its name says, EngineError
    for an image that isn't given whole.
    """
    write = _Writer(out)
    for path in sorted(set(files), key=lambda one: (one.parent.name, one.name)):
        progress.output(path.name)
        _pack_file(write, path)
    named = [member[0] for member in write.members]
    commits = sorted(set(commits), key=lambda one: one.commit)
    packed_commits = [_pack_commit(write, one, progress) for one in commits]
    packed_images = [
        _pack_image(write, id, sorted(names), save(id), progress)
        for id, names in sorted(images.items())
    ]
    index = Index(
        rows=sorted(set(rows), key=lambda row: (row.tag, row.megatron)),
        files=named,
        commits=packed_commits,
        images=packed_images,
        members=write.members,
    )
    return write.end(_text(index))


def write(
    path: Path, fetched: Sequence[Fetched], client: DockerClient | None, progress: Progress
) -> str:
    """Write the bundle of some rows to `path`; its sha256."""
    names: dict[str, set[str]] = {}
    for one in fetched:
        for name, id in one.images.items():
            names.setdefault(id, set()).add(name)

    def save(id: str) -> Iterator[bytes]:
        assert client is not None  # or there would be no images
        saved: Iterator[bytes] = client.api.get_image(id, chunk_size=READ)
        return saved

    progress.step(f"pack {path}")
    with replacing(path) as out:
        digest = pack(
            out,
            [
                PackedRow(tag=row.tag, megatron=row.release, platform=row.platform)
                for row in (one.row for one in fetched)
            ],
            [file for one in fetched for file in one.files],
            [commit for one in fetched for commit in one.commits],
            {id: sorted(own) for id, own in names.items()},
            save,
            progress,
        )
    progress.close()
    return digest


def check(path: Path) -> Index:
    """The index of the bundle at `path`, every byte of which is as it was written.

    Raises UsageError, which names what is damaged.
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: is not a bundle of `launcher fetch`: it is no regular file")
    with path.open("rb") as file:
        seal = _read_seal(file, path)
        index = _read_index(file, seal)
        if index is None:
            raise _damaged(path, [f"{INDEX}, the list of what is in it"])
        file.seek(0)
        whole = _hash(file, path.stat().st_size - TAIL)
        if whole != seal.sha256:
            raise _damaged(path, _find_damage(file, index) or [SEAL])
    return index


def take(path: Path, index: Index, site: Settings, progress: Progress) -> None:
    """Put a checked bundle's files and commits into the cache."""
    with path.open("rb") as file, files.scratch(site.cache) as scratch:
        places = _places(index)
        for name in index.files:
            _, digest, own = name.split("/")
            progress.output(own)
            if fetch.cached(digest, site) is None:
                at = scratch / own
                with at.open("wb") as target:
                    target.writelines(_blocks(file, *places[name]))
                fetch.store(at, site)
        for packed in index.commits:
            progress.output(packed.url)
            _take_commit(packed, _blocks(file, *places[packed.path]), scratch, site)


def load(path: Path, index: Index, client: DockerClient, progress: Progress) -> None:
    """Load a checked bundle's images into an engine, and give them their names.

    What an image's own stream names is not named; a name that another image has stays with that.
    Raises EngineError where the engine refuses an image, makes another of it, or has such a name.
    """
    from docker.errors import ImageNotFound

    places = _places(index)
    for image in index.images:
        try:
            own = str(client.api.inspect_image(image.id)["Id"])
        except ImageNotFound:
            progress.step(f"load {', '.join(image.names)}")
            with path.open("rb") as file:
                blocks = (b for part in image.parts for b in _blocks(file, *places[part]))
                own = _load(client, blocks, image, progress)
        for name in image.names:
            if "@" not in name:
                _name(client, own, name)
    progress.close()


def unmet(index: Index, site: Settings) -> list[tuple[str, str]]:
    """Rows of the bundle for which the lock here names something else, and what that is."""
    matrix, lock = load_matrix(site.matrix), load_lock(site.matrix.with_suffix(".lock"))
    files = {path.split("/")[1] for path in index.files}
    commits = {one.commit for one in index.commits}
    found = []
    for row in index.rows:
        try:
            here = inputs.needed(matrix, lock, Request(row.tag, row.megatron), row.platform)
            lacks = ", ".join(inputs.unmet(here, files, commits))
        except UsageError as error:
            lacks = error.problem
        if lacks:
            found.append((row.tag, lacks))
    return found


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when the block ends well, and is gone when it doesn't.

    What a killed launcher left of it goes with the next. Raises UsageError while another
    one writes it, and for a folder.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder", "Name a file: it is made, or replaced.")
    files.require_trusted(path.parent)
    with files.folder_lock(path.parent):
        if files.sweep(path):
            raise UsageError(f"{path}: another launcher is writing it", "Wait for it.")
        new = files.Aside(path)
    with new:
        try:
            yield new.file
            new.publish()
        except OSError as error:
            if error.errno and error.filename is None:
                error.filename = str(path)  # a full disk, and which one
            raise


class _Writer:
    """Writes members of a tar one after another, and hashes all that it writes."""

    def __init__(self, out: IO[bytes]) -> None:
        self.out = out
        self.members: list[Member] = []
        self._digest = hashlib.sha256()
        self._at = 0

    def add(self, path: str, size: int, blocks: Iterable[bytes]) -> str:
        """Write one member of `size` bytes; its sha256."""
        self._write(_header(path, size))
        begun, digest = self._at, hashlib.sha256()
        for block in blocks:
            digest.update(block)
            self._write(block)
        if self._at - begun != size:
            raise BuildError(f"{path}: changed while it was read", "Try again.")
        self._write(bytes(-size % BLOCK))
        self.members.append((path, size, digest.hexdigest()))
        return digest.hexdigest()

    def end(self, index: bytes) -> str:
        """Write the index and the seal; the sha256 of all that was written."""
        offset = self._at
        own = self.add(INDEX, len(index), [index])
        self._write(bytes(Seal(self._digest.hexdigest(), own, offset)))
        return self._digest.hexdigest()

    def _write(self, block: bytes) -> None:
        self._digest.update(block)
        self._at += len(block)
        self.out.write(block)


def _pack_file(write: _Writer, path: Path) -> None:
    """Add a file of the cache, which lies in a folder named by its sha256."""
    with path.open("rb") as file:
        digest = path.parent.name
        size = path.stat().st_size
        actual = write.add(f"sha256/{digest}/{path.name}", size, iter(lambda: file.read(READ), b""))
    if actual != digest:
        raise BuildError(
            f"{path}: its sha256 is not the one it is kept by\n  kept by: {digest}\n"
            f"  file:    {actual}",
            "Remove the file to have it fetched again.",
        )


def _pack_commit(write: _Writer, one: Commit, progress: Progress) -> PackedCommit:
    """Add a commit and its tree as a pack, made anew: what a server sent is another each time."""
    progress.output(one.url)
    listed = source.git(
        one.repository,
        "rev-list",
        "--objects",
        "--no-object-names",
        "--no-walk",
        "--end-of-options",
        one.commit,
    )
    command = ["git", "-C", str(one.repository), "pack-objects", "--stdout", "-q", "--threads=1"]
    command += ["--no-reuse-delta", "--no-reuse-object", "--window=0", "--compression=6"]
    env = source.git_environment()
    done = subprocess.run(command, input=listed.encode(), env=env, capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise BuildError(f"{one.repository}: git can't pack {one.commit}:\n  {said}")
    path = f"git/{one.commit}.pack"
    write.add(path, len(done.stdout), [done.stdout])
    return PackedCommit(url=one.url, commit=one.commit, path=path)


def _pack_image(
    write: _Writer, id: str, names: list[str], saved: Iterator[bytes], progress: Progress
) -> PackedImage:
    parts, last = [], b""
    for number, part in enumerate(_regrouped(saved, PART)):
        last = (last + part)[-len(END) :]
        path = f"images/{id.removeprefix('sha256:')}/{number:05d}"
        write.add(path, len(part), [part])
        parts.append(path)
        progress.output(f"{', '.join(names)} {(number + 1) * PART / 1e6:.0f} MB")
    if last != END:  # what went wrong is told at the end of the stream, or it just ends
        raise EngineError(
            f"{', '.join(names)}: the engine ended its stream early",
            "Run it again. The engine's own disk may be full.",
        )
    return PackedImage(id=id, names=names, parts=parts)


def _regrouped(blocks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """The same bytes in pieces of `size`, the last one shorter."""
    held = bytearray()
    for block in blocks:
        held += block
        while len(held) >= size:
            yield bytes(held[:size])
            del held[:size]
    if held:
        yield bytes(held)


def _take_commit(
    packed: PackedCommit, blocks: Iterator[bytes], scratch: Path, site: Settings
) -> None:
    """Have git fetch the commit from a repository made of its pack, as from any other."""
    there = Path(tempfile.mkdtemp(dir=scratch))
    source.git(there, "init", "--bare", "--quiet")
    at = there / "objects/pack/bundle.pack"
    with at.open("wb") as file:
        file.writelines(blocks)
    source.git(there, "index-pack", str(at))
    (there / "shallow").write_text(f"{packed.commit}\n", encoding="ascii")
    source.git(there, "update-ref", "refs/heads/bundle", packed.commit)
    source.repository(packed.url, packed.commit, site, at=f"file://{there}")


def _load(
    client: DockerClient, blocks: Iterator[bytes], image: PackedImage, progress: Progress
) -> str:
    """Have the engine load an image; the ID that it has there."""
    from docker.errors import APIError

    names = ", ".join(image.names)
    with saved.told(names, "Have the bundle written again."):
        read = saved.Saved(blocks, [""])
        loaded = stream(client, read.unnamed(image.id), image.id, progress)
        ids = _ids(image.id, read.kept)
    own = str(client.api.inspect_image(loaded)["Id"])
    if own not in ids and not names_by_manifest(client):
        with suppress(APIError):
            client.api.remove_image(loaded)
        raise EngineError(f"{names}: the bundle lists {image.id}, and what it holds is {own}")
    return own


def _ids(listed: str, kept: bytes) -> set[str]:
    """The IDs of an image: its own; where that is a manifest's, its configuration's as well."""
    if sha256(kept) != listed:
        return {listed}
    config = json.loads(kept)["config"]
    return {listed, str(config.get("digest"))}


def _name(client: DockerClient, id: str, name: str) -> None:
    """Give an image a name that no other one has."""
    if (there := id_of(client, name)) not in (None, id):
        raise EngineError(
            f"{name}: the engine has {there} under that name, and the bundle has {id}",
            f"If that one may lose its name: docker rmi {shlex.quote(name)}",
        )
    client.api.tag(id, *_split_tag(name))


def _split_tag(name: str) -> tuple[str, str]:
    """Repository and tag of an image's name, whose registry may have a port."""
    repository, colon, tag = name.rpartition(":")
    return (repository, tag) if colon and "/" not in tag else (name, "latest")


def _header(path: str, size: int) -> bytes:
    """A member's header; the same for everybody and every day."""
    member = tarfile.TarInfo(path)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT)


def _padded(text: bytes) -> bytes:
    return text + bytes(-len(text) % BLOCK)


def _text(index: Index) -> bytes:
    value: Any = index.model_dump(mode="json")
    return (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


def _places(index: Index) -> dict[str, tuple[int, int]]:
    """Where each member's bytes begin in the bundle, and how many there are."""
    places, at = {}, 0
    for path, size, _ in index.members:
        at += len(_header(path, size))
        places[path] = at, size
        at += size + -size % BLOCK
    return places


def _blocks(file: IO[bytes], at: int, size: int) -> Iterator[bytes]:
    """`size` bytes of a file from `at` on.

    Raises UsageError where they can't be read: on their way to an engine, an OSError would be
    taken for the engine's.
    """
    while size:
        file.seek(at)
        try:
            block = file.read(min(size, READ))
        except OSError as error:
            raise UsageError(
                f"{file.name}: can't be read at byte {at}: {error.strerror}",
                "Copy it again from where it was made.",
            ) from error
        if not block:
            raise UsageError(f"{file.name}: changed while it was read")
        yield block
        at, size = at + len(block), size - len(block)


def _hash(file: IO[bytes], size: int) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, file.tell(), size):
        digest.update(block)
    return digest.hexdigest()


def _read_seal(file: IO[bytes], path: Path) -> Seal:
    size = file.seek(0, io.SEEK_END)
    if size < TAIL:
        raise UsageError(f"{path}: is not a bundle of `launcher fetch`, or only its beginning")
    file.seek(size - TAIL)
    tail = file.read(TAIL)
    match = re.fullmatch(
        rb"([0-9a-f]{64}) ([0-9a-f]{64}) (\d{20})\n\0+", tail[BLOCK : 2 * BLOCK], re.DOTALL
    )
    if match is None:
        raise UsageError(
            f"{path}: is not a bundle of `launcher fetch`, or its end is damaged or missing",
            f"Compare its size with that where it was made: here it is {size} bytes.",
        )
    seal = Seal(match[1].decode(), match[2].decode(), int(match[3]))
    if bytes(seal) != tail:
        raise _damaged(path, [SEAL])
    return seal


def _read_index(file: IO[bytes], seal: Seal) -> Index | None:
    """The index that the seal names, or None where it isn't what it was."""
    file.seek(0, io.SEEK_END)
    size = file.tell() - TAIL - seal.offset
    if not BLOCK <= size <= LARGEST_INDEX:
        return None
    file.seek(seal.offset)
    text = file.read(size)[BLOCK:].rstrip(b"\0")
    if hashlib.sha256(text).hexdigest() != seal.index:
        return None
    if _header(INDEX, len(text)) + _padded(text) != _again(file, seal.offset, size):
        return None
    try:
        return Index.model_validate_json(text)
    except ValidationError as error:
        raise UsageError(
            f"{file.name}: a bundle of another launcher, which this one can't read",
            f"Use the launcher that it was made with. {error.errors()[0]['msg']}",
        ) from error


def _again(file: IO[bytes], at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _find_damage(file: IO[bytes], index: Index) -> list[str]:
    """The members of which a byte is not what it was."""
    places = _places(index)
    return [
        path
        for path, size, digest in index.members
        if not _is_whole(file, path, places[path][0], size, digest)
    ]


def _is_whole(file: IO[bytes], path: str, at: int, size: int, digest: str) -> bool:
    header, padding = _header(path, size), -size % BLOCK
    file.seek(at - len(header))
    if file.read(len(header)) != header or _hash(file, size) != digest:
        return False
    return file.read(padding) == bytes(padding)


def _damaged(path: Path, what: list[str]) -> UsageError:
    listed = "\n".join(f"  {one}" for one in what)
    return UsageError(
        f"{path}: damaged, and nothing was taken from it:\n{listed}",
        "Copy it again from where it was made, and compare the two with sha256sum.",
    )
