"""The layers of a GPT that need neither Apex nor TransformerEngine, and their specification."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from launcher.trainer.gpt import context_parallel


class LayerNorm(torch.nn.LayerNorm):
    """torch's layer norm, whose parameters' gradients sequence parallelism sums over TP."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class RMSNorm(torch.nn.Module):
    """x / √(mean of x² + eps), times a weight: https://arxiv.org/abs/1910.07467; fp32 inside.

    torch has its own from 2.4 on, for which some images are too old; compiled, this one is fused.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…, hidden] in any precision, to the same."""
        own = getattr(torch.nn.functional, "rms_norm", None)
        if own and not torch.compiler.is_compiling():
            normed: torch.Tensor = own(x, self.weight.shape, self.weight, self.eps)
            return normed
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def norm(config: TransformerConfig) -> type[torch.nn.Module]:
    """The layers' and heads' normalisation."""
    return RMSNorm if config.normalization == "RMSNorm" else LayerNorm


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """https://arxiv.org/abs/2109.08668; Megatron-Core has it from 0.10 on."""
    return torch.relu(x).square()


def bias_dropout_add(training: bool, fused: bool) -> Any:
    """Megatron's sum of a layer's output with its bias, and the residual, rounded once at the end.

    Rounded to bf16 on the way, output + bias is the output as long as the bias is small: biases
    would begin to count only after many steps. Upstream's kernels, `fused`, don't round either.
    """
    if fused:
        return get_bias_dropout_add(training, fused)

    def add(x_with_bias: Any, residual: torch.Tensor, share: float) -> torch.Tensor:
        x, bias = x_with_bias
        if bias is None and not (training and share):
            return residual + x
        return (residual + dropout(_wide(x, bias), share, training)).to(x.dtype)

    return add


def _wide(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x + bias in fp32."""
    return x.float() if bias is None else x + bias.float()


class WideMLP(MLP):
    """Megatron's, whose first bias and activation are rounded as by `bias_dropout_add`."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[s, b, h] to the same, and the bias that is added later."""
        if self.config.bias_activation_fusion:
            return super().forward(hidden_states, *args, **kwargs)
        how = {"use_reentrant": False, "preserve_rng_state": False}  # nothing is kept in fp32
        return self.linear_fc2(checkpoint(self._activated, *self.linear_fc1(hidden_states), **how))

    def _activated(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        wide = _wide(x, bias)
        gate, *linear = wide.chunk(2, dim=-1) if self.config.gated_linear_unit else (wide,)
        made = self.activation_func(gate)
        return (made * linear[0] if linear else made).to(x.dtype)


class Attention(torch.nn.Module):
    """Causal core attention by torch's scaled dot product, on any device."""

    gathered: Any = staticmethod(context_parallel.Gather.apply)

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.dropout = config.attention_dropout
        self.window: int | None = config.window_size[0] if config.window_size else None
        self.divided = config.context_parallel_size > 1

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """query [s, b, heads, d]; key, value [s, b, groups, d]; result [s, b, heads × d]."""
        mask = self.mask(query)
        if self.divided:
            key, value = self.gathered(torch.stack((key, value), dim=1)).unbind(dim=1)
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        dropout = self.dropout if self.training else 0.0
        with self.randomness() if dropout else nullcontext():
            attended = torch.nn.functional.scaled_dot_product_attention(
                *heads, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
            )
        # Which kernel torch takes decides the layout; Megatron views the result as it stands.
        return attended.permute(2, 0, 1, 3).flatten(2).contiguous()

    def mask(self, query: torch.Tensor) -> torch.Tensor | None:
        """What attends to what, bool [s, all s], where that isn't just all tokens before."""
        length, device = query.shape[0], query.device
        if not self.divided and (self.window is None or self.window >= length):
            return None
        mine = everyone = torch.arange(length, device=device)
        if self.divided:
            mine, everyone = context_parallel.positions(length, device)
        behind = mine[:, None] - everyone[None, :]
        allowed = behind >= 0
        return allowed if self.window is None else allowed & (behind <= self.window)

    def randomness(self) -> AbstractContextManager[None]:
        """Where dropout's numbers come from: each TP rank has heads of its own."""
        tracked: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
        return tracked


@dataclass(frozen=True)
class Parts:
    """What a layer is made of, besides its norms: Megatron's own, or what torch can compile."""

    column: Any = ColumnParallelLinear
    row: Any = RowParallelLinear
    attention: Any = Attention
    layer: Any = TransformerLayer


def local_layer(config: TransformerConfig, mlp: ModuleSpec | None, parts: Parts) -> ModuleSpec:
    """A transformer layer of linear layers, torch's norm and attention.

    Its checkpoints have TransformerEngine's names, so that either can load the other's: there
    the norm before an MLP is part of that, and the one before experts, `mlp`, isn't.
    """
    column, row = parts.column, parts.row
    of_heads = norm(config) if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=parts.attention,
        linear_proj=row,
        q_layernorm=of_heads,
        k_layernorm=of_heads,
    )
    names = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    if mlp is None:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        mlp = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    layer = TransformerLayerSubmodules(
        input_layernorm=norm(config),
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=bias_dropout_add,
        pre_mlp_layernorm=norm(config),
        mlp=mlp,
        mlp_bda=bias_dropout_add,
        sharded_state_dict_keys_map=names,
    )
    return ModuleSpec(module=parts.layer, submodules=layer)
