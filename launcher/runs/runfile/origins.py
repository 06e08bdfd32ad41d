"""Finds a run file, lays the command line over it, and knows where each value stands."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from launcher.base import yamlfile
from launcher.base.errors import UsageError, nearest
from launcher.runs.runfile.config import ImageRequest, RunConfig
from launcher.runs.runfile.secrets import HIDDEN, holds_secret

if TYPE_CHECKING:
    from yaml import Node

PRESETS = Path(__file__).parents[2] / "presets"
EXTENDS, DEEPEST = "extends", 8
"""The key of the file that a run file is laid over, and how many may be laid so."""

BASE_60 = re.compile(r"\d[\d-]*(:\d\d)+")
"""24:00:00 and 1-12:00:00, for which no quotes get through a shell."""

PRESET = "preset "
"""What the name of a preset begins with in messages."""
NODE_RANKS = (
    "PET_NODE_RANK",
    "SLURM_NODEID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "JOB_COMPLETION_INDEX",
)
"""Where torchrun and Kubeflow, Slurm, Open MPI, MPICH and Kubernetes' indexed jobs give a process
that is alone on its node which one that is."""

LOCAL_RANKS = ("SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""Where Slurm, Open MPI and MPICH give a process its number on its node."""

FREE = ("env", "megatron_args")
"""The sections whose keys the user chooses, so that any of them may name a secret."""


@dataclass(frozen=True)
class Origin:
    """Where the values of a configuration stand: lines of a file, or the command line."""

    name: str
    lines: dict[str, int]
    overrides: dict[str, str]
    base: Origin | None = None
    """Of the file that this one extends."""

    def place(self, key: str) -> str:
        """'gpt2.yaml:12: model.num_layers', or the argument that set it."""
        shown = yamlfile.printable(key)
        for set_key, argument in self.overrides.items():
            if key == set_key or key.startswith(f"{set_key}."):
                return f"{argument}: {shown}"
        if self.base and key not in self.lines and self.base.has(key):
            return self.base.place(key)
        known = key
        while known and known not in self.lines:
            known = known.rpartition(".")[0]
        if not known and self.base:
            return self.base.place(key)
        line = f":{self.lines[known]}" if known else ""
        return f"{self.name}{line}: {shown}"

    def has(self, key: str) -> bool:
        """Whether a key stands in the file, or in one that it extends."""
        return key in self.lines or bool(self.base and self.base.has(key))

    def is_presets(self, key: str) -> bool:
        """Whether a preset says it: neither a file of the user's nor an argument."""
        return self.place(key).startswith(PRESET)


@dataclass(frozen=True)
class Override:
    """An argument of the command line, and the values it puts under dotted keys."""

    argument: str
    values: dict[str, Any]


@dataclass(frozen=True)
class RunRequest:
    """What a user asks for: the configuration, where its values stand, and the arguments beside.

    Relative paths start in `cwd`. `payload_digest` names an earlier run's payload, which is used
    again; "" is this launcher's own.
    """

    config: RunConfig
    origin: Origin
    cwd: str
    rest: tuple[str, ...] = ()
    tie: bool = False
    payload_digest: str = ""


def load(name: str, overrides: list[Override]) -> tuple[RunConfig, Origin]:
    """The run file or preset `name` with `overrides` laid over it. Raises UsageError."""
    label, path = find(name)
    root, data, origin = _read(label, path)
    set_by = {key: override.argument for override in overrides for key in override.values}
    origin = replace(origin, overrides=set_by)
    if config := _at_once(data, overrides):
        return config, origin
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        told = yamlfile.describe(error, root, label, RunConfig, holds_secret)
        raise UsageError(told) from error
    return overridden(config, overrides), origin


def _read(label: str, path: Path, above: tuple[Path, ...] = ()) -> tuple[Node, Any, Origin]:
    """A file's tree over those that it extends, and its values' places. Raises UsageError."""
    root = yamlfile.tree(yamlfile.read(path, label), label)
    if root is None:
        raise UsageError(f"{label}:1: the file is empty")
    data, origin = yamlfile.value(root, label), Origin(label, yamlfile.lines(root), {})
    if not isinstance(data, dict) or EXTENDS not in data:
        return root, data, origin
    name, here = data.pop(EXTENDS), path.resolve()
    if not isinstance(name, str):
        raise UsageError(f"{origin.place(EXTENDS)}: the name of a run file or a preset is wanted")
    if here in above or len(above) == DEEPEST:
        files = " extends ".join(each.name for each in (*above, here))
        raise UsageError(f"{origin.place(EXTENDS)}: {files}, and so on")
    try:
        found = find(name, path.parent)
    except UsageError as error:
        raise UsageError(f"{origin.place(EXTENDS)}: {error.problem}", error.remedy) from error
    _, base, beneath = _read(*found, (*above, here))
    return root, _over(base, data), replace(origin, base=beneath)


def _over(base: Any, data: Any) -> Any:
    """`data` laid over `base`: a mapping's keys one by one, anything else as a whole."""
    if not (isinstance(base, dict) and isinstance(data, dict)):
        return data
    return base | {key: _over(base.get(key), value) for key, value in data.items()}


