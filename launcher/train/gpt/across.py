"""Data on several nodes: its index is built where it is missing, and equal on all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from launcher.train.gpt.arguments import UsageError

ARRAYS = (
    *("document_index", "sample_index", "shuffle_index"),
    *("dataset_index", "dataset_sample_index"),
)
"""What Megatron-Core's datasets, and blends of them, take their samples by."""


def several_nodes() -> bool:
    """Whether this run has ranks on other nodes, by torchrun's variables."""
    world = os.environ.get("WORLD_SIZE", "1")
    return torch.distributed.is_initialized() and world != os.environ.get("LOCAL_WORLD_SIZE", world)


def built(build: Callable[[], Any]) -> Any:
    """What `build` gives on this rank; all ranks of several nodes call this together.

    Upstream builds the index on rank 0 alone, which other nodes find only in a folder that all
    share. Here the first rank of every node builds what it doesn't find: after rank 0, so that
    nodes which do share a folder never write it at once.
    """
    rank, first_here = torch.distributed.get_rank(), os.environ.get("LOCAL_RANK", "0") == "0"
    mine, result = 0 if rank == 0 else 1 if first_here else 2, None
    for turn in range(3):
        if turn == mine:
            with _alone():
                result = build()
        torch.distributed.barrier()
    return result


@contextmanager
def _alone() -> Iterator[None]:
    """As if there were no process group, which upstream builds an index without asking."""
    kept = torch.distributed.is_initialized, torch.distributed.get_rank
    torch.distributed.is_initialized, torch.distributed.get_rank = lambda: False, lambda *_: 0
    try:
        yield
    finally:
        torch.distributed.is_initialized, torch.distributed.get_rank = kept


def agree(what: str, digest: str) -> None:
    """Raises `UsageError` on all ranks, naming nodes, unless all have node 0's `digest`."""
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, (os.environ.get("GROUP_RANK", "0"), digest))
    wrong = sorted({int(node) for node, other in told if other != told[0][1]})
    if wrong:
        names = ", ".join(str(node) for node in wrong)
        raise UsageError(f"{what} on node {names} isn't node {told[0][0]}'s")


def index_digest(datasets: list[Any]) -> str:
    """SHA-256 over the arrays that the datasets, and those of their blends, take samples by."""
    digest = hashlib.sha256()
    for dataset in datasets:
        for name in ARRAYS:
            array = getattr(dataset, name, None)
            if array is not None:
                digest.update(f"{name} {array.dtype} {array.shape}".encode())
                digest.update(memoryview(array).cast("B"))
        if hasattr(dataset, "datasets"):
            digest.update(index_digest(dataset.datasets).encode())
    return digest.hexdigest()
