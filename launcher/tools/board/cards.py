"""Collects what the page shows of each run: sizes, layout, state, curves, and why it failed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter, mul, sub
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from launcher.agent.words import REPORTS
from launcher.base.names import LABEL
from launcher.base.screen import printable
from launcher.base.settings import settings
from launcher.runs.plan import model_size
from launcher.runs.plan.mounts import PROFILE
from launcher.runs.plan.program_options import Value
from launcher.runs.records import plot, record, recorded_runs
from launcher.runs.records.metrics import ALARM
from launcher.tools.forecast.receipt import Receipts

MOST_POINTS = 1000
"""Points of a run's curves; of more steps, those with the lowest and highest losses are taken."""

COLUMNS = {
    "iteration": "iteration",
    "samples": "samples",
    "loss": "loss",
    "rate": "tokens_per_s",
    "norm": "grad_norm",
    "lr": "learning_rate",
}
"""The curves of a run, and the fields of its steps."""

PARALLEL = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
}

FOLDERS = (REPORTS, PROFILE)
READ, JSON = (record.LOG, *FOLDERS), (".json", ".jsonl")
"""How the names of folders in a record begin, and of what a person reads; how others end."""

UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
NOTHING: tuple[object, ...] = (None, "", [], (), {})
"""Values that are left out."""

FOREIGN = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a record raises that another program, or another version, has written."""

STAMPED = (".", record.ENDINGS, record.METRICS)
"""The files whose time and size are compared; replacing another file changes the folder's time."""


class Cards:
    """Reads the records; what hasn't changed since the last time isn't read again."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, bytes]] = {}
        self.receipts = Receipts()

    def read(self, alive: Mapping[str, str], wanted: recorded_runs.Filter | None = None) -> bytes:
        """The wanted runs as a JSON array; all of them without `wanted`.

        `alive` has the states of the runs that go on, by their ids.
        """
        folder, names = str(settings().runs), list[str]()
        if os.path.isdir(folder):
            names = os.listdir(folder)
        before, self._kept = self._kept, {}
        for name in names:
            stamp = (alive.get(name), *_stamps(f"{folder}/{name}"))
            kept = before.get(name)
            if not kept or kept[0] != stamp:
                kept = (stamp, _text(name, f"{folder}/{name}", alive, wanted))
            self._kept[name] = kept
        return b"[" + b",\n".join(text for _, text in self._kept.values() if text) + b"]"


def _stamps(folder: str) -> Iterator[tuple[int, int] | None]:
    for name in STAMPED:
        try:
            found = os.stat(f"{folder}/{name}")
            yield found.st_mtime_ns, found.st_size
        except OSError:
            yield None


def _text(
    run: str, folder: str, alive: Mapping[str, str], wanted: recorded_runs.Filter | None
) -> bytes:
    """The card of a run as JSON; b"" without a readable record, or if the run isn't wanted."""
    kept = record.load(run, f"{folder}/{record.FILE}")
    if not kept:
        return b""
    try:
        card = _card(kept, folder, alive, wanted)
    except FOREIGN as error:
        why = f"its record can't be read: {type(error).__name__}: {error}"
        card = {
            "run": run,
            "name": kept.name,
            "created": kept.created,
            "state": recorded_runs.UNKNOWN,
        }
        card["why"] = [why]
    known = {name: _safe(value) for name, value in card.items() if value not in NOTHING}
    return to_json(known, inf_nan_mode="null") if card else b""


def _card(
    kept: record.Record, folder: str, alive: Mapping[str, str], wanted: recorded_runs.Filter | None
) -> dict[str, Any]:
    """What the page shows of a run; {} if it isn't wanted."""
    found = [*record.read_lines(f"{folder}/{record.METRICS}")]
    drawn = plot.continued(found)
    steps = [each for each in drawn if each["kind"] == plot.STEP]
    last = steps[-1] if steps else {}
    plan = record.read_file(f"{folder}/{record.PLAN}")
    image = plan.get("image", "").removeprefix("none: ") if plan else ""
    summary = recorded_runs.summary(kept, folder, alive, last, image)
    if wanted and not wanted.takes(summary):
        return {}
    shown = {
        **vars(summary),
        **_sizes(plan),
        "of": last.get("train_iters"),
        "files": _files(folder),
        "curves": _curves(steps),
        "validation": [
            (each["iteration"], each.get("loss"))
            for each in drawn
            if each["kind"] == plot.VALIDATION
        ],
        "alarms": [
            (each["iteration"], f"{each['alarm']}: {each.get('text', '')}")
            for each in found
            if each["kind"] == ALARM
        ],
    }
    del shown["folder"]
    return shown


