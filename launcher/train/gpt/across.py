"""Data on several nodes: its index is built where it is missing, and equal on all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from launcher.train.gpt.arguments import UsageError

ARRAYS = (
    *("document_index", "sample_index", "shuffle_index"),
    *("dataset_index", "dataset_sample_index"),
)
"""What Megatron-Core's datasets, and blends of them, take their samples by."""


def built(build: Callable[[], Any]) -> Any:
    """What `build` gives on this rank; all ranks call this together.

    Upstream builds the index on rank 0 alone, which other nodes find only in a folder that all
    share. Here the first rank of every node builds what it doesn't find: after rank 0, so that
    nodes which do share a folder never write it at once.
    """
    if not torch.distributed.is_initialized():
        return build()
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
    with (
        patch.object(torch.distributed, "is_initialized", lambda: False),
        patch.object(torch.distributed, "get_rank", lambda *_: 0),
    ):
        yield


def agree(what: str, digest: str) -> None:
    """Raises `UsageError` on all ranks, naming nodes, unless all have node 0's `digest`."""
    if not torch.distributed.is_initialized():
        return
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, (os.environ.get("GROUP_RANK", "0"), digest))
    wrong = sorted({int(node) for node, other in told if other != told[0][1]})
    if wrong:
        names = ", ".join(str(node) for node in wrong)
        raise UsageError(f"{what} on node {names} isn't node {told[0][0]}'s")


def data_digest(parts: list[str]) -> str:
    """SHA-256 over the .idx files whole and the .bin files' sizes; paths may differ."""
    digest = hashlib.sha256()
    for part in parts:
        index, tokens = Path(f"{part}.idx"), Path(f"{part}.bin")
        if index.is_file() and tokens.is_file():  # a blend's weight has none
            with index.open("rb") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
            digest.update(tokens.stat().st_size.to_bytes(8, "big"))
    return digest.hexdigest()


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
