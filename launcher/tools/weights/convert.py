"""Converts checkpoints: to Hugging Face, from it, and between Megatron's formats.

All of it or nothing: what is written stands aside until it is whole. Optimizer states stay behind.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launcher import __version__
from launcher.agent.checkpoints import folders
from launcher.base import files, owned
from launcher.base.errors import UsageError
from launcher.base.trust import require_trusted
from launcher.tools.weights import architecture, hf_config, safetensors, writer
from launcher.tools.weights.architecture import Architecture
from launcher.tools.weights.families import Family, TensorRow, family, rows
from launcher.tools.weights.hf_config import CONFIG
from launcher.tools.weights.reader import DISTRIBUTED, KEPT, SavedModel
from launcher.tools.weights.torch_file import PickledName, StoredTensor, UnpickledObject
from launcher.tools.weights.writer import TensorSource

ADAPTER = "adapter_config.json"
SHARD = 5_000_000_000
"""Bytes of a shard, as transformers has them."""

GENERATION = "generation_config.json"
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("vocab.json", "merges.txt", "added_tokens.json", "chat_template.jinja", GENERATION),
)
"""What belongs to a model beside its weights and its shape, where it is there."""

ENDS = ("bos_token_id", "eos_token_id")
"""Carried over as they are: Llama 3 Instruct has a list of ends."""

KINDS = ("tensor", "pipeline", "expert")
"""Of model parallelism: a layout's words."""

LARGEST_FILE = 256 << 20


@dataclass(frozen=True)
class Conversion:
    """What was written: the model's family and shape, the files, and how many bytes of weights."""

    folder: Path
    shape: Architecture
    bytes: int
    names: tuple[str, ...] = ()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """An empty folder to write to, which becomes `target` if all goes well, and else goes.

    Raises UsageError where `target` is something else than an empty folder or nothing, and
    ForeignFileError where others can write beside it.
    """
    target = Path(os.path.abspath(target))
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"{target} is there, and isn't an empty folder", "Name another one.")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such folder", f"Make it: mkdir -p {target.parent}")
    require_trusted(target.parent)
    owned.sweep_folders(target.parent)
    with owned.locked_folder(files.aside_path(target, secrets.token_hex(8))) as made:
        try:
            with files.named(target):
                yield made
            files.sync_tree(made)
            files.rename(made, target)
        except BaseException:
            if made.exists():
                owned.remove_folder(made, made.parent)
            raise
    (target / owned.MARKER).unlink()  # from now on it is the user's
    files.sync(target)


# To Hugging Face


def export(
    saved: SavedModel,
    target: Path,
    given: Mapping[str, Any] = {},
    name: str = "",
    tokenizer: Mapping[str, Path] = {},
    shard: int = SHARD,
) -> Conversion:
    """Write a checkpoint's model as a folder that transformers loads.

    `given` are arguments of Megatron's that win over the checkpoint's, `name` is a family, and
    `tokenizer` its files by their names there, beside those that an import left. Raises UsageError
    for what no family has.
    """
    shape = architecture.of_checkpoint(saved, given, name)
    of = family(shape.family)
    wanted = [*rows(of, shape)]
    _check_names(saved, wanted, of)
    config = hf_config.config(shape, of.model)
    kept = _kept(saved.folder.parent / KEPT)
    copied = kept | dict(tokenizer)
    bound = 256 + sum(160 + len(each) for row in wanted for each in row.theirs)
    with new_folder(target) as folder:
        shards = safetensors.Shards(folder, shard)
        for row in wanted:
            source = saved.tensors[row.megatron]
            parts = row.transform.apart(source.read(), shape)
            named = dict(zip(row.theirs, parts, strict=True))
            shards.add(named, source.dtype, bound)
        names = shards.finish()
        end = saved.arguments.get("eod_id")
        ends = {"bos_token_id": end if of.name == "gpt2" else None, "eos_token_id": end}
        ends |= {key: saved.arguments.get(f"hf_{key}", value) for key, value in ends.items()}
        ends = {key: value for key, value in ends.items() if value is not None}
        _write_json(folder / CONFIG, config | ends)
        _write_json(folder / GENERATION, {"_from_model_config": True, **ends})
        for each, path in copied.items():
            below = saved.folder.parent if path == kept.get(each) else path.parent
            files.copy_foreign(path, below, folder / each)
        return Conversion(target, shape, shards.total, (CONFIG, *names))


