"""Reads Megatron's checkpoints: names, shapes, layout, and tensors on demand.

Of both formats: `torch_dist`, in which a tensor is many pieces, and the one from before, in which
each rank has a file of its own. A layer's tensors have the names of Megatron's local layers, one
layer each: `decoder.layers.3.input_layernorm.weight`, whatever the checkpoint calls them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.agent.checkpoints import completeness, folders
from launcher.agent.checkpoints.pickles import PickledObject, load
from launcher.base import files
from launcher.base.errors import LauncherError, UsageError
from launcher.tools.weights import torch_file
from launcher.tools.weights.torch_file import SIZES, StoredTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

DISTRIBUTED, RANKS = "torch_dist", "mp_rank"
"""The formats: one that any layout reads, and a folder a rank."""

ALIASES = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("mlp.experts.experts.", "mlp.experts.local_experts."),
)
"""TransformerEngine's names, which distributed checkpoints have, and those that are used here."""

MOST = 100_000
"""Values that a checkpoint's arguments may have."""

KEPT = "tokenizer"
"""The folder of a tokenizer's files in an imported checkpoint's."""

MODEL = re.compile(r"(embedding|decoder|output_layer)\.(?!.*_extra_state)")
LAYER = "decoder.layers."
EXPERT = "mlp.experts.local_experts."
COLUMN = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)$")
ROW = re.compile(r"(linear_proj|linear_fc2)\.weight$")
"""Which a rank of a tensor-parallel group has a share of, along the first axis or the last."""


@dataclass(frozen=True)
class TensorBlock:
    """A block of a tensor that begins `at`, and where it is: bytes of a file, as torch saved it."""

    at: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    offset: int
    length: int
    stored: StoredTensor | None = None

    @property
    def place(self) -> tuple[slice, ...]:
        """Where it lies in the tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.at, self.shape, strict=True))

    def read(self, dtype: str) -> NDArray[Any]:
        """Its elements, a number of as many bytes standing for each. Raises UsageError."""
        found = self.stored or torch_file.read(self.path, self.offset, self.length)
        if not isinstance(found, StoredTensor) or found.dtype != dtype:
            raise UsageError(f"{self.path}: what is stored there is no tensor of {dtype}")
        if prod(found.shape) != prod(self.shape):
            raise UsageError(f"{self.path}: a tensor has shape {found.shape}, not {self.shape}")
        return replace(found, shape=self.shape).read()


@dataclass(frozen=True)
class Tensor:
    """A tensor in pieces, which cover it; `dtype` is torch's name for it."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorBlock, ...]

    @property
    def elements(self) -> int:
        """How many it has."""
        return prod(self.shape)

    def read(self) -> NDArray[Any]:
        """Its elements, a number of as many bytes standing for each. Raises UsageError."""
        import numpy as np

        if len(self.pieces) == 1 and prod(self.pieces[0].shape) == prod(self.shape):
            return self.pieces[0].read(self.dtype).reshape(self.shape)
        self._check_covered()
        whole: NDArray[Any] = np.empty(self.shape, f"u{SIZES[self.dtype]}")
        for piece in self.pieces:
            whole[piece.place] = piece.read(self.dtype)
        return whole

    def _check_covered(self) -> None:
        """Raise UsageError unless each element is in one piece."""
        import numpy as np

        where = self.pieces[0].path.parent if self.pieces else "a checkpoint"
        covered: NDArray[Any] = np.zeros(self.shape, bool)
        for piece in self.pieces:
            ends = zip(piece.at, piece.shape, self.shape, strict=True)
            if any(a < 0 or n < 0 or a + n > size for a, n, size in ends):
                raise UsageError(f"{where}: a part of a tensor lies outside of it")
            if covered[piece.place].any():
                raise UsageError(f"{where}: two parts of a tensor overlap")
            covered[piece.place] = True
        if not covered.all():
            raise UsageError(f"{where}: parts of a tensor aren't there")


@dataclass(frozen=True)
class SavedModel:
    """What is in a checkpoint: `arguments` are those of the program that saved it, {} if unsaid.

    `layout` is TP, PP and EP by the words tensor, pipeline and expert; `optimizer` the bytes of
    the optimizer's tensors, 0 where there are none or only files of their own.
    """

    folder: Path
    format: str
    iteration: int
    arguments: Mapping[str, Any]
    layout: Mapping[str, int]
    tensors: Mapping[str, Tensor]
    optimizer: int = 0

    @cached_property
    def layers(self) -> int:
        """How many layers it has."""
        found = [int(name.split(".")[2]) for name in self.tensors if name.startswith(LAYER)]
        return max(found, default=-1) + 1

    @cached_property
    def experts(self) -> int:
        """How many experts a layer has, 0 where there are none."""
        found = [name.partition(EXPERT)[2] for name in self.tensors if EXPERT in name]
        return max((int(rest.partition(".")[0]) for rest in found), default=-1) + 1


