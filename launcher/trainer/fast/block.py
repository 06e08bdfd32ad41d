"""GPT-2 layers of few kernels: matrix products, attention, and Triton kernels between them.

For a CUDA graph, since the host starts each kernel by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from launcher.trainer.fast.kernels import layer_kernels as kernels
from launcher.trainer.fast.kernels import tokens as of_tokens

PlaceOf = Callable[[Any], Tensor | None]
"""Where a parameter's gradient is to be written, if anywhere."""


class Gradients:
    """Where parameters' gradients go: to autograd, or to where they are read from, by `complete`.

    The sums' parts are kept, to be summed for all layers at once.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.place: PlaceOf = {}.get  # of none
        self.kept: dict[tuple[int, ...], Tensor] = {}
        self.rows_summed: tuple[Tensor, Tensor] | None = None
        self.forget()

    def forget(self) -> None:
        """Drop what is left of a step, which may have failed."""
        self.summed: dict[tuple[int, ...], list[Any]] = {}

    def write(self, place: PlaceOf) -> None:
        """Write them to their places from now on."""
        self.place = place

    def product(self, weight: Any, of_y: Tensor, x: Tensor) -> Tensor | None:
        """The gradient of y = x @ weightᵀ: of_y is [n, output], x [n, input]."""
        if (place := self.place(weight)) is None:
            return of_y.t() @ x
        torch.mm(of_y.t(), x, out=place)
        return None

    def parts(self, *shape: int, like: Tensor, each: int = 1) -> Tensor:
        """Where the parts of `sums` belong, fp32 [programs, k, width], of `each` in a layer."""
        if shape not in self.kept:
            count = each * self.layers + 1  # and the first norm's
            self.kept[shape] = like.new_empty(count, *shape, dtype=torch.float32)
        return self.kept[shape][len(self.summed.get(shape, ()))]

    def sums(self, parts: Tensor, *parameters: Any) -> list[Tensor | None]:
        """The gradients of k parameters [width], from the `parts` of each."""
        places = [self.place(each) for each in parameters]
        if None not in places:
            self.summed.setdefault(tuple(parts.shape), []).append(places)
            return [None] * len(places)
        made = parts.new_empty(parts.shape[1:], dtype=parameters[0].dtype)
        kernels.column_sums(parts.unsqueeze(0), made.unsqueeze(0))
        return list(made)

    def rows(self, weight: Any, tokens: Tensor, of_rows: Tensor) -> Tensor | None:
        """The gradient of rows [n, width] by tokens [n], of a weight whose product's is made."""
        if (place := self.place(weight)) is None:
            return torch.ops.aten.embedding_dense_backward(of_rows, tokens, len(weight), -1, False)
        if self.rows_summed is None:
            sums = torch.zeros_like(weight, dtype=torch.float32)
            self.rows_summed = sums, torch.zeros_like(sums[:, 0], dtype=torch.int32)
        of_tokens.add_rows(of_rows, tokens, place, *self.rows_summed)
        return None

    def complete(self) -> None:
        """Have all of a step's in their places."""
        into, found = list[Any](), list[Tensor]()
        for shape, places in self.summed.items():
            kept = self.kept[shape][: len(places)]
            made = kept.new_empty(len(kept), *shape[1:], dtype=places[0][0].dtype)
            kernels.column_sums(kept, made)
            into += [place for each in places for place in each]
            found += [each for several in made for each in several]
        if into:
            torch._foreach_copy_(into, found)
        self.forget()


class Product(torch.autograd.Function):
    """x [n, input] @ weightᵀ, [n, output]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gradients: Gradients) -> Tensor:
        """The product."""
        ctx.save_for_backward(x)
        ctx.rest = weight, gradients
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of x and the weight."""
        (x,), (weight, gradients) = ctx.saved_tensors, ctx.rest
        of_y = grads[0].contiguous()
        return of_y @ weight, gradients.product(weight, of_y, x), None


