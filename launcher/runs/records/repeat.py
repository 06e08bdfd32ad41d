"""Prepares the exact repetition of a run, or of an array's tasks, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from os import listdir
from os.path import isdir, join, lexists, normpath
from typing import TYPE_CHECKING, Any

from launcher.agent import words
from launcher.base.settings import expanded
from launcher.runs.plan.program import ProgramKind, program
from launcher.runs.runfile.config import RunConfig

if TYPE_CHECKING:
    from launcher.runs.plan.job import Backend

SAME = ("argv", "env", "processes_per_node", "nodes", "user", "workdir", "ulimits")
"""What of a plan bears on results."""

SEED = 1234
"""Megatron's and our program's, where none is given (megatron/training/arguments.py)."""


def as_task(config: RunConfig, number: int, cwd: str) -> RunConfig:
    """The configuration of an array's task, a run of its own: in folders named by its number.

    Its seed is `number` above that of all, and the program knows it as in any array of Slurm's.
    """
    config, _ = aside(config, cwd, began=False, named=lambda one: f"{one.rstrip('/')}/{number}")
    found: dict[str, Any] = {"slurm": config.slurm.model_copy(update={"array": None})}
    found["env"] = {**config.env, "SLURM_ARRAY_TASK_ID": str(number)}
    seed = config.training.seed
    if program(config.program).kind is not ProgramKind.SCRIPT or seed is not None:
        own = (SEED if seed is None else seed) + number
        found["training"] = config.training.model_copy(update={"seed": own})
    return config.model_copy(update=found)


def aside(
    config: RunConfig, cwd: str, *, began: bool, named: Callable[[str], str] | None = None
) -> tuple[RunConfig, list[str]]:
    """The configuration with folders of its own to write to, and what to report about them.

    A run that loaded what it saved, and `began` from nothing, is to find nothing again. `named`
    says what is in place of a folder: by default one beside it that nothing has yet.
    """
    checkpoint, logging = config.checkpoint, config.logging
    free = named or partial(_free, cwd=cwd, several=config.nodes.count > 1)
    shared = [mount.source for mount in config.mounts if not mount.read_only]
    profile = config.profile.folder if config.profile else None
    shared += filter(None, [config.resources.workdir, logging.wandb_save_dir, profile])
    notes = [f"it writes to {folder}, as that run did" for folder in shared]
    updates = dict[str, dict[str, Any]]()
    if checkpoint.save:
        save = free(checkpoint.save)
        notes.append(f"it saves to {save}")
        updates["checkpoint"] = {"save": save}
        same = checkpoint.load and _path(checkpoint.load, cwd) == _path(checkpoint.save, cwd)
        if same and not began:
            updates["checkpoint"]["load"] = save
    if logging.tensorboard_dir:
        folder = free(logging.tensorboard_dir)
        updates["logging"] = {"tensorboard_dir": folder}
    sections = {
        name: getattr(config, name).model_copy(update=update) for name, update in updates.items()
    }
    return (config.model_copy(update=sections) if sections else config), notes


def _free(folder: str, cwd: str, *, several: bool) -> str:
    """A name beside the folder's that nothing has yet.

    Of `several` nodes all find the same: to them an empty folder, as another one makes it, is free.
    """
    for number in count(1):
        name = f"{folder.rstrip('/')}-rerun{number if number > 1 else ''}"
        path = _path(name, cwd)
        if not (listdir(path) if several and isdir(path) else lexists(path)):
            break
    return name


def _path(text: str, cwd: str) -> str:
    return normpath(join(cwd, expanded(text)))


def pinned(config: RunConfig, image: Mapping[str, Any], chosen: Backend) -> RunConfig:
    """The configuration with the very image of then, where its name has gone to another one.

    The same configuration where the name still means it, or where the image is gone.
    """
    then, name = image.get("id"), image["name"]
    if not chosen.contained or then is None or chosen.facts(then) is None:
        return config
    if chosen.facts(name) and chosen.identity(name).get("id") == then:
        return config
    by_id = config.image.model_copy(update={"name": then, "tag": None, "extras": []})
    return config.model_copy(update={"image": by_id})


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each part of the plan that isn't what it was, as another launcher makes it."""
    for key in SAME:
        was, found = (_plain(one.get(key), one["run"]) for one in (then, now))
        if was != found:
            yield f"{key} was {was}, and is {found}"


def _plain(value: object, run: str) -> object:
    """The value as it comes back from JSON, with no run's id in paths of its own.

    What a run says of a missing package names the file that asks for it, so that is left out.
    """
    if isinstance(value, Mapping):
        return {key: one for key, one in value.items() if key != words.NEEDS}
    if isinstance(value, list | tuple):
        return [_plain(item, run) for item in value]
    return value.replace(run, "RUN") if isinstance(value, str) else value
