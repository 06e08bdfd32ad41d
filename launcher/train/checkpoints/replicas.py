"""Check that parameters which ranks hold copies of are still the same on all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

CHUNK = 1 << 22
"""Elements summed at a time, which bounds the check's memory to 64 MB."""


@dataclass(frozen=True)
class Disagreement:
    """A parameter whose copy on `ranks` is not that of the first rank of its group."""

    parameter: str
    ranks: tuple[int, ...]
    reference: int

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"{self.parameter} on rank {ranks} is not what it is on rank {self.reference}"


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar of the tensor's bits that a change of any one element changes.

    Each element's bits are multiplied by an odd number of its own, which loses nothing
    modulo 2^64.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(integers).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        odd = torch.arange(start, start + chunk.numel(), device=tensor.device) * 2 + 1
        total += (chunk * odd).sum()
    return total


def disagreements(parameters: Iterable[tuple[str, torch.Tensor]], group: Any) -> list[Disagreement]:
    """The named tensors that differ between the group's ranks; every rank gets the same list."""
    named = list(parameters)
    size = torch.distributed.get_world_size(group)
    if size == 1 or not named:
        return []
    mine = torch.stack([checksum(tensor) for _, tensor in named])
    gathered = [torch.empty_like(mine) for _ in range(size)]
    torch.distributed.all_gather(gathered, mine, group=group)
    ranks = torch.distributed.get_process_group_ranks(group)
    differs = (torch.stack(gathered) != gathered[0]).cpu()
    return [
        Disagreement(
            parameter=name,
            ranks=tuple(rank for rank, bad in zip(ranks, differs[:, column], strict=True) if bad),
            reference=ranks[0],
        )
        for column, (name, _) in enumerate(named)
        if bool(differs[:, column].any())
    ]


def model_disagreements(model: torch.nn.Module) -> list[Disagreement]:
    """Across tensor-parallel ranks, of what isn't divided among them; across data-parallel, of all.

    A cause seen in practice: random states that have parted, so that dropout differs where
    the same activations are computed twice. No error follows, and the loss still falls.
    """
    from megatron.core import parallel_state

    named = list(model.named_parameters())
    shared = [
        (name, parameter)
        for name, parameter in named
        if not getattr(parameter, "tensor_model_parallel", False)
    ]
    return [
        *disagreements(shared, parallel_state.get_tensor_model_parallel_group()),
        *disagreements(named, parallel_state.get_data_parallel_group()),
    ]
