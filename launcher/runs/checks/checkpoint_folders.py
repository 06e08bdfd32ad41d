"""Checks checkpoint folders before the start: free space, and whether what is loaded fits."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.base.screen import size
from launcher.runs.checks.machine import Finding, SavedCheckpoints
from launcher.runs.plan import model_size
from launcher.runs.plan.plan import Plan
from launcher.runs.plan.program_options import key_of
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin

SHAPES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups"),
    *("kv_channels", "max_position_embeddings"),
    *("normalization", "position_embedding_type", "num_experts"),
)
"""Options that a checkpoint's tensors have their names and sizes by."""


def room(what: str, each: int, free: int, config: RunConfig, done: int) -> Iterator[Finding]:
    """Room for one checkpoint of `each` bytes, and for all that the run will write."""
    if each > free:
        yield Finding(
            what,
            f"One checkpoint takes about {size(each)}: weights and optimizer.",
            "Free some, or --set checkpoint.save to a folder with more.",
        )
        return
    at = saves(config, done, iterations(config))
    keep = config.checkpoint.keep
    wanted = min(len(at), keep + 1) if keep else len(at)
    if wanted * each <= free:
        return
    fits = free // each
    yield Finding(
        what,
        f"{wanted} checkpoints of about {size(each)} make {size(wanted * each)}: it is full "
        + (f"at iteration {at[fits]}." if fits < len(at) else "before the end."),
        "Set checkpoint.keep, a larger checkpoint.save_interval, or another folder.",
        refuse=False,
    )


def iterations(config: RunConfig) -> int:
    """The training's length in iterations, 0 where it isn't known."""
    training = config.training
    if training.train_samples and training.global_batch_size:
        return -(-training.train_samples // training.global_batch_size)
    return training.train_iters or 0


def saves(config: RunConfig, done: int, total: int) -> list[int]:
    """The iterations after `done` at which a checkpoint is saved: each interval, and the end."""
    step = config.checkpoint.save_interval or total or 1
    at = list(range((done // step + 1) * step, total + 1, step))
    return at if total <= done or total % step == 0 else [*at, total]


def check_loaded(origin: Origin, plan: Plan, load: SavedCheckpoints | None) -> Iterator[Finding]:
    """The newest checkpoint of the folder that is loaded from, and whether it is of this model."""
    if load is None:
        return
    for name in SHAPES:
        was, given = load.options.get(name), plan.options.get(name)
        if was is not None and given is not None and str(was) != str(given):
            yield Finding(
                f"{origin.place(key_of(name))}: {given}, and iteration {load.newest} in "
                f"{origin.place('checkpoint.load')} was saved with {was}",
                "Its tensors have other sizes than this model's: it can't be loaded.",
                f"--set {key_of(name)}={was}, or another folder.",
            )
    sizes = [model_size.vocabulary_of(False, options) for options in (load.options, plan.options)]
    if None not in sizes and len({*sizes}) > 1:
        yield Finding(
            f"{origin.place('data.vocab_size')}: padded to {sizes[1]}, and iteration {load.newest} "
            f"in {origin.place('checkpoint.load')} was saved with {sizes[0]}",
            "Its embeddings have another size than this model's: it can't be loaded.",
            "Set data.vocab_size and model.make_vocab_size_divisible_by × TP as they were, or "
            "another folder.",
        )
    if not load.broken:
        return
    folder, problem = load.broken[-1]
    goes_on = f"The run goes on from iteration {load.newest}, the newest complete one."
    none = "No checkpoint in that folder is complete, so the run would begin anew."
    refuse = load.newest is None
    yield Finding(
        f"{origin.place('checkpoint.load')}: {folder}: {problem}",
        none if refuse else goes_on,
        "Move them away to begin from the start."
        if refuse
        else f"Move {folder} away to be rid of this warning.",
        refuse=refuse,
    )
