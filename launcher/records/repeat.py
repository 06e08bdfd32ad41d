"""What repeats a run: the same configuration, image and beginning, and a place of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from os import listdir
from os.path import isdir, join, lexists, normpath
from typing import TYPE_CHECKING, Any

from launcher.plan.config import RunConfig
from launcher.settings import expanded

if TYPE_CHECKING:
    from launcher.plan.job import Backend

SAME = ("argv", "env", "processes_per_node", "nodes", "user", "workdir", "ulimits")
"""What of a plan bears on results."""


def aside(config: RunConfig, cwd: str, *, began: bool) -> tuple[RunConfig, list[str]]:
    """The configuration with folders of its own to write to, and what to tell of them.

    A run that loaded what it saved, and `began` from nothing, is to find nothing again.
    """
    checkpoint, logging, several = config.checkpoint, config.logging, config.nodes.count > 1
    shared = [mount.source for mount in config.mounts if not mount.read_only]
    profile = config.profile.folder if config.profile else None
    shared += filter(None, [config.resources.workdir, logging.wandb_save_dir, profile])
    notes = [f"it writes to {folder}, as that run did" for folder in shared]
    updates = dict[str, dict[str, Any]]()
    if checkpoint.save:
        save = _free(checkpoint.save, cwd, several=several)
        notes.append(f"it saves to {save}")
        updates["checkpoint"] = {"save": save}
        same = checkpoint.load and _path(checkpoint.load, cwd) == _path(checkpoint.save, cwd)
        if same and not began:
            updates["checkpoint"]["load"] = save
    if logging.tensorboard_dir:
        folder = _free(logging.tensorboard_dir, cwd, several=several)
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
    by_id = config.image.model_copy(update={"name": then, "tag": None})
    return config.model_copy(update={"image": by_id})


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each part of the plan that isn't what it was, as another launcher makes it."""
    for key in SAME:
        was, found = (_plain(one.get(key), one["run"]) for one in (then, now))
        if was != found:
            yield f"{key} was {was}, and is {found}"


def _plain(value: object, run: str) -> object:
    """The value as it comes back from JSON, with no run's id in paths of its own."""
    if isinstance(value, list | tuple):
        return [_plain(item, run) for item in value]
    return value.replace(run, "RUN") if isinstance(value, str) else value
