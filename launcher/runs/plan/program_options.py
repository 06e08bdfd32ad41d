"""The options that a program takes, of each Megatron series and of our own, and their keys."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from launcher.agent.series import removed, series_of
from launcher.base.errors import Faults, nearest
from launcher.base.yamlfile import printable
from launcher.runs.runfile.config import Checkpoint, Data, Logging, Model, Parallel, Training
from launcher.runs.runfile.secrets import redacted
from launcher.runs.runfile.values import Scalar

T = TypeVar("T")
Value = Scalar | list[Scalar]
"""What an option is given: True for one that takes no value."""

SECTIONS: dict[str, type[BaseModel]] = {
    "model": Model,
    "training": Training,
    "parallel": Parallel,
    "data": Data,
    "checkpoint": Checkpoint,
    "logging": Logging,
}
"""The sections of a run file whose keys are options of the training program."""

THE_RUNNERS = {"checkpoint.keep", "checkpoint.save_overwrite", "training.precision"}
"""Keys of the sections that the launcher or its runner takes, and the program doesn't."""

RENAMED = {
    "data.path": "--data-path",
    "data.mock": "--mock-data",
    "data.cache": "--data-cache-path",
}

DATA = Path(__file__).parent / "arguments.json"

REQUIRED = (
    ("--num-layers", "--encoder-num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern"),
    ("--hidden-size",),
    ("--num-attention-heads",),
    ("--seq-length", "--encoder-seq-length"),
    ("--max-position-embeddings",),
    ("--micro-batch-size",),
    ("--train-iters", "--train-samples", "--skip-train"),
    ("--lr", "--skip-train"),
)
"""What pretrain_gpt.py of every series here asks for, one of each: validate_args in
megatron/training/arguments.py, get_optimizer_param_scheduler in training.py.
"""
NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""What argparse takes for a number, and not for an option."""

OF_A_CHECKPOINT = 5
"""As many of these --use-checkpoint-args takes from the checkpoint (load_args_from_checkpoint)."""


@dataclass(frozen=True)
class ReleaseSpans:
    """The releases that have an option, as [first, last] pairs; "" for a last still to come."""

    pairs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        told = []
        for first, last in self.pairs:
            told.append(f"from {first} to {last}" if last else f"from {first} on")
        return " and ".join(told)


@dataclass(frozen=True)
class Table:
    """The options of Megatron, as arguments.json has them by series, and of our own program.

    releases: the series, oldest first; gpt: our program's options, by name. Choices are of the
    options that take only some values; a kind says what one takes: "flag", "int", "str +".
    """

    @cached_property
    def _data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
        return found

    @cached_property
    def releases(self) -> tuple[str, ...]:
        return tuple(self._data["releases"])

    @cached_property
    def gpt(self) -> dict[str, argparse.Action]:
        from launcher.trainer.gpt.arguments import parser

        return {
            name: one
            for one in parser()._actions
            for name in one.option_strings
            if name.startswith("--") and one.dest != "help"
        }

    @cached_property
    def megatron(self) -> dict[str, ReleaseSpans]:
        return {name: _spans(text) for name, text in self._data["megatron"].items()}

    @cached_property
    def choices(self) -> dict[str, dict[tuple[str, ...], ReleaseSpans]]:
        return {
            name: {tuple(text.split()): _spans(spans) for text, spans in several.items()}
            for name, several in self._data["choices"].items()
        }

    @cached_property
    def kinds(self) -> dict[str, dict[str, ReleaseSpans]]:
        return {
            name: {kind: _spans(spans) for kind, spans in several.items()}
            for name, several in self._data["kinds"].items()
        }

    def options_of(self, release: str) -> set[str] | None:
        """Megatron's options in `release`; None for a series that the table doesn't know."""
        if series_of(release) not in self.releases:
            return None
        at = self.releases.index(series_of(release))
        return {name for name, spans in self.megatron.items() if self._has(spans, at)}

    def choices_of(self, release: str | None) -> dict[str, tuple[str, ...]]:
        """The values of Megatron's options in `release`; None means our own program's."""
        if release is not None:
            return self._said(self.choices, release)
        return {name: tuple(map(str, one.choices)) for name, one in self.gpt.items() if one.choices}

    def kinds_of(self, release: str | None) -> dict[str, str]:
        """What Megatron's options in `release` take; None means our own program's."""
        if release is not None:
            return self._said(self.kinds, release)
        return {name: _kind_of(one) for name, one in self.gpt.items()}

    def _said(self, of: Mapping[str, Mapping[T, ReleaseSpans]], release: str) -> dict[str, T]:
        """What is known of each option in `release`; nothing for an unknown series."""
        if series_of(release) not in self.releases:
            return {}
        at = self.releases.index(series_of(release))
        return {
            option: said
            for option, several in of.items()
            for said, spans in several.items()
            if self._has(spans, at)
        }

    def any_choices(self, option: str) -> tuple[str, ...]:
        """The values that some program takes for an option, sorted; () where none has choices."""
        several = [self.choices_of(None).get(option, ()), *self.choices.get(option, ())]
        return tuple(sorted({value for allowed in several for value in allowed}))

    def _has(self, spans: ReleaseSpans, at: int) -> bool:
        order = self.releases
        return any(
            order.index(first) <= at and (not last or at <= order.index(last))
            for first, last in spans.pairs
        )


@cache
def table() -> Table:
    """Megatron's options from the table that ships with the launcher, and our parser's."""
    return Table()


def _kind_of(action: argparse.Action) -> str:
    """What an option of our own parser takes."""
    if action.nargs == 0:
        return "flag"
    kind = {int: "int", float: "float"}.get(action.type, "str")  # type: ignore[call-overload]
    return kind if action.nargs is None else f"{kind} {action.nargs}"


def _spans(text: str) -> ReleaseSpans:
    pairs = (span.partition("-") for span in text.split(","))
    return ReleaseSpans(tuple((first, last) for first, _, last in pairs))


def check_ours(options: dict[str, str]) -> None:
    """Refuse an option that our own program doesn't take; the values say where each comes from."""
    faults = Faults()
    for option, where in options.items():
        if option not in table().gpt:
            remedy = nearest(option, sorted(table().gpt))
            if option in table().megatron:
                remedy = "Megatron's pretrain_gpt.py does: program: pretrain_gpt.py"
            faults.add(f"{where}: the program gpt takes no {printable(option)}", remedy)
    faults.refuse()


