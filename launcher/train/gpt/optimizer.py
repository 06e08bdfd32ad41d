"""What steps the model: its data parallelism and its optimizer."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from launcher.train import compat
from launcher.train.gpt import model
from launcher.train.gpt.arguments import learning_rate

CONFIG = (
    "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad fp16 bf16 loss_scale "
    "initial_loss_scale min_loss_scale loss_scale_window hysteresis use_distributed_optimizer"
).split()
"""What Megatron's description of an optimizer calls as its command line does."""


def wrap(arguments: argparse.Namespace, gpt: Any, overlaps: bool) -> Any:
    """The model in its precision, under Megatron's data parallelism; gradients are fp32.

    `overlaps` where they are summed over the replicas while others are worked out.
    """
    gpt.cuda(torch.cuda.current_device())
    precise = Float16Module(gpt.config, gpt) if arguments.fp16 or arguments.bf16 else gpt
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlaps,
        average_in_collective=overlaps and not arguments.on_cpu,  # gloo can't
        bucket_size=int(os.environ.get("FAST_BUCKET", 0)) or None,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
    )
    return DistributedDataParallel(gpt.config, config, precise)


def build(arguments: argparse.Namespace, wrapped: list[Any]) -> Any:
    """Megatron's own optimizer for a model's parts, each under its data parallelism."""
    if arguments.use_distributed_optimizer:
        compat.check_distributed_optimizer()
    same = {name: getattr(arguments, name) for name in CONFIG}
    config = OptimizerConfig(**same, params_dtype=model.dtype(arguments))
    return get_megatron_optimizer(config, wrapped)


class HostSteps:
    """Megatron's own step, and the rate and decay that its own training loop would set before.

    `steps` are those taken so far.
    """

    def __init__(self, arguments: argparse.Namespace, optimizer: Any, steps: int) -> None:
        self.arguments, self.optimizer, self.steps = arguments, optimizer, steps
        _fuse_adam(optimizer)

    def step(self) -> tuple[bool, float | None]:
        """Whether the step was taken, and the gradient's norm, None if it isn't known."""
        rate = learning_rate(self.arguments, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.arguments.weight_decay * group.get("wd_mult", 1.0)
        advanced, norm, _ = self.optimizer.step()
        self.steps += bool(advanced)
        return bool(advanced), norm

    def settle(self) -> int:
        """The steps taken so far."""
        return self.steps


class GatheredGradients:
    """The gradients of a step's one micro-batch, copied into their fp32 buffer: all at once.

    Megatron's data parallelism would add each as it comes, to a buffer that is zeroed before; it
    finds none where these were taken. Where it sums over the replicas meanwhile, each is copied as
    it comes, and Megatron is told that it was added.
    """

    def __init__(self, wrapped: Any, overlaps: bool) -> None:
        self.wrapped, self.overlaps = wrapped, overlaps
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in wrapped.module.parameters():
            parameter.register_post_accumulate_grad_hook(self._copy if overlaps else self._take)

    def begin(self) -> None:
        """Before a step, in place of zeros: Megatron counts which gradients are there."""
        if self.overlaps:
            for group in self.wrapped.bucket_groups:
                group.reset()

    def _take(self, parameter: Any) -> None:
        self.taken.append((parameter.main_grad, parameter.grad))
        parameter.grad = None

    @torch.no_grad()
    def _copy(self, parameter: Any) -> None:
        parameter.main_grad.copy_(parameter.grad)
        parameter.grad_added_to_main_grad = True

    @torch.no_grad()
    def finalize(self, *args: Any, **kwargs: Any) -> None:
        """Copy what is left, and then do what Megatron does with gradients that are complete."""
        if self.taken:
            torch._foreach_copy_(*map(list, zip(*self.taken, strict=True)))
            self.taken.clear()
        finalize_model_grads(*args, **kwargs)


def _fuse_adam(optimizer: Any) -> None:
    """Update all parameters in few kernels where the optimizer is torch's Adam on a GPU.

    To be called after loading too, which brings the flags and step counts of the device
    that saved.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(part.optimizer, torch.optim.AdamW):
            continue
        for group in part.optimizer.param_groups:
            device = group["params"][0].device
            group.update(fused=device.type == "cuda", foreach=False)
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                if "step" in state and device.type == "cuda":
                    state["step"] = state["step"].to(device)
