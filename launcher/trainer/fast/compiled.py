"""A GPT for torch.compile: linear layers, attention, loss, layers, model.

Compiled is the whole model, where one rank has it, and else each layer for itself, once for all.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from launcher.trainer.fast import context_attention
from launcher.trainer.fast.tensor_parallel import (
    CopyToRanks,
    GatherFromRanks,
    LayerRanks,
    ScatterToRanks,
    SplitLoss,
    SumOverRanks,
)
from launcher.trainer.gpt.layers import Attention, Parts
from launcher.trainer.gpt.model import ModelKind

KINDS = 64
"""Compilations of one function that torch keeps: before 2.5, each layer is one of its own."""


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


class CompiledColumn(ColumnParallelLinear):
    """Megatron's layer as one product, which compiles."""

    ranks: LayerRanks
    product: Any = staticmethod(torch.nn.functional.linear)

    def forward(self, input_: torch.Tensor, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """[s, b, input] to [s, b, output / TP], with no bias left to be added."""
        weight = self.weight if weight is None else weight
        if self.ranks.size > 1:
            way = GatherFromRanks if self.sequence_parallel else CopyToRanks
            input_ = way.apply(input_, self.ranks)
        if not self.skip_bias_add or self.bias is None:
            return self.product(input_, weight, self.bias), None
        return AddBias.apply(self.product(input_, weight), self.bias), None


class LastProduct(CompiledColumn):
    """The output layer, which leaves its product to `output_loss` where it is asked to."""

    left = False

    def forward(self, input_: torch.Tensor, weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        """[s, b, h] to the logits [s, b, vocabulary], or as it is."""
        if self.left and self.training:
            return input_, None
        return super().forward(input_, weight, *args, **kwargs)


def output_loss(x: torch.Tensor, weight: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The output layer's product and its cross-entropy in fp32, [n], from x [n, h].

    weight is [vocabulary, h], `wanted` int64 [n]. Compiled as one, torch writes the gradient over
    the logits, which nobody else has: half the memory of a function with a gradient of its own.
    """
    logits = (x @ weight.t()).float()
    return torch.nn.functional.cross_entropy(logits, wanted, reduction="none")


class CompiledRow(RowParallelLinear):
    """As `CompiledColumn`."""

    ranks: LayerRanks
    product: Any = staticmethod(torch.nn.functional.linear)

    def forward(self, input_: torch.Tensor) -> Any:
        """[s, b, input / TP] to [s, b, output], and the bias where it is added later."""
        later = self.bias if self.skip_bias_add else None
        now = None if self.skip_bias_add else self.bias
        if self.ranks.size == 1:
            return self.product(input_, self.weight, now), later
        way = ScatterToRanks if self.sequence_parallel else SumOverRanks
        output = way.apply(self.product(input_, self.weight), self.ranks)
        return (output if now is None else output + now), later


class WholeAttention(Attention):
    """Dropout by the generator that torch's compiler and CUDA graphs know, as it stands."""

    def randomness(self) -> AbstractContextManager[None]:
        """The default generator: the only one, or this rank's own under sequence parallelism."""
        return nullcontext()


class WholeGatheredAttention(WholeAttention, context_attention.GatheredAttention):
    """With the keys and values of all ranks of context parallelism."""


class WholeExchangedAttention(WholeAttention, context_attention.ExchangedAttention):
    """Of this rank's part of the heads to whole sequences."""


class SplitAttention(Attention):
    """Left out of what is compiled, since its dropout differs between ranks, and others don't."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.apart = torch._dynamo.disable(super().forward)  # takes 2 s to import

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As `Attention`."""
        return self.apart(*args, **kwargs)


class Layer(TransformerLayer):
    """A layer that is compiled in training, where `compiled` is given."""

    compiled: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's."""
        if self.compiled and self.training:
            return self.compiled(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def compile_training(self) -> None:
        """Compile it at its first call; the next layer is found to be the same."""
        self.compiled = torch.compile(super().forward, dynamic=False)


def parts(config: TransformerConfig) -> Parts:
    """What a layer is made of, to be compiled."""
    split = config.tensor_model_parallel_size > 1 and not config.sequence_parallel
    attention: Any = WholeAttention
    if split and config.attention_dropout > 0:
        attention = SplitAttention
    elif (ranks := config.context_parallel_size) > 1:
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        attention = WholeGatheredAttention if heads % ranks else WholeExchangedAttention
    return Parts(CompiledColumn, CompiledRow, attention, Layer)


def losses(labels: torch.Tensor, logits: torch.Tensor, ranks: LayerRanks) -> torch.Tensor:
    """Cross-entropy in fp32, [b, s]; labels are [b, s], logits [s, b, vocabulary / TP]."""
    flat, wanted = logits.view(-1, logits.shape[-1]), labels.transpose(0, 1).reshape(-1)
    if ranks.size > 1:
        found = SplitLoss.apply(flat, wanted, ranks)
    else:
        found = torch.nn.functional.cross_entropy(flat.float(), wanted, reduction="none")
    return found.view(labels.shape[1], labels.shape[0]).transpose(0, 1).contiguous()


class GPT(GPTModel):
    """A GPT of these layers, compiled in training.

    Evaluation takes the layers as they are: another compilation would cost more than it gains.
    """

    ranks: LayerRanks
    compiled: Any = None
    loss: Any = staticmethod(losses)
    output_loss: Any = staticmethod(output_loss)
    expert_ranks: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's: losses [b, s] where labels are given."""
        if self.compiled and self.training:
            return self.compiled(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def compute_language_model_loss(
        self, labels: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """Cross-entropy, [b, s]; labels are [b, s], logits [s, b, vocabulary / TP], or still x."""
        if not (self.training and getattr(self.output_layer, "left", False)):
            return (self.loss if self.training else losses)(labels, logits, self.ranks)
        weight, wanted = self.output_layer.weight, labels.transpose(0, 1).reshape(-1)
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        found = self.output_loss(logits.reshape(-1, logits.shape[-1]), weight, wanted)
        return found.view(labels.shape[1], labels.shape[0]).transpose(0, 1).contiguous()

    def compile_training(self, how: str) -> None:
        """Compile what training runs, at its first call, as `fast.FastPath` says how.

        Functions with gradients of their own are part of what torch keeps of a compilation, by the
        graphs of both halves; unless asked to, torch would compile anew at each start
        (autograd_cache.py, torch 2.8 on).
        """
        with suppress(AttributeError):
            torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
        self.ranks, whole = LayerRanks(), how != "layers"
        if how == "kernels":
            self._take_kernels()
        if self.post_process:
            self.output_layer.__class__ = LastProduct  # no spec names it
            self.output_layer.left = self.ranks.size == 1
        for module in self.modules():
            if isinstance(module, CompiledColumn | CompiledRow):
                module.ranks = self.ranks
        if whole:
            self.compiled = torch.compile(super().forward, dynamic=False)
            return
        if self.config.num_moe_experts:
            self._take_experts()
        limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else ""
        setattr(torch._dynamo.config, limit or "cache_size_limit", KINDS)
        self.loss = torch.compile(losses, dynamic=False)
        self.output_loss = torch.compile(output_loss, dynamic=False)
        for layer in self.decoder.layers:
            layer.compile_training()

    def _take_kernels(self) -> None:
        """Have `block`'s layers; what Triton makes is kept where torch's compiler keeps its own."""
        if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
            os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(folder, "triton"))
        from launcher.trainer.fast import block

        self.decoder.__class__ = block.Decoder  # no spec names it
        gradients = self.decoder.gradients = block.Gradients(len(self.decoder.layers))
        self.output_loss = torch._dynamo.disable(
            lambda *given: block.KernelOutputLoss.apply(*given, gradients)
        )
        if self.share_embeddings_and_output_weights:
            self.embedding.word_embeddings.__class__ = block.Embedding
            self.embedding.word_embeddings.gradients = gradients
        self.decoder.tanh = self.config.activation_func is not torch.nn.functional.gelu

    def _take_experts(self) -> None:
        """Have `experts`' grouped products in each layer."""
        from launcher.trainer.fast import experts

        ranks = self.expert_ranks = experts.ExpertRanks(self.config.num_moe_experts)
        for layer in self.decoder.layers:
            layer.mlp.__class__, layer.mlp.ranks = experts.ExpertLayer, ranks  # no spec names it

    def plain(self, part: str) -> None:
        """Do without "kernels", or all that is "compiled"."""
        if part == "kernels":
            self.decoder.plain, self.output_loss = True, output_loss
            self.decoder.gradients.place = {}.get  # of none
            self.decoder.gradients.forget()
            return
        self.compiled, self.loss, self.output_loss = None, losses, output_loss
        if self.post_process:
            self.output_layer.left = False
        for layer in self.decoder.layers:
            layer.compiled, layer.mlp.plain = None, True


KIND = ModelKind(GPT, parts, compiled=True)