def lacking(options: Iterable[str]) -> list[str]:
    """What our own program needs and isn't given."""
    given = set(options)
    return [name for name, one in table().gpt.items() if one.required and name not in given]


def lacking_upstream(options: Iterable[str], release: str) -> list[tuple[str, ...]]:
    """What pretrain_gpt.py of `release` needs and isn't given: one of each tuple.

    Nothing of a release that the table doesn't know, or where another file has the arguments.
    """
    there, names = table().options_of(release), set(options)
    if there is None or "--yaml-cfg" in names:
        return []
    needed = REQUIRED[OF_A_CHECKPOINT:] if "--use-checkpoint-args" in names else REQUIRED
    if "--save" in names:
        needed = (*needed, ("--save-interval", "--persistent-save-interval"))
    several = (tuple(name for name in one if name in there) for one in needed)
    return [one for one in several if not names & set(one)]


def check_megatron(options: dict[str, str], release: str, *, own: bool = False) -> None:
    """Refuse an option that `release` doesn't have; the values say where each comes from.

    With `own`, the script may have options of its own: only those pass that no release knows.
    A release that the table doesn't know isn't checked.
    """
    there, faults = table().options_of(release), Faults()
    if there is None:
        return
    for option, where in options.items():
        if instead := removed(release).get(option):
            problem = f"{where}: Megatron {release} knows {option}, but ends if it is given"
            faults.add(problem, f"Write {instead} in its place.")
        if option in there or (own and option not in table().megatron):
            continue
        known = table().megatron.get(option)
        since = f"; Megatron has it {known}" if known else ""
        faults.add(
            f"{where}: Megatron {release} has no {printable(option)}{since}",
            _closest(option, there),
        )
    faults.refuse()


