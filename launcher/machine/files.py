"""Checks of what a run reads and writes: data, folders, checkpoints, and room for them."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.machine import memory
from launcher.machine.finding import Finding
from launcher.machine.gpus import GB
from launcher.machine.machine import Folder, Machine
from launcher.plan.config import RunConfig
from launcher.plan.layout import Layout
from launcher.plan.source import Origin

MB = 1e6


def check(config: RunConfig, origin: Origin, where: Layout, machine: Machine) -> Iterator[Finding]:
    """All of these."""
    for dataset in machine.datasets:
        if dataset.problem:
            yield Finding(
                f"{origin.of('data.path')}: {dataset.problem}",
                "Megatron would stop, or read other tokens than were written.",
                "Make the two again from the text, or copy both anew.",
                refuse=True,
            )
    for key, path in machine.unseen:
        yield Finding(
            f"{origin.of(key)}: {path}: the engine sees something else there",
            "It has mounts of its own, without those made after its start: what the run writes "
            "there would be lost.",
            "Start the engine again, once all is mounted.",
            refuse=True,
        )
    for folder in machine.folders:
        if folder.problem:
            yield Finding(
                f"{origin.of(folder.key)}: {folder.path}: {folder.problem}",
                "What the run writes there would be lost.",
                "Give another folder, change its owner, or set resources.user.",
                refuse=True,
            )
        elif folder.key == "checkpoint.save":
            yield from _room(config, origin, where, machine, folder)
    yield from _loadable(config, origin, machine)


def _loadable(config: RunConfig, origin: Origin, machine: Machine) -> Iterator[Finding]:
    """The newest checkpoint of the folder that is loaded from."""
    load = machine.load
    if load is None or not load.broken:
        return
    folder, problem = load.broken[-1]
    what = f"{origin.of('checkpoint.load')}: {folder}: {problem}"
    if load.newest is None:
        yield Finding(
            what,
            "No checkpoint in that folder is complete, so the run would begin anew.",
            "Move them away to begin from the start.",
            refuse=True,
        )
        return
    yield Finding(
        what,
        f"The run goes on from iteration {load.newest}, the newest complete one.",
        f"Move {folder} away to be rid of this warning.",
        refuse=False,
    )


def _room(
    config: RunConfig, origin: Origin, where: Layout, machine: Machine, folder: Folder
) -> Iterator[Finding]:
    """Room for one checkpoint, and for all that the run will write."""
    each, total = memory.bytes_of_checkpoint(config, where), iterations(config)
    if each is None or folder.free is None:
        return
    what = f"{origin.of('checkpoint.save')}: {_told(folder.free)} free for {folder.path}"
    if each > folder.free:
        yield Finding(
            what,
            f"One checkpoint takes about {_told(each)}: weights and optimizer.",
            "Free some, or --set checkpoint.save to a folder with more.",
            refuse=True,
        )
        return
    at = saves(config, machine.load.newest or 0 if machine.load else 0, total)
    keep = config.checkpoint.keep
    wanted = min(len(at), keep + 1) if keep else len(at)
    if wanted * each <= folder.free:
        return
    fits = folder.free // each
    yield Finding(
        what,
        f"{wanted} checkpoints of about {_told(each)} make {_told(wanted * each)}: it is full "
        + (f"at iteration {at[fits]}." if fits < len(at) else "before the end."),
        "Set checkpoint.keep, a larger checkpoint.save_interval, or another folder.",
        refuse=False,
    )


def iterations(config: RunConfig) -> int:
    """The training's length in iterations, 0 where it isn't told."""
    training = config.training
    if training.train_samples and training.global_batch_size:
        return -(-training.train_samples // training.global_batch_size)
    return training.train_iters or 0


def saves(config: RunConfig, done: int, total: int) -> list[int]:
    """The iterations after `done` at which a checkpoint is saved: each interval, and the end."""
    step = config.checkpoint.save_interval or total or 1
    at = list(range((done // step + 1) * step, total + 1, step))
    return at if total <= done or total % step == 0 else [*at, total]


def _told(size: float) -> str:
    """'1.7 GB', or '12 MB' of what is small."""
    return f"{size / GB:.1f} GB" if size >= GB / 10 else f"{size / MB:.0f} MB"
