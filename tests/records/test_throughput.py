"""How fast a run is: by the published formula, and of the sizes that its command line gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.plan.plan import Plan
from launcher.records.throughput import Shape, flops_per_step, peak, rates, shape_of

GPT2 = Shape(
    layers=12,
    hidden=768,
    ffn=3072,
    heads=12,
    groups=12,
    head=64,
    sequence=512,
    vocabulary=50304,
    batch=16,
    world=1,
    precision="bf16",
)
OURS = (
    *("python3", "-m", "launcher.train.runner", "--processes-per-node", "2", "--"),
    *("-m", "launcher.train.gpt", "--num-layers", "2", "--hidden-size", "64"),
    *("--num-attention-heads", "4", "--seq-length", "32", "--vocab-size", "100"),
    *("--micro-batch-size", "2", "--global-batch-size", "8"),
)
UPSTREAM = (
    *("python3", "-m", "launcher.train.runner", "--processes-per-node", "8", "--"),
    *("/opt/megatron/src/pretrain_gpt.py", "--num-layers=2", "--hidden-size=64"),
    *("--num-attention-heads=4", "--seq-length=32", "--tokenizer-type", "GPT2BPETokenizer"),
    *("--micro-batch-size", "2", "--bf16"),
)


def paper(shape: Shape) -> float:
    """96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h)), as the paper prints it: with recomputation."""
    b, s, l, h, v = shape.batch, shape.sequence, shape.layers, shape.hidden, shape.vocabulary  # noqa: E741
    return 96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))


def recomputed(shape: Shape) -> float:
    """The forward pass of the layers, 24·B·s·l·h² + 4·B·s²·l·h, that recomputation repeats."""
    b, s, l, h = shape.batch, shape.sequence, shape.layers, shape.hidden  # noqa: E741
    return 24 * b * s * l * h**2 + 4 * b * s**2 * l * h


def test_a_case_worked_out_by_hand() -> None:
    # A token forward, in multiply-adds, h = 768, s = 512:
    #   queries, keys, values, output   4 · 768²        = 2,359,296
    #   scores, and the sum of values   2 · 512 · 768   =   786,432
    #   MLP                             8 · 768²        = 4,718,592
    #   a layer                                           7,864,320
    #   12 layers                                        94,371,840
    #   logits                          768 · 50304     = 38,633,472
    #   in all                                          133,005,312
    # Twice as many operations, three times (forward, two gradients): 798,031,872.
    # A step has 16 · 512 = 8192 tokens: 6,537,477,095,424.
    assert flops_per_step(GPT2) == 6_537_477_095_424


def test_the_papers_formula_less_what_is_recomputed() -> None:
    # GPT-3, 175 billion parameters, as in the paper's section 5.1: 96 layers, h = 12288, s = 2048.
    gpt3 = Shape(
        layers=96,
        hidden=12288,
        ffn=4 * 12288,
        heads=96,
        groups=96,
        head=128,
        sequence=2048,
        vocabulary=51200,
        batch=1536,
        world=1024,
    )
    assert flops_per_step(gpt3) == pytest.approx(paper(gpt3) - recomputed(gpt3), rel=1e-12)
    # 140 TFLOP/s on each of 1024 GPUs, with recomputation, is what the paper has for it; it
    # estimates 34 days for 300 billion tokens, without the terms in s and V.
    steps = 300e9 / (1536 * 2048)
    days = steps * paper(gpt3) / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, abs=1)


@given(
    layers=st.integers(1, 200),
    heads=st.integers(1, 128),
    head=st.integers(1, 256),
    sequence=st.integers(1, 10**6),
    vocabulary=st.integers(1, 10**6),
    batch=st.integers(1, 10**4),
)
def test_the_papers_formula_for_any_sizes(
    layers: int, heads: int, head: int, sequence: int, vocabulary: int, batch: int
) -> None:
    hidden = heads * head
    shape = Shape(
        layers, hidden, 4 * hidden, heads, heads, head, sequence, vocabulary, batch, world=1
    )
    assert flops_per_step(shape) == pytest.approx(paper(shape) - recomputed(shape), rel=1e-9)


def test_beyond_the_paper() -> None:
    whole, tokens = flops_per_step(GPT2), 16 * 512
    # Three groups for twelve heads: keys and values are a quarter as wide, 1.5 · 768² less.
    grouped = flops_per_step(replace(GPT2, groups=3))
    assert whole - grouped == 6 * tokens * 12 * 1.5 * 768**2
    # A gated MLP has a third product of 768 · 3072.
    assert flops_per_step(replace(GPT2, gated=True)) - whole == 6 * tokens * 12 * 768 * 3072
    # Six of twelve layers pass each token through two experts of 1024, and one shared of 512.
    experts = replace(GPT2, expert_layers=6, routed=2, expert_ffn=1024, shared_ffn=512)
    less = 6 * 2 * 768 * (3072 - 2 * 1024 - 512)
    assert whole - flops_per_step(experts) == 6 * tokens * less


def test_rates() -> None:
    found = rates(GPT2, 82.1, "NVIDIA H100 80GB HBM3")
    assert found
    assert found.tokens_per_s == pytest.approx(8192 / 0.0821)
    assert found.tflops_per_gpu == pytest.approx(79.63, abs=0.01)  # 6.537 in 0.0821 s
    assert found.mfu == pytest.approx(79.63 / 989.4, abs=1e-4)
    two = rates(replace(GPT2, world=2), 82.1, "NVIDIA H100 80GB HBM3")
    assert two
    assert (two.tokens_per_s, two.tflops_per_gpu) == (found.tokens_per_s, found.tflops_per_gpu / 2)


@pytest.mark.parametrize("ms", [0.0, -1.0, float("nan"), float("inf")])
def test_no_time_has_no_rates(ms: float) -> None:
    assert rates(GPT2, ms) is None


def test_our_program() -> None:
    found = shape_of(OURS, world=2)
    assert found == Shape(
        layers=2,
        hidden=64,
        ffn=256,
        heads=4,
        groups=4,
        head=16,
        sequence=32,
        vocabulary=128,
        batch=8,
        world=2,
    )
    more = ("--tensor-model-parallel-size", "2", "--num-query-groups", "2", "--ffn-hidden-size=96")
    found = shape_of((*OURS, *more, "--fp16"), world=2)
    assert found
    assert (found.vocabulary, found.groups, found.ffn, found.precision) == (256, 2, 96, "fp16")


def test_the_last_of_two_values_counts() -> None:
    found = shape_of((*OURS, "--seq-length", "64"), world=2)
    assert found
    assert found.sequence == 64


def test_upstreams_program() -> None:
    found = shape_of(UPSTREAM, world=8)
    assert found
    assert (found.vocabulary, found.batch, found.precision) == (50304, 16, "bf16")
    parallel = ("--tensor-model-parallel-size=2", "--pipeline-model-parallel-size", "2")
    found = shape_of((*UPSTREAM, *parallel, "--swiglu", "--kv-channels", "32"), world=8)
    assert found
    # Megatron's own sizes: 8/3 of 64, in 64s; 50257 in 256s.
    assert (found.ffn, found.head, found.gated) == (128, 32, True)
    assert (found.batch, found.vocabulary) == (4, 50432)


def test_upstream_groups_queries_only_where_told_to() -> None:
    for words, groups in (
        (("--num-query-groups=2",), 4),
        (("--group-query-attention", "--num-query-groups=2"), 2),
        (("--group-query-attention",), 1),
    ):
        found = shape_of((*UPSTREAM, *words), world=8)
        assert found
        assert found.groups == groups


def test_upstreams_vocabulary_is_its_tokenizers() -> None:
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "255")
    found = shape_of((*UPSTREAM, *null), world=8)
    assert found
    assert found.vocabulary == 256
    unknown = ("--tokenizer-type", "HuggingFaceTokenizer", "--vocab-size", "255")
    assert shape_of((*UPSTREAM, *unknown), world=8) is None
    found = shape_of((*UPSTREAM, *unknown), world=8, vocabulary=32000)
    assert found
    assert found.vocabulary == 32000


def test_experts() -> None:
    words = ("--num-experts", "8", "--moe-layer-freq", "2", "--moe-ffn-hidden-size", "48")
    found = shape_of((*UPSTREAM, *words, "--moe-shared-expert-intermediate-size=16"), world=8)
    assert found
    experts = (found.expert_layers, found.routed, found.expert_ffn, found.shared_ffn)
    assert experts == (1, 2, 48, 16)
    assert shape_of((*UPSTREAM, "--num-experts=8", "--moe-layer-freq", "[0]+[1]"), world=8) is None


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("--",),
        ("python3", "-m", "launcher.train.runner", "--", "/program/mine.py", *OURS[8:]),
        ("python3", "-m", "launcher.train.runner", "--", "pretrain_bert.py", *OURS[8:]),
        OURS[:-8],
        (*OURS, "--num-layers", "many"),
        (*OURS, "--num-attention-heads", "0"),
        (*UPSTREAM, "--multi-latent-attention"),
        (*UPSTREAM, "--use-checkpoint-args"),
        (*UPSTREAM, "--tensor-model-parallel-size", "0"),
    ],
)
def test_no_shape(argv: tuple[str, ...]) -> None:
    assert shape_of(argv, world=2) is None


@given(st.lists(st.sampled_from([*OURS, *UPSTREAM, "", "--", "0", "-1", "9" * 400, "x"])))
def test_no_command_line_breaks_it(argv: list[str]) -> None:
    found = shape_of(argv, world=2)
    if found:
        rates(found, 1.0, "NVIDIA L4")


def test_the_plans_of_presets_have_shapes(plan: Callable[..., Plan]) -> None:
    tiny = plan("gpt2-tiny.yaml")
    found = shape_of(tiny.argv, tiny.processes_per_node)
    assert found
    assert found.world == tiny.processes_per_node
    big = plan("gpt3-175b.yaml")
    found = shape_of(big.argv, 1024, vocabulary=51200)
    assert found
    assert (found.layers, found.hidden, found.sequence) == (96, 12288, 2048)


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "fp16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5),
        ("NVIDIA A100-PCIE-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp16", 312),
        ("Tesla V100-SXM2-16GB", "fp16", 125),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla V100-PCIE-32GB", "fp16", 112),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181.05),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp8", None),
        ("Some GPU", "bf16", None),
        ("", "bf16", None),
    ],
)
def test_peaks(name: str, precision: str, tflops: float | None) -> None:
    assert peak(name, precision) == tflops


def test_an_unknown_gpu_has_no_share() -> None:
    for name in ("NVIDIA H20", None):
        found = rates(GPT2, 82.1, name)
        assert found
        assert found.mfu is None
