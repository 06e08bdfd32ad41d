"""Counts the documents that training, evaluation and test get of the data, as Megatron does.

Megatron hangs, or ends by SIGABRT, where a split that it takes samples from has no document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from launcher.runs.checks.machine import Dataset, Finding
from launcher.runs.plan.program import ProgramKind
from launcher.runs.plan.program_options import given
from launcher.runs.plan.resolved import Resolved

SPLIT = "969, 30, 1"
"""Upstream's default of --split, and ours."""

TRAINING, EVALUATION, _ = NAMES = ("training", "evaluation", "test")


def shares(split: str) -> list[float]:
    """The share of each of NAMES. Raises ValueError where there is a fourth."""
    found = [float(share) for share in re.findall(r"[.0-9]+", split)]
    if len(found) > len(NAMES):
        raise ValueError(f"{split!r} has more shares than {', '.join(NAMES)}")
    return found + [0.0] * (len(NAMES) - len(found))


def bounds(parts: Sequence[float], documents: int) -> list[tuple[int, int]]:
    """The first document of each split, and the one behind its last."""
    total = sum(parts)
    ends = accumulate((part / total for part in parts), initial=0.0)
    return [*pairwise(round(end * float(documents)) for end in ends)]


def _split(resolved: Resolved) -> str:
    """What the program is given."""
    return str(resolved.values.get("split", SPLIT))


def used(resolved: Resolved) -> tuple[str, ...]:
    """The splits that the program takes samples from: our own never tests."""
    if resolved.values.get("eval_iters") == 0:
        return (TRAINING,)
    return (TRAINING, EVALUATION) if resolved.program.kind is ProgramKind.OURS else NAMES


def without_empty(resolved: Resolved, documents: Sequence[int]) -> tuple[Resolved, list[str]]:
    """The run without splits that have no document and that nothing uses, and notes on it.

    `documents` are those of each data file. The share goes to the split before, whose documents
    stay the same.
    """
    try:
        parts = shares(_split(resolved))
    except ValueError:  # the program says so
        return resolved, []
    if resolved.program.kind is ProgramKind.SCRIPT or not sum(parts):
        return resolved, []
    if "--split" in (option.name for option in given(resolved.rest)):
        return resolved, []
    dropped = list[str]()
    for index in (2, 1):
        before = next((at for at in range(index - 1, -1, -1) if parts[at]), None)
        if not parts[index] or before is None or NAMES[index] in used(resolved):
            continue
        if any(begin == end for begin, end in (bounds(parts, n)[index] for n in documents)):
            parts[before], parts[index] = parts[before] + parts[index], 0.0
            dropped.append(NAMES[index])
    if not dropped:
        return resolved, []
    split = ",".join(f"{part:g}" for part in parts)
    told = " and ".join(dropped)
    note = f"data.split: {split}: the program doesn't use {told}, which would have no document"
    return resolved.with_split(split), [note]


def check_splits(resolved: Resolved, datasets: Sequence[Dataset]) -> Iterator[Finding]:
    """A document for each split that is used, and a sample's tokens in all of them."""
    place, length = resolved.origin.place("data.split"), resolved.config.model.seq_length
    if resolved.program.kind is ProgramKind.SCRIPT:
        return
    try:
        parts = shares(_split(resolved))
    except ValueError:
        return
    counted = [data for data in datasets if data.documents is not None and any(parts)]
    for data in counted:
        empty = _without(resolved, place, parts, data, counted)
        yield from [*empty, *_short(resolved, place, parts, length, data)][:1]


def _without(
    resolved: Resolved,
    place: str,
    parts: Sequence[float],
    data: Dataset,
    datasets: Sequence[Dataset],
) -> Iterator[Finding]:
    """Splits that are used and have no document; training is, though its share be 0."""
    count = data.documents or 0
    for name, part, (begin, end) in zip(NAMES, parts, bounds(parts, count), strict=True):
        if name in used(resolved) and (part or name == TRAINING) and begin == end:
            yield Finding(
                f"{place}: {data.prefix} has no document for {name}: {part:g} of {sum(parts):g} "
                f"parts of its {count} documents rounds to none",
                "Megatron would hang, or end by SIGABRT, as it looks for the first sample.",
                _mend([each.documents or 0 for each in datasets]),
            )


def _mend(documents: Sequence[int]) -> str:
    """A split by which training and evaluation get a document of each data file."""
    for split in ("95,5,0", "90,10,0", "75,25,0", "50,50,0"):
        if all(begin < end for n in documents for begin, end in bounds(shares(split), n)[:2]):
            return f"--set data.split={split} (nothing for test), or more documents."
    return "--set data.split=100,0,0 --set logging.eval_iters=0, or more documents."


def _short(
    resolved: Resolved, place: str, parts: Sequence[float], length: int | None, data: Dataset
) -> Iterator[Finding]:
    """Splits with fewer tokens than a sample has, about."""
    if length is None or data.tokens is None:
        return
    for name, part in zip(NAMES, parts, strict=True):
        there = round(data.tokens * part / sum(parts))
        if part and name in used(resolved) and there <= length:
            yield Finding(
                f"{place}: {data.prefix} has about {there} tokens for {name}, and a sample "
                f"{length + 1}",
                "A sample would be the same text more than once.",
                "Set another data.split, more text, or a smaller model.seq_length.",
                refuse=data.tokens <= length,
            )
