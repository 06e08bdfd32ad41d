"""Layers and a loss that are split over ranks, for torch's compiler.

Tensor parallelism is by collectives that it sees through: Megatron's own break its graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state


class LayerRanks:
    """The ranks that a layer is split over; `size` is 1 and `name` "" where it isn't.

    `group`: tensor parallelism's if not given.
    """

    def __init__(self, group: Any = None) -> None:
        group = group or parallel_state.get_tensor_model_parallel_group()
        self.size: int = torch.distributed.get_world_size(group)
        self.rank: int = torch.distributed.get_rank(group)
        self.name: str = group.group_name if self.size > 1 else ""

    def reduced(self, x: torch.Tensor, how: str = "sum") -> torch.Tensor:
        """x over all ranks, on each."""
        calls = torch.ops._c10d_functional
        return calls.wait_tensor(calls.all_reduce(x.contiguous(), how, self.name))

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[s / TP, …] of each rank to [s, …]."""
        calls = torch.ops._c10d_functional
        return calls.wait_tensor(calls.all_gather_into_tensor(x.contiguous(), self.size, self.name))

    def exchanged(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks, …]: part i goes to rank i, and part i of the result is rank i's."""
        calls, one = torch.ops._c10d_functional, [1] * self.size
        return calls.wait_tensor(calls.all_to_all_single(x.contiguous(), one, one, self.name))

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """[s, …] to this rank's [s / TP, …] of the sum over all."""
        calls = torch.ops._c10d_functional
        return calls.wait_tensor(
            calls.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name)
        )


class AlikeGradients:
    """Gradients that each rank of a split layer works out for itself, such as those of norms.

    What the ranks have compiled apart may differ in the last bit, and replicas would part.
    """

    def __init__(self, parameters: Iterable[Any]) -> None:
        self.group = parallel_state.get_tensor_model_parallel_group()
        divided = ("tensor_model_parallel", "sequence_parallel")  # the latter's are summed
        self.grads = [
            each.main_grad
            for each in parameters
            if not any(getattr(each, name, False) for name in divided)
        ]

    @torch.no_grad()
    def average(self) -> None:
        """Let each rank have the mean of all."""
        if not self.grads:
            return
        flat = torch.cat([grad.view(-1) for grad in self.grads])
        torch.distributed.all_reduce(flat, group=self.group)
        flat /= torch.distributed.get_world_size(self.group)
        means = flat.split([grad.numel() for grad in self.grads])
        shaped = [mean.view(grad.shape) for mean, grad in zip(means, self.grads, strict=True)]
        torch._foreach_copy_(self.grads, shaped)


class CopyToRanks(torch.autograd.Function):
    """Into a split layer: the same on each rank; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: LayerRanks) -> torch.Tensor:
        """x."""
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The sum."""
        return ctx.ranks.reduced(grads[0]), None


class SumOverRanks(torch.autograd.Function):
    """Out of a split layer: the sum over the ranks; each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: LayerRanks) -> torch.Tensor:
        """The sum."""
        return ranks.reduced(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it is."""
        return grads[0], None


class Exchange(torch.autograd.Function):
    """An all-to-all: each rank's part i, [ranks, …], to rank i."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: LayerRanks) -> torch.Tensor:
        """The parts that came here."""
        ctx.ranks = ranks
        return ranks.exchanged(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Their gradients, back where they came from."""
        return ctx.ranks.exchanged(grads[0]), None


class GatherFromRanks(torch.autograd.Function):
    """Into a split layer under sequence parallelism: [s / TP, …] to [s, …]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: LayerRanks) -> torch.Tensor:
        """All ranks' parts."""
        ctx.ranks = ranks
        return ranks.gathered(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """This rank's part of the sum."""
        return ctx.ranks.scattered(grads[0]), None


class ScatterToRanks(torch.autograd.Function):
    """Out of one: this rank's part of the sum over the ranks, [s, …] to [s / TP, …]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: LayerRanks) -> torch.Tensor:
        """The part."""
        ctx.ranks = ranks
        return ranks.scattered(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """All ranks' parts."""
        return ctx.ranks.gathered(grads[0]), None


class SplitLoss(torch.autograd.Function):
    """Cross-entropy over a vocabulary that is split over ranks, from logits [n, vocabulary / TP].

    Kept for the way back are the logits in their own precision, from which it works the rest out.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, wanted: torch.Tensor, ranks: LayerRanks
    ) -> torch.Tensor:
        """fp32 [n]; `wanted` are numbers in the whole vocabulary, int64 [n]."""
        first = ranks.rank * logits.shape[-1]
        wide, place = logits.float(), wanted - first
        here = (place >= 0) & (place < logits.shape[-1])
        most = ranks.reduced(wide.amax(-1), "max")
        chosen = wide.gather(-1, torch.where(here, place, 0).unsqueeze(-1)).squeeze(-1) - most
        total = (wide - most.unsqueeze(-1)).exp().sum(-1)
        total, chosen = ranks.reduced(torch.stack((total, torch.where(here, chosen, 0.0))))
        ctx.save_for_backward(logits, place, most, total)
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Softmax less one at what was wanted, as the loss's gradient weighs it."""
        logits, place, most, total = ctx.saved_tensors
        shares = (logits.float() - most.unsqueeze(-1)).exp() / total.unsqueeze(-1)
        numbers = torch.arange(logits.shape[-1], device=logits.device)
        shares = torch.where(numbers == place.unsqueeze(-1), shares - 1, shares)
        return (shares * grads[0].unsqueeze(-1)).to(logits.dtype), None, None
