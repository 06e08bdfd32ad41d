"""Which options a program takes: our own, or those of an image's Megatron release."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.errors import UsageError, nearest

DATA = Path(__file__).parent / "arguments.json"


@dataclass(frozen=True)
class Spans:
    """The releases that have an option, as [first, last] pairs; "" for a last still to come."""

    pairs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        told = []
        for first, last in self.pairs:
            told.append(f"from {first} to {last}" if last else f"from {first} on")
        return " and ".join(told)


@dataclass(frozen=True)
class Table:
    """arguments.json: the series of releases, oldest first, our options, and Megatron's."""

    releases: tuple[str, ...]
    gpt: frozenset[str]
    gpt_required: tuple[str, ...]
    megatron: dict[str, Spans]

    def of(self, release: str) -> set[str] | None:
        """Megatron's options in `release`; None for a series that the table doesn't know."""
        if series(release) not in self.releases:
            return None
        at = self.releases.index(series(release))
        return {name for name, spans in self.megatron.items() if self._has(spans, at)}

    def _has(self, spans: Spans, at: int) -> bool:
        order = self.releases
        return any(
            order.index(first) <= at and (not last or at <= order.index(last))
            for first, last in spans.pairs
        )


def series(release: str) -> str:
    """'0.16' for '0.16.1' and '0.16.1+abc': options change between series, hardly within one."""
    return ".".join(release.split(".")[:2])


@cache
def table() -> Table:
    """The table that ships with the launcher."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    megatron = {name: _spans(text) for name, text in data["megatron"].items()}
    return Table(
        tuple(data["releases"]), frozenset(data["gpt"]), tuple(data["gpt_required"]), megatron
    )


def _spans(text: str) -> Spans:
    pairs = (span.partition("-") for span in text.split(","))
    return Spans(tuple((first, last) for first, _, last in pairs))


def check_ours(options: dict[str, str]) -> None:
    """Refuse an option that our own program doesn't take; the values say where each comes from."""
    for option, where in options.items():
        if option not in table().gpt:
            remedy = nearest(option, sorted(table().gpt))
            if option in table().megatron:
                remedy = "Megatron's pretrain_gpt.py does: program: pretrain_gpt.py"
            raise UsageError(f"{where}: the program gpt takes no {option}", remedy)


def lacking(options: Iterable[str]) -> list[str]:
    """What our own program needs and isn't given."""
    return [option for option in table().gpt_required if option not in set(options)]


def check_megatron(options: dict[str, str], release: str, *, own: bool = False) -> None:
    """Refuse an option that `release` doesn't have; the values say where each comes from.

    With `own`, the script may have options of its own: only those pass that no release knows.
    A release that the table doesn't know isn't checked.
    """
    there = table().of(release)
    if there is None:
        return
    for option, where in options.items():
        if option in there or (own and option not in table().megatron):
            continue
        known = table().megatron.get(option)
        since = f"; Megatron has it {known}" if known else ""
        raise UsageError(
            f"{where}: Megatron {release} has no {option}{since}", _closest(option, there)
        )


def _closest(option: str, there: set[str]) -> str:
    """The nearest few option names: all of them would be hundreds."""
    from difflib import get_close_matches

    close = get_close_matches(option, sorted(there), n=3, cutoff=0.5)
    if not close:
        return "The options are those of megatron/training/arguments.py."
    return f"Did you mean {' or '.join(close)}?"
