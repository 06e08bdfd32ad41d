"""Small random models of each family, as Hugging Face has them, made without its libraries."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from launcher.tools.weights import architecture, hf_config, safetensors
from launcher.tools.weights.families import FAMILIES, rows

SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 4, "n_embd": 64, "n_head": 4, "n_positions": 64, "vocab_size": 100},
    "llama": {
        **SIZES,
        "rope_theta": 500000.0,
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
        },
    },
    "mistral": {**SIZES, "head_dim": 32, "sliding_window": 8},
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 32},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2_moe": {**SIZES, **EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**SIZES, **EXPERTS, "head_dim": 32, "norm_topk_prob": True},
}


def made(folder: Path, family: str, most: int = 1 << 30, dtype: str = "float32") -> Path:
    """A folder with config.json and random bits for weights, in shards of up to `most` bytes.

    The bits are those of small numbers, each sign and fraction as likely as another.
    """
    folder.mkdir()
    config = {"model_type": family, "torch_dtype": dtype, **CONFIGS[family]}
    (folder / "config.json").write_text(json.dumps(config))
    shape = hf_config.of_config(config, 64)
    random, shards = np.random.default_rng(1), safetensors.Shards(folder, most)
    kind = np.dtype({"float32": "<u4", "bfloat16": "<u2"}[dtype])
    for row in rows(FAMILIES[family], shape):
        size = architecture.shape_of(row.megatron, shape)
        whole = np.frombuffer(random.bytes(prod(size) * kind.itemsize), kind).reshape(size)
        exponent = 8 * kind.itemsize - 9  # of which the fraction has one bit less
        whole = whole & ~kind.type(0xFF << exponent) | kind.type(0x7A << exponent)
        parts = row.transform.apart(whole, shape)
        shards.add(dict(zip(row.theirs, parts, strict=True)), dtype, 1 << 16)
    shards.finish()
    return folder


def same(one: Path, two: Path) -> None:
    """Assert that two folders of Hugging Face's have the same weights, to the byte."""
    first, second = safetensors.entries(one), safetensors.entries(two)
    assert first.keys() == second.keys()
    for name, entry in first.items():
        assert (entry.dtype, entry.shape) == (second[name].dtype, second[name].shape), name
        assert np.array_equal(entry.read(), second[name].read()), name