class Heads(torch.autograd.Function):
    """q, k and v of x [n, h], as Megatron's linear_qkv has them: views, [b, heads, s, size]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, shape: Any, gradients: Gradients
    ) -> Any:
        """`shape`: s, b, heads."""
        ctx.save_for_backward(x)
        ctx.rest = weight, bias, shape, gradients
        apart = torch.addmm(bias, x, weight.t()).view(*shape, 3, -1).permute(3, 1, 2, 0, 4)
        return apart[0], apart[1], apart[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of x, the weight and the bias."""
        (x,), (weight, bias, shape, gradients) = ctx.saved_tensors, ctx.rest
        q, k, v = (each.permute(2, 0, 1, 3).reshape(x.shape).contiguous() for each in grads)
        parts = gradients.parts(kernels.PACKERS, 1, 3 * x.shape[1], like=q)
        packed = kernels.pack(q, k, v, x.shape[1] // shape[2], parts)
        of_weight = gradients.product(weight, packed, x)
        return packed @ weight, of_weight, *gradients.sums(parts, bias), None, None


class AddNorm(torch.autograd.Function):
    """residual + dropout(x + bias), and its layer norm; all [n, h]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        bias: Tensor,
        gain: Tensor,
        shift: Tensor,
        constants: Any,
        gradients: Gradients,
    ) -> Any:
        """`constants`: the norm's eps, dropout's p and its seed."""
        hidden, normed, known = kernels.add_norm(x, bias, residual, gain, shift, *constants)
        ctx.save_for_backward(hidden, known)
        ctx.set_materialize_grads(False)  # of the last one's first result there is none
        ctx.rest = bias, gain, shift, constants[1:], gradients, residual is not None
        return hidden, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of x, the residual and the parameters."""
        bias, gain, shift, dropout, gradients, adds = ctx.rest
        of_hidden = None if grads[0] is None else grads[0].contiguous()
        parts = gradients.parts(kernels.ROWS, 3, len(gain), like=gain, each=2)
        known = (gain, *dropout, *ctx.saved_tensors, parts)
        of_x, of_residual = kernels.add_norm_back(grads[1].contiguous(), of_hidden, *known)
        of_gain, of_shift, of_bias = gradients.sums(parts, gain, shift, bias)
        return of_x, of_residual if adds else None, of_bias, of_gain, of_shift, None, None


class Gelu(torch.autograd.Function):
    """GELU of x [n, width] + bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, tanh: bool, gradients: Gradients) -> Tensor:
        """By its tanh form, or exactly."""
        ctx.save_for_backward(x)
        ctx.rest = bias, tanh, gradients
        return kernels.gelu(x, bias, tanh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of x and the bias."""
        (x,), (bias, tanh, gradients) = ctx.saved_tensors, ctx.rest
        parts = gradients.parts(kernels.STRIPS, 1, len(bias), like=x)
        of_x = kernels.gelu_back(x, bias, grads[0].contiguous(), tanh, parts)
        return of_x, *gradients.sums(parts, bias), None, None


class TiedEmbedding(torch.autograd.Function):
    """Rows of a weight that the output layer has too, [b, s, h], by tokens [b, s]."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, gradients: Gradients) -> Tensor:
        """The rows."""
        ctx.save_for_backward(tokens)
        ctx.rest = weight, gradients
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of the weight."""
        (tokens,), (weight, gradients) = ctx.saved_tensors, ctx.rest
        lie = grads[0].transpose(0, 1)  # what comes next is [s, b, h]
        of_rows = lie.reshape(-1, lie.shape[-1]).contiguous()
        return None, gradients.rows(weight, tokens.t().reshape(-1), of_rows), None


class KernelOutputLoss(torch.autograd.Function):
    """Cross-entropy in fp32, [n], of x [n, h] @ weightᵀ: `compiled.output_loss` by a kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, wanted: Tensor, gradients: Gradients
    ) -> Tensor:
        """weight is [vocabulary, h], `wanted` int64 [n]."""
        logits = x @ weight.t()
        losses = of_tokens.cross_entropy(logits, wanted)
        ctx.save_for_backward(x, logits)
        ctx.rest = weight, gradients
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of x and the weight."""
        (x, slope), (weight, gradients) = ctx.saved_tensors, ctx.rest
        factors = grads[0].contiguous()
        weighed = of_tokens.weigh(x, factors)
        of_weight, of_x = gradients.product(weight, slope, weighed), slope @ weight
        return of_tokens.weigh(of_x, factors), of_weight, None, None


class Embedding(VocabParallelEmbedding):
    """Megatron's, with the place where the gradients go."""

    gradients: Gradients

    @torch._dynamo.disable
    def forward(self, input_: Tensor) -> Tensor:
        """Tokens [b, s] to rows [b, s, h]."""
        return TiedEmbedding.apply(input_, self.weight, self.gradients)


class Decoder(TransformerBlock):
    """Megatron's layers, whose parameters training takes through few kernels, unless `plain`."""

    plain = False
    gradients: Gradients
    tanh: bool

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """[s, b, h] to the same, as Megatron's."""
        if self.plain or not self.training:
            return super().forward(hidden_states, *args, **kwargs)
        return self._layers(hidden_states)

    @torch._dynamo.disable
    def _layers(self, x: Tensor) -> Tensor:
        config, gradients = self.config, self.gradients
        gradients.forget()
        shape, hidden = (*x.shape[:2], config.num_attention_heads), x.reshape(-1, x.shape[-1])
        dropout, p, eps = config.attention_dropout, config.hidden_dropout, config.layernorm_epsilon
        norms = [n for one in self.layers for n in (one.input_layernorm, one.pre_mlp_layernorm)]
        norms += [self.final_layernorm]
        seeds = torch.randint(2**31 - 1, (len(norms), 1), device=x.device)
        after = zip(norms[1:], seeds, strict=False)

        def add(y: Tensor, linear: Any) -> Any:
            norm, seed = next(after)
            given = (linear.bias, norm.weight, norm.bias, (eps, p, seed))
            return AddNorm.apply(y, hidden, *given, gradients)

        first, nothing = norms[0], torch.zeros_like(norms[0].bias, requires_grad=False)
        given = (nothing, first.weight, first.bias, (eps, 0.0, seeds[0]))
        hidden, normed = AddNorm.apply(hidden, None, *given, gradients)
        for each in self.layers:
            attention, mlp = each.self_attention, each.mlp
            made = attention.linear_qkv
            heads = Heads.apply(normed, made.weight, made.bias, shape, gradients)
            attended = scaled_dot_product_attention(*heads, dropout_p=dropout, is_causal=True)
            attended = attended.permute(2, 0, 1, 3).reshape(hidden.shape)
            y = Product.apply(attended, attention.linear_proj.weight, gradients)
            hidden, normed = add(y, attention.linear_proj)
            y = Product.apply(normed, mlp.linear_fc1.weight, gradients)
            y = Gelu.apply(y, mlp.linear_fc1.bias, self.tanh, gradients)
            y = Product.apply(y, mlp.linear_fc2.weight, gradients)
            hidden, normed = add(y, mlp.linear_fc2)
        return normed.view(x.shape)
