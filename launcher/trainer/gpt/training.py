"""The training run: set up the ranks, step, log, evaluate, save, stop."""

from __future__ import annotations

import argparse
import datetime
import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads

from launcher.agent import compat
from launcher.agent.ranks.ending import RunError
from launcher.agent.ranks.stop import StopRequest
from launcher.trainer.fast import fast
from launcher.trainer.fast.device_adam import DeviceAdam
from launcher.trainer.fast.gradients import GatheredGradients
from launcher.trainer.gpt import checkpoint, data, measurements, model, optimizer, replicas, split
from launcher.trainer.gpt.arguments import Layout, learning_rate
from launcher.trainer.gpt.checkpoint import Progress
from launcher.trainer.gpt.evaluation import Evaluation
from launcher.trainer.gpt.measurements import Meter
from launcher.trainer.gpt.passes import Passes
from launcher.trainer.gpt.report import Report, say

ASKED = "asked to by a signal"


def initialise(arguments: argparse.Namespace, layout: Layout) -> None:
    """Join the process group, divide it by `layout`, and seed every random generator."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    graphed = fast.choose(arguments, layout).graphed
    if graphed:
        fast.own_stream()
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
    # Stages of a pipeline hold different layers, and must not start from the same numbers.
    seed = arguments.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, **compat.capturable_randomness(graphed))


class Trainer:
    """A run in progress: the model, its optimizer, its data, and where it is."""

    def __init__(self, arguments: argparse.Namespace, layout: Layout) -> None:
        self.arguments = arguments
        self.layout = layout
        source = checkpoint.newest(arguments.load) if arguments.load else None
        saved = checkpoint.common(source) if source else {}
        self.path = fast.choose(arguments, layout)
        vocabulary = model.vocabulary(arguments, layout.tensor, saved)
        compiled, several = self.path.compiled, range(layout.virtual)
        self.parts = [model.build(arguments, vocabulary, compiled, part) for part in several]
        self.gpt = self.parts[0]
        self.wrapped = [optimizer.wrap(arguments, each) for each in self.parts]
        alone = layout.micro_batches == 1 and not arguments.overlap_grad_reduce
        self.gathered: GatheredGradients | None = None
        if self.path.compiled and alone:
            self.gathered = GatheredGradients(self.wrapped[0])
            self.path = self._reach(self.gathered)
        self.optimizer = optimizer.build(arguments, self.wrapped)
        self.config = self.gpt.config
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.batch_p2p_sync = not self.path.graphed
        self.config.finalize_model_grads_func = self._finalize
        compiled_apart = self.path.compiled and layout.tensor > 1
        every = (each for part in self.parts for each in part.parameters())
        self.alike = split.Alike(every) if compiled_apart else None
        if arguments.overlap_grad_reduce:
            each = [part.no_sync for part in self.wrapped]
            self.config.no_sync_func = each if len(each) > 1 else each[0]
        self.passes = Passes(arguments, layout, self.wrapped)
        self.report = Report(arguments, layout, self.optimizer)
        self.progress = self._load(source, saved)
        self.steps = self._steps()
        if self.gathered:
            self.gathered.keep_for(self.steps, getattr(self.gpt.decoder, "gradients", None))
        self.fast_step = fast.Step(self.path, self._step, self._plain, say, layout.micro_batches)
        self.saved = self.progress.iteration
        self.profile = measurements.Profile(arguments, self.saved, self.path.slow_steps)
        self.report.begin(self.saved)
        self.stop = StopRequest() if arguments.exit_signal_handler else None
        self.training_set, held_out = data.datasets(arguments)
        self.evaluation = Evaluation(arguments, held_out, self.passes)

    def _reach(self, gathered: GatheredGradients) -> fast.Path:
        """The path, with two replicas that use each other's memory, or why they don't."""
        try:
            gathered.reach()
        except RuntimeError as error:
            return self.path.without("symmetric", f"no symmetric memory: {error}")
        return replace(self.path, symmetric=bool(gathered.peer))

    def _load(self, source: Path | None, saved: dict[str, Any]) -> Progress:
        if source is None:
            if self.arguments.load:
                say(f"no checkpoint in {self.arguments.load}: starting from the beginning")
            return Progress()
        progress = checkpoint.load(source, saved, self.parts, self.optimizer)
        say(f"loaded {source}: going on after iteration {progress.iteration}")
        if saved["layout"] != checkpoint.layout():
            other = "TP={tensor} PP={pipeline}".format(**saved["layout"])
            say(f"it was saved with {other}: random states are not carried over")
        return progress

    def _steps(self) -> DeviceAdam | optimizer.HostSteps:
        """What steps the parameters: Megatron's optimizer, or its device-side stand-in."""
        taken = self.progress.steps
        if self.path.optimizer:
            try:
                return DeviceAdam(self.arguments, self.optimizer, taken, self._compiler())
            except ValueError as error:
                self.path = self.path.without("optimizer", f"Megatron's optimizer: {error}")
                if self.path.graphed:
                    self.path = self.path.without("graphed", "no CUDA graph")
        return optimizer.HostSteps(self.arguments, self.optimizer, taken)

    def _compiler(self) -> Callable[[Any], Any]:
        """What makes a function of tensors faster: torch's, on GPUs."""
        return (lambda function: function) if self.arguments.on_cpu else fast.compile_alike

    def _plain(self, part: str) -> None:
        """Do without "kernels", or all that is "compiled"."""
        if isinstance(self.steps, DeviceAdam):  # what failed may have counted
            self.steps.steps.fill_(self.progress.steps)
        for each in self.parts:
            each.plain(part)
        if part != "kernels" and isinstance(self.steps, DeviceAdam):
            self.steps.compile_with(lambda function: function)

    def run(self) -> None:
        """Train to the last iteration, or to where the run is asked to stop."""
        with fast.attention():
            self._run()
        self.fast_step.release()

    def _run(self) -> None:
        arguments, reason = self.arguments, ""
        say(str(self.path))
        if self.path.compiled and arguments.eval_interval < arguments.train_iters:
            self.evaluation.warm_up()
        loader = data.loader(arguments, self.training_set, self.progress.consumed_samples)
        batches = iter(loader) if loader else None
        self.report.meter = Meter()
        while self.progress.iteration < arguments.train_iters and not reason:
            self._iteration(batches)
            reason = self._reason_to_stop()
        if not reason:
            self._check_replicas()
        if arguments.save and self.saved != self.progress.iteration:
            self._save()
        if not reason and not self._evaluate():
            reason = ASKED
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

    def step(self, batches: Any) -> fast.Outcome:
        """One step: its loss (on the last stage), whether it was taken, the gradient's norm."""
        return self.fast_step(batches) if self.path.compiled else self._step(batches)

    def _step(self, batches: Any) -> fast.Outcome:
        if self.gathered:
            self.gathered.taken.clear()  # what a step left that failed
        else:
            for part in self.wrapped:
                part.zero_grad_buffer()
        self.optimizer.zero_grad()
        return (self.passes(batches), *self.steps.step())

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        """Complete the gradients, once a step's backward passes are done."""
        if self.gathered:
            self.gathered.gather()
        finalize_model_grads(*args, **kwargs)
        if self.alike:
            self.alike.average()

    def _settled(self) -> tuple[Progress, float]:
        """The progress, with the steps that the device has taken; the rate that the next uses."""
        self.progress = replace(self.progress, steps=self.steps.settle())
        return self.progress, learning_rate(self.arguments, self.progress.steps)

    def _save(self) -> None:
        self._check_replicas()
        self.steps.unite()
        self._settled()
        self.saved = self.progress.iteration
        folder = checkpoint.save(
            *(self.arguments.save, self.parts, self.optimizer, self.progress), vars(self.arguments)
        )
        say(f"saved {folder}")

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
        raise RunError("")  # said by those ranks

    def _evaluate(self) -> bool:
        """Evaluate, unless it is asked to stop meanwhile: then False, and nothing is said."""
        if not self.evaluation.asked_for:
            return True
        found = self.evaluation.measure(self._is_asked_to_stop)
        if found:
            self.report.validation(self.progress, found)
        return bool(found)