def find(folder: Path) -> Path:
    """The folder of a checkpoint: itself, or the newest complete one below it.

    Raises UsageError.
    """
    if (folder / completeness.INDEX).exists() or [*folder.glob("mp_rank_*")]:
        return folder
    found = folders.since_complete(folder) if folder.is_dir() else []
    if not found:
        raise UsageError(f"{folder}: no checkpoint of Megatron", "Name the folder it was saved to.")
    if found[0].problem:
        raise UsageError(f"{folder}: no checkpoint is complete: {found[-1].problem}")
    return found[0].folder


def is_later(name: str) -> bool:
    """Whether it is a tensor of another layer or expert than the first."""
    return bool(re.search(r"\.(layers|local_experts)\.[1-9]", name))


def opened(folder: Path) -> SavedModel:
    """The checkpoint in a folder. Raises UsageError where it isn't complete, or not a GPT's."""
    if problem := completeness.problem(folder):
        raise UsageError(f"{folder}: {problem}")
    try:
        made = _ranks(folder) if [*folder.glob("mp_rank_*")] else _distributed(folder)
    except (LauncherError, OSError):
        raise
    except Exception as error:  # whatever a foreign pickle makes of it
        raise UsageError(f"{folder}: damaged, or of a format not known here ({error})") from None
    if not made.tensors:
        raise UsageError(f"{folder}: no tensors of a GPT by Megatron-Core in it")
    return made


def plain(value: Any, left: Iterator[int] | None = None) -> Any:
    """Plain values of what a pickle had; what else it named becomes None.

    Raises ValueError for more than `MOST` values: a list can have one list many times.
    """
    left = left or iter(range(MOST))
    if next(left, None) is None:
        raise ValueError(f"it has more than {MOST} values")
    if isinstance(value, (list, tuple)):
        return [plain(each, left) for each in value]
    if isinstance(value, dict):
        return {str(key): plain(each, left) for key, each in value.items()}
    return value if isinstance(value, (str, int, float)) else None


def _arguments(found: Any) -> dict[str, Any]:
    values = plain(found.__dict__ if isinstance(found, PickledObject) else found)
    return values if isinstance(values, dict) else {}


def _layout(arguments: Mapping[str, Any], noted: Mapping[str, int]) -> dict[str, int]:
    return {
        kind: int(noted.get(kind) or arguments.get(f"{kind}_model_parallel_size") or 1)
        for kind in ("tensor", "pipeline", "expert")
    }


# Distributed


def _distributed(folder: Path) -> SavedModel:
    with files.open_regular(folder / completeness.INDEX) as stream:
        index = load(stream)
    where = {
        (key.fqn, tuple(getattr(key, "offset", None) or ())): at
        for key, at in index.storage_data.items()
    }
    common = _common(folder, where)
    arguments = _arguments(common.get("args"))
    tensors, optimizer = dict[str, Tensor](), 0
    for name, about in index.state_dict_metadata.items():
        if not hasattr(about, "chunks"):
            continue
        dtype, shape = about.properties.state[0].__name__, tuple(about.size)
        if not MODEL.match(name):
            optimizer += prod(shape) * SIZES.get(dtype, 1)
            continue
        pieces = [_piece(folder, where[name, tuple(c.offsets)], c) for c in about.chunks]
        tensors |= _each(_canonical(name), Tensor(dtype, shape, tuple(pieces)))
    iteration = int((common.get("progress") or common).get("iteration") or 0)
    layout = _layout(arguments, common.get("layout") or {})
    return SavedModel(folder, DISTRIBUTED, iteration, arguments, layout, tensors, optimizer)


def _common(folder: Path, where: Mapping[Any, Any]) -> Mapping[str, Any]:
    """What all ranks have alike: its own file, or from 0.19 on a list of one among the rest."""
    found: Any = {}
    if (folder / completeness.COMMON).exists():
        found = torch_file.read(folder / completeness.COMMON)
    elif at := where.get(("common_state/shard_0_1", ())):
        path = _file(folder, at)
        [found] = torch_file.read(path, int(at.offset), int(at.length))
    return found if isinstance(found, Mapping) else {}


def _piece(folder: Path, at: Any, chunk: Any) -> TensorBlock:
    place = tuple(chunk.offsets), tuple(chunk.sizes)
    return TensorBlock(*place, _file(folder, at), int(at.offset), int(at.length))


def _file(folder: Path, at: Any) -> Path:
    """The file that something of a checkpoint is in. Raises UsageError for one outside of it."""
    name = str(at.relative_path)
    if Path(name).name != name or getattr(at, "transform_descriptors", None):
        raise UsageError(f"{folder}: {name!r} isn't a file of it, or is compressed")
    return folder / name


def _canonical(name: str) -> str:
    for theirs, ours in ALIASES:
        name = name.replace(theirs, ours)
    return name


