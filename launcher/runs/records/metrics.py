"""Reads the lines of a training log: steps, validations and memory, of our program and upstream's.

The formats are those of megatron/training/training.py and utils.py in Megatron-LM 0.8 to 0.16.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from launcher.agent.diverged import NUMBER, named_values
from launcher.runs.records.throughput import Rates


def _logged(name: str) -> Any:
    """A field of what the log calls `name`; None where a line doesn't say it."""
    return field(default=None, metadata={"name": name})


@dataclass(frozen=True)
class TrainingStep:
    """A line of training: means since the line before, but for what is counted.

    A loss that isn't in the line is None: Megatron leaves it out where no iteration advanced, or
    where it is NaN. `losses` are the others, by the log's names. `skipped` and `nan` are numbers
    of iterations. Energy is in J for each iteration and GPU, power in W for each GPU, `data_ms` the
    host's wait for data in an iteration.
    """

    iteration: int
    train_iters: int
    ms_per_step: float = field(metadata={"name": "elapsed time per iteration (ms)"})
    time: str | None = None
    samples: int | None = _logged("consumed samples")
    skipped_samples: int | None = _logged("skipped samples")
    reported_tflops_per_gpu: float | None = _logged("throughput per GPU (TFLOP/s/GPU)")
    energy_j: float | None = _logged("energy per GPU (J/iter/GPU)")
    power_w: float | None = _logged("power per GPU (W/GPU)")
    data_ms: float | None = _logged("waiting for data (ms)")
    learning_rate: float | None = _logged("learning rate")
    decoupled_learning_rate: float | None = _logged("decoupled learning rate")
    global_batch_size: int | None = _logged("global batch size")
    loss: float | None = _logged("lm loss")
    losses: dict[str, float] = field(default_factory=dict)
    loss_scale: float | None = _logged("loss scale")
    grad_norm: float | None = _logged("grad norm")
    num_zeros: float | None = _logged("num zeros")
    params_norm: float | None = _logged("params norm")
    skipped: int | None = _logged("number of skipped iterations")
    nan: int | None = _logged("number of nan iterations")

    @property
    def values(self) -> dict[str, float | None]:
        """The numbers by the log's names."""
        return {name: getattr(self, key) for name, key in (STEP | COUNTS).items()} | self.losses


@dataclass(frozen=True)
class Validation:
    """A line of an evaluation: mean loss per token in nats, and its perplexity.

    `split` is validation or test; `dataset` counts where there are several validation sets.
    """

    iteration: int
    split: str = "validation"
    dataset: int | None = None
    loss: float | None = None
    perplexity: float | None = None
    losses: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class MemoryUse:
    """A rank's GPU memory as torch's allocator counts it, in MiB, which Megatron calls MB."""

    rank: int
    iteration: int | None = None
    allocated_mib: float | None = _logged("allocated")
    max_allocated_mib: float | None = _logged("max allocated")
    reserved_mib: float | None = _logged("reserved")
    max_reserved_mib: float | None = _logged("max reserved")
    device_mib: float | None = _logged("total device memory used")


Found = TrainingStep | Validation | MemoryUse

ALARM, REWIND = "alarm", "rewind"
"""Kinds of metrics.jsonl that the guard of a run adds."""

KINDS = {TrainingStep: "step", Validation: "validation", MemoryUse: "memory"}


def _names(kind: type[TrainingStep | MemoryUse], begins: str) -> dict[str, str]:
    """The fields by the log's names, of those whose type begins so."""
    logged = (one for one in fields(kind) if "name" in one.metadata)
    return {one.metadata["name"]: one.name for one in logged if str(one.type).startswith(begins)}


STEP, COUNTS, MEMORY = (
    _names(TrainingStep, "float"),
    _names(TrainingStep, "int"),
    _names(MemoryUse, "float"),
)

_START = re.compile(
    r"iteration +(?P<step>[0-9]{1,18})/ *(?P<of>[0-9]{1,18}) \|"
    r"|validation(?:-(?P<dataset>[0-9]{1,9}))? loss at iteration (?P<evaluated>[0-9]{1,18})"
    r"(?: on (?P<split>validation|test) set)? \|"
    r"|\[Rank (?P<rank>[0-9]{1,9})\] \((?P<when>[^()|]{0,80})\) memory \(MB\) \|"
)
_TIME = re.compile(r"\[([0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.[0-9]+)?\] *$")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LOSS = re.compile(r"[-+]?(?:[0-9]\.[0-9]{6}e[-+][0-9]+|inf|nan)", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _./-]{0,63}")
_COUNT = re.compile(r"[0-9]{1,18}")
_ITERATION = re.compile(r"(?:after|for iteration) ([0-9]{1,18})")
_PADDED = re.compile(
    r"padded vocab \(size: [0-9]+\) with [0-9]+ .{0,20}\(new size: ([0-9]{1,12})\)"
)


