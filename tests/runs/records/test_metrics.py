"""Numbers of a log: read, and judged."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.runs.records import metrics
from launcher.runs.records.alarms import FLAT, NAN, SPIKE, Detector
from launcher.runs.records.metrics import (
    Found,
    MemoryUse,
    TrainingStep,
    Validation,
    as_record,
    parse_all,
)
from launcher.runs.records.throughput import Rates
from launcher.trainer.gpt import log

LOG = Path(__file__).parent / "logs/megatron.txt"
LINES = LOG.read_text(encoding="utf-8").splitlines()
METRIC = [line for line in LINES if re.search(r"iteration +\d+/|loss at|memory \(MB\)", line)]

WHOLE = st.integers(0, 10**12)
REAL = st.floats(0, 1e12, allow_nan=False).map(lambda x: as_printed(x))
LOSS = st.one_of(st.floats(0, 1e6), st.sampled_from([math.inf, math.nan])).map(
    lambda x: as_printed(x)
)
NAMES = ("load_balancing_loss", "mtp_1 loss", "z_loss", "sop loss")


def parse(line: str) -> Found | None:
    return next(iter(parse_all(line)), None)


def as_printed(value: float) -> float:
    return float(f"{value:.6E}")


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, TrainingStep]:
    """A line of Megatron's 0.8 to 0.16, and what it says; names are those of the sample log."""
    often = {name: LOSS if "loss" in field else REAL for name, field in metrics.STEP.items()}
    always = {name: often.pop(name) for name in ("elapsed time per iteration (ms)",)}
    fields = draw(st.fixed_dictionaries(always, optional=often))
    counts = draw(st.fixed_dictionaries({}, optional=dict.fromkeys(metrics.COUNTS, WHOLE)))
    losses = draw(st.dictionaries(st.sampled_from(NAMES), LOSS))
    known = {metrics.STEP[name]: value for name, value in fields.items()}
    known |= {metrics.COUNTS[name]: value for name, value in counts.items()}
    iteration, of = draw(st.integers(1, 10**9)), draw(st.integers(1, 10**9))
    time, fraction = "2025-04-13 23:41:20", draw(st.sampled_from(["", ".123456"]))
    line = f" [{time}{fraction}] iteration {iteration:8d}/{of:8d} |"
    line += "".join(f" {name}: {value:12d} |" for name, value in counts.items())
    line += "".join(f" {name}: {value:.6E} |" for name, value in (fields | losses).items())
    return line, TrainingStep(iteration, of, time=time, losses=losses, **known)


@st.composite
def validations(draw: st.DrawFn) -> tuple[str, Validation]:
    loss = draw(LOSS)
    found = Validation(
        iteration=draw(st.integers(0, 10**9)),
        split=draw(st.sampled_from(["validation", "test"])),
        dataset=draw(st.none() | st.integers(0, 99)),
        loss=loss,
        perplexity=as_printed(math.exp(min(20, loss))),
    )
    suffix = "" if found.dataset is None else f"-{found.dataset}"
    test = found.split == "test"
    where = f" on {found.split} set" if test or draw(st.booleans()) else ""
    return (
        f" validation{suffix} loss at iteration {found.iteration}{where} | "
        f"lm loss value: {loss:.6E} | lm loss PPL: {found.perplexity:.6E} | "
    ), found


@st.composite
def memories(draw: st.DrawFn) -> tuple[str, MemoryUse]:
    sizes = [round(draw(st.floats(0, 1e6)), 2) for _ in range(4)]
    found = MemoryUse(draw(st.integers(0, 9999)), draw(st.integers(1, 10**6)), *sizes)
    return (
        f"[Rank {found.rank}] (after {found.iteration} iterations) memory (MB)"
        f" | allocated: {sizes[0]} | max allocated: {sizes[1]}"
        f" | reserved: {sizes[2]} | max reserved: {sizes[3]}"
    ), found


RECORDS = st.one_of(steps(), validations(), memories())
AROUND = (
    "",
    "node-1 | ",
    "rank0: ",
    "100%|█████| 3/3 \r",
    "\x1b[32m",
    "[default0]:",
    "\ufffd\ufffd ",
)
BEHIND = ("", "\r", "\x1b[0m", " ", "[rank0]:[W413 ProcessGroupNCCL.cpp] Warning: bye")


def same(one: Found, other: Found) -> bool:
    """Equal, NaN counting as equal to itself."""
    return type(one) is type(other) and repr(one) == repr(other)


@given(RECORDS, st.sampled_from(AROUND), st.sampled_from(BEHIND))
def test_every_shape_of_line_is_read(record: tuple[str, Found], before: str, behind: str) -> None:
    line, expected = record
    found = parse(before + line + behind)
    assert found is not None
    assert same(found, expected)


@given(st.lists(RECORDS, min_size=2, max_size=4))
def test_records_written_into_one_line_are_all_read(records: list[tuple[str, Found]]) -> None:
    found = parse_all("".join(line for line, _ in records))
    assert len(found) == len(records)
    assert all(same(one, expected) for one, (_, expected) in zip(found, records, strict=True))


