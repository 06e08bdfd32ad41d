"""Collects facts about an image in a container, and compares them with its row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base.errors import UsageError
from launcher.images.matrix.schema import Row
from launcher.runs.follow.assemble import bare_plan
from launcher.tools.trials import inside

if TYPE_CHECKING:
    from launcher.runs.plan.job import Backend

KEYS = ("os", "python", "torch", "cuda", "cudnn", "nccl", "driver")
"""The facts that a row of matrix.yaml has a key for."""

ORDER = tuple(Row.model_fields)
"""The order in which a row's keys stand."""


@dataclass(frozen=True)
class Fact:
    """What was found: a value, None where there is no such thing, or why asking failed."""

    value: str | None = None
    error: str = ""
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"fails: {self.error}" if self.error else self.value or "-"


def ask_image(
    chosen: Backend,
    image: Mapping[str, str],
    gpus: str = "0",
    names: Sequence[str] = tuple(inside.FACTS),
) -> dict[str, Fact]:
    """The facts of an image, as a run file's `image` names it; those of GPUs on `gpus`.

    A fact that ends Python counts as failed, and the others are asked again. Raises EngineError
    where the container can't be started.
    """
    found: dict[str, Fact] = {}
    text = Path(inside.__file__).read_text(encoding="utf-8")
    while left := [name for name in names if name not in found]:
        argv = ["python3", "-c", text, *left]
        job = chosen.start(bare_plan(chosen, image, gpus, argv), attach=True)
        try:
            said = b"".join(piece.data for piece in job.output() if not piece.is_error)
            found |= _facts(said.decode(errors="replace").splitlines())
            code = job.wait().code
        finally:
            job.remove()
        if missing := [name for name in left if name not in found]:
            found[missing[0]] = Fact(error=f"python3 ended with exit code {code}")
    return {name: found[name] for name in names}


def _facts(lines: Iterable[str]) -> Iterator[tuple[str, Fact]]:
    for line in lines:
        with suppress(ValueError, KeyError):  # a line of a package that writes past Python
            told: dict[str, Any] = json.loads(line)
            value, error = told.get("value"), told.get("error", "")
            yield told["name"], Fact(value, error, tuple(told["warnings"]))


def differences(row: Row, found: Mapping[str, Fact]) -> list[str]:
    """What the row states and the image has otherwise; a version may have fewer places."""
    told = []
    for key in KEYS:
        stated, fact = getattr(row, key), found.get(key)
        if stated and fact and fact.value and not _agree(key, stated, fact.value):
            told.append(f"{key}: the row says {stated}, and the image has {fact.value}")
    return told


def _agree(key: str, stated: str, value: str) -> bool:
    if key == "torch":  # 24.10 says 2.5.0a0+e000cf0ad9.nv24.10
        return value.startswith(stated)
    short, long = sorted((_places(stated), _places(value)), key=len)
    return long[: len(short)] == short


def _places(version: str) -> list[str]:
    """What is between its dots; 12.4.0.041, as NVIDIA's images have it, is 12.4.0.41."""
    return [place.lstrip("0") for place in version.split(".")]


def unstated(row: Row, found: Mapping[str, Fact]) -> dict[str, str]:
    """The facts that the row has a key for and doesn't state, as it would state them."""
    return {
        key: value
        for key in KEYS
        if not getattr(row, key) and (fact := found.get(key)) and (value := fact.value)
    }


def written(text: str, tag: str, facts: Mapping[str, str]) -> str:
    """`text`, a matrix, with `facts` added to the row `tag`, none of which it has a key for yet.

    Every other byte is kept. Raises UsageError where the row isn't written as a block of lines, as
    all of ours are.
    """
    head = rf"^rows:.*?^  [\"']?{re.escape(tag)}[\"']?:[ \t]*\n"
    found = re.search(rf"{head}((?:    \S[^\n]*\n)*)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise UsageError(
            f"matrix.yaml: the row {tag} isn't written as a block of lines",
            "Write its facts there by hand: `image probe TAG --json` prints them.",
        )
    row = found[1].splitlines(keepends=True)
    for key in sorted(facts, key=ORDER.index):
        before = ORDER[: ORDER.index(key)]
        places = [n for n, line in enumerate(row, 1) if line.split(":")[0].strip() in before]
        row.insert(max(places, default=0), f'    {key}: "{facts[key]}"\n')
    return text[: found.start(1)] + "".join(row) + text[found.end(1) :]