@dataclass(frozen=True)
class Option:
    """An option with what it is given, and where that stands: a key, or a word behind `--`."""

    name: str
    value: Value
    where: str

    @property
    def words(self) -> tuple[str, ...]:
        """Its values as the program's arguments."""
        if self.value is True:
            return ()
        return tuple(map(str, self.value if isinstance(self.value, list) else [self.value]))

    @property
    def plain(self) -> str:
        """Its name as run files spell it: num_layers of --num-layers."""
        return plain(self.name)


def plain(name: str) -> str:
    """A name of an option, or of megatron_args, with underscores and no dashes before it."""
    return name.lstrip("-").replace("-", "_")


def option_name(key: str) -> str:
    """The option of a section's key: '--num-layers' of model.num_layers."""
    return RENAMED.get(key, "--" + key.partition(".")[2].replace("_", "-"))


@cache
def own_keys() -> dict[str, str]:
    """The key of every option that has one in a section."""
    keys = [
        f"{section}.{field}" for section, model in SECTIONS.items() for field in model.model_fields
    ]
    return {option_name(key): key for key in keys if key not in THE_RUNNERS}


def key_of(option: str) -> str:
    """The key of an option, however it is spelled, in its section or under megatron_args."""
    name = plain(option)
    return own_keys().get(f"--{name.replace('_', '-')}", f"megatron_args.{name}")


def given(words: Iterable[str]) -> list[Option]:
    """The options among a command line's words: `--name value …` and `--name=value`."""
    found: list[Option] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found.append(Option(name, value if equals else True, f"-- {redacted((word,))[0]}"))
        elif found:
            last = found[-1]
            values: list[Scalar] = [*last.words, word]
            found[-1] = Option(last.name, values if len(values) > 1 else word, last.where)
    return found


def check_values(options: Iterable[Option], release: str | None) -> None:
    """Refuse what an option doesn't take in `release`, values of its choices, type and number.

    None means our own program. A release that the table doesn't know isn't checked.
    """
    choices, kinds = table().choices_of(release), table().kinds_of(release)
    program = f"Megatron {release}" if release else "the program gpt"
    faults = Faults()
    for option in options:
        if (kind := kinds.get(option.name)) is None:
            continue
        problem, remedy = _misfit(option, kind)
        if problem:
            faults.add(f"{option.where}: {option.name} of {program} {problem}", remedy)
        allowed = choices.get(option.name, option.words)
        for value in () if problem else option.words:
            if value not in allowed:
                faults.add(
                    f"{option.where}: {program} takes no {option.name} {value!r}",
                    nearest(value, list(allowed)),
                )
    faults.refuse()


NUMBERS = {"int": ("a whole number", int), "float": ("a number", float)}


def _misfit(option: Option, kind: str) -> tuple[str, str]:
    """Why an option can't be given these values, and the mend; ("", "") where it can."""
    words = option.words
    told = printable(" ".join(redacted((option.name, *words))[1:]))
    if kind == "flag":
        remedy = "Write true, or false to leave it out."
        return ("", "") if not words else (f"takes no value, and is given {told}", remedy)
    word, _, many = kind.partition(" ")
    what, read = NUMBERS.get(word, ("a value", str))
    count = len(words)
    if not (many == "*" or (many == "+" and count) or count == int(many if many.isdigit() else 1)):
        wanted = {"": f"takes {what}", "+": "takes one value or more"}.get(many, f"takes {many}")
        return f"{wanted}, and is given {told or 'none'}", f"Set it to {what}."
    for value in words:
        if value.startswith("-") and " " not in value and not NEGATIVE.fullmatch(value):
            return f"can't be given {told}, which looks like an option", "Leave out the dash."
        try:
            read(value)
        except ValueError:
            return f"takes {what}, and is given {told}", f"Set it to {what}."
    return "", ""


def _closest(option: str, there: set[str]) -> str:
    """The nearest few option names: all of them would be hundreds."""
    from difflib import get_close_matches

    close = get_close_matches(option, sorted(there), n=3, cutoff=0.5)
    if not close:
        return "The options are those of megatron/training/arguments.py."
    return f"Did you mean {' or '.join(close)}?"
