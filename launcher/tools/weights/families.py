"""What families of models differ in: the names of weights, and the keys of config.json."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points

from launcher.base.errors import UsageError
from launcher.tools.weights.transform import (
    HALVES,
    QKV,
    SAME,
    STACKED,
    STACKED_TURNED,
    TURNED,
    VOCABULARY,
    ModelSizes,
    Transform,
)


@dataclass(frozen=True)
class TensorRow:
    """One tensor of Megatron's, and those of Hugging Face that it becomes."""

    megatron: str
    theirs: tuple[str, ...]
    transform: Transform


@dataclass(frozen=True)
class Family:
    """A `model_type` of Hugging Face's and the class of it; {n} is a layer, {e} an expert.

    prefix: may be missing from names
    ignored: tensors that are no weights
    gpt2: learned positions, LayerNorm, biases and GELU, under GPT-2's keys; else Llama's
    biased: queries, keys and values have biases; normed: queries and keys have norms
    windowed: every layer looks back `sliding_window` tokens; Qwen's do where they say so
    experts: the key of their number; "" for a family without
    apart: experts have a size of their own, beside that of layers without
    shared: there may be experts for all tokens
    normalised: the weights of the chosen experts always sum to 1
    head, epsilon, base: what config.json has where it doesn't say; head 0 is hidden / heads
    """

    name: str
    model: str
    rows: tuple[tuple[str, str, Transform], ...]
    prefix: str = "model."
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    gpt2: bool = False
    biased: bool = False
    normed: bool = False
    windowed: bool = False
    experts: str = ""
    apart: bool = False
    shared: bool = False
    normalised: bool = False
    head: int = 0
    epsilon: float = 1e-6
    base: float = 1e4


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
        Family(
            *("gpt2", "GPT2LMHeadModel", GPT2, "transformer.", (".attn.bias", ".masked_bias")),
            gpt2=True,
            epsilon=1e-5,
        ),
        Family("llama", "LlamaForCausalLM", (*ATTENTION, *MLP)),
        Family("mistral", "MistralForCausalLM", (*ATTENTION, *MLP), windowed=True),
        Family("qwen2", "Qwen2ForCausalLM", (*ATTENTION, *BIASES, *MLP), biased=True),
        Family("qwen3", "Qwen3ForCausalLM", (*ATTENTION, *NORMS, *MLP), normed=True, head=128),
        Family(
            *("mixtral", "MixtralForCausalLM", (*ATTENTION, *MIXTRAL)),
            windowed=True,
            experts="num_local_experts",
            normalised=True,
            epsilon=1e-5,
            base=1e6,
        ),
        Family(
            *("qwen2_moe", "Qwen2MoeForCausalLM", (*ATTENTION, *BIASES, *EXPERTS, *SHARED)),
            biased=True,
            experts="num_experts",
            apart=True,
            shared=True,
        ),
        Family(
            *("qwen3_moe", "Qwen3MoeForCausalLM", (*ATTENTION, *NORMS, *EXPERTS)),
            normed=True,
            experts="num_experts",
            apart=True,
            head=128,
        ),
    )
}

GROUP = "launchpad.families"
"""The entry points by which other packages bring families: each is a `Family`, by its name."""


def family(name: str) -> Family:
    """A family by its name: ours, or another package's. Raises UsageError where there is none."""
    if name in FAMILIES:
        return FAMILIES[name]
    others = entry_points(group=GROUP)
    if name not in others.names:
        there = ", ".join([*FAMILIES, *sorted(others.names)])
        raise UsageError(f"no family of models {name!r}", f"There are {there}.")
    found: Family = others[name].load()
    return found


def rows(of: Family, shape: ModelSizes) -> Iterator[TensorRow]:
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


def _row(row: tuple[str, str, Transform], layer: int = 0, expert: int = 0) -> TensorRow:
    megatron, theirs, transform = row
    numbers = {"n": layer, "e": expert}
    return TensorRow(megatron.format(**numbers), tuple(theirs.format(**numbers).split()), transform)
