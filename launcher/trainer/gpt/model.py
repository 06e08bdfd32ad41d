"""The GPT model: Megatron-Core's, of TransformerEngine's layers or of ours."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import inspect
import math
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from launcher.agent import compat
from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.gpt.arguments import padded_vocabulary, virtual_stages
from launcher.trainer.gpt.layers import Parts, WideMLP, local_layer, norm, squared_relu

CONFIG = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels "
    "normalization qk_layernorm add_qkv_bias window_size hidden_dropout attention_dropout "
    "init_method_std tensor_model_parallel_size pipeline_model_parallel_size "
    "context_parallel_size expert_model_parallel_size sequence_parallel fp16 bf16 "
    "fp8 fp8_recipe cross_entropy_loss_fusion "
    "recompute_granularity recompute_method recompute_num_layers"
).split()
"""What Megatron's description of a model calls as its command line does."""

EXPERTS = (
    "moe_router_topk moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_router_score_function "
    "moe_router_pre_softmax moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff "
    "moe_grouped_gemm moe_token_dispatcher_type"
).split()
"""The same, where there are experts."""

ORIGINAL_POSITIONS, LOW, HIGH = 8192, 1.0, 4.0
"""Of Llama 3.1's RoPE: rope_scaling in the config.json of meta-llama/Llama-3.1-8B."""

OF_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
"""Megatron scales these by the number of layers: what they add to adds up."""


@dataclass(frozen=True)
class ModelKind:
    """The classes of a model and of its layers' parts; `compiled` where torch compiles them."""

    gpt: Any = GPTModel
    parts: Callable[[TransformerConfig], Parts] = lambda _: Parts()
    compiled: bool = False


PLAIN = ModelKind()


def vocabulary(arguments: argparse.Namespace, tensor: int, saved: dict[str, Any]) -> int:
    """The padded vocabulary, a loaded checkpoint's first. OptionError: that doesn't fit."""
    if not saved:
        divisible_by = arguments.make_vocab_size_divisible_by
        return padded_vocabulary(arguments.vocab_size, divisible_by, tensor)
    size = int(saved["vocabulary"])
    if size < arguments.vocab_size or size % tensor:
        raise OptionError(
            f"the checkpoint in {arguments.load} has a padded vocabulary of {size}, which "
            f"doesn't fit --vocab-size {arguments.vocab_size} and TP={tensor}"
        )
    return size


WIDE_IN_FP8 = 2048
"""llama3.2-1b's hidden size: with Transformer Engine 674 ms a step for bf16's 774, on an H100."""


def _layers(arguments: argparse.Namespace, described: TransformerConfig, kind: ModelKind) -> Any:
    wanted = arguments.transformer_impl
    there = not arguments.on_cpu and importlib.util.find_spec("transformer_engine")
    if wanted == "auto":
        wanted = "transformer_engine" if there and not kind.compiled else "local"
    elif wanted == "transformer_engine" and not there:
        where = "for the CPU" if arguments.on_cpu else "here"
        raise OptionError(f"--transformer-impl {wanted}: there is no Transformer Engine {where}")
    if arguments.fp8 and wanted == "local" and not kind.compiled:
        raise OptionError("--fp8-format needs Transformer Engine, or layers compiled on GPUs")
    if arguments.fp8 and wanted != "local" and arguments.hidden_size < WIDE_IN_FP8:
        raise OptionError(
            f"--fp8-format: Transformer Engine's FP8 needs a hidden size of {WIDE_IN_FP8} to gain; "
            "GPT-2 (768) took 98 ms a step with it and 68 in bf16, on an H100: leave out "
            "--transformer-impl, --fp8-recipe, --no-fast for our own FP8, or leave out --fp8-format"
        )
    grouped = arguments.moe_grouped_gemm and not kind.compiled  # whose experts always are
    experts = {"num_experts": arguments.num_experts, "moe_grouped_gemm": grouped}
    if wanted == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_spec(**experts)
        if arguments.qk_layernorm:  # theirs are Apex's layer norms in 0.9, whatever the others are
            of_heads = dict.fromkeys(("q_layernorm", "k_layernorm"), norm(described))
            vars(layer.submodules.self_attention.submodules).update(of_heads)
        return layer
    mlp = None
    if grouped and not importlib.util.find_spec("grouped_gemm"):
        raise OptionError("--moe-grouped-gemm needs TransformerEngine or the package grouped_gemm")
    if arguments.num_experts:
        compat.prepare_experts()
        mlp = get_gpt_layer_local_spec(**experts).submodules.mlp
    stage = arguments.num_layers // arguments.pipeline_model_parallel_size
    layers = stage // virtual_stages(arguments)
    specs = [local_layer(described, mlp, kind.parts(described))] * layers
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm(described))


def dtype(arguments: argparse.Namespace) -> torch.dtype:
    """The precision of parameters and activations."""
    if arguments.fp16:
        return torch.float16
    return torch.bfloat16 if arguments.bf16 else torch.float32


