"""Distributed checkpoints: SAVE/iter_0000020/ and SAVE/latest_checkpointed_iteration.txt."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject

from launcher.train import compat
from launcher.train.arguments import UsageError

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Progress:
    """Where a run is; `steps` are those the optimizer took, `iterations` those it tried."""

    iteration: int = 0
    consumed_samples: int = 0
    steps: int = 0


def folder(root: str | Path, iteration: int) -> Path:
    """The folder of an iteration's checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def newest(root: str | Path) -> int | None:
    """The iteration of the newest complete checkpoint, or None where there is none.

    Raises `UsageError` where the tracker names no iteration whose folder is there.
    """
    tracker = Path(root) / TRACKER
    if not tracker.exists():
        return None
    text = tracker.read_text().strip()
    if not text.isdecimal() or not folder(root, int(text)).is_dir():
        raise UsageError(f"{tracker} names iteration {text!r}, whose checkpoint isn't there")
    return int(text)


def _common(source: Path) -> dict[str, Any]:
    """What isn't divided among ranks; raises `UsageError` if another program saved it."""
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(source))
    if "vocabulary" not in common:
        raise UsageError(f"{source} was not saved by launcher.train.gpt")
    return common


def saved_vocabulary(root: str | None) -> int | None:
    """The padded vocabulary of the newest checkpoint under `root`; None if there is none.

    The padding takes part in the softmax, so a run that goes on in another layout has to
    keep it.
    """
    iteration = newest(root) if root else None
    if root is None or iteration is None:
        return None
    return int(_common(folder(root, iteration))["vocabulary"])


def _layout() -> dict[str, int]:
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _random_state() -> ShardedObject:
    """This rank's random state; data-parallel ranks have the same, so one of them writes it."""
    state = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    layout = _layout()
    ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    replica = parallel_state.get_data_parallel_rank()
    shape = (layout["pipeline"], layout["tensor"])
    return ShardedObject("rng_state", state, shape, ranks, replica_id=replica)


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])


def _sharded(model: Any, optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"model": model.sharded_state_dict(prefix="")}
    state["optimizer"] = compat.sharded_optimizer_state(optimizer, dict(state), is_loading)
    return state


def save(root: str, model: Any, optimizer: Any, progress: Progress) -> Path:
    """Write a checkpoint under a temporary name, then give it its own and note it as newest.

    All ranks call this together. Raises `OSError` on a full or read-only disk.
    """
    final = folder(root, progress.iteration)
    partial = final.with_name(final.name + ".partial")
    if torch.distributed.get_rank() == 0:
        for unfinished in Path(root).glob("iter_*.partial"):
            shutil.rmtree(unfinished)
        partial.mkdir(parents=True)
    torch.distributed.barrier()
    state = _sharded(model, optimizer, is_loading=False)
    state.update(
        progress=vars(progress),
        layout=_layout(),
        vocabulary=model.vocab_size,
        rng_state=_random_state(),
    )
    dist_checkpointing.save(state, str(partial))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _note_newest(Path(root), progress.iteration)
    torch.distributed.barrier()
    return final


def _note_newest(root: Path, iteration: int) -> None:
    new = root / f"{TRACKER}.new"
    new.write_text(str(iteration))
    os.replace(new, root / TRACKER)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave; `saved_layout` is set where it was another than this run's."""

    folder: Path
    progress: Progress
    saved_layout: dict[str, int] | None


def load(root: str, model: Any, optimizer: Any) -> Loaded | None:
    """Load the newest checkpoint under `root`, saved with any layout; None if there is none.

    All ranks call this together. Random states are those of ranks, so they are carried over
    only into the layout that they were saved with.
    """
    iteration = newest(root)
    if iteration is None:
        return None
    source = folder(root, iteration)
    common = _common(source)
    same = common["layout"] == _layout()
    state = _sharded(model, optimizer, is_loading=True)
    if same:
        state["rng_state"] = _random_state()
    loaded = dist_checkpointing.load(state, str(source))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    if same:
        _set_random_state(loaded["rng_state"])
    return Loaded(source, Progress(**common["progress"]), None if same else common["layout"])
