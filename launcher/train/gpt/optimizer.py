"""What steps the model: its data parallelism and its optimizer."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
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


PAIR, SHARES = 2, 6
"""Replicas that exchange gradients in 16 bits: more of them would send more than a sum does. And
the shares in which they do."""


def wrap(arguments: argparse.Namespace, gpt: Any) -> Replica:
    """The model in its precision, under Megatron's data parallelism; gradients are fp32."""
    gpt.cuda(torch.cuda.current_device())
    precise = Float16Module(gpt.config, gpt) if arguments.fp16 or arguments.bf16 else gpt
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=arguments.overlap_grad_reduce,
        use_distributed_optimizer=arguments.use_distributed_optimizer,
    )
    return Replica(gpt.config, config, precise)


def build(arguments: argparse.Namespace, wrapped: list[Any]) -> Any:
    """Megatron's own optimizer for a model's parts, each under its data parallelism."""
    if arguments.use_distributed_optimizer:
        compat.check_distributed_optimizer()
    same = {name: getattr(arguments, name) for name in CONFIG}
    config = OptimizerConfig(**same, params_dtype=model.dtype(arguments))
    return get_megatron_optimizer(config, wrapped)


class Replica(DistributedDataParallel):
    """Megatron's data parallelism, which needn't sum gradients over the replicas once `summed`."""

    summed = False

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        """At the end of a step's backward passes."""
        if not self.summed:
            super().finish_grad_sync(*args, **kwargs)
        self.summed = False


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
    """The gradients of a step's one micro-batch, brought to their fp32 buffer all at once.

    Megatron's data parallelism would add each as it comes, to a buffer that is zeroed before; it
    finds none where these were taken. Two replicas exchange them as they are, in 16 bits, and each
    adds them up in fp32: the same sums from half the bytes, 0.25 GB of GPT-2's 0.5.
    """

    def __init__(self, replica: Replica, compiled: Callable[[Any], Any]) -> None:
        self.replica = replica
        self.compile_with(compiled)
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []
        for parameter in replica.module.parameters():
            parameter.register_post_accumulate_grad_hook(self._take)

    def compile_with(self, compiled: Callable[[Any], Any]) -> None:
        """Have the arithmetic done by what `compiled` makes of it."""
        self._mean = compiled(_mean)

    def _take(self, parameter: Any) -> None:
        self.taken.append((parameter.main_grad, parameter.grad))
        parameter.grad = None

    @torch.no_grad()
    def gather(self) -> None:
        """Bring them there; what Megatron does with complete gradients comes after."""
        shares = list(_shares(self.taken))
        if self._pair() and all(share.beside for share in shares):
            self._exchange(shares)
            self.replica.summed = True
        else:
            torch._foreach_copy_(*map(list, zip(*self.taken, strict=True)))
        self.taken.clear()

    def _pair(self) -> bool:
        replicas = parallel_state.get_data_parallel_world_size()
        return replicas == PAIR and all(grad.itemsize == 2 for _, grad in self.taken)

    def _exchange(self, shares: list[Share]) -> None:
        """The means of both replicas' gradients; one share is sent while another is copied."""
        group, sent = parallel_state.get_data_parallel_group(), []
        for share in shares:
            mine = torch.cat(share.grads)
            both = mine.new_empty(PAIR * mine.numel())
            work = torch.distributed.all_gather_into_tensor(both, mine, group=group, async_op=True)
            sent.append((share.whole(), mine, both, work))
        for main, _, both, work in sent:
            work.wait()
            self._mean(main, both)


@dataclass
class Share:
    """Some gradients [elements] of the model, and where they go in fp32."""

    mains: list[torch.Tensor]
    grads: list[torch.Tensor]

    @property
    def elements(self) -> int:
        """Of all of them."""
        return sum(grad.numel() for grad in self.grads)

    @property
    def beside(self) -> bool:
        """Whether there is nothing between the places that they go to."""
        first, last = self.mains[0], self.mains[-1]
        end = last.storage_offset() + last.numel()
        one = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        return one and end - first.storage_offset() == self.elements

    def whole(self) -> torch.Tensor:
        """All these places as one."""
        return self.mains[0].as_strided((self.elements,), (1,))


def _shares(taken: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[Share]:
    """About equal shares of the gradients, in an order that both replicas have."""
    most, share = sum(grad.numel() for _, grad in taken) / SHARES, Share([], [])
    for main, grad in sorted(taken, key=lambda pair: pair[0].data_ptr()):
        share.mains.append(main)
        share.grads.append(grad.reshape(-1))
        if share.elements >= most:
            yield share
            share = Share([], [])
    if share.grads:
        yield share


def _mean(main: torch.Tensor, both: torch.Tensor) -> None:
    """The mean in fp32 of two replicas' gradients, one after the other in `both`."""
    one, other = both.view(PAIR, -1).unbind()
    main.copy_((one.float() + other.float()) / PAIR)


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
