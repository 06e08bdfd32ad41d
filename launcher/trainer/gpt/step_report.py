"""Reports steps: log lines, TensorBoard and W&B values, a summary."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from launcher.trainer.gpt import log, measurements
from launcher.trainer.gpt.arguments import RankLayout
from launcher.trainer.gpt.distributed_checkpoint import TrainingProgress
from launcher.trainer.gpt.measurements import Meter, Waits
from launcher.trainer.gpt.passes import mean_over_data
from launcher.trainer.gpt.writers import Writers


def say(text: str) -> None:
    """Print on rank 0 only."""
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)


def _is_last() -> bool:
    """Whether this is the last rank: in a pipeline, the loss is known there."""
    return bool(torch.distributed.get_rank() == torch.distributed.get_world_size() - 1)


def _say_last(text: str) -> None:
    """Print on the last rank only."""
    if _is_last():
        print(text, flush=True)


def _number(grad_norm: torch.Tensor | float | None) -> float | None:
    """A norm for people: None where there is none, or an overflow took it."""
    known = None if grad_norm is None else float(grad_norm)
    return known if known is None or math.isfinite(known) else None


class StepReport:
    """All ranks call its methods, since a loss is a mean over them; `grad_norm` is a step's."""

    def __init__(self, arguments: argparse.Namespace, layout: RankLayout, optimizer: Any) -> None:
        self.arguments, self.layout, self.optimizer = arguments, layout, optimizer
        self.loss: torch.Tensor | None = None  # the last step's, on the last stage
        self.seconds: list[float] = []  # each step's, where they are asked for
        self.writes = bool(arguments.tensorboard_dir or arguments.wandb_project)
        self.writers: Writers | None = None
        self.most = 0  # bytes of a GPU's memory that the last line of it names
        self.meter = Meter()
        self.waits: Waits | None = None

    def begin(self, done: int) -> None:
        """After so many iterations."""
        if self.writes and _is_last():
            self.writers = Writers(self.arguments, done)

    def add(self, loss: torch.Tensor | None, advanced: Any, began: float) -> None:
        """A step."""
        self.loss = loss
        if self.arguments.performance_summary:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - began)
        self.meter.add(loss, advanced)

    def write(self, progress: TrainingProgress, rate: float, grad_norm: Any) -> None:
        """An iteration's numbers."""
        loss = None if self.loss is None else mean_over_data(self.loss.clone())
        if self.writers:
            values = {
                "learning-rate": rate,
                "batch-size": self.arguments.global_batch_size,
                "lm loss": loss,
                "loss-scale": float(self.optimizer.get_loss_scale()),
                "grad-norm": _number(grad_norm),
            }
            self.writers.write(values, progress.iteration, progress.consumed_samples)

    def log(self, progress: TrainingProgress, rate: float, grad_norm: Any) -> None:
        """The interval's line, on the last rank, and what else comes with it; begin another."""
        meter, iteration, loss, nan = self.meter, progress.iteration, None, 0
        advanced = int(meter.advanced)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            nan = int(meter.nan)
            if advanced:
                loss = mean_over_data(torch.as_tensor(meter.loss)) / advanced
        # Once the loss is known, the device has come to here.
        milliseconds = 1000.0 * (time.perf_counter() - meter.started) / meter.iterations
        before, joules = meter.joules, measurements.energy()
        line = log.training_line(
            time.strftime("%Y-%m-%d %H:%M:%S"),
            iteration=iteration,
            train_iters=self.arguments.train_iters,
            consumed_samples=progress.consumed_samples,
            milliseconds=milliseconds,
            learning_rate=rate,
            global_batch_size=self.arguments.global_batch_size,
            loss=loss,
            loss_scale=float(self.optimizer.get_loss_scale()),
            grad_norm=_number(grad_norm),
            skipped=meter.iterations - advanced,
            nan=nan,
            waited=1000.0 * self.waits.seconds / meter.iterations if self.waits else None,
            energy=(joules - before) / meter.iterations if joules and before else None,
        )
        _say_last(line)
        if self.writers:  # upstream's is in seconds
            self.writers.write({"iteration-time": milliseconds / 1000.0}, iteration)
        if progress.steps and not self.most:  # the optimizer has made its state
            self._log_memory(iteration)
        self.meter = Meter()
        if self.waits:
            self.waits.seconds = 0.0

    def _log_memory(self, iteration: int) -> None:
        """A GPU's line, where it has needed more than the last one says; as upstream's, on some."""
        on_cpu = bool(self.arguments.on_cpu)
        most = 0 if on_cpu else measurements.peak(on_cpu)["allocated"]
        if most > self.most and parallel_state.get_data_parallel_rank() == 0:
            print(measurements.memory_line(iteration), flush=True)
        self.most = max(self.most, most)

    def validation(self, progress: TrainingProgress, meter: Meter) -> None:
        """An evaluation's line."""
        if self.most:
            self._log_memory(progress.iteration)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return
        loss = mean_over_data(torch.as_tensor(meter.loss)) / meter.advanced
        _say_last(log.validation_line(progress.iteration, loss))
        if self.writers:
            where = (progress.iteration, progress.consumed_samples)
            self.writers.write({"lm loss validation": loss}, *where)

    def end(self, text: str) -> None:
        """Say how it ended, and write the summary on rank 0, from what all ranks know."""
        say(text)
        if self.writers:
            self.writers.close()
        if self.arguments.performance_summary:
            self._summarise()

    def _summarise(self) -> None:
        device = torch.cuda.current_device()
        loss = float("nan") if self.loss is None else mean_over_data(self.loss.clone())
        last = torch.tensor([loss], device=device, dtype=torch.float64)
        torch.distributed.broadcast(last, src=torch.distributed.get_world_size() - 1)
        peak = measurements.peak(self.arguments.on_cpu)
        most = torch.tensor(list(peak.values()), device=device, dtype=torch.float64)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        if torch.distributed.get_rank() == 0:
            made = measurements.summary(
                self.arguments,
                self.layout,
                self.seconds,
                loss=float(last.item()),
                memory={kind: int(most[at].item()) for at, kind in enumerate(peak)},
            )
            say(measurements.write(made, Path(self.arguments.performance_summary)))
