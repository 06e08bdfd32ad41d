"""Writes Megatron's checkpoints without torch, one tensor in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from launcher.agent.checkpoints import completeness
from launcher.base.errors import UsageError
from launcher.tools.weights import torch_file
from launcher.tools.weights.reader import COLUMN, EXPERT, LAYER, ROW, rank_folder
from launcher.tools.weights.torch_file import PickledName, TensorToWrite, UnpickledObject

VERSION = 3.0
"""Upstream's checkpoint_version, since which linear_qkv lies as it does."""

DCP = "torch.distributed.checkpoint.metadata"
DATA = "__0_0.distcp"
STATEFUL = re.compile(r"(linear_qkv|linear_proj|linear_fc1|linear_fc2)\.weight$")
"""Of layers that Megatron asks for an extra state, which is nothing without FP8."""


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written, by its name here; `read` gives it when it is wanted."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]

    @property
    def bytes(self) -> int:
        """How many it has."""
        return prod(self.shape) * torch_file.SIZES[self.dtype]

    def tensor(self, axes: int = 0) -> TensorToWrite:
        """It as torch's, with `axes` more of length 1 before its own."""
        return TensorToWrite(self.dtype, (1,) * axes + self.shape, lambda: raw(self.read()))

    def share(self, rank: int, ranks: int, gated: bool) -> TensorToWrite:
        """What a rank of a tensor-parallel group has. Raises UsageError where it can't be divided.

        Of a gated layer, its share of the gate's half and of the other.
        """
        column = COLUMN.search(self.name)
        if ranks == 1 or not (column or ROW.search(self.name)):
            return self.tensor()
        axis = 0 if column else len(self.shape) - 1
        halves = 2 if gated and "linear_fc1." in self.name else 1
        whole = self.shape[axis] // halves
        size, left = divmod(whole, ranks)
        if left:
            raise UsageError(f"TP={ranks} doesn't divide {self.name}, {self.shape}")
        rows = [half * whole + rank * size + n for half in range(halves) for n in range(size)]
        shape = (*self.shape[:axis], len(rows), *self.shape[axis + 1 :])
        return TensorToWrite(self.dtype, shape, lambda: raw(self.read().take(rows, axis)))


def raw(values: Any) -> Any:
    """The bytes of an array, row by row."""
    return memoryview(np.ascontiguousarray(values).reshape(-1)).cast("B")


# Distributed


