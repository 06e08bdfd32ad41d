"""Makes the plan of a run file: asks the engine and the machine what it needs to know."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.agent import series
from launcher.base.errors import EngineError, LauncherError
from launcher.base.settings import expanded, runs_folder, settings
from launcher.runs import payload
from launcher.runs.backends import backend
from launcher.runs.follow.run_files import caller
from launcher.runs.plan import image_facts, rules
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.job import Backend
from launcher.runs.plan.mounts import Host
from launcher.runs.plan.plan import INFINIBAND, Plan, Stamp, make_plan, rule_input
from launcher.runs.plan.program import ProgramKind, fewest, program
from launcher.runs.plan.render import place
from launcher.runs.plan.resolved import Resolved, resolve
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin, Override, RunRequest, made, overridden
from launcher.runs.runfile.secrets import redacted
from launcher.runs.runfile.values import Gpus, parse_gpus, split

if TYPE_CHECKING:
    from launcher.runs.checks.machine import Gpu

NO_PROGRAM = "./shell"
"""Placeholder program for containers that run a command instead of training."""


NETWORK = "resources.network"
SOCKETS = ("docker.sock", "podman.sock", "containerd.sock", "crio.sock")
"""By which engines are asked, whose containers may be root's."""


@dataclass(frozen=True)
class PlannedRun:
    """A plan, the run file that it is made of, notes on what `auto` came to, and warnings."""

    plan: Plan
    resolved: Resolved
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def assemble(
    asked: RunRequest,
    chosen: Backend,
    stamp: Stamp,
    *,
    dry: bool = False,
    visible: Sequence[Gpu] | None = None,
) -> PlannedRun:
    """The plan on the backend `chosen`; with `dry`, neither engine nor image need be there.

    `visible` are the GPUs that decide what `auto` comes to: this machine's, unless they are given.
    Raises UsageError and EngineError.
    """
    config, origin = _one_folder(asked.config, asked.cwd), asked.origin
    if chosen.scheduled and origin.is_presets(NETWORK):  # a cluster has its own
        config = overridden(config, [Override(NETWORK, {NETWORK: None})])
    asked = replace(asked, config=config)
    try:
        told, rootless = _ask(config, origin, chosen, dry=dry)
        facts = _known(asked, told)
        host = _host(chosen, asked, rootless=rootless)
        gpus = counted(config, chosen)
    except EngineError:
        _check_alone(asked, chosen, stamp)  # the file's faults are reported first
        raise
    resolved = resolve(config, origin, facts, host, stamp.run, gpus=gpus, rest=asked.rest)
    resolved, notes = _decided(resolved, chosen, visible)
    plan = make_plan(resolved, host, stamp, tie=asked.tie)
    return PlannedRun(
        plan, resolved, tuple(notes), (*_ignored(resolved), *_opened(plan), *_unused(plan, facts))
    )


def _decided(
    resolved: Resolved, chosen: Backend, visible: Sequence[Gpu] | None
) -> tuple[Resolved, list[str]]:
    """The run without `auto` where GPUs decide, and empty splits dropped; notes on it."""
    from launcher.runs.checks import auto, gather

    dropped = list[str]()
    if documents := gather.documents(resolved.mounts):
        from launcher.runs.checks import splits

        resolved, dropped = splits.without_empty(resolved, documents)
    if not auto.is_open(resolved.config):
        return resolved, dropped
    if visible is None:
        visible = ()
        with suppress(EngineError):  # where that matters, it is reported as the run starts
            visible = gather.visible(resolved.gpus, chosen)
    resolved, notes = auto.decide(resolved, visible)
    return resolved, [*dropped, *notes]


def _unused(plan: Plan, facts: ImageFacts) -> Iterator[str]:
    """What an older image carries in vain, and what its Megatron is taken for."""
    if facts.instead_of is not None:
        there = f"Megatron {facts.instead_of}".rstrip()
        yield f"{there} is treated as {facts.release}, but may differ from it"
    if facts.runner:
        yield f"{plan.image} has the runner of launcher {facts.runner} in it, which isn't used"


def _opened(plan: Plan) -> Iterator[str]:
    """What opens this machine to the program, or a secret to others, as warnings."""
    for mount in plan.mounts:
        if mount.source == "/" and not mount.read_only:
            yield f"{mount.key}: the program can change all files of this machine"
        if os.path.basename(mount.source) in SOCKETS:
            yield f"{mount.key}: by {mount.source} the program can do all that the engine can"
    if redacted(plan.argv) != plan.argv:
        yield (
            "a secret among the program's arguments: this machine's users see it in the list of"
            " processes, and the engine keeps it\n  Give it as a variable: secrets: {NAME: FILE}"
        )


def _ignored(resolved: Resolved) -> Iterator[str]:
    """What the program doesn't heed of what it is given, as warnings."""
    if resolved.program.kind is ProgramKind.SCRIPT:
        return
    told, where = rule_input(resolved, resolved.gpus), place((), resolved.origin)
    for problem, mend in rules.broken(rules.IGNORED, told, resolved.facts.release, where):
        yield f"{problem}\n  {mend}"


def _one_folder(config: RunConfig, cwd: str) -> RunConfig:
    """`config` with one name for the folder that is saved to and loaded from, links or not."""
    checkpoint = config.checkpoint
    if not (checkpoint.save and checkpoint.load):
        return config
    save, load = (Path(cwd, expanded(one)) for one in (checkpoint.save, checkpoint.load))
    if os.path.realpath(save) != os.path.realpath(load):
        return config
    update = {"checkpoint": checkpoint.model_copy(update={"load": checkpoint.save})}
    return config.model_copy(update=update)


