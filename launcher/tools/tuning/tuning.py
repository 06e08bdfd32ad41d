"""Tunes a run: predicts, measures, and explains what limits the fastest setting."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.base.errors import LauncherError, UsageError
from launcher.base.screen import Progress, duration
from launcher.runs.checks import auto, gather, memory
from launcher.runs.checks.machine import Gpu
from launcher.runs.follow.assemble import PlannedRun, assemble, counted, new_stamp
from launcher.runs.plan import model_size
from launcher.runs.plan.job import Backend
from launcher.runs.plan.render import values_of
from launcher.runs.records import record, throughput
from launcher.runs.runfile.origins import Override, RunRequest, overridden
from launcher.tools.forecast import timing
from launcher.tools.tuning import measure, predict
from launcher.tools.tuning.candidates import MICRO, Setting, Space, supported
from launcher.tools.tuning.predict import GpuRates
from launcher.tools.tuning.search import Measurement, Search

PREDICTABLE = ("micro-batch", "precision", "layout", "recomputing", "data parallelism", "fast path")
"""The axes that a prediction knows a difference for."""

MIB = 1 << 20
MOST_LEFT = 2
HEADS = f"{'ms a step':>10}  {'GB':>6}  setting"


HELPS = {
    "the host": "which starts kernels one by one; on GPUs, program: gpt starts them together",
    "communication": "which grows with the processes that a model is split over",
    "arithmetic": "which is the model's own",
    measure.TRAFFIC: "by all that isn't products: norms, dropout, the optimizer, copies",
}


@dataclass(frozen=True)
class TuneRequest:
    """How to tune: `steps` of a run, `minutes` in all; `card` is a GPU's name, in place of ours."""

    steps: int = 25
    minutes: float = 5.0
    any_precision: bool = False
    fresh: bool = False
    card: str = ""


@dataclass(frozen=True)
class TuneResult:
    """What came of it: the run without `auto`, its fastest setting, and what to report of all.

    `tried` are the measurements, the fastest first.
    """

    best: Measurement
    space: Space
    lines: tuple[str, ...]
    tried: tuple[Measurement, ...]

    @property
    def table(self) -> list[str]:
        """The measurements as lines of text."""
        return [HEADS, *map(_row, self.tried)]

    def changes(self, asked: RunRequest) -> dict[str, object]:
        """The keys of the run file to change, its `auto` of the micro-batch too."""
        found, tuned = dict(self.best.setting.changes), self.space.of(self.best.setting)
        training = asked.config.training
        if training.micro_batch_size == "auto":
            found[MICRO] = tuned.training.micro_batch_size
        if training.precision is not None and found.keys() & {"training.fp16", "training.bf16"}:
            for name in ("fp16", "bf16"):
                found.pop(f"training.{name}", None)
                if getattr(training, name):
                    found[f"training.{name}"] = None
            found["training.precision"] = predict.precision(tuned)
        return found


@dataclass(frozen=True)
class TuneSubject:
    """What is tuned where: the space, the plan as given, the GPUs' name, "" on the CPU."""

    space: Space
    assembled: PlannedRun
    gpu: str
    given: dict[str, object]


def _ground(asked: RunRequest, chosen: Backend, wanted: TuneRequest, *, dry: bool) -> TuneSubject:
    """Raises UsageError for a run that can't be tuned, EngineError."""
    config, origin = asked.config, asked.origin
    if not supported(config.program):
        told = f"{origin.place('program')}: {config.program} can't be tuned"
        raise UsageError(told, "gpt and pretrain_gpt.py can.")
    if config.nodes.count > 1 or chosen.scheduled:
        raise UsageError("tune measures on this machine alone", "--backend docker or local.")
    if not config.training.global_batch_size:
        told = f"{origin.place('training.global_batch_size')}: tune keeps it, and none is given"
        raise UsageError(told, "Set it.")
    gpus = counted(config, chosen)
    cards = () if wanted.card else gather.visible(gpus, chosen)
    named = re.search(r"(\d+) ?GB", wanted.card)
    total = min((gpu.total for gpu in cards), default=int(named[1]) * 10**9 if named else 0)
    capability = min((gpu.capability for gpu in cards if gpu.capability), default=None)
    capability = (9, 0) if wanted.card and capability is None else capability
    seen = cards
    if wanted.card:  # which isn't the machine's
        able = capability if _has_bf16(wanted.card) else auto.TURING
        seen = (Gpu(0, "", wanted.card, total, 0, able, ""),)
    now = assemble(asked, chosen, new_stamp(), dry=dry, visible=seen).resolved
    training = now.config.training
    micro = now.values.get("micro_batch_size")
    given: dict[str, object] = {MICRO: micro, "training.precision": None}
    given |= {f"training.{name}": getattr(training, name) for name in ("fp16", "bf16")}
    fixed = overridden(now.config, [Override("tune", given)])
    assembled = assemble(replace(asked, config=fixed), chosen, new_stamp(), dry=dry)
    space = Space(fixed, now.processes, capability, total, wanted.any_precision)
    return TuneSubject(space, assembled, cards[0].name if cards else wanted.card, given)