def _check_names(saved: SavedModel, wanted: list[TensorRow], of: Family) -> None:
    """Raise UsageError where the table hasn't all tensors of a checkpoint, or others."""
    known = {row.megatron for row in wanted}
    missing, more = sorted(known - {*saved.tensors}), sorted({*saved.tensors} - known)
    if missing or more:
        told = f"no {missing[0]}" if missing else f"{more[0]}, which that has not"
        raise UsageError(f"{saved.folder}: taken for a {of.name}, but it has {told}")


def _write_json(path: Path, value: Any) -> None:
    files.write(path, json.dumps(value, indent=2) + "\n")


def _kept(folder: Path) -> dict[str, Path]:
    """The tokenizer's files in a folder, by their names. Raises UsageError."""
    found = {name: folder / name for name in TOKENIZER if (folder / name).is_file()}
    if big := [path for path in found.values() if path.stat().st_size > LARGEST_FILE]:
        raise UsageError(f"{big[0]}: too big for a tokenizer's file")
    return found


def given(words: Sequence[str]) -> dict[str, Any]:
    """Megatron's arguments, as they stand on a command line. Raises UsageError."""
    found, name = dict[str, Any](), ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("-", "_").partition("=")
            found[name] = _number(value) if equals else True
        elif name:
            found[name] = _number(word)
        else:
            raise UsageError(f"{word}: no option of Megatron's", "-- --num-attention-heads 12")
    return found


def _number(text: str) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


# To Megatron


def require_model(source: Path) -> None:
    """Raise UsageError where a folder has no model of Hugging Face's."""
    if (source / ADAPTER).is_file() and not (source / CONFIG).is_file():
        raise UsageError(
            f"{source}: an adapter of PEFT's: what it adds to a model, and no model",
            "Merge the two first: PEFT's merge_and_unload() and save_pretrained(FOLDER).",
        )
    if not (source / CONFIG).is_file():
        raise UsageError(f"{source}: no {CONFIG} in it", "Name the folder of a model.")


def import_(source: Path, target: Path, padding: int = 128) -> Conversion:
    """Write a folder of Hugging Face's as a checkpoint, in `torch_dist`, for any layout.

    The vocabulary is padded with zeros to a multiple of `padding`. Raises UsageError.
    """
    require_model(source)
    config = safetensors.read_json(source / CONFIG)
    of = family(str(config.get("model_type")))
    shape = hf_config.of_config(config, padding)
    found = safetensors.entries(source)
    shape = _untied(found, shape, of)
    sources, used = list[TensorSource](), set[str]()
    for row in rows(of, shape):
        names = [_found(each, of, found) for each in row.theirs]
        used |= {*names}
        sources.append(_source(row, [found[each] for each in names], shape))
    left = sorted(each for each in {*found} - used if not each.endswith(of.ignored))
    if left:
        raise UsageError(f"{source}: {left[0]} isn't a {of.name}'s, and nothing is left out")
    known = architecture.arguments(replace(shape, dtype=sources[0].dtype))
    end = config.get("eos_token_id")
    first = end[0] if isinstance(end, list) and end else end
    known |= {"eod_id": first} if type(first) is int and 0 <= first < shape.vocabulary else {}
    for key in ENDS:
        if (value := config.get(key)) is not None:
            ends = value if isinstance(value, list) else [value]
            if not all(type(each) is int and 0 <= each < 1 << 31 for each in ends):
                raise UsageError(f"{CONFIG}: {key} is {value!r}, and should be a token's number")
            known[f"hf_{key}"] = value
    copied = _kept(source)
    with new_folder(target) as folder:
        _write_distributed(folder, sources, shape.layers, shape.experts, known, 0)
        if copied:
            (folder / KEPT).mkdir()
        for each, path in copied.items():
            files.copy_foreign(path, source, folder / KEPT / each)
    return Conversion(target, shape, sum(each.bytes for each in sources))