def _check_alone(asked: RunRequest, chosen: Backend, stamp: Stamp) -> None:
    """Raise UsageError for what is wrong whatever the image and the machine: see make_plan."""
    config, origin, gpus = asked.config, asked.origin, parse_gpus(asked.config.gpus)
    if gpus.count is None:
        gpus = replace(gpus, count=fewest(config))
    elif chosen.every_node:
        gpus = split(gpus, config.nodes.count)
    planned = _planned(config, origin) if chosen.contained else ImageFacts(config.image.megatron)
    facts = _known(asked, planned)
    host = _host(chosen, asked, rootless=False)
    make_plan(
        resolve(config, origin, facts, host, stamp.run, gpus=gpus, rest=asked.rest), host, stamp
    )


def release(asked: RunRequest, chosen: Backend) -> str | None:
    """The run's Megatron release, also without its image, or None; raises as `assemble`."""
    return _known(asked, _ask(asked.config, asked.origin, chosen, dry=True)[0]).release


def _known(asked: RunRequest, facts: ImageFacts) -> ImageFacts:
    """The facts, with those of a checkout that takes the place of the image's Megatron.

    A series that nobody has described is the one that the run file takes it for.
    """
    if asked.config.source:
        from launcher.images.sources.megatron_source import own_version

        release = own_version(Path(asked.cwd, expanded(asked.config.source)))
        facts = replace(facts, release=release, scripts=True)
    taken = asked.config.megatron
    if taken and not (facts.release and series.is_known(facts.release)):
        return replace(facts, release=taken.as_, instead_of=facts.release or "")
    return facts


def new_stamp() -> Stamp:
    """A run's id, and the time."""
    now = datetime.now(timezone.utc).replace(microsecond=0)
    return Stamp(run=os.urandom(4).hex(), created=now.isoformat())


def _ask(
    config: RunConfig, origin: Origin, chosen: Backend, *, dry: bool
) -> tuple[ImageFacts, bool]:
    """What is known of the image, and whether its root is this user; a dry run does without."""
    try:
        found = chosen.facts(image_facts.reference(config.image))
        rootless = bool(caller().uid) and chosen.rootless()  # for root it makes no difference
    except EngineError:
        if not dry:
            raise
        found, rootless = None, False
    return _facts(config, origin, chosen, found, dry=dry), rootless


def _facts(
    config: RunConfig, origin: Origin, chosen: Backend, found: ImageFacts | None, *, dry: bool
) -> ImageFacts:
    """What is known of the image: from itself, or for a dry run without it from the matrix."""
    if found is not None:
        own = bool(program(config.program).host)
        if not (chosen.contained or found.release or config.source or own):
            raise EngineError(
                "python3 here has no Megatron-Core",
                "Install megatron-core, or give --source PATH, a Megatron-LM checkout.",
            )
        return replace(found, release=found.release or config.image.megatron)
    if not (dry or chosen.scheduled):
        raise image_facts.absent(config.image)
    if not chosen.contained:
        return ImageFacts(config.image.megatron)
    return replace(
        _planned(config, origin), packages=_built_here(config) if chosen.scheduled else None
    )


def _built_here(config: RunConfig) -> frozenset[str] | None:
    """The packages of an image that a scheduler's machines are to have, where this one has it."""
    with suppress(LauncherError):
        found = backend("docker").facts(image_facts.reference(config.image))
        return found.packages if found else None
    return None


def _planned(config: RunConfig, origin: Origin) -> ImageFacts:
    from launcher.images.matrix.matrix_file import load_matrix

    if config.image.name:
        return ImageFacts(config.image.megatron)
    return image_facts.planned(config.image, load_matrix(), origin.place)


def counted(config: RunConfig, chosen: Backend) -> Gpus:
    """The GPUs asked for, on each node; what all means is asked of the backend."""
    asked = parse_gpus(config.gpus)
    if asked.everything:
        count = chosen.count_gpus()
        if count is None:
            raise EngineError(
                "no GPUs found, so --gpus all means nothing here", "Give their number."
            )
        asked = replace(asked, count=count)
    several = config.nodes.count > 1 and chosen.every_node
    return split(asked, config.nodes.count) if several else asked


def _host(chosen: Backend, asked: RunRequest, *, rootless: bool) -> Host:
    who, cache = caller(), settings().cache
    if (
        chosen.contained and os.getuid() != who.uid
    ):  # sudo: root's cache may be that of several users
        cache /= f"of-{who.uid}"
    return Host(
        who.uid,
        who.gid,
        str(Path.home()),
        asked.cwd,
        str(cache),
        contained=chosen.contained,
        rootless=rootless,
        every_node=chosen.every_node,
        scheduled=chosen.scheduled,
        groups=who.groups,
        runs=str(runs_folder()),
        payload=payload.write_payload(runs_folder(), asked.payload_digest),
        infiniband=not chosen.scheduled and os.path.isdir(INFINIBAND),
    )


def bare_plan(chosen: Backend, image: Mapping[str, str], gpus: str, argv: Sequence[str]) -> Plan:
    """The plan of a container that runs `argv` without a network or mounts."""
    values = {"name": "probe", "image": image, "gpus": gpus, "program": NO_PROGRAM}
    config = made(values | {"resources": {"network": "none"}}, "image probe")
    asked = RunRequest(config, Origin("image probe", {}, {}), os.getcwd())
    return replace(assemble(asked, chosen, new_stamp()).plan, argv=tuple(argv), mounts=())
