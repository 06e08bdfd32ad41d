"""The training program's arguments: arithmetic, defaults, refusals."""

from __future__ import annotations

import pytest

from launcher.train.gpt import arguments as command_line

from .conftest import TINY

MOCK = [*TINY, "--mock-data"]


def test_layout_of_eight_ranks() -> None:
    parallel = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    arguments = command_line.parse([*MOCK, *parallel, "--global-batch-size", "24"])
    layout = command_line.layout(arguments, 8)
    assert layout == command_line.Layout(tensor=2, pipeline=2, data=2, micro_batches=6)


def test_values_that_follow_from_others() -> None:
    arguments = command_line.parse(MOCK)
    assert arguments.ffn_hidden_size == 128
    assert arguments.max_position_embeddings == 32
    assert arguments.lr_decay_iters == 6
    assert arguments.eod_id == 99


def test_global_batch_defaults_to_one_micro_batch_per_rank() -> None:
    at = MOCK.index("--global-batch-size")
    arguments = command_line.parse(MOCK[:at] + MOCK[at + 2 :])
    command_line.layout(arguments, 4)
    assert arguments.global_batch_size == 8


def test_sequence_parallelism_alone_is_turned_off_as_upstream_does() -> None:
    arguments = command_line.parse([*MOCK, "--sequence-parallel"])
    command_line.layout(arguments, 1)
    assert not arguments.sequence_parallel


@pytest.mark.parametrize(
    ("size", "divisible_by", "tensor", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 2, 50432), (50304, 128, 1, 50304), (100, 64, 2, 128)],
)
def test_vocabulary_padding_is_upstreams(
    size: int, divisible_by: int, tensor: int, padded: int
) -> None:
    assert command_line.padded_vocabulary(size, divisible_by, tensor) == padded


@pytest.mark.parametrize(
    ("extra", "world", "reason"),
    [
        (["--tensor-model-parallel-size", "3"], 3, r"--num-attention-heads \(4\)"),
        (["--tensor-model-parallel-size", "2"], 3, r"world size \(3\) is not divisible by TP"),
        (["--pipeline-model-parallel-size", "4"], 4, r"--num-layers \(2\)"),
        (["--global-batch-size", "6"], 2, r"--global-batch-size \(6\)"),
        (["--hidden-size", "33"], 1, r"--hidden-size \(33\)"),
        (["--num-query-groups", "3"], 1, r"--num-query-groups \(3\)"),
        (["--fp16", "--bf16"], 1, "exclude each other"),
        (["--data-path", "x"], 1, "either --mock-data or --data-path"),
        (["--eod-id", "100"], 1, "not in the vocabulary"),
        (["--max-position-embeddings", "8"], 1, "smaller than --seq-length"),
        (["--micro-batch-size", "0"], 1, "at least 1"),
        (["--save-interval", "2"], 1, "needs --save"),
        (["--lr-warmup-iters", "2", "--lr-warmup-fraction", "0.1"], 1, "exclude each other"),
    ],
)
def test_refusals(extra: list[str], world: int, reason: str) -> None:
    with pytest.raises(command_line.UsageError, match=reason):
        command_line.layout(command_line.parse([*MOCK, *extra]), world)


def test_missing_data_file_is_named() -> None:
    arguments = command_line.parse([*TINY, "--data-path", "0.5", "/nowhere/text"])
    with pytest.raises(command_line.UsageError, match=r"no file /nowhere/text\.bin"):
        command_line.layout(arguments, 1)


def test_typo_names_the_nearest() -> None:
    with pytest.raises(command_line.UsageError, match="did you mean --global-batch-size"):
        command_line.parse([*MOCK, "--globl-batch-size", "4"])