@given(steps())
@settings(max_examples=20)
def test_a_line_that_was_cut_says_nothing_that_it_did_not(record: tuple[str, TrainingStep]) -> None:
    line, whole = record
    expected = {name: repr(value) for name, value in _flat(whole).items()}
    for cut in range(len(line)):
        found = parse(line[:cut])
        if found is not None:
            told = {name: repr(value) for name, value in _flat(found).items()}
            assert told.items() <= expected.items()


def _flat(found: Found) -> dict[str, object]:
    """What is said, the other losses among it."""
    values = asdict(found)
    values |= values.pop("losses")
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("long", ["9" * 5000, "9" * 19])
def test_numbers_longer_than_any_count_are_none(long: str) -> None:
    """Python itself refuses to make a number of so many digits."""
    ms = "elapsed time per iteration (ms): 1.0"
    assert parse(f"iteration {long}/10 | {ms} |") is None
    assert parse(f"iteration 1/{long} | {ms} |") is None
    assert parse(f"iteration 1/10 | {ms} | global batch size: {long} |") == TrainingStep(1, 10, 1.0)
    assert parse(f"validation loss at iteration {long} | lm loss value: 1.0 |") is None
    assert parse(f"[Rank {long}] (after 1 iterations) memory (MB) | reserved: 1.0") is None
    assert metrics.padded_vocabulary(f"padded vocab (size: 1) with 1 (new size: {long})") is None


def test_the_sample_log() -> None:
    found = [parse(line) for line in LINES]
    for one in METRIC:  # colours within a line are passed over
        coloured = re.sub(r"([0-9.]+)", "\x1b[1;31m\\1\x1b[0m", one)
        assert repr(parse_all(coloured)) == repr(parse_all(one))
    assert [type(each).__name__ for each in found if each] == [
        *("TrainingStep", "MemoryUse", "MemoryUse", "TrainingStep", "Validation"),
        *("TrainingStep", "MemoryUse"),
        *("Validation", "Validation", "Validation"),
    ]
    last = [each for each in found if isinstance(each, TrainingStep)][-1]
    assert (last.losses, last.grad_norm) == (
        {"load_balancing_loss": 1.02, "mtp_1 loss": 10.11},
        math.inf,
    )
    assert (last.power_w, last.energy_j, last.skipped_samples) == (304.4, 240.5, 16)
    saving = [each for each in found if isinstance(each, MemoryUse)][-1]
    assert (saving.iteration, saving.device_mib) == (22, 2301.06)
    several = [each for each in found if isinstance(each, Validation)][1]
    assert (several.dataset, several.losses) == (1, {"sop loss": 0.7})
    splits = [each.split for each in found if isinstance(each, Validation)]
    assert splits == ["validation", "validation", "validation", "test"]
    assert not [line for line in LINES if line not in METRIC and parse(line)]
    assert parse(" iteration 3/10 | lm loss: 1.000000E+00 |") is None  # it has no time
    assert [size for size in map(metrics.padded_vocabulary, LINES) if size] == [50304]
    assert metrics.padded_vocabulary("padded vocab (size: x)") is None


def test_ten_thousand_broken_lines_never_raise() -> None:
    chance = random.Random(4)  # noqa: S311 - a test's
    pieces = [*"0123456789.-+Ee|:/[]()% \r\t\x1b\x00\ufffd٣", "nan", "inf", "9" * 5000, " " * 3000]
    for _ in range(10_000):
        line = chance.choice(METRIC)
        for _ in range(chance.randint(1, 8)):
            at, width = chance.randrange(len(line) + 1), chance.choice([0, 1, 1, 5, 60])
            line = line[:at] + chance.choice([*pieces, *METRIC[:2], ""]) + line[at + width :]
        for found in parse_all(line):
            json.dumps(as_record(found, 0), allow_nan=False)


def test_a_record_has_the_documented_keys() -> None:
    line, *_ = (line for line in LINES if "TFLOP/s/GPU" in line)
    found = parse(line)
    assert found
    assert as_record(found, 1, Rates(10088.7, 8.5, 0.068)) == {
        "kind": "step",
        "attempt": 1,
        "iteration": 12,
        "train_iters": 40,
        "ms_per_step": 812.0,
        "time": "2025-01-02 03:04:25",
        "samples": 192,
        "reported_tflops_per_gpu": 8.7,
        "learning_rate": 4e-5,
        "global_batch_size": 16,
        "loss": 10.72453,
        "loss_scale": 131072.0,
        "grad_norm": 3.874,
        "num_zeros": 71.0,
        "params_norm": 111.402,
        "skipped": 6,
        "nan": 0,
        "tokens_per_s": 10088.7,
        "tflops_per_gpu": 8.5,
        "mfu": 0.068,
    }


def test_what_is_no_number_is_null_and_named() -> None:
    step = TrainingStep(
        1, 2, 3.0, loss=math.nan, grad_norm=math.inf, losses={"mtp_1 loss": -math.inf}
    )
    record = as_record(step, 0)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["loss"], record["grad_norm"], record["losses.mtp_1 loss"]) == (None, None, None)
    assert record["not_finite"] == {
        "loss": "nan",
        "grad_norm": "inf",
        "losses.mtp_1 loss": "-inf",
    }
    assert "not_finite" not in as_record(replace(step, losses={}, loss=1.0, grad_norm=None), 0)


