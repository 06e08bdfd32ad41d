"""Layers, a loss and sequences that are split over ranks.

Tensor parallelism is by collectives that torch's compiler sees through: Megatron's own break its
graphs. By context parallelism, each rank has a part of every sequence, and attends to all of it:
of 2 × CP pieces, rank r has the pieces r and 2 × CP - 1 - r, as upstream, so every rank has as much
before it to attend to.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core import parallel_state


class Ranks:
    """The ranks that a layer is split over; `size` is 1 and `name` "" where it isn't."""

    def __init__(self) -> None:
        group = parallel_state.get_tensor_model_parallel_group()
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

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """[s, …] to this rank's [s / TP, …] of the sum over all."""
        calls = torch.ops._c10d_functional
        return calls.wait_tensor(
            calls.reduce_scatter_tensor(x.contiguous(), "sum", self.size, self.name)
        )


class Alike:
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


class Copied(torch.autograd.Function):
    """Into a split layer: the same on each rank; gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """x."""
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The sum."""
        return ctx.ranks.reduced(grads[0]), None


class Summed(torch.autograd.Function):
    """Out of a split layer: the sum over the ranks; each has the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """The sum."""
        return ranks.reduced(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """The gradient as it is."""
        return grads[0], None


class Gathered(torch.autograd.Function):
    """Into a split layer under sequence parallelism: [s / TP, …] to [s, …]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """All ranks' parts."""
        ctx.ranks = ranks
        return ranks.gathered(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """This rank's part of the sum."""
        return ctx.ranks.scattered(grads[0]), None


class Scattered(torch.autograd.Function):
    """Out of one: this rank's part of the sum over the ranks, [s, …] to [s / TP, …]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
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
    def forward(ctx: Any, logits: torch.Tensor, wanted: torch.Tensor, ranks: Ranks) -> torch.Tensor:
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


def own_part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor [b, s]: [b, s / CP]."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return batch
    rank = parallel_state.get_context_parallel_rank()
    parted = {}
    for name, whole in batch.items():
        pieces = whole.chunk(2 * size, dim=1)
        parted[name] = torch.cat((pieces[rank], pieces[2 * size - 1 - rank]), dim=1)
    return parted


def positions(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this rank's `length` tokens stand in the sequence, and where all ranks' do in turn."""
    size = parallel_state.get_context_parallel_world_size()
    pieces = torch.arange(length * size, device=device).chunk(2 * size)
    each = [torch.cat((pieces[rank], pieces[2 * size - 1 - rank])) for rank in range(size)]
    return each[parallel_state.get_context_parallel_rank()], torch.cat(each)


class _Gather(torch.autograd.Function):
    """All ranks' parts one after the other; the gradient of each is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        """[s / CP, …] to [s, …]."""
        group = parallel_state.get_context_parallel_group()
        parts = [torch.empty_like(part) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """[s, …] to [s / CP, …]."""
        group = parallel_state.get_context_parallel_group()
        total = grads[0].contiguous()
        torch.distributed.all_reduce(total, group=group)
        parts = total.chunk(torch.distributed.get_world_size(group))
        return parts[torch.distributed.get_rank(group)]


def gathered(part: torch.Tensor) -> torch.Tensor:
    """[s / CP, …] of this rank to [s, …] in the order of `positions`."""
    return _Gather.apply(part)


def share(loss: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A sum of losses over this rank's part, as its share of a mean over all ranks of the group.

    `tokens` are those that count here.
    """
    size = parallel_state.get_context_parallel_world_size()
    if size > 1:
        torch.distributed.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    return loss * size / tokens
