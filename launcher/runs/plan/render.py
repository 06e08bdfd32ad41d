"""Renders a run file as the training program's options, checked against what the program takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from launcher.agent import compat, series
from launcher.agent.ranks.exit_codes import OptionError
from launcher.base.errors import Faults, UsageError
from launcher.runs.plan import program_options, rules
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.layout import Layout, micro_batch, with_precision
from launcher.runs.plan.program import Program, ProgramKind, program
from launcher.runs.plan.program_options import SECTIONS, THE_RUNNERS, Option, Value, own_keys
from launcher.runs.runfile.config import Profile, RunConfig
from launcher.runs.runfile.origins import Origin
from launcher.trainer.gpt import arguments as ours

NULL_TOKENIZER = "NullTokenizer"


def null_adds_one(release: str | None) -> bool:
    """Whether NullTokenizer adds an end-of-document token to the size that it is given."""
    return series.has(release, "NullTokenizer adds a token")


def options(
    config: RunConfig, kind: ProgramKind, where: Layout, release: str | None
) -> list[Option]:
    """What the sections and megatron_args say, in their order, as `release` spells it."""
    values = {
        f"{section}.{field}": value
        for section in SECTIONS
        for field, value in getattr(config, section)
        if value is not None and value is not False
    }
    values = {key: value for key, value in values.items() if key not in THE_RUNNERS}
    if config.checkpoint.save is None and "save" in config.checkpoint.model_fields_set:
        values.pop("checkpoint.save_interval", None)  # save: null turns it off
    if "logging.wandb_project" in values:  # which wants a name
        values.setdefault("logging.wandb_exp_name", config.name)
    if "training.micro_batch_size" in values:
        values["training.micro_batch_size"] = micro_batch(config, where)
    if "data.path" in values:
        values.pop("data.mock", None)
    extras = [] if kind is ProgramKind.OURS else _upstream_extras(config)
    extras += _profile(config.profile, kind) if config.profile else []
    if any(option.value == NULL_TOKENIZER for option in extras):
        values["data.vocab_size"] -= null_adds_one(release)
    own = [Option(program_options.option_name(key), value, key) for key, value in values.items()]
    passed = [
        Option(_spelled(name, release), value, f"megatron_args.{name}")
        for name, value in config.megatron_args.items()
        if value is not None and value is not False
    ]
    return own + extras + passed


def _upstream_extras(config: RunConfig) -> list[Option]:
    """Options that upstream's programs need and ours takes for granted."""
    extras = []
    if config.model.num_query_groups:
        extras.append(Option("--group-query-attention", True, "model.num_query_groups"))
    made_up = config.data.mock and config.data.path is None
    if made_up and config.data.vocab_size and config.data.tokenizer_type is None:
        extras.append(Option("--tokenizer-type", NULL_TOKENIZER, "data.mock"))
    return extras


def _profile(wanted: Profile, kind: ProgramKind) -> list[Option]:
    """What has the program trace steps.

    With torch's profiler, Megatron counts from where it starts, 1 the first, and `end` is the one
    after the last; else from 0 (megatron/training/training.py). torch's traces go to a folder of
    TensorBoard's, and from 0.17 on beside that.
    """
    first, last, folder = wanted.first, wanted.last, wanted.folder
    by_torch = wanted.tool == "torch"
    told: dict[str, Value] = {"--profile-ranks": [*wanted.ranks]}
    if kind is ProgramKind.OURS:
        told |= {"--profile-steps": [first, last]}
        told |= {"--profile-dir": str(folder)} if by_torch else {}
    else:
        begin, end = (first, last + 1) if by_torch else (first - 1, last)
        told |= {"--profile": True, "--profile-step-start": begin, "--profile-step-end": end}
        if by_torch:
            told |= {"--use-pytorch-profiler": True, "--tensorboard-dir": f"{folder}/tensorboard"}
    return [Option(name, value, "profile.steps") for name, value in told.items()]


def _spelled(name: str, release: str | None) -> str:
    """The option as `release` spells it: a few have underscores, in some releases only.

    A key with its dashes, `--task_list`, is spelled as it stands: other programs have such.
    """
    if name.startswith("--"):
        return name
    wanted = "--" + name.lstrip("-").replace("_", "-")
    there = (program_options.table().options_of(release) if release else None) or set()
    if wanted in there:
        return wanted
    return next((known for known in there if known.replace("_", "-") == wanted), wanted)


def placed(found: list[Option], rest: tuple[str, ...], origin: Origin) -> list[Option]:
    """All options that the program is given, those behind `--` last, with the lines they are on."""
    return [
        *(replace(option, where=origin.place(option.where)) for option in found),
        *program_options.given(rest),
    ]