def _untied(found: dict[str, StoredTensor], shape: Architecture, of: Family) -> Architecture:
    """The shape, with a head of its own where its weights aren't those of the embedding.

    Fine-tunes are saved so, with a config.json that says that they are tied. A head that is the
    embedding once more is taken out of what was `found`. Raises UsageError.
    """
    import numpy as np

    head = found.get("lm_head.weight")
    first = next(row for row in of.rows if row[0] == "embedding.word_embeddings.weight")[1]
    embedding = found[_found(first, of, found)]
    if embedding.shape[:1] != (shape.vocabulary,):
        raise UsageError(
            f"{CONFIG}: vocab_size is {shape.vocabulary}, and {first} has shape {embedding.shape}"
        )
    if not (shape.tied and head):
        return shape
    if head.shape == embedding.shape and np.array_equal(head.read(), embedding.read()):
        del found["lm_head.weight"]
        return shape
    return replace(shape, tied=False)


def _found(name: str, of: Family, there: Mapping[str, Any]) -> str:
    for each in (name, name.removeprefix(of.prefix)):
        if each in there:
            return each
    raise UsageError(f"it has no {name}, which a {of.name} has")


def _source(row: TensorRow, parts: list[StoredTensor], shape: Architecture) -> TensorSource:
    """A tensor of Megatron's, read from those that it is made of."""
    whole = row.transform.shape([part.shape for part in parts], shape)
    if len({part.dtype for part in parts}) > 1 or whole != architecture.shape_of(
        row.megatron, shape
    ):
        raise UsageError(f"{parts[0].path}: {row.theirs[0]} doesn't fit {CONFIG}")
    return TensorSource(
        row.megatron,
        parts[0].dtype,
        whole,
        lambda: row.transform.together([part.read() for part in parts], shape),
    )


def _write_distributed(
    folder: Path,
    sources: list[TensorSource],
    layers: int,
    experts: int,
    known: Mapping[str, Any],
    iteration: int,
) -> None:
    """A folder of checkpoints with one of an iteration, for any layout."""
    one = {f"{kind}_model_parallel_size": 1 for kind in KINDS}
    said = _common({**known, **one}, iteration, sources)
    writer.distributed(_placed(folder, iteration), sources, layers, experts, said)


def _placed(folder: Path, iteration: int) -> Path:
    """The folder of a checkpoint among those of a run, with the file that names it, as runs do."""
    files.write(folder / folders.TRACKER, str(iteration or folders.RELEASE))
    final = folders.folder(folder, iteration) if iteration else folder / folders.RELEASE
    final.mkdir()
    return final


def _common(
    known: Mapping[str, Any], iteration: int, sources: list[TensorSource]
) -> dict[str, Any]:
    """What a checkpoint says beside its tensors, for upstream's programs and for ours."""
    [padded] = [each.shape[0] for each in sources if "word_embeddings" in each.name]
    return {
        "progress": {"iteration": iteration, "consumed_samples": 0, "steps": 0},
        "layout": {kind: known[f"{kind}_model_parallel_size"] for kind in KINDS[:2]},
        "vocabulary": padded,
        "args": UnpickledObject(PickledName("argparse", "Namespace"), state=dict(known)),
        "checkpoint_version": writer.VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "weights_alone": True,
        "launcher": __version__,
    }


# To another format


def convert(saved: SavedModel, target: Path, format: str, layout: Mapping[str, int]) -> Conversion:
    """Write a checkpoint's weights in another format, or layout of it. Raises UsageError."""
    sources = [
        TensorSource(name, tensor.dtype, tensor.shape, tensor.read)
        for name, tensor in saved.tensors.items()
    ]
    known = {**saved.arguments}
    shape = architecture.of_checkpoint(saved, known)
    with new_folder(target) as folder:
        if format == DISTRIBUTED:
            _write_distributed(folder, sources, saved.layers, saved.experts, known, saved.iteration)
        else:
            known |= {f"{kind}_model_parallel_size": size for kind, size in layout.items()}
            ranks = writer.RankFolders(
                saved.layers,
                saved.experts,
                layout,
                gated=bool(known.get("swiglu")),
                tied="output_layer.weight" not in saved.tensors,
                engine=known.get("transformer_impl") == "transformer_engine",
                grouped=bool(known.get("moe_grouped_gemm")),
            )
            common = _common(known, saved.iteration, sources)
            ranks.write(_placed(folder, saved.iteration), sources, common)
    return Conversion(target, shape, sum(each.bytes for each in sources))
