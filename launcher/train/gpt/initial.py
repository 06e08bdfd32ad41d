"""The weights that a model starts from on the CPU, the same in every layout."""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from megatron.core import parallel_state

OF_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
"""Megatron scales these by the number of layers: what they add to adds up."""


def make(gpt: Any, seed: int) -> None:
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