def valued(found: Iterable[Option]) -> dict[str, Value]:
    """What each option comes to, by its plain name: the last of several counts."""
    return {option.plain: option.value for option in found}


def values_of(config: RunConfig, where: Layout) -> dict[str, Value]:
    """What each option of a run comes to, by its plain name, as the run file has it."""
    kind = program(config.program).kind
    return valued(options(with_precision(config), kind, where, None))


def check_options(
    found: list[Option],
    rest: tuple[str, ...],
    started: Program,
    facts: ImageFacts,
    origin: Origin,
    told: rules.RuleInput,
) -> None:
    """Refuse an option that the program doesn't take, or that has a key and is given past it.

    So is what Megatron would end at by its own rules between what it is `told`.
    """
    if started.kind is ProgramKind.SCRIPT:
        return
    every = placed(found, rest, origin)
    given = {option.name: option.where for option in every}
    faults, upstreams_gpt = Faults(), started.name == "pretrain_gpt.py"
    with faults.collected():
        _refuse_past_keys(found, every)
    with faults.collected():
        if started.kind is ProgramKind.OURS:
            program_options.check_ours(given)
        elif facts.release:
            program_options.check_megatron(given, facts.release, own=not upstreams_gpt)
    with faults.collected():
        if "--save-interval" in given and "--save" not in given:
            raise UsageError(
                f"{origin.place('checkpoint.save_interval')}: no folder to save to is given",
                "Set checkpoint.save, or leave save_interval out.",
            )
    with faults.collected():
        if started.kind is ProgramKind.OURS:
            if keys := [own_keys().get(name, name) for name in program_options.lacking(given)]:
                raise UsageError(f"{origin.name}: the program gpt needs {', '.join(keys)}")
        elif facts.release and upstreams_gpt:
            _check_upstreams(given, facts.release, origin)
    with faults.collected():
        if started.kind is ProgramKind.OURS or facts.release:
            release = None if started.kind is ProgramKind.OURS else facts.release
            program_options.check_values(every, release)
    if started.kind is ProgramKind.UPSTREAM:
        for problem, mend in rules.broken(rules.RULES, told, facts.release, place(every, origin)):
            faults.add(problem, mend)
    faults.refuse()


def check_fits(given: list[Option], told: rules.RuleInput, release: str | None) -> None:
    """Refuse what our own program would end at: by its own arithmetic, or by what Megatron has."""
    faults, where = Faults(), {option.name: option.where for option in given}
    try:
        arguments = ours.parser().known(words(given))
        ours.layout(ours.complete(arguments), told.where.world)
    except OptionError as error:
        lines = (where[name] for name in error.options if name in where)
        raise UsageError(f"{', '.join(lines)}: {error}", "Change one of them.") from None
    world = told.where.world
    for lacks, since in compat.lacking(told.values, release, world) if release else ():
        name, _, how = lacks.partition(" ")
        option = f"--{name.replace('_', '-')}"
        faults.add(
            f"{where[option]}: {option} {how}".rstrip()
            + f" needs Megatron {since} or newer, and the image has {release}",
            "Leave it out, or take an image with a newer Megatron.",
        )
    faults.refuse()


def place(given: Iterable[Option], origin: Origin) -> Callable[[str], str]:
    """Where an option stands, by its plain name, or where its key would."""
    known = {option.plain: option.where for option in given}
    return lambda name: known.get(name) or origin.place(program_options.key_of(name))


def _check_upstreams(given: Iterable[str], release: str, origin: Origin) -> None:
    """Refuse what pretrain_gpt.py would end at for want of an option."""
    faults = Faults()
    own = own_keys()
    for one, *others in program_options.lacking_upstream(given, release):
        instead = "".join(f" or {own[name]}" for name in others if name in own)
        where = origin.place(own[one])
        faults.add(f"{where}{instead} must be given: Megatron {release} ends without {one}")
    faults.refuse()


def _refuse_past_keys(found: list[Option], every: list[Option]) -> None:
    """The checks and mounts go by the sections, so what has a key there must stand there."""
    own, faults = own_keys(), Faults()
    by_key = sum(not option.where.startswith("megatron_args.") for option in found)
    for option in every[by_key:]:
        if option.name in own:
            faults.add(
                f"{option.where}: {option.name} has a key of its own, which is what gets checked",
                f"Write it as {own[option.name]} in the run file, or --set {own[option.name]}=…",
            )
    faults.refuse()


def words(found: Iterable[Option]) -> tuple[str, ...]:
    """The options as the program's arguments."""
    return tuple(word for option in found for word in (option.name, *option.words))