def distributed(
    folder: Path,
    sources: Iterable[TensorSource],
    layers: int,
    experts: int,
    common: Mapping[str, Any],
) -> None:
    """Write a checkpoint that any layout reads, into a folder that is there and empty.

    A layer's tensors are parts of one with an axis of layers, as Megatron has them, and experts'
    have another. `common` is what else it says: `args`, …
    """
    tensors, places = dict[str, Any](), list[tuple[UnpickledObject, UnpickledObject]]()
    with (folder / DATA).open("xb") as file:
        for source in sources:
            for name, at, before in _shared_names(source.name, layers, experts):
                if name not in tensors:
                    tensors[name] = _described(source.dtype, (*before, *source.shape))
                offset = (*at, *(0,) * len(source.shape))
                chunk = {"offsets": torch_file.size(offset)}
                chunk["sizes"] = torch_file.size((*(1,) * len(at), *source.shape))
                tensors[name].state["chunks"].append(
                    UnpickledObject(PickledName(DCP, "ChunkStorageMetadata"), state=chunk)
                )
                begin, length = _item(file, source.tensor(axes=len(at)))
                places.append(_place(name, offset, begin, length))
                for key in _states(name, at, before):
                    tensors[key] = UnpickledObject(
                        PickledName(DCP, "BytesStorageMetadata"), state={}
                    )
                    places.append(_place(key, None, *_item(file, [None])))
    index = {"state_dict_metadata": tensors, "planner_data": None, "storage_data": _Pairs(places)}
    (folder / completeness.INDEX).write_bytes(
        torch_file.pickled(UnpickledObject(PickledName(DCP, "Metadata"), state=index))
    )
    with (folder / completeness.COMMON).open("xb") as file:
        torch_file.write(file, dict(common))
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    description = backends | {"sharded_backend_version": 1, "common_backend_version": 1}
    (folder / completeness.DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")


class _Pairs(dict[Any, Any]):
    """A mapping to be pickled, whose keys Python couldn't look up."""

    def __init__(self, pairs: list[tuple[Any, Any]]) -> None:
        super().__init__()
        self.pairs = pairs

    def items(self) -> Any:
        """They."""
        return self.pairs


def _item(file: IO[bytes], value: Any) -> tuple[int, int]:
    begin = file.tell()
    return begin, torch_file.write(file, value)


def _described(dtype: str, shape: tuple[int, ...]) -> UnpickledObject:
    layout = UnpickledObject(PickledName("torch.serialization", "_get_layout"), ("torch.strided",))
    memory = UnpickledObject(PickledName(DCP, "_MEM_FORMAT_ENCODING"), (0,))
    state = (PickledName("torch", dtype), layout, False, memory, False)
    about = {"properties": UnpickledObject(PickledName(DCP, "TensorProperties"), state=state)}
    shapes = {"size": torch_file.size(shape), "chunks": list[UnpickledObject]()}
    return UnpickledObject(PickledName(DCP, "TensorStorageMetadata"), state=about | shapes)


def _place(
    name: str, offset: tuple[int, ...] | None, begin: int, length: int
) -> tuple[UnpickledObject, UnpickledObject]:
    index = {"fqn": name, "index": None}
    index["offset"] = None if offset is None else torch_file.size(offset)  # type: ignore[assignment]
    where = {"relative_path": DATA, "offset": begin, "length": length}
    return (
        UnpickledObject(PickledName(DCP, "MetadataIndex"), state=index),
        UnpickledObject(
            PickledName("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state=where
        ),
    )


def _shared_names(
    name: str, layers: int, experts: int
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """What a tensor is called in a distributed checkpoint, where it is in that, and the axes there.

    The norm before experts has two names: TransformerEngine's layers have another than Megatron's.
    """
    if not name.startswith(LAYER):
        yield name, (), ()
        return
    layer, _, rest = name.removeprefix(LAYER).partition(".")
    at: tuple[int, ...] = (int(layer),)
    before: tuple[int, ...] = (layers,)
    if rest.startswith(EXPERT):
        expert, _, rest = rest.removeprefix(EXPERT).partition(".")
        rest = f"mlp.experts.experts.{rest}"
        at, before = (*at, int(expert)), (*before, experts)
    if experts and rest.startswith("pre_mlp_layernorm."):
        yield f"{LAYER}{rest}", at, before
    rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    yield f"{LAYER}{rest.replace('pre_mlp_layernorm.', 'mlp.linear_fc1.layer_norm_')}", at, before


def _states(name: str, at: tuple[int, ...], before: tuple[int, ...]) -> Iterator[str]:
    """The keys of a layer's extra states (ShardedObject.unique_key of Megatron)."""
    where = f"shard_{'.'.join(map(str, at))}_{'.'.join(map(str, before))}"
    if at and (found := STATEFUL.search(name)):
        yield f"{name[: found.end(1)]}._extra_state/{where}"
        if found[1] == "linear_qkv":
            yield f"{name[: found.start()]}core_attention._extra_state/{where}"


# A folder a rank


@dataclass(frozen=True)
class RankFolders:
    """A checkpoint of a folder a rank, for one layout and one kind of layers.

    `gated` and `tied` are the model's, `engine` whether layers are TransformerEngine's, whose norms
    have other names, and `grouped` whether experts are its grouped ones.
    """

    layers: int
    experts: int
    layout: Mapping[str, int]
    gated: bool
    tied: bool
    engine: bool = False
    grouped: bool = False

    def write(self, folder: Path, sources: list[TensorSource], common: Mapping[str, Any]) -> None:
        """Write it into a folder that is there. Raises UsageError where the layout doesn't fit."""
        stages, parts, tensor = (self.layout[kind] for kind in ("pipeline", "expert", "tensor"))
        if self.layers % stages or self.experts % parts or (parts > 1 and not self.experts):
            told = f"{self.layers} layers and {self.experts} experts"
            raise UsageError(f"PP={stages} and EP={parts} don't divide {told}")
        for stage, expert, rank in product(range(stages), range(parts), range(tensor)):
            model = dict[str, Any]()
            for source in sources:
                for name in self._names(source.name, stage, expert):
                    model[name] = source.share(rank, tensor, self.gated)
                    if found := STATEFUL.search(name):
                        model[f"{name[: found.end(1)]}._extra_state"] = None
            if stage == stages - 1:
                model["output_layer._extra_state"] = None  # of a tied one, too
            path = folder / rank_folder(rank, stage, expert, self.layout) / completeness.RANK
            path.parent.mkdir()
            with path.open("xb") as file:
                torch_file.write(file, {**common, "model": model})

    def _names(self, name: str, stage: int, expert: int) -> Iterator[str]:
        """What a tensor is called in the ranks of a stage; nothing where they don't have it."""
        last = self.layout["pipeline"] - 1
        if not name.startswith(LAYER):
            if name.startswith("embedding."):
                if stage == 0:
                    yield name
                if self.tied and 0 < stage == last and "word" in name:
                    yield "output_layer.weight"
            elif stage == last:
                yield name
            return
        per_stage = self.layers // (last + 1)
        layer, _, rest = name.removeprefix(LAYER).partition(".")
        if int(layer) // per_stage != stage:
            return
        if rest.startswith(EXPERT):
            per_rank = self.experts // self.layout["expert"]
            number, _, rest = rest.removeprefix(EXPERT).partition(".")
            if int(number) // per_rank != expert:
                return
            local = int(number) % per_rank
            rest = f"mlp.experts.{rest}{local}" if self.grouped else f"{EXPERT}{local}.{rest}"
        if self.engine:
            rest = rest.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
            if not self.experts:
                rest = rest.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        yield f"{LAYER}{int(layer) % per_stage}.{rest}"
