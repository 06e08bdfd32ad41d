"""Distributed checkpoints: SAVE/iter_0000020/ and SAVE/latest_checkpointed_iteration.txt."""

from __future__ import annotations

import argparse
import datetime
import errno
import os
import re
import shutil
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    apply_factories,
    is_main_replica,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async

from launcher.agent import compat
from launcher.agent.checkpoints import folders, lineage
from launcher.agent.ranks.exit_codes import OptionError, RunError, has_lost_another

CUT_SHORT = "inline_container.cc"
"""Where torch finds that the system wrote less of an archive than it was given."""

LOST_WRITER = "results_queue should not be empty"
"""What Megatron finds where the process has ended that writes beside training."""

FULL = 1 << 16
"""Bytes free on a disk that is as good as full."""

SCALES = "_extra_state"
"""What torch calls what isn't a tensor; in Transformer Engine, FP8's scales."""

CHAINED = re.compile(r"^chained_\d+\.")
"""What the names of an optimizer's tensors begin with where there are several."""

PATIENCE = datetime.timedelta(seconds=2)


@dataclass(frozen=True)
class TrainingProgress:
    """Where a run is; `steps` are those the optimizer took, `iterations` those it tried."""

    iteration: int = 0
    consumed_samples: int = 0
    steps: int = 0


def newest(root: str) -> Path | None:
    """The folder of the newest complete checkpoint under `root`, or None where there is none.

    All ranks call this together: rank 0 looks, and says which newer ones it leaves out. Raises
    `OptionError` where none is complete though the tracker names one.
    """
    return _on_rank_0(lambda: _look(Path(root)))


def _look(root: Path) -> Path | None:
    try:
        newer, named = folders.since_complete(root), folders.noted(root)
    except OSError as error:
        raise OptionError(f"--load {root} can't be read: {error.strerror}") from error
    newest = newer.pop(0) if newer and not newer[0].problem else None
    if named and not newest:
        told = f"{root / folders.TRACKER} names iteration {named!r}, whose checkpoint isn't "
        raise OptionError(told + (f"complete: {newer[-1].problem}" if newer else "there"))
    for each in newer:
        print(f"{each.folder} is left out: {each.problem}", flush=True)
    return newest.folder if newest else None


def common(source: Path) -> dict[str, Any]:
    """What isn't divided among ranks; raises `OptionError` if another program saved it.

    `vocabulary` is the padded one, whose padding takes part in the softmax: a run that goes on in
    another layout has to keep it.
    """
    with suppress(AttributeError):  # since torch 2.6 it names what it loads
        torch.serialization.add_safe_globals([argparse.Namespace])
    state: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(source))
    if "vocabulary" not in state:
        raise OptionError(f"{source} was not saved by launcher.trainer.gpt")
    return state


def layout() -> dict[str, int]:
    """How this run divides the model among ranks, as a checkpoint notes it."""
    return {
        "tensor": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
    }


def _generators() -> dict[str, Any]:
    """The states of the ranks' own generators, as tensors; where graphs hold them, generators."""
    known: dict[str, Any] = tensor_parallel.get_cuda_rng_tracker().get_states()
    return known


def _plain(state: Any) -> torch.Tensor:
    known: torch.Tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return known


def _set_generators(states: dict[str, torch.Tensor]) -> None:
    mine = _generators()
    for name, state in states.items():
        if isinstance(mine.get(name), torch.Generator):
            mine[name].set_state(state)
        else:
            mine[name] = state
    tensor_parallel.get_cuda_rng_tracker().set_states(mine)


def _random_state() -> ShardedObject:
    """This rank's random state; its replicas have the same, so one of them writes it."""
    state = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(),
        "tracker": {name: _plain(state) for name, state in _generators().items()},
    }
    shape = tuple(reversed(layout().values()))
    ranks = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", state, shape, ranks, replica_id=replica)