def _at_once(data: Any, overrides: list[Override]) -> RunConfig | None:
    """The file and what is laid over it, validated as one; None for what has faults."""
    with suppress(TypeError, ValidationError):
        if "image" in data:
            data = data | {"image": ImageRequest.spelled_out(data["image"])}  # type: ignore[operator]
        for override in overrides:
            for key, value in override.values.items():
                data = _with(data, key.split("."), value)
        return RunConfig.model_validate(data)
    return None


def _with(data: Any, keys: list[str], value: Any) -> dict[str, Any]:
    """A mapping with the value under `keys`. Raises TypeError where one on the way is none."""
    if not isinstance(data, dict):
        raise TypeError
    first, *rest = keys
    return {**data, first: _with(data.get(first, {}), rest, value) if rest else value}


def numbered(
    config: RunConfig, origin: Origin, environ: Mapping[str, str]
) -> tuple[RunConfig, Origin]:
    """The run of several nodes as this node's, by the variables of what started one process on it.

    So the same command works on all nodes. What the run file or an argument says counts more.
    Raises UsageError where several launchers were started on one node.
    """
    if config.nodes.count == 1:
        return config, origin
    _check_alone(environ)
    named = {"nodes.rank": NODE_RANKS, "nodes.master_addr": ("PET_MASTER_ADDR",)}
    found = list[Override]()
    for key, variables in named.items():
        told = origin.has(key) or key in origin.overrides
        name = next((name for name in variables if environ.get(name)), None)
        if name and not told:
            text = environ[name]
            value = int(text) if text.isdecimal() and key == "nodes.rank" else text
            found.append(Override(f"${name}", {key: value}))
    said = {key: override.argument for override in found for key in override.values}
    return overridden(config, found), replace(origin, overrides=origin.overrides | said)


def _check_alone(environ: Mapping[str, str]) -> None:
    """Raise UsageError in the second and later launcher of a node: one starts all its ranks."""
    for name in LOCAL_RANKS:
        if environ.get(name, "").isdecimal() and int(environ[name]) > 0:
            raise UsageError(
                f"this is task {environ[name]} of its node (${name}), and each started a launcher",
                "One launcher starts all ranks of a node: srun --ntasks-per-node=1, or mpirun "
                "--map-by ppr:1:node.",
            )


def find(name: str, folder: Path | None = None) -> tuple[str, Path]:
    """The name in messages and the path of a file or preset; relative paths begin in `folder`."""
    path = (folder or Path()) / name
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError:  # of a name that no file can have
        is_file = is_folder = False
    if is_file:
        return str(path) if folder else name, path
    if is_folder:
        raise UsageError(f"{name} is a folder, not a run file")
    if os.path.dirname(name):  # a path, and no preset's name
        raise UsageError(f"{name}: no such file", _near(path))
    presets = sorted(preset.name for preset in PRESETS.glob("*.yaml"))
    wanted = name if name.endswith(".yaml") else f"{name}.yaml"
    if wanted in presets:
        return f"{PRESET}{wanted}", PRESETS / wanted
    here = sorted(one.name for one in (folder or Path()).glob("*.yaml"))
    raise UsageError(f"no file and no preset {name!r}", nearest(wanted, [*here, *presets]))


def _near(path: Path) -> str:
    """What is there beside a path that isn't: the run files of its folder, or how far it leads."""
    if not path.parent.is_dir():
        return f"There is no folder {path.parent}."
    there = sorted(one.name for one in path.parent.glob("*.yaml"))
    return nearest(path.name, there) if there else f"There is no run file in {path.parent}."


def parse_set(argument: str) -> Override:
    """What `--set a.b=value` asks for; the value is YAML. A secret one isn't shown in messages."""
    key, equals, text = argument.partition("=")
    told = f"--set {yamlfile.printable(argument)}"
    if not equals or not all(key.split(".")):
        raise UsageError(f"{told}: not KEY=VALUE", "For example: --set training.lr=3e-4")
    hidden = f"--set {yamlfile.printable(key)}={HIDDEN}"
    try:
        root = yamlfile.tree(text, told)
        is_time = BASE_60.fullmatch(text)  # which YAML 1.2 takes for text
        value = text if is_time else None if root is None else yamlfile.value(root, told)
    except UsageError as error:
        told = hidden if key in FREE or holds_secret(key, text) else told
        what = error.what if isinstance(error, yamlfile.SurpriseError) else "the value isn't YAML"
        raise UsageError(f"{told}: {what}", error.remedy) from error
    return Override(hidden if holds_secret(key, value) else told, {key: value})


def overridden(config: RunConfig, overrides: list[Override]) -> RunConfig:
    """`config` with the overrides, each checked as if it stood in the file."""
    data = config.model_dump(exclude_unset=True)
    for override in overrides:
        for key, value in override.values.items():
            _put(data, key.split("."), value)
        config = made(data, override.argument)
    return config


def made(values: Mapping[str, Any], told: str) -> RunConfig:
    """The configuration of `values`. Raises UsageError, which calls where they stand `told`."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise UsageError(yamlfile.describe(error, None, told, RunConfig, holds_secret)) from error


def _put(data: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set the value under `keys`; what is no mapping on the way gives place to one."""
    for key in keys[:-1]:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[keys[-1]] = value
