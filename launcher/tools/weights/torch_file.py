"""Reads and writes torch's files without torch: zip archives of a pickle and raw storages.

The format is that of torch.save since 1.6: `data.pkl`, whose tensors name a storage by its key, and
`data/KEY`, uncompressed, little-endian.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from launcher.agent.checkpoints.pickles import Reader, look
from launcher.base import files
from launcher.base.errors import LauncherError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
SIZES = {
    **{"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2},
    **{"uint8": 1, "bool": 1},
}
"""Bytes of an element."""


LEAST = 1 << 20
INFLATED = 64
"""Times its size on the disk that a deflated entry may have: weights shrink by a third at most."""


@dataclass
class ArchiveEntry:
    """An entry of a zip archive in a file: where its bytes lie, and what they are.

    `packed` is their number on the disk, `crc` that of their content, 0 where torch made none.
    """

    path: Path
    start: int
    packed: int
    length: int
    crc: int
    deflated: bool
    checked: bool = False

    def content(self) -> bytes:
        """All of it, inflated where it is deflated. Raises UsageError where it isn't whole."""
        with files.open_regular(self.path) as file:
            file.seek(self.start)
            data = file.read(self.packed)
        if self.deflated:
            if self.length > INFLATED * self.packed + LEAST:
                raise UsageError(f"{self.path}: an entry of it becomes {self.length} bytes")
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, self.length + 1)
            except zlib.error as error:
                raise UsageError(f"{self.path}: an entry of it is damaged: {error}") from None
        self._compare(len(data), zlib.crc32(data))
        return data

    def check(self) -> None:
        """Compare its CRC, once, a part at a time. Raises UsageError."""
        if self.checked or self.deflated:
            return
        crc, left = 0, self.packed
        with files.open_regular(self.path) as file:
            file.seek(self.start)
            while part := file.read(min(left, 1 << 24)):
                crc, left = zlib.crc32(part, crc), left - len(part)
        self._compare(self.packed - left, crc)

    def _compare(self, length: int, crc: int) -> None:
        if length != self.length or self.crc not in (0, crc):
            raise UsageError(f"{self.path}: an entry of it is damaged: its checksum is another")
        self.checked = True


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's elements as they lie, row by row, in a file: `shape` of them from byte `start`.

    That counts from the beginning of the `entry`, where they lie in one.
    """

    path: Path
    start: int
    dtype: str
    shape: tuple[int, ...]
    entry: ArchiveEntry | None = None

    def read(self) -> NDArray[Any]:
        """Its elements, a number of as many bytes standing for each. Raises UsageError."""
        import numpy as np

        kind, count = np.dtype(f"u{SIZES[self.dtype]}"), prod(self.shape)
        if self.entry and self.start + count * kind.itemsize > self.entry.length:
            raise UsageError(f"{self.path}: a tensor of shape {self.shape} is cut short")
        if self.entry and self.entry.deflated:
            content = bytearray(self.entry.content())
            return np.frombuffer(content, kind, count, self.start).reshape(self.shape)
        start = self.start
        if self.entry:
            self.entry.check()
            start += self.entry.start
        with files.open_regular(self.path) as file:
            values = np.fromfile(file, kind, count, offset=start)
        if values.size != prod(self.shape):
            raise UsageError(f"{self.path}: a tensor of shape {self.shape} is cut short")
        return values.reshape(self.shape)


MOST_AXES = 64
"""Axes of a tensor: no operation of torch takes more."""


class Part(io.RawIOBase):
    """`length` bytes of a file from `offset` on, to be read as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self.file, self.offset, self.length, self.at = file, offset, length, 0

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        """As a file has it."""
        self.at = at + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.length}[whence]
        return self.at

    def tell(self) -> int:
        """Where it is read next."""
        return self.at

    def seekable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes."""
        left = max(0, self.length - self.at)
        self.file.seek(self.offset + self.at)
        data = self.file.read(left if size < 0 else min(size, left))
        self.at += len(data)
        return data


def read(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """What torch saved in a file, or in `length` bytes of it; a tensor as `StoredTensor`.

    Names are `pickles.PickledObject`. Raises UsageError where it isn't such a file, or a tensor in
    it isn't one block of its storage.
    """
    try:
        with files.open_regular(path) as file:
            size = path.stat().st_size - offset if length is None else length
            with zipfile.ZipFile(Part(file, offset, size)) as archive:
                return _Tensors(path, file, offset, archive).load()
    except (LauncherError, OSError):
        raise
    except Exception as error:  # whatever a foreign pickle makes of it
        raise UsageError(f"{path}: no file of torch's, or a damaged one ({error})") from None


KNOWN = set[bytes]()
"""The hashes of pickles that another process has read without harm: none is started for them."""


class _Tensors(Reader):
    """Reads the pickle of an archive."""

    def __init__(self, path: Path, file: IO[bytes], offset: int, archive: zipfile.ZipFile) -> None:
        [name] = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        self.path, self.file, self.offset, self.archive = path, file, offset, archive
        self.folder, self.entries = name.removesuffix("data.pkl"), dict[str, ArchiveEntry]()
        content = self._entry("data.pkl").content()
        digest = sha256(content).digest()  # tensors of one shape have the same pickle
        if digest not in KNOWN:
            look(io.BytesIO(content))
            KNOWN.add(digest)
        super().__init__(io.BytesIO(content))
        order = f"{self.folder}byteorder"
        if order in archive.namelist() and self._entry("byteorder").content() != b"little":
            raise UsageError(f"{path}: was saved on a machine of another byte order")

    def find_class(self, module: str, name: str) -> Any:
        if name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return self._tensor if name == "_rebuild_tensor_v2" else lambda tensor, *_: tensor
        return super().find_class(module, name)

    def _tensor(self, storage: Any, first: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
        dtype, shape = STORAGES[storage[1].__name__], tuple(shape)
        if len(shape) > MOST_AXES:
            raise UsageError(f"{self.path}: a tensor of {len(shape)} axes")
        if tuple(stride) != strides(shape) and prod(shape) > 1:
            raise UsageError(f"{self.path}: a tensor of shape {shape} isn't stored row by row")
        if min((first, *shape), default=0) < 0:
            raise UsageError(f"{self.path}: a tensor of shape {shape}, from element {first} on")
        entry = self._entry(f"data/{storage[2]}")
        return StoredTensor(self.path, first * SIZES[dtype], dtype, shape, entry)

    def _entry(self, name: str) -> ArchiveEntry:
        if name in self.entries:
            return self.entries[name]
        found = self.archive.getinfo(self.folder + name)
        if found.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise UsageError(f"{self.path}: {name} is compressed in a way that torch doesn't read")
        at = self.offset + found.header_offset
        self.file.seek(at + 26)  # of its own header's two lengths
        start = at + 30 + sum(struct.unpack("<HH", self.file.read(4)))
        deflated = found.compress_type == zipfile.ZIP_DEFLATED
        entry = ArchiveEntry(
            self.path, start, found.compress_size, found.file_size, found.CRC, deflated
        )
        return self.entries.setdefault(name, entry)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one to the next along each axis of a tensor that lies row by row."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


# Written


@dataclass(frozen=True)
class PickledName:
    """Something that a pickle names by its module."""

    module: str
    name: str


@dataclass(frozen=True)
class UnpickledObject:
    """An object that unpickling makes: `of` called with `args`, or a new one given `state`."""

    of: PickledName
    args: tuple[Any, ...] | None = None
    state: Any = None


@dataclass(frozen=True)
class TensorToWrite:
    """A tensor to be written: `data` gives its bytes, row by row, when they are wanted."""

    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Any]


def size(shape: tuple[int, ...]) -> UnpickledObject:
    """A torch.Size."""
    return UnpickledObject(PickledName("torch", "Size"), (shape,))


def pickled(value: Any, tensors: list[TensorToWrite] | None = None) -> bytes:
    """A pickle, protocol 2, of plain values, `PickledName`, `UnpickledObject` and `TensorToWrite`.

    The last go to a list.
    """
    return b"\x80\x02" + b"".join(_opcodes(value, [] if tensors is None else tensors)) + b"."


def _opcodes(value: Any, tensors: list[TensorToWrite]) -> Iterator[bytes]:
    if value is None or isinstance(value, bool):
        yield {None: b"N", True: b"\x88", False: b"\x89"}[value]
    elif isinstance(value, int):
        small = -(1 << 31) <= value < 1 << 31
        yield struct.pack("<ci", b"J", value) if small else struct.pack("<cBq", b"\x8a", 8, value)
    elif isinstance(value, float):
        yield struct.pack(">cd", b"G", value)
    elif isinstance(value, str):
        text = value.encode("utf-8", "surrogatepass")
        yield struct.pack("<cI", b"X", len(text)) + text
    elif isinstance(value, (tuple, list)):
        yield b"(" if isinstance(value, tuple) else b"]("
        for each in value:
            yield from _opcodes(each, tensors)
        yield b"t" if isinstance(value, tuple) else b"e"
    elif isinstance(value, Mapping):
        yield b"}("
        for pair in value.items():
            for each in pair:
                yield from _opcodes(each, tensors)
        yield b"u"
    elif isinstance(value, PickledName):
        yield f"c{value.module}\n{value.name}\n".encode()
    elif isinstance(value, UnpickledObject):
        yield from _opcodes(value.of, tensors)
        yield from _opcodes(value.args or (), tensors)
        yield b"\x81" if value.args is None else b"R"  # NEWOBJ, REDUCE
        if value.state is not None:
            yield from _opcodes(value.state, tensors)
            yield b"b"
    elif isinstance(value, TensorToWrite):
        yield from _tensor_opcodes(value, tensors)
    else:
        raise TypeError(f"{type(value).__name__} isn't pickled here")


def _tensor_opcodes(tensor: TensorToWrite, tensors: list[TensorToWrite]) -> Iterator[bytes]:
    kind = next(name for name, dtype in STORAGES.items() if dtype == tensor.dtype)
    key, elements = str(len(tensors)), prod(tensor.shape)
    tensors.append(tensor)
    yield from _opcodes(PickledName("torch._utils", "_rebuild_tensor_v2"), tensors)
    yield b"("
    yield from _opcodes(("storage", PickledName("torch", kind), key, "cpu", elements), tensors)
    yield b"Q"  # BINPERSID
    for each in (0, tensor.shape, strides(tensor.shape), False):
        yield from _opcodes(each, tensors)
    yield from _opcodes(UnpickledObject(PickledName("collections", "OrderedDict"), ()), tensors)
    yield b"tR"


class _OffsetFile(io.RawIOBase):
    """A file that is written from where it is now on, as if it began there."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.begin = file, file.tell()

    def tell(self) -> int:
        """Bytes written, or where it was set to."""
        return self.file.tell() - self.begin

    def seek(self, at: int, whence: int = io.SEEK_SET) -> int:
        """As a file has it."""
        return self.file.seek(at + (0 if whence else self.begin), whence) - self.begin

    def seekable(self) -> bool:
        """It is: sizes are written into headers afterwards."""
        return True

    def write(self, data: Any) -> int:
        """Write."""
        return self.file.write(data)

    def flush(self) -> None:
        """It is the other's buffer."""


def write(file: IO[bytes], value: Any) -> int:
    """Write what torch.load reads as `value` at the end of an open file; how many bytes.

    One tensor's bytes are in memory at a time.
    """
    tensors = list[TensorToWrite]()
    begun, text = file.tell(), pickled(value, tensors)
    with zipfile.ZipFile(_OffsetFile(file), "w", zipfile.ZIP_STORED) as archive:
        for name, content in {"data.pkl": text, "byteorder": b"little"}.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
        for key, tensor in enumerate(tensors):
            with archive.open(
                zipfile.ZipInfo(f"archive/data/{key}"), "w", force_zip64=True
            ) as entry:
                entry.write(tensor.data())
        archive.writestr(zipfile.ZipInfo("archive/version"), b"3\n")
    return file.tell() - begun
