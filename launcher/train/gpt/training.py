"""The training run: set up the ranks, step, log, evaluate, save, stop."""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from launcher.train import compat, log
from launcher.train.checkpoints import checkpoint, replicas
from launcher.train.checkpoints.checkpoint import Progress
from launcher.train.gpt import data, fast, measurements, model, optimizer, split
from launcher.train.gpt.arguments import Layout, learning_rate
from launcher.train.gpt.device_adam import DeviceAdam
from launcher.train.gpt.gradients import GatheredGradients
from launcher.train.gpt.measurements import Meter
from launcher.train.gpt.writers import Writers
from launcher.train.ranks.ending import RunError
from launcher.train.ranks.stop import StopRequest

ASKED = "asked to by a signal"


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


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean over the tokens that count; losses and loss_mask are [micro-batch, sequence]."""
    mask = loss_mask.reshape(-1)
    loss = split.share(torch.sum(losses.float().view(-1) * mask), mask.sum())
    # The schedules divide the loss in place, so what is logged has to be a copy.
    logged = {"lm loss": loss.detach().clone()}
    return loss * compat.loss_factor(parallel_state.get_context_parallel_world_size()), logged


def forward_step(batches: Iterator[dict[str, torch.Tensor]] | None, gpt: Any) -> Any:
    """One micro-batch through this rank's layers, and how to make its output a loss."""
    if batches is None:
        return gpt(None, None, None), None
    batch = {name: x.cuda(non_blocking=True) for name, x in split.own_part(next(batches)).items()}
    output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def _mean_of(losses: list[dict[str, torch.Tensor]]) -> torch.Tensor | None:
    """The mean over a step's micro-batches; None where this rank has no losses."""
    return torch.stack([each["lm loss"] for each in losses]).mean() if losses else None


def _number(grad_norm: torch.Tensor | float | None) -> float | None:
    """A norm for people: None where there is none, or an overflow took it."""
    known = None if grad_norm is None else float(grad_norm)
    return known if known is None or math.isfinite(known) else None


