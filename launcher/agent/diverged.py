"""From which iteration on a run's numbers are NaN: the launchers and the last rank judge alike."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

FILE = "diverged"
STEP = re.compile(r"\biteration +([0-9]{1,18})/ *[0-9]{1,18} \|(.* \(ms\): [0-9].*)", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?|inf|nan)", re.IGNORECASE)


@dataclass
class Divergence:
    """`first` is the iteration from which on no weights were numbers, 0 where the last ones were.

    `has_loss`: whether an earlier line had a loss
    """

    has_loss: bool = False
    first: int = 0

    def add(self, iteration: int, step: Mapping[str, float | None]) -> None:
        """Judge a line of the log by its names and numbers; Megatron leaves out a loss of NaN.

        A gradient that is a number is enough: a mean is NaN where one batch has no token to learn,
        and fp16 skips steps. The norm is 0 where Megatron doesn't clip.
        """
        losses = [x for name, x in step.items() if name.endswith("loss") and x is not None]
        skipped, nan = (step.get(f"number of {kind} iterations") for kind in ("skipped", "nan"))
        gone = not losses and (nan or (skipped == 0 and self.has_loss))
        bad = bool(gone) or not all(map(isfinite, losses))
        if norm := step.get("grad norm"):
            bad = not isfinite(norm) and (bad or bool(nan) or not skipped)
        self.has_loss = self.has_loss or bool(losses)
        self.first = (self.first or iteration) if bad else 0


def named_values(text: str) -> list[tuple[str, str]]:
    """Names and values of `name: value | name: value |`; what no bar ends is left out."""
    pairs = (part.partition(":") for part in text.split("|")[:-1])
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def note(environ: Mapping[str, str], folder: str) -> None:
    """Have what the last rank prints noted in the folder, where there are several nodes."""
    rank, ranks = (int(environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    if rank != ranks - 1 or environ.get("LOCAL_WORLD_SIZE") == str(ranks):
        return
    show, file, steps = builtins.print, Path(folder, FILE), Divergence()

    def noting(*words: object, **how: object) -> None:
        if words and (found := STEP.search(str(words[0]))):
            values, before = named_values(found[2]), steps.first
            steps.add(int(found[1]), {k: float(v) for k, v in values if NUMBER.fullmatch(v)})
            if steps.first != before:
                with suppress(OSError):
                    file.write_text(str(steps.first), encoding="ascii")
        show(*words, **how)  # type: ignore[call-overload]

    builtins.print = noting


def noted(folder: str) -> int:
    """The iteration from which on they were NaN to the end, 0 where they weren't."""
    with suppress(OSError, ValueError):
        return int(Path(folder, FILE).read_text(encoding="ascii"))
    return 0
