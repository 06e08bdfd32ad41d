"""Plots the metrics of runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from pathlib import Path
from typing import Any

from launcher.base.errors import UsageError
from launcher.base.install import install
from launcher.runs.records import record
from launcher.runs.records.metrics import ALARM, KINDS, REWIND, TrainingStep, Validation

STEP, VALIDATION = KINDS[TrainingStep], KINDS[Validation]

Points = list[tuple[int, float]]
"""Iterations and values, by iteration."""


@dataclass(frozen=True)
class Curves:
    """What is drawn of a run: losses in nats a token, and its speed at each step.

    `tokens` are tokens a second, `samples` samples a second; a run whose shape isn't known has no
    tokens. `alarms` are the iterations at which the guard warned, and the warning's kind.
    """

    name: str
    train: Points
    validation: Points
    tokens: Points
    samples: Points
    alarms: Sequence[tuple[int, str]] = ()


def plot(names: Sequence[str], output: Path) -> list[str]:
    """Draw the runs that `names` name into a PNG file; what couldn't be drawn of which run.

    Raises UsageError where there is no such run, no metrics, or no such folder, and as `install`.
    """
    pattern = any(map(record.is_pattern, names))
    listed = [(run.run, run.name) for run in record.records()] if pattern else []
    known = {run.run: run.name for run in map(record.find, record.expanded(names, listed))}
    runs = [curves(f"{name} ({run})", read_metrics(run)) for run, name in known.items()]
    empty = [run.name for run in runs if not (run.train or run.validation or run.samples)]
    if len(empty) == len(runs):
        raise UsageError(
            f"no metrics of {', '.join(empty)}",
            "They are kept once a run logs its iterations: logging.log_interval in the run file.",
        )
    _draw([run for run in runs if run.name not in empty], output)
    return [f"{name} has no metrics yet, and isn't drawn" for name in empty]


def read_metrics(run: str) -> Iterator[dict[str, Any]]:
    """What is kept of a run's metrics."""
    return record.read_lines(record.folder(run) / record.METRICS)


def curves(name: str, records: Iterable[dict[str, Any]]) -> Curves:
    """The curves of a run, its attempts put together."""
    records = [*records]
    kept = continued(records)
    steps = [each for each in kept if each["kind"] == STEP]
    return Curves(
        name=name,
        train=_points((each["iteration"], each.get("loss")) for each in steps),
        validation=_points(
            (each["iteration"], each.get("loss")) for each in kept if each["kind"] == VALIDATION
        ),
        tokens=_points((each["iteration"], each.get("tokens_per_s")) for each in steps),
        samples=_points(
            (each["iteration"], 1000 * each["global_batch_size"] / each["ms_per_step"])
            for each in steps
            if each.get("global_batch_size") and each["ms_per_step"]
        ),
        alarms=[(each["iteration"], each["alarm"]) for each in records if each["kind"] == ALARM],
    )


def _is_first_validation(found: dict[str, Any]) -> bool:
    """Whether it is an evaluation of the first validation set."""
    mine = found["kind"] == VALIDATION and found["split"] == VALIDATION
    return mine and not found.get("dataset")


def continued(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps and evaluations of all attempts as one run: where one begins, it alone counts.

    What an earlier attempt did from there on was lost with it, as this one began at a checkpoint;
    so was what it did after the one that it went back to.
    """
    attempts: dict[int, dict[tuple[int, str], dict[str, Any]]] = {}
    back = dict[int, int]()
    for each in records:
        if each["kind"] == REWIND:
            back[each["attempt"]] = each["iteration"]
        elif each["kind"] == STEP or _is_first_validation(each):
            mine = attempts.setdefault(each["attempt"], {})
            mine[each["iteration"], each["kind"]] = each
    kept: dict[tuple[int, str], dict[str, Any]] = {}
    for attempt, mine in sorted(attempts.items()):
        begun, end = min(mine)[0], back.get(attempt, inf)
        kept = {key: each for key, each in kept.items() if key[0] < begun} | mine
        kept = {key: each for key, each in kept.items() if key[0] <= end}
    return [each for _, each in sorted(kept.items(), key=itemgetter(0))]


def _points(pairs: Iterable[tuple[int, float | None]]) -> Points:
    return [(iteration, value) for iteration, value in pairs if value is not None]


def _draw(runs: Sequence[Curves], output: Path) -> None:
    """One picture: losses above, speed below, a colour for each run."""
    install("plot")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 8), dpi=120, layout="constrained")
    losses, speeds = figure.subplots(2, 1, sharex=True)
    in_tokens = all(run.tokens for run in runs)
    for number, run in enumerate(runs):
        line: dict[str, Any] = {"color": f"C{number % 10}", "marker": ".", "markersize": 2}
        losses.plot(*_axes(run.train), label=f"{run.name}, training", **line)
        if run.validation:
            dashed = {**line, "linestyle": "--", "markersize": 8}
            losses.plot(*_axes(run.validation), label=f"{run.name}, validation", **dashed)
        for iteration, kind in run.alarms:
            losses.axvline(iteration, color=line["color"], linestyle=":", linewidth=1)
            where = {"xycoords": losses.get_xaxis_transform(), "rotation": 90, "va": "top"}
            losses.annotate(kind, (iteration, 1.0), fontsize=7, color=line["color"], **where)
        speeds.plot(*_axes(run.tokens if in_tokens else run.samples), **line)
    losses.set_ylabel("loss (nats/token)")
    speeds.set_ylabel("throughput (tokens/s)" if in_tokens else "throughput (samples/s)")
    speeds.set_xlabel("iteration")
    speeds.set_ylim(bottom=0)
    for axes in (losses, speeds):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2)
    try:
        figure.savefig(output, format="png")
    except OSError as error:
        raise UsageError(
            f"{output} can't be written: {error.strerror}", "Give another file: -o FILE.png"
        ) from error


def _axes(points: Points) -> tuple[list[int], list[float]]:
    return [iteration for iteration, _ in points], [value for _, value in points]