def _safe(value: Any) -> Any:
    """The value, in which characters that can't be seen are written as escapes."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (tuple, list)) and value and not isinstance(value[0], (int, float)):
        return [_safe(each) for each in value]
    return value


def _sizes(plan: Mapping[str, Any] | None) -> dict[str, Any]:
    """The model, the layout and the processes of a plan, and the run that its line began with."""
    if plan is None:
        return {}
    options: Mapping[str, Value] = plan.get("options") or {}  # an older launcher kept none
    world = plan["nodes"] * plan["processes_per_node"]
    sizes = {name: _size(options, option) for name, option in PARALLEL.items()}
    replica = sizes["TP"] * sizes["PP"] * sizes["CP"]
    sizes["DP"] = world // replica
    shape = model_size.shape(plan["program"], options)
    return {
        "model": f"{count(shape.parameters)} · {shape.layers} × {shape.hidden}"
        if shape
        else plan["program"].rpartition("/")[2],
        "experts": shape.experts if shape and shape.experts else None,
        "layout": " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1),
        "world": world,
        "cpu": plan["gpus"]["count"] == 0 or None,
        "sequence": _size(options, "seq_length", 0) or None,
        "line": dict(plan["labels"]).get(f"{LABEL}line"),
    }


def _size(options: Mapping[str, Value], name: str, default: int = 1) -> int:
    try:
        return model_size.whole(options, name, default)
    except (TypeError, ValueError):
        return default


def count(number: float) -> str:
    """124 M of a number, in three digits."""
    for unit, letter in UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.0f}"


def _files(folder: str) -> list[str]:
    """The files of a record that a person may want to read."""
    names = [name for name in os.listdir(folder) if name.startswith(READ) or name.endswith(JSON)]
    for name in [name for name in names if name.startswith(FOLDERS)]:
        names.remove(name)
        if not Path(folder, name).is_symlink():
            names += (f"{name}/{inner.name}" for inner in Path(folder, name).glob("*"))
    return sorted(names)


def _curves(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns of the curves that are known, and the ms of training since the run began."""
    if not steps:
        return {}
    found: dict[str, list[Any]] = {
        name: [step.get(field) for step in steps] for name, field in COLUMNS.items()
    }
    found["rate"] = [value and round(value) for value in found["rate"]]
    found["ms"] = _elapsed(steps)
    if len(steps) > MOST_POINTS:
        chosen = thinned(found["loss"], MOST_POINTS)
        found = {name: [column[at] for at in chosen] for name, column in found.items()}
    return {name: column for name, column in found.items() if column.count(None) < len(column)}


def _elapsed(steps: Sequence[Mapping[str, Any]]) -> list[int]:
    """The ms of training until each step; each line says how long its iterations took."""
    numbers = [step["iteration"] for step in steps]
    before = max(0, 2 * numbers[0] - numbers[1]) if len(numbers) > 1 else numbers[0] - 1
    counts = map(sub, numbers, [before, *numbers])
    took = map(mul, map(itemgetter("ms_per_step"), steps), counts)
    return [*map(round, accumulate(took))]


def thinned(values: Sequence[float | None], most: int) -> list[int]:
    """Which of more than `most` values to draw: the lowest and highest of each part, both ends."""
    parts, chosen = most // 2, {0, len(values) - 1}
    for part in range(parts):
        numbers = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        known = [(value, at) for at in numbers if (value := values[at]) is not None]
        if known:
            chosen |= {min(known)[1], max(known)[1]}
    return sorted(chosen)
