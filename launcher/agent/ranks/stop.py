"""Agrees between ranks on the iteration to stop at, as a signal reaches them at different times."""

from __future__ import annotations

import signal
from typing import Any

import torch


class StopRequest:
    """Whether any rank was asked to stop; signals reach the ranks at different iterations."""

    def __init__(self) -> None:
        self.received = False
        self.group = torch.distributed.new_group(backend="gloo")
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._receive)

    def _receive(self, *_: Any) -> None:
        self.received = True

    def agreed(self) -> bool:
        """All ranks call this together, and get the same answer."""
        flag = torch.tensor([int(self.received)], device="cpu")
        torch.distributed.all_reduce(flag, group=self.group, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())