def _each(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A tensor that stands for all layers, or all experts, as one of each."""
    for before in (LAYER, EXPERT):
        start, found, rest = name.partition(before)
        if found and not rest.partition(".")[0].isdecimal():
            for number, one in enumerate(_split(tensor)):
                yield from _each(f"{start}{before}{number}.{rest}", one)
            return
    yield name, tensor


def _split(tensor: Tensor) -> list[Tensor]:
    """A tensor for each index of its first axis, none of whose pieces spans two."""
    parts: list[list[TensorBlock]] = [[] for _ in range(tensor.shape[0])]
    for piece in tensor.pieces:
        if piece.shape[0] != 1:
            raise UsageError(f"{piece.path}: one piece has several layers or experts")
        parts[piece.at[0]].append(replace(piece, at=piece.at[1:], shape=piece.shape[1:]))
    return [Tensor(tensor.dtype, tensor.shape[1:], tuple(part)) for part in parts]


# A folder a rank


def rank_folder(tensor: int, pipeline: int, expert: int, layout: Mapping[str, int]) -> str:
    """The name of a rank's folder (get_checkpoint_name of megatron/training/checkpointing.py)."""
    name = f"mp_rank_{tensor:02d}"
    name += f"_{pipeline:03d}" if layout["pipeline"] > 1 else ""
    return name + (f"_{expert:03d}" if layout["expert"] > 1 else "")


def _ranks(folder: Path) -> SavedModel:
    first = torch_file.read(next(iter(sorted(folder.glob("mp_rank_*")))) / completeness.RANK)
    arguments = _arguments(first.get("args"))
    layout = _layout(arguments, {})
    gated, found, begun = bool(arguments.get("swiglu")), dict[str, Tensor](), 0
    if arguments.get("expert_tensor_parallel_size") not in (None, layout["tensor"]):
        raise UsageError(f"{folder}: experts are divided by another TP than the rest")
    for stage in range(layout["pipeline"]):
        here = 0
        for expert, rank in product(range(layout["expert"]), range(layout["tensor"])):
            path = folder / rank_folder(rank, stage, expert, layout) / completeness.RANK
            state = torch_file.read(path)
            if "model" not in state or "language_model" in state["model"]:
                raise UsageError(f"{path}: no single model by Megatron-Core in it")
            for name, stored in _stored(state["model"], begun, expert, arguments, layout):
                if name.startswith(LAYER):
                    here = max(here, int(name.split(".")[2]) + 1 - begun)
                tensor = _of_rank(name, stored, rank, layout["tensor"], gated)
                if expert and EXPERT not in name:
                    continue
                before = found.get(name) if rank else None
                found[name] = (
                    replace(tensor, pieces=(*before.pieces, *tensor.pieces))
                    if (before and tensor.shape != stored.shape)
                    else before or tensor
                )
        begun += here
    if not arguments.get("untie_embeddings_and_output_weights"):
        found.pop("output_layer.weight", None)  # the last stage's copy
    return SavedModel(folder, RANKS, int(first.get("iteration") or 0), arguments, layout, found)


def _stored(
    model: Mapping[str, Any],
    begun: int,
    expert: int,
    arguments: Mapping[str, Any],
    layout: Mapping[str, int],
) -> Iterator[tuple[str, StoredTensor]]:
    """A rank's tensors, its layers and experts by their numbers in the whole model."""
    first = expert * int(arguments.get("num_experts") or 0) // layout["expert"]
    for given, stored in model.items():
        if not MODEL.match(given) or not isinstance(stored, StoredTensor):
            continue
        # TransformerEngine's grouped experts: mlp.experts.linear_fc1.weight3
        name = re.sub(r"mlp\.experts\.(linear_fc\d)\.weight(\d+)$", rf"{EXPERT}\2.\1.weight", given)
        name = _canonical(name)
        if re.search(r"mlp\.experts\.weight\d$", name):
            raise UsageError(f"{stored.path}: legacy grouped experts in it aren't read")
        for before, more in ((LAYER, begun), (EXPERT, first)):
            start, there, rest = name.partition(before)
            if there:
                number, _, rest = rest.partition(".")
                name = f"{start}{before}{int(number) + more}.{rest}"
        yield name, stored


def _of_rank(name: str, stored: StoredTensor, rank: int, ranks: int, gated: bool) -> Tensor:
    """What a rank has of a tensor, as a part of the whole."""
    axis = 0 if COLUMN.search(name) else len(stored.shape) - 1 if ROW.search(name) else None
    if axis is None or ranks == 1:
        piece = TensorBlock((0,) * len(stored.shape), stored.shape, stored.path, 0, 0, stored)
        return Tensor(stored.dtype, stored.shape, (piece,))
    share, rest = stored.shape[axis], stored.shape[:axis]
    whole = (*rest, share * ranks, *stored.shape[axis + 1 :])
    halves = 2 if gated and "linear_fc1." in name else 1  # a rank has its share of gate and up
    pieces, size = [], share // halves
    for half in range(halves):
        at = [0] * len(stored.shape)
        at[axis] = half * size * ranks + rank * size
        shape = (*rest, size, *stored.shape[axis + 1 :])
        start = stored.start + half * prod(shape) * SIZES[stored.dtype]
        part = replace(stored, start=start, shape=shape)
        pieces.append(TensorBlock(tuple(at), shape, stored.path, 0, 0, part))
    return Tensor(stored.dtype, whole, tuple(pieces))
