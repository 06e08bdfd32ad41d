"""The names of weights: Megatron's beside Hugging Face's, one table a family."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from launcher.base.errors import UsageError
from launcher.tools.weights.architecture import Architecture
from launcher.tools.weights.transform import (
    HALVES,
    QKV,
    SAME,
    STACKED,
    STACKED_TURNED,
    TURNED,
    VOCABULARY,
    Transform,
)


@dataclass(frozen=True)
class Row:
    """One tensor of Megatron's, and those of Hugging Face that it becomes."""

    megatron: str
    theirs: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True)
class Family:
    """A `model_type` of Hugging Face's and the class of it; {n} is a layer, {e} an expert.

    `prefix` may be missing from names. `ignored` are tensors that are no weights.
    """

    name: str
    model: str
    rows: tuple[tuple[str, str, Transform], ...]
    prefix: str = "model."
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)


M, H = "decoder.layers.{n}.", "model.layers.{n}."
ATTENTION = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight", VOCABULARY),
    (f"{M}input_layernorm.weight", f"{H}input_layernorm.weight", SAME),
    (
        f"{M}self_attention.linear_qkv.weight",
        " ".join(f"{H}self_attn.{one}_proj.weight" for one in "qkv"),
        QKV,
    ),
    (f"{M}self_attention.linear_proj.weight", f"{H}self_attn.o_proj.weight", SAME),
    (f"{M}pre_mlp_layernorm.weight", f"{H}post_attention_layernorm.weight", SAME),
    ("decoder.final_layernorm.weight", "model.norm.weight", SAME),
    ("output_layer.weight", "lm_head.weight", VOCABULARY),
)
BIASES = (
    (
        f"{M}self_attention.linear_qkv.bias",
        " ".join(f"{H}self_attn.{one}_proj.bias" for one in "qkv"),
        QKV,
    ),
)
NORMS = tuple(
    (f"{M}self_attention.{one}_layernorm.weight", f"{H}self_attn.{one}_norm.weight", SAME)
    for one in "qk"
)


def _mlp(
    megatron: str,
    theirs: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> tuple[tuple[str, str, Transform], ...]:
    return (
        (
            f"{M}{megatron}.linear_fc1.weight",
            f"{H}{theirs}.{gate}.weight {H}{theirs}.{up}.weight",
            HALVES,
        ),
        (f"{M}{megatron}.linear_fc2.weight", f"{H}{theirs}.{down}.weight", SAME),
    )


MLP = _mlp("mlp", "mlp")
EXPERTS = (
    (f"{M}mlp.router.weight", f"{H}mlp.gate.weight", SAME),
    *_mlp("mlp.experts.local_experts.{e}", "mlp.experts.{e}"),
)
SHARED = (
    *_mlp("mlp.shared_experts", "mlp.shared_expert"),
    (f"{M}mlp.shared_experts.gate_weight", f"{H}mlp.shared_expert_gate.weight", SAME),
)
MIXTRAL = (
    (f"{M}mlp.router.weight", f"{H}block_sparse_moe.gate.weight", SAME),
    *_mlp("mlp.experts.local_experts.{e}", "block_sparse_moe.experts.{e}", "w1", "w3", "w2"),
)
G = "transformer.h.{n}."
GPT2 = (
    ("embedding.word_embeddings.weight", "transformer.wte.weight", VOCABULARY),
    ("embedding.position_embeddings.weight", "transformer.wpe.weight", SAME),
    (f"{M}input_layernorm.weight", f"{G}ln_1.weight", SAME),
    (f"{M}input_layernorm.bias", f"{G}ln_1.bias", SAME),
    (f"{M}self_attention.linear_qkv.weight", f"{G}attn.c_attn.weight", STACKED_TURNED),
    (f"{M}self_attention.linear_qkv.bias", f"{G}attn.c_attn.bias", STACKED),
    (f"{M}self_attention.linear_proj.weight", f"{G}attn.c_proj.weight", TURNED),
    (f"{M}self_attention.linear_proj.bias", f"{G}attn.c_proj.bias", SAME),
    (f"{M}pre_mlp_layernorm.weight", f"{G}ln_2.weight", SAME),
    (f"{M}pre_mlp_layernorm.bias", f"{G}ln_2.bias", SAME),
    (f"{M}mlp.linear_fc1.weight", f"{G}mlp.c_fc.weight", TURNED),
    (f"{M}mlp.linear_fc1.bias", f"{G}mlp.c_fc.bias", SAME),
    (f"{M}mlp.linear_fc2.weight", f"{G}mlp.c_proj.weight", TURNED),
    (f"{M}mlp.linear_fc2.bias", f"{G}mlp.c_proj.bias", SAME),
    ("decoder.final_layernorm.weight", "transformer.ln_f.weight", SAME),
    ("decoder.final_layernorm.bias", "transformer.ln_f.bias", SAME),
    ("output_layer.weight", "lm_head.weight", VOCABULARY),
)
FAMILIES = {
    family.name: family
    for family in (
        Family("gpt2", "GPT2LMHeadModel", GPT2, "transformer.", (".attn.bias", ".masked_bias")),
        Family("llama", "LlamaForCausalLM", (*ATTENTION, *MLP)),
        Family("mistral", "MistralForCausalLM", (*ATTENTION, *MLP)),
        Family("qwen2", "Qwen2ForCausalLM", (*ATTENTION, *BIASES, *MLP)),
        Family("qwen3", "Qwen3ForCausalLM", (*ATTENTION, *NORMS, *MLP)),
        Family("mixtral", "MixtralForCausalLM", (*ATTENTION, *MIXTRAL)),
        Family("qwen2_moe", "Qwen2MoeForCausalLM", (*ATTENTION, *BIASES, *EXPERTS, *SHARED)),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", (*ATTENTION, *NORMS, *EXPERTS)),
    )
}


def family(name: str) -> Family:
    """A family by its name. Raises UsageError."""
    if name not in FAMILIES:
        raise UsageError(f"no family of models {name!r}", f"There are {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def rows(of: Family, shape: Architecture) -> Iterator[Row]:
    """Every tensor of a model of that shape, in the order in which layers are run."""
    layered = [row for row in of.rows if "{n}" in row[0]]
    at = of.rows.index(layered[0])
    for row in of.rows[:at]:
        yield _row(row)
    for layer in range(shape.layers):
        for row in layered:
            for expert in range(shape.experts) if "{e}" in row[0] else (0,):
                yield _row(row, layer, expert)
    for row in of.rows[at:]:
        if row not in layered and not (shape.tied and row[0].startswith("output_layer.")):
            yield _row(row)


def _row(row: tuple[str, str, Transform], layer: int = 0, expert: int = 0) -> Row:
    megatron, theirs, transform = row
    numbers = {"n": layer, "e": expert}
    return Row(megatron.format(**numbers), tuple(theirs.format(**numbers).split()), transform)
