"""The training run: set up the ranks, step, log, evaluate, save, stop."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib
import importlib.util
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads

from launcher.agent import compat, words
from launcher.agent.ranks.exit_codes import RunError
from launcher.agent.ranks.stop import StopRequest
from launcher.trainer.gpt import (
    distributed_checkpoint,
    measurements,
    model,
    optimizer,
    replicas,
    samples,
)
from launcher.trainer.gpt.arguments import RankLayout, learning_rate
from launcher.trainer.gpt.distributed_checkpoint import TrainingProgress
from launcher.trainer.gpt.evaluation import Evaluation
from launcher.trainer.gpt.measurements import Meter, Waits
from launcher.trainer.gpt.passes import Passes
from launcher.trainer.gpt.step_report import StepReport, say

ASKED = "asked to by a signal"
FAST = "launcher.trainer.fast"
"""The package with the fast path, which the payload may lack."""

StepOutcome = tuple[torch.Tensor | None, Any, Any]
"""A step's loss, fp32 [], whether it was taken, and the gradient's norm: until the next one."""


def begin(arguments: argparse.Namespace, layout: RankLayout) -> Trainer:
    """Join the process group, and return the trainer: the fast one, where it is here and wanted."""
    kind, there = Trainer, importlib.util.find_spec(FAST)
    if there and not arguments.no_fast:
        kind = importlib.import_module(f"{FAST}.trainer").FastTrainer
    initialise(arguments, layout, graphed=kind.is_graphed(arguments, layout))
    return kind(arguments, layout)


def initialise(arguments: argparse.Namespace, layout: RankLayout, *, graphed: bool = False) -> None:
    """Join the process group, divide it by `layout`, and seed every random generator.

    `graphed` leaves the default stream, which no CUDA graph can be captured on.
    """
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if graphed:
        torch.cuda.set_stream(torch.cuda.Stream())
    torch.distributed.init_process_group(
        backend="nccl", timeout=datetime.timedelta(minutes=arguments.distributed_timeout_minutes)
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        distributed_timeout_minutes=arguments.distributed_timeout_minutes,
    )
    measurements.say_links()
    # Stages of a pipeline hold different layers, and must not start from the same numbers.
    seed = arguments.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, **compat.capturable_randomness(graphed))


class Trainer:
    """A run in progress: the model, its optimizer, its data, and where it is.

    Plain PyTorch on Megatron-Core; the fast trainer has parts of its own in the place of these.
    """

    slow_steps = 0
    """The first steps of a process, whose times say nothing of the others."""

    def __init__(self, arguments: argparse.Namespace, layout: RankLayout) -> None:
        self.arguments = arguments
        self.layout = layout
        source = distributed_checkpoint.newest(arguments.load) if arguments.load else None
        saved = distributed_checkpoint.common(source) if source else {}
        vocabulary = model.vocabulary(arguments, layout.tensor, saved)
        self.parts = [self._build(vocabulary, part) for part in range(layout.virtual)]
        self.gpt = self.parts[0]
        self.wrapped = self._wrapped()
        self.optimizer = optimizer.build(arguments, self.wrapped)
        self.config = self.gpt.config
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = self._finalize
        if arguments.overlap_grad_reduce:
            each = [part.no_sync for part in self.wrapped]
            self.config.no_sync_func = each if len(each) > 1 else each[0]
        self.passes = Passes(arguments, layout, self.wrapped)
        self.report = StepReport(arguments, layout, self.optimizer)
        self.progress = self._load(source, saved)
        self.steps = self._steps()
        self.saved = self.progress.iteration
        self.saving: Path | None = None
        copies = distributed_checkpoint.HostCopies()
        self.beside = (*compat.async_saving(), copies) if arguments.async_save else None
        self.profile = measurements.StepTracer(arguments, self.saved, self.slow_steps)
        self.report.begin(self.saved)
        self.stop = StopRequest() if arguments.exit_signal_handler else None
        self.training_set, held_out = samples.datasets(arguments)
        self.evaluation = Evaluation(arguments, held_out, self.passes)

    @classmethod
    def is_graphed(cls, arguments: argparse.Namespace, layout: RankLayout) -> bool:
        """Whether its steps are to become a CUDA graph."""
        return False

    def _build(self, vocabulary: int, part: int) -> Any:
        """One of this rank's parts of the model."""
        return model.build(self.arguments, vocabulary, part)

    def _wrapped(self) -> list[Any]:
        """Each part under its data parallelism."""
        return [optimizer.wrap(self.arguments, each) for each in self.parts]

    def _load(self, source: Path | None, saved: dict[str, Any]) -> TrainingProgress:
        if source is None:
            if self.arguments.load:
                say(f"no checkpoint in {self.arguments.load}: starting from the beginning")
            return TrainingProgress()
        progress = distributed_checkpoint.load(source, saved, self.parts, self.optimizer)
        say(f"loaded {source}: going on after iteration {progress.iteration}")
        if saved["layout"] != distributed_checkpoint.layout():
            other = "TP={tensor} PP={pipeline}".format(**saved["layout"])
            say(f"it was saved with {other}: random states are not carried over")
        return progress

    def _steps(self) -> Any:
        """What steps the parameters, as `optimizer.HostSteps` does."""
        return optimizer.HostSteps(self.arguments, self.optimizer, self.progress.steps)

    def describe(self) -> str:
        """The line that says how fast it is meant to be."""
        why = "--no-fast" if self.arguments.no_fast else f"there is no {FAST}"
        return f"{words.FAST}off; {why}"

    def warm_up(self) -> None:
        """Do before the first step what would count as its time."""

    def run(self) -> None:
        """Train to the last iteration, or to where the run is asked to stop."""
        arguments, reason = self.arguments, ""
        say(self.describe())
        self.warm_up()
        loader = samples.loader(arguments, self.training_set, self.progress.consumed_samples)
        batches = self.report.waits = Waits(iter(loader)) if loader else None
        self.report.meter = Meter()
        gc.freeze()  # what is there stays: to look through it took 0.3 s of a save
        while self.progress.iteration < arguments.train_iters and not reason:
            self._iteration(batches)
            reason = self._reason_to_stop()
        if not reason:
            self._check_replicas()
        if arguments.save and self.saved != self.progress.iteration:
            self._save()
        self._finish_saving(wait=True)
        if not reason and not self._evaluate():
            reason = ASKED
        for each in (loader, self.evaluation.loader):  # at exit torch waits 5 s for each worker
            if getattr(each, "_iterator", None) is not None:
                each._iterator._shutdown_workers()
        end = f"after iteration {self.progress.iteration}"
        self.report.end(f"stopped {end}: {reason}" if reason else f"finished {end}")

    def _iteration(self, batches: Any) -> None:
        """Step, or pass its batches over, and do what is due after it."""
        arguments, grad_norm = self.arguments, None
        passed_over = self.progress.iteration + 1 in arguments.iterations_to_skip
        if passed_over:
            say(f"iteration {self.progress.iteration + 1}: its batches are passed over")
            for _ in range(self.layout.micro_batches if batches else 0):
                next(batches)
        else:
            grad_norm = self._measured(batches)
        self.progress = replace(
            self.progress,
            iteration=self.progress.iteration + 1,
            consumed_samples=self.progress.consumed_samples + arguments.global_batch_size,
        )
        due = self._is_due(arguments.tensorboard_log_interval) and not passed_over
        if self.report.writes and due:
            self.report.write(*self._settled(), grad_norm)
        if self._is_due(arguments.log_interval) and self.report.meter.iterations:
            self.report.log(*self._settled(), grad_norm)
        if self._is_due(arguments.check_replicas_interval):
            self._check_replicas()
        ended = self.progress.iteration >= arguments.train_iters  # then it evaluates anyway
        if self._is_due(arguments.eval_interval) and not ended:
            self._evaluate()
        self._finish_saving(wait=False)
        if self._is_due(arguments.save_interval):
            self._save()

    def _measured(self, batches: Any) -> Any:
        """Step, and keep its time and loss; the gradient's norm."""
        began = time.perf_counter()
        with self.profile.step(self.progress.iteration + 1):
            loss, advanced, grad_norm = self.step(batches)
        self.report.add(loss, advanced, began)
        return grad_norm

    def _is_due(self, interval: int | None) -> bool:
        return self.progress.iteration % interval == 0 if interval else False

    def _is_asked_to_stop(self) -> bool:
        return bool(self.stop and self.stop.agreed())

    def _reason_to_stop(self) -> str:
        if self._is_asked_to_stop():
            return ASKED
        return "--exit-interval" if self._is_due(self.arguments.exit_interval) else ""

    def step(self, batches: Any) -> StepOutcome:
        """One step: its loss (on the last stage), whether it was taken, the gradient's norm."""
        self._zero()
        self.optimizer.zero_grad()
        return (self.passes(batches), *self.steps.step())

    def _zero(self) -> None:
        """Have no gradients, before a step."""
        for part in self.wrapped:
            part.zero_grad_buffer()

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        """Complete the gradients, once a step's backward passes are done."""
        finalize_model_grads(*args, **kwargs)

    def _settled(self) -> tuple[TrainingProgress, float]:
        """The progress, with the steps that the device has taken; the rate that the next uses."""
        self.progress = replace(self.progress, steps=self.steps.settle())
        return self.progress, learning_rate(self.arguments, self.progress.steps)

    def _save(self) -> None:
        self._check_replicas()
        self.steps.unite()
        self._settled()
        self._finish_saving(wait=True)
        self.saved = self.progress.iteration
        what = (self.arguments.save, self.parts, self.optimizer, self.progress)
        self.saving = distributed_checkpoint.save(*what, vars(self.arguments), self.beside)
        self._finish_saving(wait=False)

    def _finish_saving(self, *, wait: bool) -> None:
        """Report the checkpoint that is being saved, once it is whole."""
        beside, folder = self.beside, self.saving
        if folder and (not beside or distributed_checkpoint.finish(folder, beside[0], wait=wait)):
            say(f"saved {folder}")
            self.saving = None

    def _check_replicas(self) -> None:
        """Raises `RunError` on every rank when any rank's replicas disagree."""
        disagreements = replicas.model_disagreements(self.parts)
        count = torch.tensor([len(disagreements)], device=torch.cuda.current_device())
        torch.distributed.all_reduce(count)
        if not int(count.item()):
            return
        for rank, text in disagreements:
            if torch.distributed.get_rank() == rank:
                print(f"replicas disagree: {text}", flush=True)
        raise RunError("")  # printed by those ranks

    def _evaluate(self) -> bool:
        """Evaluate, unless it is asked to stop meanwhile: then False, and nothing is printed."""
        if not self.evaluation.asked_for:
            return True
        found = self.evaluation.measure(self._is_asked_to_stop)
        if found:
            self.report.validation(self.progress, found)
        return bool(found)
