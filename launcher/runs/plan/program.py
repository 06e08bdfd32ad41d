"""What a run starts: our own program, a script of the image's Megatron, or a script of the host."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from functools import cache
from itertools import count
from pathlib import Path

from launcher.agent import series
from launcher.base.errors import Faults
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.layout import layout, listed, neighbours
from launcher.runs.plan.program_options import table
from launcher.runs.runfile.config import Profile, RunConfig
from launcher.runs.runfile.origins import Origin

IMAGE = "/opt/megatron"
SOURCE = f"{IMAGE}/src"
CHECKOUT = f"{IMAGE}/checkout"
HOST_SCRIPTS = "/program"
QUICKSTART = "run_simple_mcore_train_loop.py"
EXAMPLE = "megatron_core_training_example.py"
SKIP = "--iterations-to-skip"
"""The option that names the iterations whose batches are passed over."""

PROGRAMS = Path(__file__).parent / "programs.json"


class ProgramKind(Enum):
    """OURS is launcher.trainer.gpt; UPSTREAM a pretrain_*.py; SCRIPT parses what it likes."""

    OURS = "ours"
    UPSTREAM = "upstream"
    SCRIPT = "script"


@dataclass(frozen=True)
class Program:
    """What the runner starts; `host` is the script's path on the host, "" for one of the image."""

    kind: ProgramKind
    name: str
    argv: tuple[str, ...]
    host: str = ""


@cache
def upstreams() -> dict[str, tuple[str, ...]]:
    """Upstream's programs by their paths, with the series of releases that have each (0.9)."""
    data: dict[str, str] = json.loads(PROGRAMS.read_text(encoding="utf-8"))
    return {path: tuple(text.split()) for path, text in data.items()}


def program(text: str, scripts: str = SOURCE) -> Program:
    """The program a run file names; a path of the host starts with ./, ../, / or ~.

    `scripts` is the folder, as the run sees it, that holds upstream's programs.
    """
    name = text.rpartition("/")[2]
    if text == "gpt":
        return Program(ProgramKind.OURS, "gpt", ("-m", "launcher.trainer.gpt"))
    if text == EXAMPLE:  # in every image, with a command line of its own
        return Program(ProgramKind.SCRIPT, name, (f"{IMAGE}/{EXAMPLE}",))
    if text.startswith(("./", "../", "/", "~")):
        return Program(ProgramKind.SCRIPT, name, (f"{HOST_SCRIPTS}/{name}",), host=text)
    kind = ProgramKind.UPSTREAM if name.startswith("pretrain_") else ProgramKind.SCRIPT
    return Program(kind, name, (f"{scripts}/{text}",))


def check_program(
    started: Program, config: RunConfig, facts: ImageFacts, origin: Origin, world: int
) -> None:
    """Raise UsageError where the image or the run file doesn't suit the program."""
    where, faults = origin.place("program"), Faults()
    if started.kind is ProgramKind.SCRIPT and not started.host and not started.name.endswith(".py"):
        faults.add(
            f"{where}: no program {config.program!r}",
            "gpt, pretrain_gpt.py or another script of the image, or ./mine.py.",
        )
    elif started.argv[0].startswith(SOURCE) and facts.scripts is False:
        faults.add(
            f"{where}: {config.program} isn't there: this Megatron, an sdist or a package, has no "
            "scripts",
            "Use program: gpt, give --source PATH, a Megatron-LM checkout, or build with SOURCE=.",
        )
    _check_series(started, config, facts, origin, faults)
    if started.name == QUICKSTART:
        _check_quickstart(config, origin, world, faults)
    elif started.kind is not ProgramKind.SCRIPT and not (config.data.path or config.data.mock):
        faults.add(
            f"{origin.place('data')}: no data to train on", "Set data.path, or data.mock: true."
        )
    if config.profile:
        _check_profile(started, config, config.profile, origin, world, faults)
    if config.guard.goes_back:
        _check_guard(started, config, facts, origin, faults)
    faults.refuse()