def _has_bf16(name: str) -> bool:
    return throughput.peak(name, "bf16") is not None


@dataclass(frozen=True)
class Prediction:
    """What the settings should take by what is published of a card; `tried` fastest first."""

    space: Space
    card: GpuRates
    best: Measurement | None
    tried: tuple[Measurement, ...]

    @property
    def lines(self) -> Iterator[str]:
        """It as lines of text."""
        space, card = self.space, self.card
        yield f"predicted for {space.processes} × {card.name}, by its published rates:"
        yield HEADS
        yield from map(_row, self.tried)
        parts = predict.predict(space, self.best.setting, card) if self.best else None
        if self.best and parts:
            yield f"{self.best.setting}: bound by {parts.bound}"
        if not space.total:
            yield "the card's memory isn't known, so what doesn't fit isn't left out"
        if self.best and parts:
            kind = timing.kind(predict.work(space, self.best.setting), parts)
            least, most = timing.OFF[kind]
            yield (
                f"such predictions were {least:.2f} to {most:.2f} of what runs on H100s and H200s "
                f"took, {timing.MOST_MEASURED} at most; other cards weren't measured"
            )


def planned(asked: RunRequest, chosen: Backend, wanted: TuneRequest) -> Prediction:
    """What the settings should take. Raises UsageError where nothing is known of the card."""
    ground = _ground(asked, chosen, wanted, dry=True)
    space, name = ground.space, ground.gpu
    card = predict.published(name, predict.precision(space.config)) if name else None
    if card is None:
        told = f"nothing is published here of {name}" if name else "there is no GPU to plan for"
        raise UsageError(told, '--card "H100 80GB HBM3", as nvidia-smi names it.')

    def predicted(setting: Setting) -> Measurement:
        found = predict.predict(space, setting, card)
        needed = memory.estimate(space.of(setting), space.where(setting), space.capability)
        mib = needed.total / MIB if needed else None
        ms, why = (found.ms, "") if found else (None, "the model's sizes aren't known")
        return Measurement(setting, ms, mib, why)

    search = Search(space, lambda setting: predicted(setting).ms, predicted, PREDICTABLE)
    best = search.run()
    rows = sorted(search.tried.values(), key=lambda one: one.ms or 0)
    return Prediction(space, card, best, tuple(rows))


def tune(
    asked: RunRequest,
    chosen: Backend,
    words: Sequence[str],
    wanted: TuneRequest,
    progress: Progress,
) -> TuneResult:
    """Search, and report each measurement at once. Raises LauncherError where no setting ran."""
    ground = _ground(asked, chosen, wanted, dry=False)
    space, began = ground.space, time.monotonic()
    name = _name(asked, chosen, wanted, ground)
    if wanted.fresh and (record.folder(name) / measure.MEASUREMENTS).exists():
        record.put_bytes(name, measure.MEASUREMENTS, b"")
    progress.step("measuring the rates of the GPU or CPU")
    precision = predict.precision(space.config)
    rates = measure.rates(chosen, space.config, precision)
    card = _card(ground.gpu, precision, rates)
    progress.close()

    def predicted(setting: Setting) -> float | None:
        found = predict.predict(space, setting, card) if card else None
        return found.ms if found else None

    every = measure.lines_every(wanted.steps, predicted(Setting()))
    given = ground.given | measure.short(space.config, wanted.steps, every)
    until = began + 60 * wanted.minutes
    runs = measure.Runs(name, words, asked.rest, given, until, progress.show)
    known = set(runs.known)
    for line in _beforehand(space, predicted(Setting())):
        progress.note(line)
    progress.note(HEADS)

    def measured(setting: Setting) -> Measurement | None:
        found = runs(setting)
        if found:
            progress.note(_row(found) + " (known)" * (setting in known))
        return found

    search = Search(space, predicted, measured)
    best = search.run()
    if best is None or best.ms is None:
        if search.alike:
            record.put_bytes(name, measure.MEASUREMENTS, b"")  # for when that is mended
        ended = {one.why: one.cure for one in search.tried.values()}
        more = [*ended.values()] or ["Give it more: --minutes M"]
        cures = ". ".join(filter(None, [*more, f"Their logs: {runs.folder / 'runs'}"]))
        raise LauncherError(f"no setting ran: {'; '.join(ended) or 'the time was over'}", cures)
    progress.step(f"what a step's time goes to: {best.setting}")
    shares = runs.shares(best.setting)
    progress.close()
    lines = [*_told(ground, search, best, rates, shares)]
    lines.append(f"it took {duration(time.monotonic() - began)}; kept in {runs.folder}")
    rows = sorted(search.tried.values(), key=lambda one: one.ms or float("inf"))
    return TuneResult(best, space, tuple(lines), tuple(rows))