@pytest.mark.parametrize(("loss", "grad_norm"), [(2.5, 1.25), (None, None), (math.inf, 0.0)])
def test_our_own_lines_are_read(loss: float | None, grad_norm: float | None) -> None:
    found = parse(log.training_line(
        "2025-04-13 23:41:20", iteration=50, train_iters=10**7, consumed_samples=800,
        milliseconds=12.34, learning_rate=1e-4, global_batch_size=16, loss=loss, loss_scale=1.0,
        grad_norm=grad_norm, skipped=0, nan=0,
    ))  # fmt: skip
    assert isinstance(found, TrainingStep)
    assert (found.iteration, found.samples, found.ms_per_step) == (50, 800, 12.3)
    assert (found.loss, found.grad_norm) == (loss, grad_norm)
    found = parse(log.validation_line(50, 8.88954))
    assert found == Validation(50, loss=8.88954, perplexity=7255.681)


def step(iteration: int, loss: float | None, **more: Any) -> TrainingStep:
    return TrainingStep(iteration, 1000, 10.0, loss=loss, **more)


def alarms(steps: Iterable[TrainingStep]) -> list[tuple[int, str]]:
    """Iterations and kinds, with the run file's defaults."""
    detector = Detector(50, 8.0)
    return [(one.iteration, one.kind) for each in steps for one in detector.judge(each)]


def well(seed: int, lines: int, noise: float = 0.02, ends: float = 2.0) -> list[TrainingStep]:
    """A loss that falls from 10.8, as noisy as a small batch's, and its gradient's norm.

    The norm begins high, and a fifth of it is noise.
    """
    chance = random.Random(seed)  # noqa: S311
    return [
        step(
            number,
            ends + (10.8 - ends) * math.exp(-number / 40) + chance.gauss(0, noise * ends),
            grad_norm=(0.8 + 4 * math.exp(-number / 10)) * math.exp(chance.gauss(0, 0.2)),
        )
        for number in range(1, lines + 1)
    ]


@given(st.integers(), st.floats(0.001, 0.05), st.floats(0.05, 6.0))
def test_no_alarm_where_all_is_well(seed: int, noise: float, ends: float) -> None:
    assert alarms(well(seed, 200, noise, ends)) == []


@given(st.integers(2, 60), st.floats(1e-3, 2.0), st.integers())
def test_no_alarm_while_the_learning_rate_warms_up(lines: int, fall: float, seed: int) -> None:
    """A loss that hardly moves, or falls at once, is no flat one and no spike."""
    chance = random.Random(seed)  # noqa: S311
    steps = [
        step(n, 10.8 - fall * n / lines + chance.gauss(0, 0.01), grad_norm=2.0 + 5 / n)
        for n in range(1, lines + 1)
    ]
    assert alarms(steps) == []


@given(st.integers(), st.integers(20, 199), st.sampled_from(["nan", "inf", "spike", "grad_norm"]))
def test_what_is_planted_is_found_at_its_line(seed: int, at: int, kind: str) -> None:
    steps = well(seed, 200)
    worse: dict[str, Any] = {
        "nan": {"loss": math.nan},
        "inf": {"grad_norm": math.inf},
        "spike": {"loss": steps[at].loss or 0.0},
        "grad_norm": {"grad_norm": 60.0},
    }[kind]
    if kind == "spike":
        worse["loss"] += 3.0
    steps[at] = step(at + 1, **{"loss": steps[at].loss, "grad_norm": 1.0} | worse)
    assert alarms(steps) == [(at + 1, NAN if kind in ("nan", "inf") else SPIKE)]


@given(st.integers(), st.integers(10, 150))
def test_a_loss_that_stands_still_is_told_once_and_within_three_lines(seed: int, at: int) -> None:
    steps = well(seed, 200)
    stuck = [step(one.iteration, steps[at - 1].loss, grad_norm=0.0) for one in steps[at:]]
    assert alarms([*steps[:at], *stuck]) == [(at + 2, FLAT)]


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        ({"loss": None, "nan": 1}, [NAN]),
        ({"loss": None, "skipped": 0}, [NAN]),  # as Megatron tells a NaN
        ({"loss": None, "skipped": 5}, []),  # fp16's scale is sought
        ({"loss": 2.0, "grad_norm": math.inf, "skipped": 1}, []),
        ({"loss": 2.0, "losses": {"mtp_1 loss": math.inf}}, [NAN]),
    ],
)
def test_what_lines_tell_of_a_loss_that_is_no_number(odd: dict[str, Any], found: list[str]) -> None:
    assert [kind for _, kind in alarms([step(1, 2.1), step(2, **odd)])] == found


def test_what_goes_on_is_told_again_only_after_it_was_well() -> None:
    losses = [2.0, math.nan, math.nan, 2.1, math.nan]
    assert [at for at, _ in alarms(step(n, x) for n, x in enumerate(losses))] == [1, 4]