def _check_series(
    started: Program, config: RunConfig, facts: ImageFacts, origin: Origin, faults: Faults
) -> None:
    """Refuse a series of Megatron that nobody has described, unless it is taken for one."""
    if config.megatron and not series.is_known(config.megatron.as_):
        faults.add(
            f"{origin.place('megatron.as')}: no series {config.megatron.as_} is known",
            f"Known are {', '.join(series.known())}.",
        )
    elif started.kind is ProgramKind.OURS and facts.release and not series.is_known(facts.release):
        near = series.nearest(facts.release)
        faults.add(
            f"{origin.place('program')}: gpt doesn't know Megatron {facts.release}",
            f'Take an image with Megatron {near}, or try it as that: megatron: {{as: "{near}"}}.',
        )


def fewest(config: RunConfig) -> int:
    """The fewest processes on each node that can work, for where their number isn't known."""
    if program(config.program).name == QUICKSTART:
        return 2
    model = layout(config, 1).model
    return next(n for n in count(1) if n * config.nodes.count % model == 0)


def _check_profile(
    started: Program,
    config: RunConfig,
    wanted: Profile,
    origin: Origin,
    world: int,
    faults: Faults,
) -> None:
    """Refuse a profile that the program wouldn't write, or would end at."""
    where, iters = origin.place("profile.steps"), config.training.train_iters
    upstream = started.kind is ProgramKind.UPSTREAM and wanted.tool == "torch"
    if started.kind is ProgramKind.SCRIPT:
        faults.add(
            f"{origin.place('profile')}: {config.program} can't trace steps",
            "It is for gpt and pretrain_gpt.py and the like.",
        )
    if iters and wanted.last > iters:
        faults.add(
            f"{where}: the last step is {iters}, by training.train_iters",
            f"Set it to {max(1, iters - 2)}-{iters}, or train longer.",
        )
    elif iters and upstream and wanted.last == iters:
        faults.add(
            f"{where}: Megatron writes a trace when the step after its last begins",
            f"Let it end before step {iters}, or set training.train_iters to {iters + 1}.",
        )
    if most := max((rank for rank in wanted.ranks if rank >= world), default=0):
        faults.add(
            f"{origin.place('profile.ranks')}: no rank {most}: there are {world}, 0 the first",
            "Set it to [0].",
        )
    if wanted.tool == "nsys" and config.gpus == "0":
        faults.add(f"{origin.place('profile.tool')}: nsys traces GPUs", "Set it to torch.")
    if upstream and config.logging.tensorboard_dir:
        faults.add(
            f"{origin.place('logging.tensorboard_dir')}: Megatron writes its traces there, or "
            "beside it, where profile has a folder",
            "--set logging.tensorboard_dir=null while you profile.",
        )


def _check_guard(
    started: Program, config: RunConfig, facts: ImageFacts, origin: Origin, faults: Faults
) -> None:
    """Refuse to go back where there is nothing to go back to, or batches can't be passed over."""
    where, instead = origin.place("guard"), "Set on_nan and on_spike to warn or end."
    if started.kind is ProgramKind.SCRIPT:
        faults.add(f"{where}: {config.program} can't skip batches", instead)
    there = (
        table().options_of(facts.release or "") if started.kind is ProgramKind.UPSTREAM else None
    )
    if there is not None and SKIP not in there:
        since = table().megatron[SKIP]
        faults.add(
            f"{where}: rewind needs {SKIP}: Megatron {facts.release} lacks it, and has it {since}",
            instead,
        )
    if not (config.checkpoint.save and config.checkpoint.save_interval):
        faults.add(
            f"{where}: rewind needs checkpoints to go back to",
            "Set checkpoint.save and checkpoint.save_interval.",
        )


def _check_quickstart(config: RunConfig, origin: Origin, world: int, faults: Faults) -> None:
    """Upstream's quickstart reads no arguments and always splits the model in two."""
    for section in ("model", "training", "parallel", "data", "checkpoint", "logging"):
        if getattr(config, section).model_fields_set:
            faults.add(
                f"{origin.place(section)}: {QUICKSTART} reads no arguments: it would do nothing",
                "Leave the section out, or use program: gpt.",
            )
    if world % 2 or config.nodes.count > 1:
        faults.add(
            f"{origin.place('program')}: {QUICKSTART} needs an even number of processes on one "
            f"node; this is {world} on {config.nodes.count}",
            f"Nearest that work: {listed(neighbours(world, 2))}.",
        )