def _name(asked: RunRequest, chosen: Backend, wanted: TuneRequest, ground: TuneSubject) -> str:
    """The folder of the measurements: the same for the same run, image, cards and steps."""
    plan = ground.assembled.plan
    image = dict(chosen.identity(plan.image)).get("id") or ground.assembled.resolved.facts.release
    config = ground.space.config.model_dump(mode="json")
    told = [config, chosen.name, image, ground.gpu, wanted.steps, asked.rest, asked.cwd]
    return "tune-" + hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8]


def _card(name: str, precision: str, rates: object) -> GpuRates | None:
    """The card by its measured rates, and by its published ones for what wasn't measured."""
    known = predict.published(name, precision) if name else None
    if not isinstance(rates, dict):
        return known
    link = known.link if known else 16.0
    return GpuRates(name or "the CPU", float(rates["tflops"]), float(rates["memory"]), link)


def _beforehand(space: Space, ms: float | None) -> Iterator[str]:
    """What a step of the run as given should take, and whether it fits."""
    if ms:
        yield f"as given, a step should take about {ms:.1f} ms by the card's rates"
    needed = memory.estimate(space.config, space.where(Setting()), space.capability)
    if space.total and needed:
        yield f"it needs about {needed.total / 1e9:.1f} GB of a GPU's {space.total / 1e9:.1f}"


def _row(found: Measurement) -> str:
    ms = f"{found.ms:.1f}" if found.ms is not None else "-"
    size = f"{found.mib * MIB / 1e9:.1f}" if found.mib else ""
    return f"{ms:>10}  {size:>6}  {found.setting}" + (f": {found.why}" if found.why else "")


def _left(search: Search, best: Measurement) -> Iterator[str]:
    """The settings for which no time was left: the best predicted, and the number of others."""
    left = sorted(search.left, key=lambda one: search.predicted(one) or 0.0)
    for one in left[:MOST_LEFT]:
        now, then = search.predicted(best.setting), search.predicted(one)
        foreseen = f"; it should take {then / now:.2f} times as long" if now and then else ""
        yield f"no time was left to measure {one}{foreseen}"
    if more := len(left[MOST_LEFT:]):
        yield f"no time was left to measure others: {more} (--minutes gives more)"


def _told(
    ground: TuneSubject, search: Search, best: Measurement, rates: object, shares: dict[str, float]
) -> Iterator[str]:
    """What came of it, in lines."""
    assert best.ms
    given = search.tried[Setting()]
    was = f"{given.ms:.1f} ms as given" if given.ms else f"as given: {given.why}"
    times = f", {given.ms / best.ms:.1f} times as fast" if given.ms else ""
    yield f"{best.ms:.1f} ms a step, {was}{times}: {best.setting}"
    yield from _left(search, best)
    config, where = ground.space.of(best.setting), ground.space.where(best.setting)
    size = model_size.shape(config.program, values_of(config, where))
    if size and isinstance(rates, dict) and config.training.global_batch_size:
        operations = size.operations(config.training.global_batch_size) / where.world
        tflops, most = operations / best.ms / 1e9, float(rates["tflops"])
        yield (
            f"{tflops:.3g} TFLOP/s on each of {where.world}, {tflops / most:.0%} of the "
            f"{most:.3g} that matrix products alone reach here in {predict.precision(config)}"
        ).replace("%", " %")
    if not shares:
        yield "no time was left to trace a step, or its trace says nothing: --minutes gives more"
    if shares:
        told = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
        yield f"time of a step: {told}".replace("%", " %")
        part = next(iter(shares))
        yield f"what holds it back most: {part}, {HELPS[part]}"
