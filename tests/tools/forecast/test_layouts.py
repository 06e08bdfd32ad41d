"""The layouts beside a run's own that a forecast names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.forecast.conftest import Said

CARD = ("--gpu", "h100-80gb")
EXPERTS, CONTEXT = "parallel.expert_model_parallel_size", "parallel.context_parallel_size"
MADE_UP = """
name: made-up
image: {name: x}
gpus: 8
model: {num_layers: 24, hidden_size: 2048, num_attention_heads: 16, ffn_hidden_size: 1408,
  seq_length: %(tokens)s, max_position_embeddings: %(tokens)s, position_embedding_type: rope,
  normalization: RMSNorm, swiglu: true, disable_bias_linear: true,
  untie_embeddings_and_output_weights: true}
parallel: {use_distributed_optimizer: true}
training: {precision: bf16, micro_batch_size: 1, global_batch_size: 8, train_iters: 10, lr: 1e-3}
data: {mock: true, vocab_size: 65024}
"""


EXPERTS_OF_48 = ("megatron_args.num_experts=48", "megatron_args.moe_router_topk=6")


@pytest.mark.parametrize(
    ("tokens", "more", "key"),
    [(4096, (*EXPERTS_OF_48, f"{EXPERTS}=2"), EXPERTS), (32768, (), CONTEXT)],
)
def test_experts_and_long_sequences_are_divided_otherwise(
    tokens: int, more: tuple[str, ...], key: str, tmp_path: Path, said: Said
) -> None:
    """TP and PP alone were tried."""
    (tmp_path / "run.yaml").write_text(MADE_UP % {"tokens": tokens})
    sets = [word for each in more for word in ("--set", each)]
    found = said("forecast", str(tmp_path / "run.yaml"), *CARD, *sets)["others"]
    assert any(key in each["set"] for each in found)
    assert all(each["bytes"] < 80e9 for each in found)
    assert "make_vocab_size_divisible_by" not in str(found[0]["set"])  # it stays what it is


@pytest.mark.parametrize("words", ["--gpus 8", "--gpus 8 --nodes 2", "--gpus 4 --nodes 8"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "llama3-8b"])
def test_what_is_named_can_be_run(name: str, words: str, said: Said) -> None:
    """mixtral-8x7b on 8 GPUs was told of TP=8, which the launcher itself refused: two processes
    for its experts, and one replica."""
    asked = ("forecast", name, *CARD, *words.split())
    for other in said(*asked)["others"]:
        keys = {key: json.dumps(value) for key, value in other["set"].items()}
        sets = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        taken = said(*asked, *sets)
        assert taken["memory"]["total"] == other["bytes"]