def _mean_over_data(value: torch.Tensor) -> float:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(value, group=group)
    return float(value.item() / torch.distributed.get_world_size(group))


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
        self.forward_backward = get_forward_backward_func()
        self.progress = self._load(source, saved)
        self.steps = self._steps()
        if self.gathered:
            self.gathered.keep_for(self.steps, getattr(self.gpt.decoder, "gradients", None))
        self.fast_step = fast.Step(self.path, self._step, self._plain, say, layout.micro_batches)
        self.saved = self.progress.iteration
        self.loss: torch.Tensor | None = None  # the last step's, on the last stage
        self.profile = measurements.Profile(arguments, self.saved, self.path.slow_steps)
        self.seconds: list[float] = []  # each step's, where they are asked for
        self.writes = bool(arguments.tensorboard_dir or arguments.wandb_project)
        self.writers = Writers(arguments, self.saved) if self.writes and _is_last() else None
        self.memory_told = bool(arguments.on_cpu)  # upstream tells a GPU's
        self.stop = StopRequest() if arguments.exit_signal_handler else None
        self.training_set, self.validation_set = data.datasets(arguments)
        held_out = self.validation_set if arguments.eval_iters else None
        self.validation = data.loader(arguments, held_out, 0)
        self.held_out = self._fetch_held_out()
        self.meter = Meter()

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
        self._warm_up_evaluation()
        loader = data.loader(arguments, self.training_set, self.progress.consumed_samples)
        batches = iter(loader) if loader else None
        self.meter = Meter()
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
        say(f"stopped {end}: {reason}" if reason else f"finished {end}")
        if self.writers:
            self.writers.close()
        if arguments.performance_summary:
            self._summarise()

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
        if self.writes and self._is_due(arguments.tensorboard_log_interval) and not passed_over:
            self._write(grad_norm)
        if self._is_due(arguments.log_interval) and self.meter.iterations:
            self._log(grad_norm)
        if self._is_due(arguments.check_replicas_interval):
            self._check_replicas()
        ended = self.progress.iteration >= arguments.train_iters  # then it evaluates anyway
        if self._is_due(arguments.eval_interval) and not ended:
            self._evaluate()
        if self._is_due(arguments.save_interval):
            self._save()

    def _measured(self, batches: Any) -> Any:
        """Step, and keep its time and loss; the gradient's norm."""
        started = time.perf_counter()
        with self.profile.step(self.progress.iteration + 1):
            self.loss, advanced, grad_norm = self.step(batches)
        if self.arguments.performance_summary:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - started)
        self.meter.add(self.loss, advanced)
        return grad_norm

    def _is_due(self, interval: int | None) -> bool:
        return self.progress.iteration % interval == 0 if interval else False

    def _reason_to_stop(self) -> str:
        if self.stop and self.stop.agreed():
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
        losses = self._forward_backward(batches, forward_only=False)
        return (_mean_of(losses), *self.steps.step())

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        """Complete the gradients, once a step's backward passes are done."""
        if self.gathered:
            self.gathered.gather()
        finalize_model_grads(*args, **kwargs)
        if self.alike:
            self.alike.average()

    def _forward_backward(self, batches: Any, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        losses: list[dict[str, torch.Tensor]] = self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=self._of_parts(batches),
            model=self.wrapped,
            num_microbatches=self.layout.micro_batches,
            seq_length=self.arguments.seq_length,
            micro_batch_size=self.arguments.micro_batch_size,
            decoder_seq_length=self.arguments.seq_length,
            forward_only=forward_only,
        )
        return losses

    def _of_parts(self, batches: Any) -> Any:
        """The batches where they are used: the first stage's first part, the last one's last."""
        if len(self.parts) == 1:
            return batches
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        rest = [None] * (len(self.parts) - 1)
        return [batches, *rest] if first else [*rest, batches]

    def _settle(self) -> float:
        """Learn from the device how many steps were taken; the rate that the next one uses."""
        self.progress = replace(self.progress, steps=self.steps.settle())
        return learning_rate(self.arguments, self.progress.steps)

    def _write(self, grad_norm: torch.Tensor | float | None) -> None:
        """This iteration's numbers; all ranks call this, since the loss is a mean over them."""
        loss = None if self.loss is None else _mean_over_data(self.loss.clone())
        if self.writers:
            values = {
                "learning-rate": self._settle(),
                "batch-size": self.arguments.global_batch_size,
                "lm loss": loss,
                "loss-scale": float(self.optimizer.get_loss_scale()),
                "grad-norm": _number(grad_norm),
            }
            self.writers.write(values, self.progress.iteration, self.progress.consumed_samples)

    def _log(self, grad_norm: torch.Tensor | float | None) -> None:
        """The interval's line, on the last rank, and what else comes with it; begin another."""
        meter, iteration, loss, nan = self.meter, self.progress.iteration, None, 0
        advanced = int(meter.advanced)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            nan = int(meter.nan)
            if advanced:
                loss = _mean_over_data(torch.as_tensor(meter.loss)) / advanced
        # Once the loss is known, the device has come to here.
        milliseconds = 1000.0 * (time.perf_counter() - meter.started) / meter.iterations
        line = log.training_line(
            time.strftime("%Y-%m-%d %H:%M:%S"),
            iteration=iteration,
            train_iters=self.arguments.train_iters,
            consumed_samples=self.progress.consumed_samples,
            milliseconds=milliseconds,
            learning_rate=self._settle(),
            global_batch_size=self.arguments.global_batch_size,
            loss=loss,
            loss_scale=float(self.optimizer.get_loss_scale()),
            grad_norm=_number(grad_norm),
            skipped=meter.iterations - advanced,
            nan=nan,
        )
        _say_last(line)
        if self.writers:  # upstream's is in seconds
            self.writers.write({"iteration-time": milliseconds / 1000.0}, iteration)
        if not self.memory_told and self.progress.steps:  # the optimizer has made its state
            self.memory_told = True
            if parallel_state.get_data_parallel_rank() == 0:  # as upstream has it
                print(measurements.memory_line(iteration), flush=True)
        self.meter = Meter()

    def _summarise(self) -> None:
        """Write the summary on rank 0, from what all ranks know."""
        device = torch.cuda.current_device()
        loss = float("nan") if self.loss is None else _mean_over_data(self.loss.clone())
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

    def _save(self) -> None:
        self._check_replicas()
        self.steps.unite()
        self._settle()
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

    def _fetch_held_out(self) -> Any:
        """The next evaluation's batches: the workers fetch them while steps are taken."""
        return iter(self.validation) if self.validation else None

    def _warm_up_evaluation(self) -> None:
        """Have its kernels loaded before the first step: 0.2 s that an evaluation took more."""
        due = self.arguments.eval_interval < self.arguments.train_iters
        if not (self.path.compiled and due and self.validation_set and self.arguments.eval_iters):
            return
        with torch.no_grad(), self._evaluating():
            self._forward_backward(self.held_out, forward_only=True)
        self.held_out = self._fetch_held_out()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        for part in self.wrapped:
            part.eval()
        yield
        for part in self.wrapped:
            part.train()

    def _evaluate(self) -> bool:
        """Evaluate, unless it is asked to stop meanwhile: then False, and nothing is said."""
        if not self.arguments.eval_iters or self.validation_set is None:
            return True
        meter = Meter()
        with torch.no_grad(), self._evaluating():
            for _ in range(self.arguments.eval_iters):
                losses = self._forward_backward(self.held_out, forward_only=True)
                meter.add(_mean_of(losses), advanced=True)
                if self.stop and self.stop.agreed():
                    return False
        self.held_out = self._fetch_held_out()
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            loss = _mean_over_data(torch.as_tensor(meter.loss)) / meter.advanced
            _say_last(log.validation_line(self.progress.iteration, loss))
            if self.writers:
                where = (self.progress.iteration, self.progress.consumed_samples)
                self.writers.write({"lm loss validation": loss}, *where)
        return True
