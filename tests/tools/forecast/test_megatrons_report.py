"""Forecasts of memory beside Megatron's own theoretical report, for every preset."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.runs.plan import layout
from launcher.runs.plan.render import values_of
from launcher.runs.runfile import origins
from launcher.tools.forecast.work import Work
from tools.extract import Checkout

MODULE = "megatron/training/theoretical_memory_usage.py"
SAID = {
    "gpt2": 2_224_917_504,
    "gpt2-tiny": 1_037_952,
    "gpt3-175b": 25_877_425_536,
    "llama-tiny": 1_127_232,
    "llama3-8b": 36_136_175_616,
    "llama3.2-1b": 22_244_659_200,
    "mixtral-8x7b": 210_157_848_576,
    "mixtral-tiny": 5_904_000,
    "qwen-moe-tiny": 5_019_264,
    "qwen3-0.6b": 10_728_769_536,
    "qwen3-30b-a3b": 137_337_873_408,
    "qwen3-tiny": 1_200_960,
}
"""Bytes of weights and optimizer on the GPU that needs most, by the report of 0.16.1.

demo is gpt2-tiny with other sizes, and of simple nothing is known.
"""

ACTIVATIONS = {
    "gpt2": 265_424_896,
    "gpt3-175b": 10_318_020_608,
}
"""Bytes of activations and fp32 logits, by the same."""


def work(preset: str, *sets: str) -> Work:
    """In bf16, with each rank's share of all experts: the report doesn't spread them."""
    sets = (*sets, "training.precision=bf16", "training.bf16=null", "training.fp16=null")
    processes = 2 if "tiny" in preset else 1 if preset == "gpt2" else 8
    sets += ("parallel.expert_model_parallel_size=null", f"gpus={processes}")
    config, _ = origins.load(preset, [origins.parse_set(each) for each in sets])
    config = layout.with_precision(config)
    where = layout.layout(config, processes)
    return Work(config.program, values_of(config, where), where, config.nodes.count)


def arguments(done: Work) -> SimpleNamespace:
    """What Megatron would have parsed."""
    shape, where = done.shape, done.where
    assert shape
    return SimpleNamespace(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads, num_query_groups=shape.groups, kv_channels=shape.head,
        group_query_attention=True, seq_length=shape.sequence, micro_batch_size=done.micro,
        swiglu=shape.gated, normalization="LayerNorm" if shape.norm_bias else "RMSNorm",
        untie_embeddings_and_output_weights=not shape.tied, padded_vocab_size=shape.vocabulary,
        num_experts=shape.experts or None, moe_ffn_hidden_size=shape.expert_ffn or None,
        moe_layer_freq=1, moe_shared_expert_intermediate_size=shape.shared_ffn or None,
        mtp_num_layers=None, multi_latent_attention=False,
        tensor_model_parallel_size=where.tensor, pipeline_model_parallel_size=where.pipeline,
        virtual_pipeline_model_parallel_size=None, data_parallel_size=where.data * where.context,
        use_distributed_optimizer="use_distributed_optimizer" in done.options,
    )  # fmt: skip


def of_words(done: Work) -> float:
    """Bytes of the positions' embedding, which the report leaves out."""
    assert done.shape
    return 18 * done.shape.positions * done.shape.hidden


@pytest.mark.parametrize("preset", SAID)
def test_weights_and_optimizer_of_presets(preset: str) -> None:
    """Of dense presets within 5 % of the report, with experts within 10 %."""
    done = work(preset)
    found = done.memory((9, 0))
    assert found
    assert done.shape
    expected = SAID[preset] + of_words(done)
    within = 0.1 if done.shape.experts else 0.05
    assert found.weights + found.gradients + found.optimizer == pytest.approx(expected, rel=within)


def unfused(preset: str) -> Work:
    """As the report has it: a GPT with MLPs of 4 h, sequence parallel, its scores made again."""
    sets = ("program=pretrain_gpt.py", "megatron_args.recompute_granularity=selective")
    return work(preset, *sets, "parallel.sequence_parallel=true", "training.micro_batch_size=1")


@pytest.mark.parametrize("preset", ACTIVATIONS)
def test_activations_of_gpt2_and_gpt3(preset: str) -> None:
    found = unfused(preset).memory((9, 0))
    assert found
    logits = found.logits * 4 / 6  # of which the report counts those in fp32
    assert found.activations + logits == pytest.approx(ACTIVATIONS[preset], rel=0.05)


@pytest.mark.skipif("MEGATRON_CHECKOUT" not in os.environ, reason="no MEGATRON_CHECKOUT")
def test_the_report_says_so() -> None:
    """What stands above is what Megatron's own code gives."""
    text = Checkout(Path(os.environ["MEGATRON_CHECKOUT"]), "core_v0.16.1").text(MODULE)
    report: dict[str, Any] = {}
    code = (text or "").replace("from .utils import print_rank_0", "")
    exec(compile(code, MODULE, "exec"), report)  # noqa: S102 - a file of the checkout
    for preset in SAID:
        said = report["compute_weight_and_optimizer_memory"](arguments(work(preset)))
        assert said == pytest.approx(SAID[preset], rel=1e-6), (preset, said)
    for preset, expected in ACTIVATIONS.items():
        done = unfused(preset)
        said = report["compute_activation_memory"](arguments(done), done.count)
        assert said == pytest.approx(expected, rel=1e-6), (preset, said)
