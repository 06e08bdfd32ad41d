"""Peer-to-peer GPU memory between the two data-parallel ranks of a node.

By torch's symmetric memory: https://docs.pytorch.org/docs/stable/symmetric_memory.html.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launcher.trainer.gpt import measurements


class Peer:
    """Tensors that lie alike in two ranks' GPUs. Its calls are both ranks', in the same order."""

    def __init__(self, group: Any) -> None:
        """Raises `RuntimeError` on both where one GPU doesn't reach the other's memory."""
        self.group, self.rank = group, torch.distributed.get_rank(group)
        self.handle: Any = None
        reason = ""
        try:
            self.empty(torch.empty(1, device="cuda"))
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        reasons = [""] * 2
        torch.distributed.all_gather_object(reasons, reason, group=group)
        if any(reasons):
            raise RuntimeError(next(filter(None, reasons)))
        self.stream = torch.cuda.Stream()

    def empty(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two of a shape and kind: this rank's, and the other's, as it is seen from here."""
        if os.environ.get("LOCAL_WORLD_SIZE") != "2":
            raise ValueError("the other replica is on another node")
        here = torch.cuda.current_device()
        if not torch.cuda.can_device_access_peer(here, 1 - here):
            raise ValueError("GPUs that don't reach each other's memory")
        from torch.distributed import _symmetric_memory as symmetric

        torch.cuda.empty_cache()  # this comes from the driver, not of what torch keeps from a step
        mine = symmetric.empty(like.shape, dtype=like.dtype, device=like.device)
        self.handle = symmetric.rendezvous(mine, self.group)
        measurements.symmetric.append(mine.nbytes)
        return mine, self.handle.get_buffer(1 - self.rank, mine.shape, mine.dtype)

    def lay(self, flat: torch.Tensor, parts: Iterable[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Have parameters lie in such, which lie in `flat`, [elements], to be let go then."""
        mine, theirs = self.empty(flat)
        mine.copy_(flat)
        for each in parts:
            start = each.data.storage_offset() - flat.storage_offset()
            each.data = mine[start : start + each.numel()].view(each.shape)
        return mine, theirs

    def meet(self) -> None:
        """Have what both have started done, and seen by both, before what they start next."""
        self.handle.barrier(channel=0)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is started in it goes on beside what comes next, until `join`."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Have what was started beside done before what comes next."""
        torch.cuda.current_stream().wait_stream(self.stream)
