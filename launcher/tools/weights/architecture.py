"""What a model is beside its weights: Megatron's arguments, Hugging Face's config.json.

Sizes come from the tensors themselves; of the arguments, only what no tensor shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.base.errors import UsageError
from launcher.tools.weights.families import FAMILIES, Family, family
from launcher.tools.weights.reader import EXPERT, LAYER, SavedModel

MODEL_TYPE = "hf_model_type"
"""Which family an imported checkpoint is of, where several have the same tensors."""

FIRST = f"{LAYER}0."
REFUSED: dict[str, tuple[Any, ...]] = {
    "rotary_percent": (1.0,),
    "rotary_interleaved": (),
    "rotary_seq_len_interpolation_factor": (),
    "apply_layernorm_1p": (),
    "layernorm_zero_centered_gamma": (),
    "squared_relu": (),
    "quick_geglu": (),
    "multi_latent_attention": (),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_scaling_factor": (1.0,),
    "moe_router_num_groups": (1,),
    "moe_apply_probs_on_input": (),
    "moe_layer_freq": (1,),
    "mtp_num_layers": (),
    "position_embedding_type": ("learned_absolute", "rope"),
}
"""Megatron's arguments that none of the families has, but for these values, 0, False or None."""


@dataclass(frozen=True)
class Architecture:
    """A GPT's shape; `head` is the width of one. `padded` is the vocabulary as Megatron has it.

    `window` is the sliding window's width, 0 for none; `scaling` the factor of Llama 3.1's RoPE,
    0 for none; `normalised` whether the weights of the chosen experts sum to 1; `gelu` which one
    GPT-2 has. `ffn` is an expert's where there are any, and `dense` that of layers without.
    """

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    vocabulary: int
    padded: int
    positions: int
    epsilon: float
    tied: bool
    dtype: str
    base: float = 10000.0
    scaling: float = 0.0
    window: int = 0
    gelu: str = "gelu_new"
    experts: int = 0
    chosen: int = 0
    normalised: bool = True
    shared: int = 0
    dense: int = 0

    @property
    def of(self) -> Family:
        """The family."""
        return family(self.family)


def _refuse(values: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], where: str) -> None:
    for name, allowed in table.items():
        if (value := values.get(name)) and value not in allowed:
            raise UsageError(
                f"{where}: {name} is {value}: there is no such model on the other side"
            )


