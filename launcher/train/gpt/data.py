"""Samples of tokens, and which of them each rank takes at each step."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

from launcher.train.gpt import across


class Tokenizer:
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
    """The training and the validation dataset; all ranks call this together.

    The validation set holds the samples of one evaluation: each evaluates the same ones.
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
        tokenizer=Tokenizer(arguments.vocab_size, arguments.eod_id),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    sizes = [training, validation or None, None]
    build = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build
    if not across.several_nodes():
        built = build()
    else:
        built = across.built(build)
        across.agree("the index of the data", across.index_digest(built[:2]))
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
