"""Check that parameters which ranks hold copies of are still the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

CHUNK = 1 << 22
"""Elements summed at a time, which bounds the check's memory to 64 MB."""


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """An int64 scalar of the tensor's bits that a change of any one element changes.

    Each element's bits are multiplied by an odd number of its own, which loses nothing modulo 2^64.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(integers).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        chunk = bits[start : start + CHUNK].to(torch.int64)
        odd = torch.arange(start, start + chunk.numel(), device=tensor.device) * 2 + 1
        total += (chunk * odd).sum()
    return total


def disagreements(named: Sequence[tuple[str, torch.Tensor]], group: Any) -> list[tuple[int, str]]:
    """The named tensors that differ between the group's ranks; every rank gets the same list.

    Each with the first rank whose copy isn't that of the first of the group, and in words.
    """
    size = torch.distributed.get_world_size(group)
    if size == 1 or not named:
        return []
    mine = torch.stack([checksum(tensor) for _, tensor in named])
    gathered = [torch.empty_like(mine) for _ in range(size)]
    torch.distributed.all_gather(gathered, mine, group=group)
    ranks = torch.distributed.get_process_group_ranks(group)
    told, columns = [], (torch.stack(gathered) != gathered[0]).T.tolist()
    for (name, _), differs in zip(named, columns, strict=True):
        if bad := [rank for rank, other in zip(ranks, differs, strict=True) if other]:
            listed = ", ".join(map(str, bad))
            told.append((bad[0], f"{name} on rank {listed} is not what it is on rank {ranks[0]}"))
    return told


def model_disagreements(parts: Sequence[torch.nn.Module]) -> list[tuple[int, str]]:
    """Across tensor-parallel ranks, of what isn't divided among them; across data-parallel, of all.

    Experts are compared with those of the ranks that have the same ones. `parts` are this rank's
    of the model. A cause seen in practice: random states that have parted, so that dropout differs
    where the same activations are computed twice. No error follows, and the loss still falls.
    """
    from megatron.core import parallel_state

    from launcher.agent import compat

    named = [each for part in parts for each in part.named_parameters()]
    shared = [each for each in named if not getattr(each[1], "tensor_model_parallel", False)]
    common = [each for each in named if getattr(each[1], "allreduce", True)]
    told = [
        *disagreements(shared, parallel_state.get_tensor_model_parallel_group()),
        *disagreements(common, parallel_state.get_data_parallel_group(with_context_parallel=True)),
    ]
    if len(common) < len(named):
        experts = [each for each in named if not getattr(each[1], "allreduce", True)]
        told += disagreements(experts, compat.expert_data_group())
    return told
