"""Records what a run was made of (image, launcher, machine, files) and finds what has changed."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import __version__
from launcher.agent.checkpoints import folders, lineage
from launcher.base.errors import LauncherError
from launcher.base.settings import expanded
from launcher.runs.plan.plan import Plan
from launcher.runs.records import record
from launcher.runs.runfile.origins import RunRequest
from launcher.runs.runfile.secrets import (
    HIDDEN,
    NAME,
    holds_secret,
    is_secret,
    is_secret_option,
    redacted,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from launcher.runs.plan.job import Backend

IN_IMAGE = "/opt/megatron/build.json"
"""What an image of ours says it was built of: release, commit, patches, the wheel's sha256."""

COMMIT = re.compile("[0-9a-f]{40,64}")

HASHED = 16 << 20
"""Bytes of a file up to which its content is compared, and beyond which its size and time are."""


def facts_of(
    plan: Plan, asked: RunRequest, chosen: Backend, machine: DataclassInstance | None
) -> dict[str, Any]:
    """The facts of a run that is about to start; `machine` as preflight saw it, None unseen.

    config: the run file with every default filled in; secrets are left out of it
    image: what the backend knows it by, its digests and labels; or this environment's versions
    source: the checkout's commit, with +edited where its files differ from it; or unversioned
    files: those that are read, by path: size in bytes, time, and of small ones the sha256
    began: the folder of the checkpoint that it goes on from, "" where it starts from nothing
    """
    return {
        "launcher": __version__,
        "host": _host(),
        "image": dict(chosen.identity(plan.image)),
        "source": _revision(asked),
        "files": {path: _file(Path(path)) for path in sorted(_read_only(plan))},
        "began": _began(plan),
        "machine": asdict(machine) if machine else None,
        "config": record.without_secrets(asked.config)[0],
    }


def kept_plan(plan: Plan) -> dict[str, Any]:
    """The plan as it is kept: a secret's value is left out, as if it were the launcher's own.

    So is what only this one run is given.
    """
    env = {name: None if is_secret(name, value) else value for name, value in plan.env}
    env.pop(lineage.VARIABLE, None)
    options = {
        name: HIDDEN if is_secret_option(name, value) or holds_secret("", value) else value
        for name, value in plan.options.items()
        if NAME.fullmatch(name)  # another is a value that begins with dashes
    }
    return asdict(plan) | {"argv": redacted(plan.argv), "options": options, "env": env}


def write_facts(plan: Plan, facts: Mapping[str, Any]) -> None:
    """Write both beside the run's record. Raises UsageError where they can't be kept."""
    record.put(plan.run, record.PLAN, kept_plan(plan))
    record.put(plan.run, record.FACTS, facts)


def _host() -> dict[str, Any]:
    system = platform.uname()
    return {
        "name": system.node,
        "system": f"{system.system} {system.release} {system.machine}",
        "python": platform.python_version(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _revision(asked: RunRequest) -> str | None:
    if not asked.config.source:
        return None
    from launcher.images.sources.megatron_source import revision

    try:
        return revision(Path(asked.cwd, expanded(asked.config.source)))
    except (LauncherError, OSError):  # no git here, or one that doesn't trust the folder
        return "unversioned"


def _read_only(plan: Plan) -> Iterator[str]:
    """The files that the run reads; folders aren't looked into, and secrets not at all."""
    for mount in plan.mounts:
        secret = mount.key.startswith("secrets.")
        if mount.read_only and not secret and os.path.isfile(mount.source):
            yield mount.source


def _file(path: Path) -> dict[str, Any]:
    told = path.stat()
    found: dict[str, Any] = {"size": told.st_size, "modified": told.st_mtime_ns}
    if told.st_size <= HASHED:
        with suppress(PermissionError):  # the run's user may read it
            found["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _began(plan: Plan) -> str:
    """The checkpoint that is newest where the run loads from."""
    for mount in plan.mounts:
        folder = mount.key in ("checkpoint.load", "checkpoint.save")
        if folder and plan.options.get("load") == mount.target:
            newest = folders.newest_complete(Path(mount.source))
            return str(newest.folder) if newest else ""
    return ""


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each fact that bears on a run's results and isn't what it was."""
    lines = []
    was, now_is = then["image"].get("id"), now["image"].get("id")
    if was != now_is:
        name = now["image"].get("name", "")
        lines.append(f"the image {name} is another one: {was}, now {now_is}")
    for key, what in (("launcher", "the launcher"), ("source", "the checkout")):
        if then[key] != now[key]:
            lines.append(f"{what} was {then[key]}, and is {now[key]}")
    source = now["source"]
    if source and source == then["source"] and not COMMIT.fullmatch(source):
        lines.append(f"what was in the checkout isn't known: {source}")
    for path, file in then["files"].items():
        there = now["files"].get(path, {})
        keys = ("sha256",) if "sha256" in file and "sha256" in there else ("size", "modified")
        if any(file[key] != there.get(key) for key in keys):
            lines.append(f"{path} is not the file that it was")
    if then["began"] != now["began"]:
        began, begins = then["began"] or "no checkpoint", now["began"] or "no checkpoint"
        lines.append(f"it began from {began}, and would begin from {begins}")
    gpus = [_gpus(facts["machine"]) for facts in (then, now)]
    if None not in gpus and gpus[0] != gpus[1]:
        lines.append(f"the GPUs were {gpus[0]}, and are {gpus[1]}")
    return lines


def _gpus(machine: Mapping[str, Any] | None) -> str | None:
    """Their names, None where they weren't looked for."""
    listed = machine["gpus"] if machine else None
    return None if listed is None else ", ".join(gpu["name"] for gpu in listed) or "none"
