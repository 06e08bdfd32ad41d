"""Reads and writes Hugging Face's safetensors shards and their index.

A file is a header's length in 8 bytes, the header, JSON that gives each tensor's type, shape and
place, and the tensors' bytes (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import IO, Any

from numpy.typing import NDArray

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.tools.data import kinds
from launcher.tools.weights.torch_file import SIZES, StoredTensor
from launcher.tools.weights.writer import raw

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "U8": "uint8",
    "BOOL": "bool",
}
NAMES = {dtype: name for name, dtype in TYPES.items()}
LARGEST_HEADER = 100 << 20
"""Of the format's own readers."""


def entries(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of all shards in a folder, by name.

    Raises UsageError where there is none, or a file is cut short or isn't what it should be.
    """
    names = [ONE]
    if (folder / INDEX).is_file():
        places = read_json(folder / INDEX).get("weight_map")
        names = sorted({*map(str, places.values())}) if isinstance(places, dict) else []
    found = dict[str, StoredTensor]()
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UsageError(
                f"{folder}: {name} isn't there",
                "Only weights as safetensors are read: model.safetensors, or shards and an index.",
            )
        found |= _header(folder / name)
    return found


def _header(path: Path) -> dict[str, StoredTensor]:
    whole = path.stat().st_size
    kinds.refuse_stand_in(path)
    with files.open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(whole, LARGEST_HEADER):
            raise UsageError(f"{path}: no safetensors, or cut short")
        header = _json(file.read(length), path)
    found = dict[str, StoredTensor]()
    for name, about in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = TYPES[about["dtype"]], tuple(map(int, about["shape"]))
            start, end = map(int, about["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise UsageError(f"{path}: {name} is of a type that isn't read here") from None
        size = prod(shape) * SIZES[dtype]
        if min((start, *shape)) < 0 or end - start != size or 8 + length + end > whole:
            raise UsageError(f"{path}: {name} isn't whole")
        found[name] = StoredTensor(path, 8 + length + start, dtype, shape)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A file of one JSON object. Raises UsageError."""
    kinds.refuse_stand_in(path)
    return _json(files.read_regular(path, LARGEST_HEADER), path)


def _json(text: bytes, name: Path) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{name} isn't JSON of one object")
    return found


class Shards:
    """Writes shards of up to `most` bytes into a folder that is ours, one tensor at a time.

    Where the header is, room is left until its contents are known; the format allows spaces.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder, self.most = folder, most
        self.file: IO[bytes] | None = None
        self.room = self.at = self.total = 0
        self.headers = list[dict[str, Any]]()

    def add(self, tensors: Mapping[str, NDArray[Any]], dtype: str, names: int) -> None:
        """Write tensors; `names` bounds how many bytes the header of a shard has."""
        for name, values in tensors.items():
            if self.file is None or (self.at and self.at + values.nbytes > self.most):
                self._next(names)
            assert self.file
            self.file.write(raw(values))
            begin, self.at = self.at, self.at + values.nbytes
            place = {"dtype": NAMES[dtype], "shape": [*values.shape]}
            self.headers[-1][name] = {**place, "data_offsets": [begin, self.at]}

    def _next(self, room: int) -> None:
        self._end()
        self.headers.append({"__metadata__": {"format": "pt"}})
        self.file = open(self.folder / f"shard-{len(self.headers)}", "xb")  # noqa: SIM115
        self.room, self.at = -(-room // 8) * 8, 0
        self.file.seek(8 + self.room)

    def _end(self) -> None:
        if self.file is None:
            return
        header = json.dumps(self.headers[-1], separators=(",", ":")).encode()
        assert len(header) <= self.room
        self.file.seek(0)
        self.file.write(struct.pack("<Q", self.room) + header.ljust(self.room))
        self.file.close()
        self.total += self.at
        self.file = None

    def finish(self) -> list[str]:
        """Give the shards their names, and write the index where there are several; the names."""
        self._end()
        count, places = len(self.headers), dict[str, str]()
        names = [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        for number, name in enumerate(names if count > 1 else [ONE]):
            files.rename(self.folder / f"shard-{number + 1}", self.folder / name)
            places |= {key: name for key in self.headers[number] if key != "__metadata__"}
        if count == 1:
            return [ONE]
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(places.items()))}
        files.write(self.folder / INDEX, json.dumps(index, indent=2) + "\n")
        return [*names, INDEX]
