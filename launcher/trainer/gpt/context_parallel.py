"""Sequences that are split over ranks: context parallelism.

Each rank has a part of every sequence, and attends to all of it: of 2 × CP pieces, rank r has the
pieces r and 2 × CP - 1 - r, as upstream, so every rank has as much before it to attend to.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state


def own_part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of each tensor [b, s]: [b, s / CP]."""
    size = parallel_state.get_context_parallel_world_size()
    if size == 1:
        return batch
    tokens = batch["tokens"]
    mine, _ = positions(tokens.shape[1] // size, tokens.device)
    return {name: whole[:, mine] for name, whole in batch.items()}


def positions(length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this rank's `length` tokens stand in the sequence, and where all ranks' do in turn."""
    size = parallel_state.get_context_parallel_world_size()
    pieces = torch.arange(length * size, device=device).chunk(2 * size)
    each = [torch.cat((pieces[rank], pieces[2 * size - 1 - rank])) for rank in range(size)]
    return each[parallel_state.get_context_parallel_rank()], torch.cat(each)


class Gather(torch.autograd.Function):
    """All ranks' parts, in the order of `positions`; the gradient of each is the sum over all."""

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


def share(loss: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """A sum of losses over this rank's `tokens`, as its share of a mean over the group's ranks."""
    size = parallel_state.get_context_parallel_world_size()
    if size > 1:
        torch.distributed.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
    return loss * size / tokens
