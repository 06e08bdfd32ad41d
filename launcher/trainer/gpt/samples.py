"""Samples of tokens, and the share of each rank in each step."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

from launcher.agent.ranks.exit_codes import OptionError

ARRAYS = (
    *("document_index", "sample_index", "shuffle_index"),
    *("dataset_index", "dataset_sample_index"),
)
"""What Megatron-Core's datasets, and blends of them, take their samples by."""


class TokenVocabulary:
    """Nothing but a vocabulary's size and its end of document: the data is tokens already."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = eod
        self.unique_identifiers = {"class": "Tokenizer", "vocab_size": vocab_size, "eod": eod}


class MockDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Consecutive numbers modulo the vocabulary, each sample from a random start.

    Can be learnt at any vocabulary size, which upstream's mock data can't be before 0.16.
    `different` is how many samples there are, over and over again; None means that all differ.
    """

    def __init__(
        self, samples: int, seq_length: int, vocab_size: int, seed: int, different: int | None
    ) -> None:
        size = samples if different is None else different
        self.starts = np.random.default_rng(seed).integers(vocab_size, size=size)
        self.samples = samples
        self.seq_length = seq_length
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """tokens, labels, position_ids: int64 [seq_length]; loss_mask: float32 [seq_length]."""
        numbers = torch.arange(self.seq_length + 1)
        tokens = (numbers + int(self.starts[index % len(self.starts)])) % self.vocab_size
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(self.seq_length),
            "position_ids": numbers[:-1],
        }


def datasets(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The training and the validation dataset, None where none is used; all ranks call this.

    The validation set holds the samples of one evaluation: each evaluates the same ones. Megatron
    refuses a weighted blend of which it is asked for all of a share, as of one that isn't used.
    """
    training = arguments.train_iters * arguments.global_batch_size
    validation = arguments.eval_iters * arguments.global_batch_size
    if arguments.mock_data:
        shape = (arguments.seq_length, arguments.vocab_size)
        return (
            MockDataset(training, *shape, arguments.seed, arguments.mock_samples),
            MockDataset(validation, *shape, arguments.seed + 1, None),
        )
    config = GPTDatasetConfig(
        random_seed=arguments.seed,
        sequence_length=arguments.seq_length,
        blend=get_blend_from_list(arguments.data_path),
        split=arguments.split,
        path_to_cache=arguments.data_cache_path,
        tokenizer=TokenVocabulary(arguments.vocab_size, arguments.eod_id),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [training, validation, 0]
    config.split_matrix = [
        share if size else None for share, size in zip(config.split_matrix, sizes, strict=True)
    ]
    build = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build
    if not _several_nodes():
        built = build()
    else:
        built = _built(build)
        _agree("the index of the data", _index_digest(built[:2]))
    return built[0], built[1]


class Indices:
    """A data-parallel rank's sample indices, one micro-batch of `size` after the other.

    Step s takes samples s × global batch onwards, so a resumed run goes on where it was.
    """

    def __init__(self, first_sample: int, samples: int, size: int) -> None:
        stride = size * parallel_state.get_data_parallel_world_size()
        start = first_sample + parallel_state.get_data_parallel_rank() * size
        self.firsts, self.size = range(start, samples, stride), size

    def __len__(self) -> int:
        return len(self.firsts)

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(first, first + self.size)) for first in self.firsts)


def loader(arguments: argparse.Namespace, dataset: Any, first_sample: int) -> Any:
    """What to iterate for this rank's micro-batches; its workers stay for another time.

    None in the middle of a pipeline, which needs none. Every tensor-parallel rank reads for
    itself: the samples are mapped from the same files, and no step has to wait for a broadcast.
    """
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if dataset is None or not (first or last):
        return None
    on_gpu, workers = not arguments.on_cpu, arguments.num_workers
    workers = 2 * on_gpu if workers is None else workers
    return torch.utils.data.DataLoader(
        dataset,
        batch_sampler=Indices(first_sample, len(dataset), arguments.micro_batch_size),
        num_workers=workers,
        pin_memory=on_gpu,
        persistent_workers=workers > 0,
        generator=torch.Generator(),
    )


def _several_nodes() -> bool:
    """Whether this run has ranks on other nodes, by torchrun's variables."""
    world = os.environ.get("WORLD_SIZE", "1")
    return torch.distributed.is_initialized() and world != os.environ.get("LOCAL_WORLD_SIZE", world)


def _built(build: Callable[[], Any]) -> Any:
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


def _agree(what: str, digest: str) -> None:
    """Raises `OptionError` on all ranks, naming nodes, unless all have node 0's `digest`."""
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, (os.environ.get("GROUP_RANK", "0"), digest))
    wrong = sorted({int(node) for node, other in told if other != told[0][1]})
    if wrong:
        names = ", ".join(str(node) for node in wrong)
        raise OptionError(f"{what} on node {names} isn't node {told[0][0]}'s")


def _index_digest(datasets: list[Any]) -> str:
    """SHA-256 over the arrays that the datasets, and those of their blends, take samples by."""
    digest = hashlib.sha256()
    for dataset in datasets:
        for name in ARRAYS:
            array = getattr(dataset, name, None)
            if array is not None:
                digest.update(f"{name} {array.dtype} {array.shape}".encode())
                digest.update(memoryview(array).cast("B"))
        if hasattr(dataset, "datasets"):
            digest.update(_index_digest(dataset.datasets).encode())
    return digest.hexdigest()