def config(arguments: argparse.Namespace, compiled: bool = False) -> TransformerConfig:
    """Megatron's description of the model and of how it is divided.

    Weights are made on the CPU where it trains there: each rank then takes its share of one
    matrix, and losses don't depend on the layout. Layers that are to be `compiled` have added
    their biases when Megatron would fuse them. All layers have experts where any has, so that the
    MLP's size is theirs. Raises `OptionError` for what the release of Megatron lacks.
    """
    compat.check_model(arguments)
    given = {name: getattr(arguments, name) for name in CONFIG if not (compiled and name == "fp8")}
    if arguments.num_experts:
        given |= {name: getattr(arguments, name) for name in EXPERTS}
        given |= {"num_moe_experts": arguments.num_experts}
        given |= {"ffn_hidden_size": arguments.moe_ffn_hidden_size}
        given["moe_grouped_gemm"] &= not compiled
        for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
            if given[name]:
                given[name] *= compat.auxiliary_factor(arguments.context_parallel_size)
    if arguments.swiglu:
        given |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    elif arguments.squared_relu:
        given |= {"activation_func": squared_relu}
    elif arguments.openai_gelu or (compiled and arguments.bias_fusion):  # whose GELU is by tanh
        given |= {"activation_func": partial(torch.nn.functional.gelu, approximate="tanh")}
    if (parts := virtual_stages(arguments)) > 1:
        # Two stages send to each other both ways at once, which only overlapping keeps apart.
        given |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        given |= {"virtual_pipeline_model_parallel_size": parts}
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    return TransformerConfig(
        **{name: value for name, value in given.items() if name in known},
        layernorm_epsilon=arguments.norm_epsilon,
        add_bias_linear=not arguments.disable_bias_linear,
        use_cpu_initialization=arguments.on_cpu or arguments.use_cpu_initialization,
        params_dtype=dtype(arguments),
        pipeline_dtype=dtype(arguments),
        bias_activation_fusion=arguments.bias_fusion and not compiled,
        bias_dropout_fusion=arguments.bias_fusion and not compiled,
    )


def build(
    arguments: argparse.Namespace, vocabulary: int, part: int = 0, kind: ModelKind = PLAIN
) -> Any:
    """This rank's part of the model for a padded vocabulary: a `kind.gpt`.

    `part` says which, where a stage of the pipeline has several. Raises `OptionError` for what the
    release of Megatron lacks.
    """
    parts, described = virtual_stages(arguments), config(arguments, kind.compiled)
    placed: dict[str, Any] = {}
    if parts > 1:
        parallel_state.set_virtual_pipeline_model_parallel_rank(part)
        if "vp_stage" in inspect.signature(GPTModel.__init__).parameters:
            placed["vp_stage"] = part
    layers = _layers(arguments, described, kind)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True) and part == 0
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and part == parts - 1
    gpt = kind.gpt(
        config=described,
        transformer_layer_spec=layers,
        vocab_size=vocabulary,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_base=arguments.rotary_base,
        rotary_percent=arguments.rotary_percent,
        **placed,
    )
    local = isinstance(layers, TransformerBlockSubmodules)
    for layer in gpt.decoder.layers if local and not kind.compiled else ():
        if type(layer.mlp) is MLP:
            layer.mlp.__class__ = WideMLP  # another in the specification is warned of
    if arguments.use_rope_scaling:
        rotary = gpt.rotary_pos_emb
        rotary.inv_freq = scaled(rotary.inv_freq, arguments.rope_scaling_factor)
    if described.use_cpu_initialization and local:
        draw_weights(gpt, arguments.seed)
    return gpt


def scaled(frequencies: torch.Tensor, factor: float) -> torch.Tensor:
    """RoPE's frequencies [d / 2] for longer sequences, as Llama 3.1 has them.

    Slow ones are divided by `factor`, fast ones stay, those between are mixed: apply_scaling in
    https://github.com/meta-llama/llama-models/blob/main/models/llama3/model.py. Here it is the
    same in all releases of Megatron, of which 0.9 has none and 0.10 no factor.
    """
    turns = ORIGINAL_POSITIONS * frequencies / (2 * math.pi)
    kept = ((turns - LOW) / (HIGH - LOW)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


def draw_weights(gpt: Any, seed: int) -> None:
    """Draw each matrix as a whole by its name in the model, and take this rank's share of it.

    Megatron draws one after the other what a rank holds, so that another pipeline, or other ranks
    for the experts, would start from other weights; and it cuts a gated MLP's matrix through,
    which makes another model of it at each TP size.
    """
    state = torch.get_rng_state()
    for name, parameter in gpt.named_parameters():
        if name.endswith((".weight", "router.bias")) and (parameter.dim() > 1 or "router" in name):
            torch.default_generator.manual_seed(zlib.crc32(f"{seed} {_global(gpt, name)}".encode()))
            _draw(gpt.config, name, parameter)
    torch.set_rng_state(state)


def _global(gpt: Any, name: str) -> str:
    """A parameter's name in the whole model, its layers and experts counted over all ranks."""
    if name == "output_layer.weight" and gpt.share_embeddings_and_output_weights:
        return "embedding.word_embeddings.weight"  # the last stage's copy

    def layer(found: re.Match[str]) -> str:
        return f"layers.{gpt.decoder.layers[int(found[1])].layer_number}."

    def expert(found: re.Match[str]) -> str:
        here = gpt.config.num_moe_experts // gpt.config.expert_model_parallel_size
        first = parallel_state.get_expert_model_parallel_rank() * here
        return f"local_experts.{first + int(found[1])}."

    return re.sub(r"local_experts\.(\d+)\.", expert, re.sub(r"layers\.(\d+)\.", layer, name))


def _draw(config: Any, name: str, parameter: torch.nn.Parameter) -> None:
    method = config.output_layer_init_method if name.endswith(OF_OUTPUTS) else config.init_method
    divided = getattr(parameter, "tensor_model_parallel", False)
    axis = parameter.partition_dim if divided else 0
    parts = parallel_state.get_tensor_model_parallel_world_size() if divided else 1
    shape = list(parameter.shape)
    shape[axis] *= parts
    whole = torch.empty(shape, dtype=torch.float32)
    method(whole)
    gates = 2 if config.gated_linear_unit and name.endswith("linear_fc1.weight") else 1
    rank = parallel_state.get_tensor_model_parallel_rank() if divided else 0
    mine = [half.chunk(parts, dim=axis)[rank] for half in whole.chunk(gates, dim=axis)]
    parameter.data.copy_(torch.cat(mine, dim=axis))
