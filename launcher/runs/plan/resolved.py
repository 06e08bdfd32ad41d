"""Resolves a run file once, for one image and one number of GPUs: what a Plan is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from launcher.base.errors import UsageError
from launcher.base.settings import PACKAGE
from launcher.runs.plan import layout, mounts, program, render
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.layout import BrokenRule, Layout
from launcher.runs.plan.mounts import Host, Mount, path_of
from launcher.runs.plan.program import Program, ProgramKind
from launcher.runs.plan.program_options import Option, Value, given
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin
from launcher.runs.runfile.values import Gpus, parse_gpus

MICRO_BATCH = "--micro-batch-size"
SPLIT = "--split"


@dataclass(frozen=True)
class Resolved:
    """A run file with all that follows from it, the image and the GPUs.

    Only two functions replace it by another: `splits.without_empty` and `auto.decide`.

    `config` has the user's paths, `seen` the same as the run sees them. `options` are what the
    run file gives the program, in order; `rest` the words behind `--`, which come after them.
    """

    config: RunConfig
    seen: RunConfig
    origin: Origin
    facts: ImageFacts
    gpus: Gpus
    processes: int
    program: Program
    layout: Layout
    mounts: tuple[Mount, ...]
    options: tuple[Option, ...]
    rest: tuple[str, ...] = ()

    @cached_property
    def values(self) -> Mapping[str, Value]:
        """What each option comes to, by its plain name: the last of several counts."""
        return render.valued([*self.options, *given(self.rest)])

    @cached_property
    def faults(self) -> list[BrokenRule]:
        """Every rule of the layout that the run file breaks."""
        return layout.faults(self.config, self.layout, self.facts.release)

    def with_config(self, config: RunConfig) -> Resolved:
        """The same, with a run file that spells it out."""
        return replace(self, config=config)

    def with_bf16(self) -> Resolved:
        """The same in bf16, where `auto` was taken for fp16."""
        options = (
            replace(option, name="--bf16", where="training.bf16")
            if option.name == "--fp16" and option.where == "training.fp16"
            else option
            for option in self.options
        )
        return replace(self, options=tuple(options))

    def with_split(self, split: str) -> Resolved:
        """The same with another share of documents for each split."""
        options = [option for option in self.options if option.name != SPLIT]
        data = self.config.data.model_copy(update={"split": split})
        config = self.config.model_copy(update={"data": data})
        return replace(self, config=config, options=(*options, Option(SPLIT, split, "data.split")))

    def with_micro_batch(self, size: int) -> Resolved:
        """The same with a micro-batch of `size`, which the run file then has, too."""
        options = (
            replace(option, value=size) if option.name == MICRO_BATCH else option
            for option in self.options
        )
        training = self.config.training.model_copy(update={"micro_batch_size": size})
        config = self.config.model_copy(update={"training": training})
        return replace(self, config=config, options=tuple(options))


def processes_of(config: RunConfig, gpus: Gpus) -> int:
    """As many processes as GPUs made visible; on the CPU, what the run file asks for."""
    if gpus.count is None:
        raise UsageError("gpus: the number for `all` isn't known here", "Give their number.")
    return gpus.count or config.processes


def resolve(
    config: RunConfig,
    origin: Origin,
    facts: ImageFacts,
    host: Host,
    run: str = "",
    *,
    gpus: Gpus | None = None,
    rest: tuple[str, ...] = (),
) -> Resolved:
    """Settle a run file for the image of `facts`, for the run of that id.

    `gpus` is the run file's request with its count found out; `rest` goes to the program as it is.
    Raises UsageError for a path, or a number of GPUs, that means nothing here.
    """
    gpus = gpus or parse_gpus(config.gpus)
    processes = processes_of(config, gpus)
    started = _program(config, host)
    where = layout.layout(config, processes)
    saving = _saving_when_stopped(config, started)
    seen, mounted = mounts.mounted(saving, started, host, run)
    options = render.options(layout.with_precision(seen), started.kind, where, facts.release)
    return Resolved(
        config=config,
        seen=seen,
        origin=origin,
        facts=facts,
        gpus=gpus,
        processes=processes,
        program=started,
        layout=where,
        mounts=mounted,
        options=tuple(options),
        rest=rest,
    )


def _program(config: RunConfig, host: Host) -> Program:
    """The program, by its path as the run sees it."""
    started = program.program(config.program, scripts(config, host))
    if started.host and not host.contained:
        return replace(started, argv=(path_of(started.host, host),))
    if started.name == program.EXAMPLE and not (started.host or host.contained):
        return replace(started, argv=(str(PACKAGE / "images/builder" / program.EXAMPLE),))
    return started


def scripts(config: RunConfig, host: Host) -> str:
    """The folder of upstream's programs, as the run sees it."""
    if not config.source:
        return program.SOURCE
    return program.CHECKOUT if host.contained else path_of(config.source, host)


def _saving_when_stopped(config: RunConfig, started: Program) -> RunConfig:
    """Megatron's programs save when asked to stop only with this option: here, where they can."""
    checkpoint = config.checkpoint
    if started.kind is ProgramKind.SCRIPT or not checkpoint.save:
        return config
    if checkpoint.exit_signal_handler is not None:
        return config
    update = {"checkpoint": checkpoint.model_copy(update={"exit_signal_handler": True})}
    return config.model_copy(update=update)
