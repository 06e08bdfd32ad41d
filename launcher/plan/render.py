"""Renders a run file as the training program's options, checked against what the program takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from launcher.errors import Faults, UsageError
from launcher.plan import arguments, rules
from launcher.plan.config import RunConfig, Scalar
from launcher.plan.gpus import parse_gpus
from launcher.plan.image import Facts
from launcher.plan.keys import SECTIONS, THE_RUNNERS, key, option_name, own_keys
from launcher.plan.layout import Layout, micro_batch
from launcher.plan.program import Kind, Program
from launcher.plan.secrets import redacted
from launcher.plan.source import Origin

NULL_TOKENIZER = "NullTokenizer"


@dataclass(frozen=True)
class Option:
    """One option with its values, and the key of the run file that it comes from."""

    name: str
    values: tuple[str, ...]
    key: str


def options(
    config: RunConfig, program: Program, where: Layout, release: str | None
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
    extras = [] if program.kind is Kind.OURS else _upstream_extras(config)
    if any(option.values == (NULL_TOKENIZER,) for option in extras):
        values["data.vocab_size"] -= 1  # it adds an end-of-document token to what it is given
    found = [_option(option_name(key), value, key) for key, value in values.items()]
    return found + extras + _passed_through(config, release)


def _option(name: str, value: Scalar | list[Scalar], key: str) -> Option:
    if value is True:
        return Option(name, (), key)
    values = value if isinstance(value, list) else [value]
    return Option(name, tuple(str(item) for item in values), key)


def _upstream_extras(config: RunConfig) -> list[Option]:
    """What upstream's programs want said and ours takes for granted."""
    extras = []
    if config.model.num_query_groups:
        extras.append(Option("--group-query-attention", (), "model.num_query_groups"))
    made_up = config.data.mock and config.data.path is None
    if made_up and config.data.vocab_size and config.data.tokenizer_type is None:
        extras.append(Option("--tokenizer-type", (NULL_TOKENIZER,), "data.mock"))
    return extras


def _passed_through(config: RunConfig, release: str | None) -> list[Option]:
    """megatron_args: name to value, list, or true for a flag; false and null leave it out."""
    return [
        _option(_spelled(name, release), value, f"megatron_args.{name}")
        for name, value in config.megatron_args.items()
        if value is not None and value is not False
    ]


def _spelled(name: str, release: str | None) -> str:
    """The option as `release` spells it: a few have underscores, in some releases only."""
    wanted = "--" + name.lstrip("-").replace("_", "-")
    there = (arguments.table().of(release) if release else None) or set()
    if wanted in there:
        return wanted
    return next((known for known in there if known.replace("_", "-") == wanted), wanted)


def told(
    found: list[Option], rest: tuple[str, ...], where: Layout, config: RunConfig
) -> rules.Options:
    """All that the program is told: the options, those after `--`, and what is around it."""
    values = {option.name: option.values for option in found}
    values |= {option.name: option.values for option in arguments.given(rest)}
    upstreams_gpt = config.program == "pretrain_gpt.py"
    if upstreams_gpt:
        values.setdefault("--tokenizer-type", ("GPT2BPETokenizer",))
    cpu = upstreams_gpt and parse_gpus(config.gpus).count == 0
    return rules.Options(values, where, config.env, cpu)


def check(
    found: list[Option],
    rest: tuple[str, ...],
    program: Program,
    facts: Facts,
    origin: Origin,
    options: rules.Options,
) -> None:
    """Refuse an option that the program doesn't take, or that has a key and is given past it.

    So is what Megatron would end at by its own rules between `options`.
    """
    if program.kind is Kind.SCRIPT:
        return
    given = {option.name: origin.of(option.key) for option in found}
    given |= dict(_behind_dashes(rest))
    faults, upstreams_gpt = Faults(), program.name == "pretrain_gpt.py"
    with faults.collected():
        _refuse_past_keys(found, rest, origin)
    with faults.collected():
        if program.kind is Kind.OURS:
            arguments.check_ours(given)
        elif facts.release:
            arguments.check_megatron(given, facts.release, own=not upstreams_gpt)
    with faults.collected():
        if "--save-interval" in given and "--save" not in given:
            raise UsageError(
                f"{origin.of('checkpoint.save_interval')}: nothing is saved without a folder",
                "Set checkpoint.save, or leave save_interval out.",
            )
    with faults.collected():
        if program.kind is Kind.OURS:
            _check_complete(given, origin)
        elif facts.release and upstreams_gpt:
            _check_upstreams(given, facts.release, origin)
    with faults.collected():
        if program.kind is Kind.OURS or facts.release:
            release = None if program.kind is Kind.OURS else facts.release
            values = [arguments.Given(o.name, o.values, origin.of(o.key)) for o in found]
            arguments.check_values([*values, *arguments.given(rest)], release)
    if program.kind is Kind.UPSTREAM:
        for problem, mend in rules.broken(
            rules.RULES, options, facts.release, place(given, origin)
        ):
            faults.add(problem, mend)
    faults.refuse()


def place(given: Mapping[str, str], origin: Origin) -> Callable[[str], str]:
    """Tells where an option stands, or where its key would."""
    return lambda option: given.get(option) or origin.of(key(option))


def _check_complete(given: Iterable[str], origin: Origin) -> None:
    keys = [own_keys().get(option, option) for option in arguments.lacking(given)]
    if keys:
        raise UsageError(f"{origin.name}: the program gpt needs {', '.join(keys)}")


def _check_upstreams(given: Iterable[str], release: str, origin: Origin) -> None:
    """Refuse what pretrain_gpt.py would end at for want of an option."""
    faults = Faults()
    own = own_keys()
    for one, *others in arguments.lacking_upstream(given, release):
        instead = "".join(f" or {own[name]}" for name in others if name in own)
        where = origin.of(own[one])
        faults.add(f"{where}{instead} must be given: Megatron {release} ends without {one}")
    faults.refuse()


def _behind_dashes(rest: tuple[str, ...]) -> list[tuple[str, str]]:
    """The options that were given after `--`, and how to tell of each."""
    return [
        (word.partition("=")[0], f"-- {redacted((word,))[0]}")
        for word in rest
        if word.startswith("--")
    ]


def _refuse_past_keys(found: list[Option], rest: tuple[str, ...], origin: Origin) -> None:
    """The checks and mounts go by the sections, so what has a key there must stand there."""
    own, faults = own_keys(), Faults()
    past = [
        (option.name, origin.of(option.key))
        for option in found
        if option.key.startswith("megatron_args.")
    ]
    for name, where in [*past, *_behind_dashes(rest)]:
        if name in own:
            faults.add(
                f"{where}: {name} has a key of its own, which is what gets checked",
                f"Write it as {own[name]} in the run file, or --set {own[name]}=…",
            )
    faults.refuse()


def words(found: list[Option]) -> tuple[str, ...]:
    """The options as the program's arguments."""
    return tuple(word for option in found for word in (option.name, *option.values))