def parse_all(line: str) -> list[Found]:
    """All that a line of a log says; a line holds several records where ranks write at once.

    A number counts only where the log ended it: of a record that was cut short, what is whole
    is kept, and a step without its time is none.
    """
    if "iteration" not in line and "memory (MB)" not in line:
        return []
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    starts = list(_START.finditer(line))
    ends = [start.start() for start in starts[1:]] + [len(line)]
    found = [_record(line, start, end) for start, end in zip(starts, ends, strict=False)]
    return [record for record in found if record]


def padded_vocabulary(line: str) -> int | None:
    """The size of the padded vocabulary, from the line in which Megatron prints it."""
    if "padded vocab" not in line:
        return None
    told = _PADDED.search(line)
    return int(told[1]) if told else None


def _record(line: str, start: re.Match[str], end: int) -> Found | None:
    text = line[start.end() : end]
    if start["step"]:
        time = _TIME.search(line[max(0, start.start() - 40) : start.start()])
        return _step(start, time[1] if time else None, named_values(text))
    if start["evaluated"]:
        return _validation(start, named_values(text))
    return _memory(start, text)


def _step(
    start: re.Match[str], time: str | None, said: list[tuple[str, str]]
) -> TrainingStep | None:
    values: dict[str, Any] = {}
    losses: dict[str, float] = {}
    for name, value in said:
        if name in STEP:
            values[STEP[name]] = _number(value)
        elif name in COUNTS:
            values[COUNTS[name]] = int(value) if _COUNT.fullmatch(value) else None
        elif _LOSS.fullmatch(value) and _NAME.fullmatch(name):
            losses[name] = float(value)
    if values.get("ms_per_step") is None:
        return None
    return TrainingStep(int(start["step"]), int(start["of"]), time=time, losses=losses, **values)


def _validation(start: re.Match[str], said: list[tuple[str, str]]) -> Validation | None:
    losses = {
        name.removesuffix(" value"): float(value)
        for name, value in said
        if name.endswith(" value") and NUMBER.fullmatch(value) and _NAME.fullmatch(name)
    }
    if not losses:
        return None
    return Validation(
        iteration=int(start["evaluated"]),
        split=start["split"] or "validation",
        dataset=int(start["dataset"]) if start["dataset"] else None,
        loss=losses.pop("lm loss", None),
        perplexity=_number(dict(said).get("lm loss PPL", "")),
        losses=losses,
    )


def _memory(start: re.Match[str], text: str) -> MemoryUse | None:
    """Nothing ends a memory line's last number but the line, or what was written after it."""
    values: dict[str, float | None] = {}
    for part in text.split("|"):
        name, _, value = part.partition(":")
        number = NUMBER.match(value.strip())
        if name.strip() in MEMORY and number:
            values[MEMORY[name.strip()]] = float(number[0])
    if not values:
        return None
    iteration = _ITERATION.search(start["when"])
    return MemoryUse(int(start["rank"]), int(iteration[1]) if iteration else None, **values)


def _number(text: str) -> float | None:
    return float(text) if NUMBER.fullmatch(text) else None


def as_record(found: Found, attempt: int, rates: Rates | None = None) -> dict[str, object]:
    """A line of metrics.jsonl; its keys are the fields' names, and those of `rates`.

    What isn't known is left out. JSON has no NaN and no infinity: such a value is null, and
    `not_finite` says by its key which it was: "nan", "inf" or "-inf".
    """
    values: dict[str, Any] = {"kind": KINDS[type(found)], "attempt": attempt, **asdict(found)}
    values |= asdict(rates) if rates else {}
    losses = values.pop("losses", {})
    values |= {f"losses.{name}": value for name, value in losses.items()}
    record = {name: value for name, value in values.items() if value is not None}
    real = {name: value for name, value in record.items() if isinstance(value, float)}
    odd = {name: str(value) for name, value in real.items() if not math.isfinite(value)}
    return {**record, **dict.fromkeys(odd), "not_finite": odd} if odd else record
