"""Hugging Face's config.json: read as an Architecture, and written of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from launcher.base.errors import UsageError
from launcher.tools.weights.architecture import Architecture
from launcher.tools.weights.families import Family, family

CONFIG = "config.json"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""With the positions of training below, what Megatron's --use-rope-scaling has (rope_utils)."""

TRAINED = 8192
DEFAULTS: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
    "use_sliding_window": (False,),
    "mlp_only_layers": ([],),
    "decoder_sparse_step": (1,),
    "partial_rotary_factor": (1.0,),
    "hidden_act": ("silu",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "qkv_bias": (True,),
    "is_decoder": (True, False),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
}
"""Of Hugging Face's configurations what changes a model and isn't carried over, but for these."""

CARRIED = {
    *("model_type", "vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
    *("n_layer", "n_embd", "n_head", "n_inner", "n_positions", "layer_norm_epsilon"),
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
    *("num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    *("norm_topk_prob", "shared_expert_intermediate_size"),
}
EFFECTLESS = re.compile(
    r"architectures|torch_dtype|dtype|transformers_version|_name_or_path|_attn_implementation\w*"
    r"|attn_implementation|initializer_range|use_cache|return_dict\w*|output_\w+|id2label|label2id"
    r"|problem_type|finetuning_task|task_specific_params|tokenizer_class|prefix|n_ctx|n_special"
    r"|predict_special_tokens|\w*(dropout|pdrop)|pad_token_id|sep_token_id|chunk_size_feed_forward"
    r"|is_encoder_decoder|gradient_checkpointing|pretraining_tp|router_aux_loss_coef"
    r"|router_jitter_noise|summary_\w+|max_window_layers|reorder_and_upcast_attn|torchscript"
    r"|unsloth_\w+|use_bfloat16|use_mup_init|max_length|min_length|do_sample|num_beams|top_[kp]"
    r"|temperature"
)
"""Names of what changes no logits: about training, generation, the library or the file itself."""


def of_config(config: Mapping[str, Any], padding: int) -> Architecture:
    """The model of a config.json; the vocabulary is padded to a multiple of `padding`.

    What isn't in the file has the default of its class in transformers. Raises UsageError for what
    isn't known to be without effect, and isn't carried over.
    """
    of = family(str(config.get("model_type")))
    _check_known(config, of)
    made = _of_gpt2(config, of) if of.gpt2 else _of_llama(config, of)
    vocabulary = _whole(config, "vocab_size")
    if made["hidden"] % made["heads"] and "head_dim" not in config:
        raise UsageError(f"{CONFIG}: {made['heads']} heads don't divide {made['hidden']}")
    if made["heads"] % made["groups"]:
        raise UsageError(f"{CONFIG}: {made['groups']} groups don't divide {made['heads']} heads")
    return Architecture(
        family=of.name,
        vocabulary=vocabulary,
        padded=-(-vocabulary // padding) * padding,
        tied=bool(config.get("tie_word_embeddings", of.gpt2)),
        dtype=str(config.get("torch_dtype") or config.get("dtype") or "float32"),
        **made,
    )


def _check_known(config: Mapping[str, Any], of: Family) -> None:
    for name, value in config.items():
        if value is None or name in CARRIED or EFFECTLESS.fullmatch(name):
            continue
        if name == "sliding_window":  # without effect elsewhere: use_sliding_window and layer_types
            continue
        if name == "layer_types" and isinstance(value, list):
            kinds = {str(each) for each in value}
            if kinds <= {"sliding_attention" if of.windowed else "full_attention"}:
                continue
            if kinds <= {"full_attention"} and not config.get("sliding_window"):
                continue
        if not any(value == one and type(value) is type(one) for one in DEFAULTS.get(name, ())):
            raise UsageError(
                f"{CONFIG}: {name} is {value}: it isn't carried over, and may change the model",
                "" if name in DEFAULTS else f"If it doesn't, take {name} out of {CONFIG}.",
            )


def _whole(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A size. Raises UsageError where it is no whole number from 1 on."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise UsageError(f"{CONFIG}: {name} is {value!r}, and should be a whole number from 1 on")
    return value


def _number(config: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A number above 0. Raises UsageError."""
    value: Any = config.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value < 1e18:
        raise UsageError(f"{CONFIG}: {name} is {value!r}, and should be a number above 0")
    return float(value)


def _of_gpt2(config: Mapping[str, Any], of: Family) -> dict[str, Any]:
    heads, hidden = _whole(config, "n_head"), _whole(config, "n_embd")
    return {
        "layers": _whole(config, "n_layer"),
        "hidden": hidden,
        "ffn": _whole(config, "n_inner", 4 * hidden),
        **{"heads": heads, "groups": heads, "head": hidden // heads},
        "positions": _whole(config, "n_positions"),
        "epsilon": _number(config, "layer_norm_epsilon", of.epsilon),
        "gelu": "gelu" if config.get("activation_function") == "gelu" else "gelu_new",
    }


def _of_llama(config: Mapping[str, Any], of: Family) -> dict[str, Any]:
    heads, hidden = _whole(config, "num_attention_heads"), _whole(config, "hidden_size")
    sparse = [name for name in ("num_local_experts", "num_experts") if config.get(name)]
    ffn = "moe_intermediate_size" if of.apart else "intermediate_size"
    base, scaling = _rope(config, of)
    window = config.get("sliding_window") if of.windowed else None
    shared = config.get("shared_expert_intermediate_size") if of.shared else None
    return {
        "layers": _whole(config, "num_hidden_layers"),
        "hidden": hidden,
        "ffn": _whole(config, ffn),
        "dense": _whole(config, "intermediate_size") if of.apart else 0,
        "heads": heads,
        "groups": _whole(config, "num_key_value_heads", heads),
        "head": _whole(config, "head_dim", of.head or hidden // heads),
        "positions": _whole(config, "max_position_embeddings"),
        "epsilon": _number(config, "rms_norm_eps", of.epsilon),
        "base": base,
        "scaling": scaling,
        "window": _whole(config, "sliding_window") if window is not None else 0,
        "experts": _whole(config, sparse[0]) if sparse else 0,
        "chosen": _whole(config, "num_experts_per_tok") if sparse else 0,
        "normalised": of.normalised or bool(config.get("norm_topk_prob", False)),
        "shared": _whole(config, "shared_expert_intermediate_size") if shared else 0,
    }


def _rope(config: Mapping[str, Any], of: Family) -> tuple[float, float]:
    """RoPE's base and the factor of Llama 3.1's scaling, 0 without. Raises UsageError."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise UsageError(f"{CONFIG}: RoPE's parameters are {rope!r}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    wanted = {**LLAMA3, "original_max_position_embeddings": TRAINED} if kind == "llama3" else {}
    more = {name for name, value in rope.items() if value is not None} - {"rope_theta", *wanted}
    more -= {"rope_type", "type", *(["factor"] if kind == "llama3" else [])}
    fits = all(rope.get(name) == value for name, value in wanted.items())
    if kind not in ("default", "llama3") or more or not fits:
        raise UsageError(f"{CONFIG}: RoPE's scaling {dict(rope)}: Megatron has Llama 3.1's alone")
    where = rope if rope.get("rope_theta") is not None else config
    base = _number(where, "rope_theta", of.base)
    if base != int(base):
        raise UsageError(f"{CONFIG}: rope_theta is {base}: Megatron takes whole numbers")
    return base, _number(rope, "factor") if kind == "llama3" else 0.0


def config(shape: Architecture, model: str) -> dict[str, Any]:
    """config.json of a model, whose class is `model`. Raises UsageError."""
    same = {
        "architectures": [model],
        "model_type": shape.family,
        "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": shape.dtype,
        "use_cache": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }
    of = shape.of
    if of.gpt2:
        return same | {
            "n_layer": shape.layers,
            "n_embd": shape.hidden,
            "n_inner": shape.ffn,
            "n_head": shape.heads,
            "n_positions": shape.positions,
            "n_ctx": shape.positions,
            "layer_norm_epsilon": shape.epsilon,
            "activation_function": shape.gelu,
            **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
        }
    found = same | {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense if of.apart else shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.head,
        "max_position_embeddings": shape.positions,
        "rms_norm_eps": shape.epsilon,
        "rope_theta": shape.base,
        "hidden_act": "silu",
    }
    if shape.scaling:
        scaling = {"rope_type": "llama3", "factor": shape.scaling, **LLAMA3}
        found["rope_scaling"] = {**scaling, "original_max_position_embeddings": TRAINED}
    if shape.window and not of.windowed:
        raise UsageError(f"a sliding window is Mistral's, and not that of {shape.family}")
    if of.windowed:
        found["sliding_window"] = shape.window or None
    if shape.experts and of.normalised and not shape.normalised:
        raise UsageError(f"--moe-router-pre-softmax isn't {of.name}'s")
    if shape.experts:
        found |= {of.experts: shape.experts, "num_experts_per_tok": shape.chosen}
    if shape.experts and of.apart:
        found |= {
            "moe_intermediate_size": shape.ffn,
            "norm_topk_prob": shape.normalised,
            **{"decoder_sparse_step": 1, "mlp_only_layers": []},
        }
        found |= {"shared_expert_intermediate_size": shape.shared} if shape.shared else {}
    return found
