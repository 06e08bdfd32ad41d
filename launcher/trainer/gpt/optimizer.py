"""The optimizer and the data parallelism of a model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module

from launcher.agent import compat
from launcher.trainer.gpt import model
from launcher.trainer.gpt.arguments import learning_rate

CONFIG = (
    "lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps clip_grad fp16 bf16 loss_scale "
    "initial_loss_scale min_loss_scale loss_scale_window hysteresis use_distributed_optimizer"
).split()
"""What Megatron's description of an optimizer calls as its command line does."""


def wrap(arguments: argparse.Namespace, gpt: Any, kind: Any = DistributedDataParallel) -> Any:
    """The model in its precision, under data parallelism of a `kind`; gradients are fp32."""
    gpt.cuda(torch.cuda.current_device())
    precise = Float16Module(gpt.config, gpt) if arguments.fp16 or arguments.bf16 else gpt
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=arguments.overlap_grad_reduce,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
    )
    return kind(gpt.config, config, precise)


def build(arguments: argparse.Namespace, wrapped: list[Any]) -> Any:
    """Megatron's own optimizer for a model's parts, each under its data parallelism."""
    if arguments.use_distributed_optimizer:
        compat.check_distributed_optimizer()
    same = {name: getattr(arguments, name) for name in CONFIG}
    config = OptimizerConfig(**same, params_dtype=model.dtype(arguments))
    made = get_megatron_optimizer(config, wrapped)
    for part in getattr(made, "chained_optimizers", [made]):
        if arguments.use_distributed_optimizer and type(part.optimizer) is torch.optim.AdamW:
            part.optimizer.__class__ = CountingAdam  # no option names it
            part.optimizer.begin()
    return made


class HostSteps:
    """Megatron's own step, with its loop's rate and decay. `steps`: those taken so far."""

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

    def unite(self) -> None:
        """Nothing: each rank's part of a checkpoint is its own."""

    def settle(self) -> int:
        """The steps taken so far."""
        return self.steps


class CountingAdam(torch.optim.AdamW):
    """torch's Adam with its steps in its groups, where Apex's and TransformerEngine's have them.

    Megatron's distributed optimizer takes all that is kept of a parameter for its moments as it
    loads, though it gives and asks for steps as torch's Adam has them.
    """

    def begin(self) -> None:
        """With moments from the start, which Megatron asks for before it loads."""
        for group in self.param_groups:
            group["step"] = 0.0
            for parameter in group["params"]:
                moments = ("exp_avg", "exp_avg_sq")
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in moments}

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Each parameter has the steps meanwhile."""
        for group in self.param_groups:
            for parameter in group["params"]:
                device = parameter.device if group.get("fused") else "cpu"
                self.state[parameter]["step"] = torch.tensor(float(group["step"]), device=device)
        yield
        for group in self.param_groups:
            for parameter in group["params"]:
                group["step"] = float(self.state[parameter].pop("step"))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """torch's."""
        with self._counted():
            return super().step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """torch's."""
        with self._counted():
            told = super().state_dict()
            return told | {"state": {at: dict(kept) for at, kept in told["state"].items()}}

    def load_state_dict(self, state_dict: Any) -> None:
        """torch's."""
        with self._counted():
            super().load_state_dict(state_dict)


def _fuse_adam(optimizer: Any) -> None:
    """Update all parameters in few kernels where the optimizer is torch's Adam on a GPU.

    To be called after loading too, which brings the flags and step counts of the device that saved.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not isinstance(part.optimizer, torch.optim.AdamW):
            continue
        for group in part.optimizer.param_groups:
            if not group["params"]:  # a replica's share may have none of a group
                continue
            device = group["params"][0].device
            group.update(fused=device.type == "cuda", foreach=False)
            for parameter in group["params"]:
                state = part.optimizer.state.get(parameter, {})
                if "step" in state and device.type == "cuda":
                    state["step"] = state["step"].to(device)