def _keys(parts: Sequence[Any]) -> list[str]:
    """What upstream calls the parts of the model that a rank has."""
    return ["model"] if len(parts) == 1 else [f"model{number}" for number in range(len(parts))]


def _weights(parts: Sequence[Any]) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, (key, part) in enumerate(zip(_keys(parts), parts, strict=True)):
        if len(parts) > 1:  # layers count from there
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        state[key] = part.sharded_state_dict(prefix="")
    return state


def _sharded(parts: Sequence[Any], optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state = _weights(parts)
    state["optimizer"] = compat.sharded_optimizer_state(optimizer, dict(state), is_loading)
    return state


class HostCopies:
    """Pinned copies of a checkpoint's tensors, which the next save writes over.

    Megatron would copy once it has planned the save, to memory that the first two saves allocate.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def replace(self, state: dict[str, Any]) -> None:
        """Begin to copy what this rank saves of a state, and have the state name the copies."""
        apply_factories(state)
        for each in nested_values(state):
            if isinstance(each, ShardedTensor) and is_main_replica(each.replica_id):
                each.data = self._copied(each.key, each.global_offset, each.data.detach())

    def _copied(self, key: str, offset: tuple[int, ...], data: torch.Tensor) -> torch.Tensor:
        if data.device.type == "cpu":
            return data
        kept = self.kept.get((key, offset))
        if kept is None or (kept.shape, kept.dtype) != (data.shape, data.dtype):
            kept = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            self.kept[key, offset] = kept
        return kept.copy_(data, non_blocking=True)


def save(
    root: str,
    parts: Sequence[Any],
    optimizer: Any,
    progress: TrainingProgress,
    arguments: Mapping[str, Any],
    beside: tuple[Any, dict[str, Any], HostCopies] | None = None,
) -> Path:
    """Write a checkpoint under a temporary name, then give it its own and note it as newest.

    `parts` are this rank's of the model, `arguments` what it was made by, under upstream's names.
    All ranks call this together. With `compat.async_saving`, `beside`, it returns once there is a
    copy in the host's memory: another process writes that, and `finish` names it. Raises
    `RunError` on a full or read-only disk; then nothing of it stays. So it does where another run
    has taken the folder over.
    """
    mine = _saver(os.environ.get(lineage.HOLDER))
    partial = folders.partial(root, progress.iteration, mine)
    state = _sharded(parts, optimizer, is_loading=False)
    state.update(
        progress=vars(progress),
        layout=layout(),
        vocabulary=parts[0].vocab_size,
        args=dict(arguments),
        rng_state=_random_state(),
    )
    with _cleared_up(root, partial):
        _on_rank_0(lambda: _make(partial, mine))
        if beside:  # what follows waits for no GPU while it copies
            beside[2].replace(state)
        compat.report_by_memory(filesystem_async)
        request = dist_checkpointing.save(state, str(partial), **(beside[1] if beside else {}))

        def publish() -> None:
            _on_rank_0(lambda: folders.publish(Path(root), progress.iteration, mine))

        if beside:
            beside[1]["validate_access_integrity"] = False  # as the first save was found
            request.add_finalize_fn(publish)
            beside[0].schedule_async_request(request)
        else:
            publish()
    return folders.folder(root, progress.iteration)


def finish(folder: Path, queue: Any, *, wait: bool) -> bool:
    """Whether all ranks have written what `save` gave as `folder`, which has its name then.

    All ranks call this together; raises as `save`.
    """
    number = int(folder.name.rpartition("_")[2])
    partial = folders.partial(folder.parent, number, _saver(os.environ.get(lineage.HOLDER)))
    with _cleared_up(str(folder.parent), partial):
        return bool(queue.maybe_finalize_async_calls(blocking=wait))


@contextmanager
def _cleared_up(root: str, partial: Path) -> Iterator[None]:
    """Remove what was written where that fails, and raise `RunError` for what the system says."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException isn't an Exception
        reason = _reason(error, root)
        made = None if isinstance(error, FileExistsError) else partial
        speaks = _clear_up(Path(root), made, bool(reason))
        if reason is None:
            raise
        raise RunError(f"can't save to {root}: {reason}" if speaks else "") from error


def _make(partial: Path, mine: lineage.LineageNote | None) -> None:
    lineage.check_claim(partial.parent, mine)
    folders.recover(partial.parent, lineage.is_claimed)
    folders.remove_partial(partial.parent)
    folders.make_room(partial)
    partial.mkdir(parents=True)


@cache
def _saver(_: str | None) -> lineage.LineageNote | None:
    """Who all ranks save for: only the first node's runner says it. They call this together."""
    note: lineage.LineageNote | None = _on_rank_0(lambda: lineage.saver(os.environ))
    return note


def _on_rank_0(work: Callable[[], Any]) -> Any:
    """What rank 0 finds, or makes while the others wait.

    Raises what that raises: a `OptionError` on every rank, for an `OSError` a silent `RunError` on
    the others.
    """
    told: list[Any] = [None, None]
    first = torch.distributed.get_rank() == 0
    if first:
        try:
            told[0] = work()
        except (OSError, OptionError) as error:
            told[1] = error
    torch.distributed.broadcast_object_list(told)
    result, failure = told
    if failure:
        raise failure if first or isinstance(failure, OptionError) else RunError("")
    return result


def _reason(error: BaseException, root: str) -> str | None:
    """Why the system let no checkpoint be written, as far as this rank knows.

    "" where another rank knows, None where it isn't the system's doing. Errors come from other
    processes and ranks, some as text alone. torch's archives don't give the system's reason: a
    write that was cut short is taken for a full disk, even if there is room again by now.
    """
    if isinstance(error, FileExistsError):
        return error.strerror or os.strerror(errno.EEXIST)
    text = "".join(traceback.format_exception(error))
    if code := re.search(r"\[Errno (\d+)\]", text):
        return os.strerror(int(code[1]))
    if CUT_SHORT in text:
        return os.strerror(errno.ENOSPC)
    if LOST_WRITER in text:
        return "the process that writes it was killed, maybe for want of memory"
    if isinstance(error, RunError) or type(error).__name__ == "CheckpointException":
        return ""
    if not has_lost_another(error) and shutil.disk_usage(root).free < FULL:
        return os.strerror(errno.ENOSPC)
    return None


def _clear_up(root: Path, made: Path | None, knows: bool) -> bool:
    """Remove what was `made`; whether this rank is the first that knows why, and so says it.

    Ranks fail each for itself, and one that waits for another in a collective only when that
    one has left: so they wait for each other, but not for long. The process group is of no
    more use here; its store is. Rank 0 removes, when no other is writing any more.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    rank, ranks = torch.distributed.get_rank(), range(torch.distributed.get_world_size())
    first = False
    with suppress(RuntimeError):
        first = knows and store.add("save/known", 1) == 1
        store.set(f"save/failed/{rank}", "")
        awaited = ["save/removed"] if rank else [f"save/failed/{each}" for each in ranks]
        store.wait(awaited, PATIENCE)
    if rank == 0:
        if made:
            folders.remove(made)
        with suppress(RuntimeError):
            store.set("save/removed", "")
    return first


def load(
    source: Path, known: dict[str, Any], parts: Sequence[Any], optimizer: Any
) -> TrainingProgress:
    """Load a checkpoint, saved with any layout, whose known facts are in `common`.

    All ranks call this together. Random states are those of ranks, so they are carried over
    only into the layout that they were saved with. Weights alone, as `launcher checkpoint import`
    leaves them, are loaded alone. Raises `OptionError` where experts have an optimizer of their
    own, as with expert parallelism, in one of both alone, and it is a distributed one.
    """
    if known.get("weights_alone"):
        load_weights(source, parts)
        optimizer.reload_model_params()
        return TrainingProgress(**known["progress"])
    size = "expert_model_parallel_size"
    saved, here = known.get("args", {}).get(size, 1), parts[0].config.expert_model_parallel_size
    state = _sharded(parts, optimizer, is_loading=True)
    chained = min(saved, here) == 1 < max(saved, here)
    own: Any = _copied(state["optimizer"]) if chained else None
    if chained and not _renamed(own, source):
        raise OptionError(
            f"{source} was saved with EP={saved}, which keeps another optimizer than EP={here}: go "
            f"on with --expert-model-parallel-size {saved}{' or another above 1' * (saved > 1)}, "
            "or with the weights alone, by `launcher checkpoint convert … --format torch_dist`"
        )
    if known["layout"] == layout():
        state["rng_state"] = _random_state()
    loaded = _loaded(state, source)
    _fill(parts, loaded)
    found = loaded["optimizer"]
    if chained and here > 1:
        found = {number: _filled(one, found[number], found) for number, one in own.items()}
    elif chained:
        found = _filled(own, found, found[0])
    optimizer.load_state_dict(found)
    if random := loaded.get("rng_state"):
        torch.set_rng_state(random["cpu"])
        torch.cuda.set_rng_state(random["cuda"])
        _set_generators(random["tracker"])
    return TrainingProgress(**known["progress"])


def _copied(state: Any) -> Any:
    """A state's dicts and lists anew, with the same tensors in them."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


def _renamed(state: Any, source: Path) -> bool:
    """Call an optimizer's tensors what a checkpoint calls them that has one more, or one less.

    With expert parallelism experts have one of their own, and each a prefix. Whether all are there.
    """
    there = torch.distributed.checkpoint.FileSystemReader(source).read_metadata()
    names = {CHAINED.sub("", name): name for name in there.state_dict_metadata}
    mine = [value for value in nested_values(state) if isinstance(value, ShardedBase)]
    for value in mine:
        value.key = names.get(CHAINED.sub("", value.key), "")
    return all(value.key for value in mine)


def _filled(own: Any, found: Any, first: Any) -> Any:
    """An optimizer's own state with the tensors that were found for it.

    `first` is what the checkpoint says of the first optimizer, whose steps and loss scale are those
    of all; its groups aren't these.
    """
    if isinstance(own, dict):
        found, first = (each if isinstance(each, dict) else {} for each in (found, first))
        more = {key: one for key, one in first.items() if not isinstance(one, (dict, list))}
        mine = {key: _filled(one, found.get(key), first.get(key)) for key, one in own.items()}
        return more | mine
    if isinstance(own, list):
        there = found if isinstance(found, list) else [None] * len(own)
        return [_filled(*pair, None) for pair in zip(own, there, strict=True)]
    if isinstance(own, ShardedBase):
        return found
    if isinstance(own, LocalNonpersistentObject):
        return own.unwrap()
    return own if first is None else first


def load_weights(source: Path, parts: Sequence[Any]) -> None:
    """Load the model alone. All ranks call this together."""
    _fill(parts, _loaded(_weights(parts), source))


def _loaded(state: dict[str, Any], source: Path) -> dict[str, Any]:
    """What a checkpoint has of `state`: all, but for FP8's scales where it is of other layers.

    Transformer Engine's layers keep something even where nothing is in FP8, and ours nothing.
    """
    loaded: dict[str, Any]
    loaded, _, lacking = dist_checkpointing.load(state, str(source), strict="return_unexpected")
    if lost := sorted(key for key in lacking if SCALES not in key):
        raise OptionError(f"{source} lacks {lost[0]} of this model, and {len(lost) - 1} more")
    return loaded


def _fill(parts: Sequence[Any], loaded: dict[str, Any]) -> None:
    for key, part in zip(_keys(parts), parts, strict=True):
        own = {name: kept for name, kept in part.state_dict().items() if name.endswith(SCALES)}
        part.load_state_dict(own | loaded[key])
