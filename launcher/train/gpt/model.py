"""The GPT model: Megatron-Core's, with layers that need neither Apex nor TransformerEngine."""

from __future__ import annotations

import argparse
import importlib.util
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

CONFIG = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups hidden_dropout "
    "attention_dropout init_method_std tensor_model_parallel_size pipeline_model_parallel_size "
    "sequence_parallel fp16 bf16 cross_entropy_loss_fusion"
).split()
"""What Megatron's description of a model calls as its command line does."""


class LayerNorm(torch.nn.LayerNorm):
    """torch's layer norm, whose parameters' gradients sequence parallelism sums over TP."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class Attention(torch.nn.Module):
    """Causal core attention by torch's scaled dot product, on any device."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.dropout = config.attention_dropout

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """query [s, b, heads, d]; key, value [s, b, groups, d]; result [s, b, heads × d]."""
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=2) for x in (key, value))
        heads = [x.permute(1, 2, 0, 3) for x in (query, key, value)]
        dropout = self.dropout if self.training else 0.0
        with self.randomness() if dropout else nullcontext():
            context = torch.nn.functional.scaled_dot_product_attention(
                *heads, dropout_p=dropout, is_causal=True
            )
        # Which kernel torch takes decides the layout; Megatron views the result as it stands.
        return context.permute(2, 0, 1, 3).flatten(2).contiguous()

    def randomness(self) -> AbstractContextManager[None]:
        """Where dropout's numbers come from: each TP rank has heads of its own."""
        tracked: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
        return tracked


class WholeAttention(Attention):
    """All heads on one rank, by the generator that torch's compiler and CUDA graphs know."""

    def randomness(self) -> AbstractContextManager[None]:
        """The default generator, as it stands."""
        return nullcontext()


class AddBias(torch.autograd.Function):
    """x [s, b, h] + bias [h], whose gradient is a product with ones.

    A product reads what it is given as it lies in memory; torch's compiler would work the
    activation's gradient out a second time for a sum, 0.5 ms of GPT-2's 19 on an H100.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return x + bias

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of both."""
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        return grads[0], (flat.new_ones(1, flat.shape[0]) @ flat).view(-1)


class WholeColumn(ColumnParallelLinear):
    """Megatron's layer where there is no tensor parallelism: one product, which compiles."""

    def forward(self, input_: torch.Tensor, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """[s, b, input] to [s, b, output], with no bias left to be added."""
        weight = self.weight if weight is None else weight
        if not self.skip_bias_add or self.bias is None:
            return torch.nn.functional.linear(input_, weight, self.bias), None
        return AddBias.apply(torch.nn.functional.linear(input_, weight), self.bias), None


class WholeRow(RowParallelLinear):
    """As `WholeColumn`."""

    def forward(self, input_: torch.Tensor) -> Any:
        """[s, b, input] to [s, b, output], and the bias where it is added later."""
        later = self.skip_bias_add
        output = torch.nn.functional.linear(input_, self.weight, None if later else self.bias)
        return output, self.bias if later else None


class WholeGPT(GPTModel):
    """A GPT that one GPU holds: compiled in training, where `compiled` is given.

    Evaluation takes the layers as they are: another compilation would cost more than it gains.
    """

    compiled: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's: losses [b, s] where labels are given."""
        if self.compiled and self.training:
            return self.compiled(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def compile_training(self) -> None:
        """Compile what training runs, at its first call.

        `AddBias` is part of what torch keeps of a compilation, by the graphs of its two halves;
        unless told so, torch would compile anew at each start (autograd_cache.py, torch 2.8 on).
        """
        with suppress(AttributeError):
            torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
        self.compiled = torch.compile(super().forward, dynamic=False)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Cross-entropy in fp32, [b, s]; labels are [b, s], logits [s, b, vocabulary]."""
        flat = logits.view(-1, logits.shape[-1]).float()
        wanted = labels.transpose(0, 1).reshape(-1)
        losses = torch.nn.functional.cross_entropy(flat, wanted, reduction="none")
        return losses.view(labels.shape[1], labels.shape[0]).transpose(0, 1).contiguous()


def local_layer(whole: bool = False) -> ModuleSpec:
    """A transformer layer of Megatron's own linear layers, torch's norm and attention.

    Its checkpoints have TransformerEngine's names, so that either can load the other's. `whole`
    where one rank holds all of it, for a compiler to see through.
    """
    column, row = (WholeColumn, WholeRow) if whole else (ColumnParallelLinear, RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=WholeAttention if whole else Attention,
        linear_proj=row,
        q_layernorm=IdentityOp,
        k_layernorm=IdentityOp,
    )
    mlp = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    layer = TransformerLayerSubmodules(
        input_layernorm=LayerNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=LayerNorm,
        mlp=ModuleSpec(module=MLP, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        },
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _layers(arguments: argparse.Namespace, compiled: bool) -> Any:
    wanted = arguments.transformer_impl
    if wanted == "auto":
        there = not arguments.on_cpu and importlib.util.find_spec("transformer_engine")
        wanted = "transformer_engine" if there and not compiled else "local"
    if wanted == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec()
    layers = arguments.num_layers // arguments.pipeline_model_parallel_size
    specs = [local_layer(compiled)] * layers
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=LayerNorm)


def dtype(arguments: argparse.Namespace) -> torch.dtype:
    """The precision of parameters and activations."""
    if arguments.fp16:
        return torch.float16
    return torch.bfloat16 if arguments.bf16 else torch.float32


def config(arguments: argparse.Namespace) -> TransformerConfig:
    """Megatron's description of the model and of how it is divided.

    Weights are made on the CPU where it trains there: each TP rank then takes its share of
    one matrix, and losses don't depend on the TP size. Compiled fusions are off by default:
    on an H100, a 124M model took 65 ms a step with those of biases and 55 ms without, since
    calling compiled functions costs the host more than the GPU saves.
    """
    same = {name: getattr(arguments, name) for name in CONFIG}
    return TransformerConfig(
        **same,
        use_cpu_initialization=arguments.on_cpu or arguments.use_cpu_initialization,
        params_dtype=dtype(arguments),
        pipeline_dtype=dtype(arguments),
        bias_activation_fusion=arguments.bias_fusion,
        bias_dropout_fusion=arguments.bias_fusion,
    )


def build(arguments: argparse.Namespace, vocabulary: int, compiled: bool = False) -> GPTModel:
    """This rank's part of the model for a padded vocabulary, with fp32 parameters."""
    gpt = (WholeGPT if compiled else GPTModel)(
        config=config(arguments),
        transformer_layer_spec=_layers(arguments, compiled),
        vocab_size=vocabulary,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
    )
    if compiled:
        gpt.output_layer.__class__ = WholeColumn  # no spec names it
        gpt.compile_training()
    return gpt
