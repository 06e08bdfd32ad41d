"""The training program's arguments: arithmetic, defaults, refusals, the learning rate."""

from __future__ import annotations

from argparse import Namespace

import pytest

from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt.arguments import RankLayout
from tests.agent.conftest import TINY

MOCK = [*TINY, "--mock-data"]
PIPELINE = ["--pipeline-model-parallel-size", "2", "--num-layers", "6"]
INTERLEAVED = [*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "3"]
EXPERTS = ["--num-experts", "4", "--disable-bias-linear"]
SHARED = ["--moe-shared-expert-intermediate-size", "8", "--sequence-parallel"]
SHARED += ["--tensor-model-parallel-size", "2"]
THREE = [*EXPERTS, "--global-batch-size", "6"]
BALANCED = [*EXPERTS, "--moe-router-load-balancing-type", "sinkhorn"]


def laid_out(world: int, *extra: str) -> tuple[Namespace, RankLayout]:
    arguments = command_line.parse([*MOCK, *extra])
    return arguments, command_line.layout(arguments, world)


def test_layout_of_eight_ranks() -> None:
    parallel = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    _, layout = laid_out(8, *parallel, "--global-batch-size", "24")
    assert layout == RankLayout(tensor=2, pipeline=2, data=2, micro_batches=6)


def test_layout_of_experts_and_contexts() -> None:
    """Experts are over replicas and context parallelism; a stage of 3 layers has 3 parts of 1."""
    words = [*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1", *EXPERTS]
    words += ["--context-parallel-size", "2", "--expert-model-parallel-size", "4"]
    arguments, layout = laid_out(8, *words, "--global-batch-size", "16")
    assert (layout.data, layout.context, layout.expert, layout.virtual) == (2, 2, 4, 3)
    assert layout.world == 8
    assert layout.micro_batches == 4
    assert arguments.moe_ffn_hidden_size == arguments.ffn_hidden_size


def test_sizes_that_swiglu_and_groups_leave_open_are_upstreams() -> None:
    given = command_line.parse([*MOCK, "--swiglu", "--group-query-attention"])
    assert (given.ffn_hidden_size, given.num_query_groups, given.kv_channels) == (64, 1, 8)
    alone = command_line.parse([*MOCK, "--num-query-groups", "4"])
    assert not alone.group_query_attention  # as many as heads


def test_values_that_follow_from_others() -> None:
    """Sequence parallelism alone is turned off, as upstream does."""
    at = MOCK.index("--global-batch-size")
    arguments = command_line.parse([*MOCK[:at], *MOCK[at + 2 :], "--sequence-parallel"])
    command_line.layout(arguments, 4)
    assert arguments.ffn_hidden_size == 128
    assert arguments.max_position_embeddings == 32
    assert arguments.lr_decay_iters == 6
    assert arguments.eod_id == 99
    assert arguments.global_batch_size == 8
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
        (["--fp8-format", "hybrid"], 1, "needs --bf16"),
        (["--data-path", "x"], 1, "either --mock-data or --data-path"),
        (["--eod-id", "100"], 1, "not in the vocabulary"),
        (["--max-position-embeddings", "8"], 1, "smaller than --seq-length"),
        (["--micro-batch-size", "0"], 1, "at least 1"),
        (["--recompute-granularity", "full"], 1, "go together"),
        (["--save-interval", "2"], 1, "needs --save"),
        (["--lr-warmup-iters", "2", "--lr-warmup-fraction", "0.1"], 1, "exclude each other"),
        (["--globl-batch-size", "4"], 1, "did you mean --global-batch-size"),
        (["--context-parallel-size", "3"], 3, r"--seq-length \(32\) is not divisible by 2 × --con"),
        (["--swiglu", "--squared-relu"], 1, "exclude each other"),
        (["--window-size", "8,1"], 1, "--window-size: invalid window value"),
        (["--use-rope-scaling"], 1, "needs --position-embedding-type rope"),
        (["--kv-channels", "7", "--position-embedding-type", "rope"], 1, "even --kv-channels"),
        (["--num-layers-per-virtual-pipeline-stage", "1"], 1, "needs a pipeline"),
        ([*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "2"], 2, "layers of a stage"),
        ([*INTERLEAVED, "--global-batch-size", "2"], 2, "the micro-batches of a step"),
        (["--expert-model-parallel-size", "2"], 2, "need --num-experts"),
        (["--moe-ffn-hidden-size", "8"], 1, "--moe-ffn-hidden-size needs --num-experts"),
        (["--num-experts", "4"], 1, "--num-experts needs --disable-bias-linear"),
        ([*EXPERTS, "--moe-router-topk", "5"], 1, "above --num-experts"),
        ([*THREE, "--expert-model-parallel-size", "3"], 3, r"--num-experts \(4\) is not"),
        ([*EXPERTS, "--expert-model-parallel-size", "4"], 2, r"replicas × CP \(2\)"),
        ([*EXPERTS, "--tensor-model-parallel-size", "2"], 2, "need --sequence-parallel"),
        ([*EXPERTS, "--moe-grouped-gemm"], 1, "needs --bf16"),
        ([*EXPERTS, *SHARED], 2, "need --moe-token-dispatcher-type alltoall"),
        ([*BALANCED, "--moe-aux-loss-coeff", "0.1"], 1, "sinkhorn goes without"),
    ],
)
def test_refusals(extra: list[str], world: int, reason: str) -> None:
    with pytest.raises(OptionError, match=reason):
        laid_out(world, *extra)


def test_missing_data_file_is_named() -> None:
    arguments = command_line.parse([*TINY, "--data-path", "0.5", "/nowhere/text"])
    with pytest.raises(OptionError, match=r"no file /nowhere/text\.bin"):
        command_line.check_files(arguments)


@pytest.mark.parametrize(
    ("style", "steps", "rate"),
    [
        ("constant", 0, 0.0),
        ("constant", 5, 0.5),
        ("constant", 10, 1.0),
        ("constant", 999, 1.0),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("linear", 111, 0.1),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.9 * 0.8535533905932737),
        ("cosine", 500, 0.1),
    ],
)
def test_warmup_of_10_then_decay_to_110(style: str, steps: int, rate: float) -> None:
    extra = "--lr 1 --min-lr 0.1 --lr-warmup-iters 10 --lr-decay-iters 110 --lr-decay-style"
    arguments = command_line.parse([*MOCK, *extra.split(), style])
    assert command_line.learning_rate(arguments, steps) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("steps", "printed"),
    [(4, "4.000000E-05"), (9, "9.000000E-05"), (19, "9.998165E-05"), (29, "9.991823E-05")],
)
def test_a_log_of_upstreams(steps: int, printed: str) -> None:
    """Peak 1e-4, cosine to 1e-5 over 1000 iterations, 1 % warmup, the first 16 skipped."""
    extra = "--lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-decay-iters 1000"
    arguments = command_line.parse([*MOCK, *extra.split(), "--lr-warmup-fraction", "0.01"])
    assert f"{command_line.learning_rate(arguments, steps):.6E}" == printed


@pytest.mark.parametrize(
    ("options", "impl"),
    [((), "auto"), (("--fp8-recipe", "mxfp8"), "transformer_engine")],
)
def test_fp8_is_our_own_where_transformer_engine_is_at_hand(
    options: tuple[str, ...], impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers were taken for every model, GPT-2 too, whose steps took 98 ms for bf16's 68."""
    monkeypatch.setattr(command_line, "find_spec", lambda name: name)
    given = command_line.parse([*MOCK, "--bf16", "--fp8-format", "hybrid", *options])
    assert given.transformer_impl == impl