def of_checkpoint(saved: SavedModel, given: Mapping[str, Any], name: str = "") -> Architecture:
    """The model of a checkpoint; `given` wins over the arguments that it was saved with.

    `name` is a family's; else it is the first that fits. Raises UsageError for what no family has,
    or where the checkpoint doesn't say enough.
    """
    known = {**saved.arguments, **given}
    _refuse(known, REFUSED, str(saved.folder))
    shapes = {name: tensor.shape for name, tensor in saved.tensors.items()}
    try:
        rows = shapes[f"{FIRST}self_attention.linear_qkv.weight"][0]
        hidden, width = shapes[f"{FIRST}self_attention.linear_proj.weight"]
        padded = shapes["embedding.word_embeddings.weight"][0]
    except KeyError as missing:
        raise UsageError(f"{saved.folder}: no {missing.args[0]} in it") from None
    normed = shapes.get(f"{FIRST}self_attention.q_layernorm.weight")
    heads = width // normed[0] if normed else int(_said(saved, known, "num_attention_heads"))
    head = width // heads
    expert = f"{FIRST}{EXPERT}0.linear_fc2.weight"
    vocabulary = int(known.get("vocab_size") or padded)
    if vocabulary > padded or width % heads or rows % head:
        raise UsageError(f"{saved.folder}: its tensors don't fit its arguments")
    learned = shapes.get("embedding.position_embeddings.weight")
    return Architecture(
        family=name or known.get(MODEL_TYPE) or _recognised(saved, known),
        layers=saved.layers,
        hidden=hidden,
        ffn=shapes.get(expert, shapes.get(f"{FIRST}mlp.linear_fc2.weight", (0, 0)))[1],
        heads=heads,
        groups=(rows // head - heads) // 2,
        head=head,
        vocabulary=vocabulary,
        padded=padded,
        positions=learned[0] if learned else int(_said(saved, known, "max_position_embeddings")),
        epsilon=float(known.get("norm_epsilon") or 1e-5),
        tied="output_layer.weight" not in shapes,
        dtype=saved.tensors["embedding.word_embeddings.weight"].dtype,
        base=float(known.get("rotary_base") or 10000),
        scaling=float(known.get("rope_scaling_factor") or 8)
        if known.get("use_rope_scaling")
        else 0,
        window=_window(known.get("window_size")),
        gelu="gelu_new" if _approximate(known) else "gelu",
        experts=saved.experts,
        chosen=int(known.get("moe_router_topk") or 2),
        normalised=not known.get("moe_router_pre_softmax"),
        dense=int(known.get("ffn_hidden_size") or 0),
        shared=shapes.get(f"{FIRST}mlp.shared_experts.linear_fc2.weight", (0, 0))[1],
    )


def _said(saved: SavedModel, known: Mapping[str, Any], name: str) -> Any:
    if known.get(name) is None:
        option = name.replace("_", "-")
        raise UsageError(
            f"{saved.folder} doesn't say {name}, and its tensors don't show it",
            f"Give what the run was given: … -- --{option} N",
        )
    return known[name]


def _window(value: Any) -> int:
    """Megatron's is how many to the left and the right; Hugging Face counts the token itself."""
    return int(value[0]) + 1 if isinstance(value, list) and value and int(value[0]) >= 0 else 0


def _approximate(known: Mapping[str, Any]) -> bool:
    """Whether GELU is the one by tanh, which Megatron's fused kernel has, and --openai-gelu."""
    fused = known.get("bias_gelu_fusion", known.get("bias_fusion"))
    return bool(fused or known.get("openai_gelu"))


def _recognised(saved: SavedModel, known: Mapping[str, Any]) -> str:
    """The first family that has these tensors. Raises UsageError where none has."""
    there = saved.tensors.keys()
    wanted = {
        "gpt2": "embedding.position_embeddings.weight" in there,
        "experts": f"{FIRST}mlp.router.weight" in there,
        "normed": f"{FIRST}self_attention.q_layernorm.weight" in there,
    }
    biased = f"{FIRST}self_attention.linear_qkv.bias" in there
    shared = f"{FIRST}mlp.shared_experts.linear_fc2.weight" in there
    fitting = [
        one
        for one in FAMILIES.values()
        if all(bool(getattr(one, trait)) == value for trait, value in wanted.items())
        and (one.gpt2 or one.biased == biased or (one.shared and shared))
    ]
    if not fitting:
        raise UsageError(f"{saved.folder}: no family of models has its tensors")
    window = bool(_window(known.get("window_size")))
    return max(fitting, key=lambda one: one.windowed == window).name


def arguments(shape: Architecture) -> dict[str, Any]:
    """Megatron's arguments of a model, under upstream's names for them."""
    gpt2 = shape.of.gpt2
    found: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.dense or shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": shape.groups < shape.heads,
        "num_query_groups": shape.groups if shape.groups < shape.heads else None,
        "kv_channels": shape.head,
        "seq_length": shape.positions,
        "max_position_embeddings": shape.positions,
        "vocab_size": shape.vocabulary,
        "padded_vocab_size": shape.padded,
        "norm_epsilon": shape.epsilon,
        "normalization": "LayerNorm" if gpt2 else "RMSNorm",
        "swiglu": not gpt2,
        "add_bias_linear": gpt2,
        "disable_bias_linear": not gpt2,
        "add_qkv_bias": shape.of.biased,
        "qk_layernorm": shape.of.normed,
        "untie_embeddings_and_output_weights": not shape.tied,
        "position_embedding_type": "learned_absolute" if gpt2 else "rope",
        "openai_gelu": gpt2 and shape.gelu == "gelu_new",
        "bias_gelu_fusion": False,
        MODEL_TYPE: shape.family,
        "bf16": shape.dtype == "bfloat16",
        "fp16": shape.dtype == "float16",
    }
    if not gpt2:
        found |= {"rotary_base": int(shape.base), "use_rope_scaling": bool(shape.scaling)}
        found |= {"rope_scaling_factor": shape.scaling} if shape.scaling else {}
        found |= {"window_size": [shape.window - 1, 0]} if shape.window else {}
    if shape.experts:
        found |= {
            "num_experts": shape.experts,
            "moe_router_topk": shape.chosen,
            "moe_router_pre_softmax": not shape.normalised,
            "moe_ffn_hidden_size": shape.ffn,
            "moe_shared_expert_intermediate_size": shape.shared or None,
            "moe_shared_expert_gate": bool(shape.shared),
        }
    return found


def shape_of(name: str, model: Architecture) -> tuple[int, ...]:
    """The shape of one of Megatron's tensors, by its name in a model of that kind."""
    last = name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]
    ffn = model.shared if "shared_experts" in name else model.ffn
    wide, heads = 1 if model.of.gpt2 else 2, model.heads * model.head
    known = {
        "word_embeddings": (model.padded, model.hidden),
        "output_layer": (model.padded, model.hidden),
        "position_embeddings": (model.positions, model.hidden),
        "linear_qkv": (heads + 2 * model.groups * model.head, model.hidden),
        "linear_proj": (model.hidden, heads),
        "linear_fc1": (wide * ffn, model.hidden),
        "linear_fc2": (model.hidden, ffn),
        "router": (model.experts, model.hidden),
        "gate_weight": (1, model.hidden),
        **dict.fromkeys(("q_layernorm", "k_layernorm"), (model.head,)),
    }
    shape: tuple[int, ...] = known.get(last, (model.hidden,))
    return shape[:1] if name.endswith(".bias") else shape
