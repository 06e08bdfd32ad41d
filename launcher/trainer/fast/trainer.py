"""The trainer of the fast path: compiled, captured as a CUDA graph, with no waits in its step."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from launcher.trainer.fast import compiled, context_attention, fast, scaled
from launcher.trainer.fast.device_adam import DeviceAdam
from launcher.trainer.fast.gradients import GatheredGradients, Replica
from launcher.trainer.fast.tensor_parallel import AlikeGradients
from launcher.trainer.gpt import model, optimizer
from launcher.trainer.gpt.arguments import RankLayout
from launcher.trainer.gpt.step_report import say
from launcher.trainer.gpt.training import StepOutcome, Trainer


class FastTrainer(Trainer):
    """A run whose parts are those of `path`; what of it doesn't work here, it does without."""

    gathered: GatheredGradients | None = None
    alike: AlikeGradients | None = None

    def __init__(self, arguments: argparse.Namespace, layout: RankLayout) -> None:
        self.path = fast.choose(arguments, layout)
        super().__init__(arguments, layout)
        self.config.batch_p2p_sync = not self.path.graphed
        if self.path.compiled and layout.tensor > 1:  # each rank compiles for itself
            self.alike = AlikeGradients(each for part in self.parts for each in part.parameters())

    @classmethod
    def is_graphed(cls, arguments: argparse.Namespace, layout: RankLayout) -> bool:
        """Whether its steps are to become a CUDA graph."""
        return fast.choose(arguments, layout).graphed

    @property
    def slow_steps(self) -> int:  # type: ignore[override]
        """The first steps of a process, which compile, warm up and capture."""
        return self.path.slow_steps

    def _build(self, vocabulary: int, part: int) -> Any:
        if not self.path.compiled:
            return super()._build(vocabulary, part)
        made = model.build(self.arguments, vocabulary, part, compiled.KIND)
        if self.arguments.fp8:
            scaled.check_support(self.arguments)
            scaled.take_products(made, self.arguments.fp8)
        context_attention.keep_positions(made, self.arguments.seq_length)
        made.compile_training(self.path.compiled)
        return made

    def _wrapped(self) -> list[Any]:
        made = [optimizer.wrap(self.arguments, each, Replica) for each in self.parts]
        alone = len(made) == 1 and not self.arguments.overlap_grad_reduce
        if self.path.compiled and alone:
            self.gathered = GatheredGradients(made[0], self.layout.micro_batches > 1)
            self.path = self._reach(self.gathered)
            if ranks := self.gpt.expert_ranks:
                ranks.put = self.gathered.put
                ranks.reach()
                reached = self.path.symmetric or bool(ranks.boxes)
                self.path = replace(self.path, symmetric=reached)
        return made

    def _reach(self, gathered: GatheredGradients) -> fast.FastPath:
        """The path, with two replicas that use each other's memory, or why they don't."""
        try:
            gathered.reach()
        except RuntimeError as error:
            return self.path.without("symmetric", f"no symmetric memory: {error}")
        return replace(self.path, symmetric=bool(gathered.peer))

    def _steps(self) -> DeviceAdam | optimizer.HostSteps:
        steps = self._device_steps() or super()._steps()
        if self.gathered:
            self.gathered.keep_for(steps, getattr(self.gpt.decoder, "gradients", None))
        self.fast_step = fast.GraphedStep(
            self.path, super().step, self._plain, say, self.layout.micro_batches
        )
        return steps

    def _device_steps(self) -> DeviceAdam | None:
        """Adam on the device, where this optimizer can be stepped there."""
        if not self.path.optimizer:
            return None
        try:
            return DeviceAdam(self.arguments, self.optimizer, self.progress.steps, self._compiler())
        except ValueError as error:
            self.path = self.path.without("optimizer", f"Megatron's optimizer: {error}")
            if self.path.graphed:
                self.path = self.path.without("graphed", "no CUDA graph")
        return None

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

    def describe(self) -> str:
        """The parts that are used, and why the others aren't."""
        products = "; products in FP8" if self.arguments.fp8 and self.path.compiled else ""
        return f"{self.path}{products}"

    def warm_up(self) -> None:
        """Evaluate once, where it will be done between steps: that loads kernels."""
        if self.path.compiled and self.arguments.eval_interval < self.arguments.train_iters:
            self.evaluation.warm_up()

    def run(self) -> None:
        """Train to the last iteration, or to where the run is asked to stop."""
        with fast.attention():
            super().run()
        self.fast_step.release()

    def step(self, batches: Any) -> StepOutcome:
        """One step: its loss (on the last stage), whether it was taken, the gradient's norm."""
        return self.fast_step(batches) if self.path.compiled else super().step(batches)

    def _evaluate(self) -> bool:
        """As `Trainer`; where there is no room for it beside the graph, the graph goes."""
        try:
            return super()._evaluate()
        except torch.cuda.OutOfMemoryError:
            if not self.fast_step.graph or torch.distributed.get_world_size() > 1:
                raise
        self.fast_step.give_memory_back("no CUDA graph: evaluations need its memory")
        self.evaluation.batches = iter(self.evaluation.loader)  # from the first one again
        return super()._evaluate()

    def _zero(self) -> None:
        if self.gathered:
            self.gathered.begin()
        else:
            super()._zero()

    def _finalize(self, *args: Any, **kwargs: Any) -> None:
        if self.gathered:
            self.gathered.gather()
        super()._finalize(*args, **kwargs)
        if self.alike:
            self.alike.average()
