"""Linear layers whose products are in FP8, by torch, for its compiler.

Each tensor has one scale, by its own largest number at each step:
https://arxiv.org/abs/2209.05433 has the two formats. Weights, activations and their gradients stay
in 16 bits outside of the products. The output layer, embeddings and routers have no such products.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.fast import compiled
from launcher.trainer.gpt.arguments import OWN_RECIPES

LEAST = (8, 9)
"""The compute capability that has FP8's products."""

NEVER = 1e-12
"""Below it a tensor's largest number is taken for this: a scale of 0 divides."""


def check_support(arguments: argparse.Namespace) -> None:
    """Raises `OptionError` where torch or the GPU has no products in FP8, or none so scaled."""
    if arguments.fp8_recipe not in OWN_RECIPES:
        raise OptionError(f"--fp8-recipe {arguments.fp8_recipe} needs Transformer Engine")
    if not hasattr(torch, "_scaled_mm") or torch.__version__ < (2, 5):
        raise OptionError(f"--fp8-format needs torch 2.5 or newer, and this is {torch.__version__}")
    able = torch.cuda.get_device_capability()
    if able < LEAST:
        name, has = torch.cuda.get_device_name(), ".".join(map(str, able))
        raise OptionError(
            f"--fp8-format needs a GPU of compute capability {LEAST[0]}.{LEAST[1]} or newer, "
            f"and the {name} has {has}"
        )


def cast(x: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [n, k] as `kind`, and its scale, fp32 []: x is about the product of both.

    The largest of each row first, which torch's compiler finds where it makes the rows: on an H100,
    1.3 % of the step of two of llama3.2-1b's layers.
    """
    most = torch.finfo(kind).max
    scale = x.abs().amax(-1).amax().float().clamp(min=NEVER) / most
    return (x.float() * scale.reciprocal()).clamp(-most, most).to(kind), scale


def product(
    a: torch.Tensor, b: torch.Tensor, scales: Any, dtype: torch.dtype, fast: bool = False
) -> torch.Tensor:
    """a [n, k] @ bᵀ, b [m, k]: both in FP8, their rows in memory, as Hopper's have to lie.

    `fast` sums in fewer bits. Gradients are summed exactly, as by Transformer Engine's recipes:
    with fast sums everywhere, 500 steps of qwen3-0.6b ended 0.07 above bf16's loss.
    """
    made: torch.Tensor = torch._scaled_mm(
        a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, use_fast_accum=fast
    )
    return made


class ScaledProduct(torch.autograd.Function):
    """x [n, input] @ weightᵀ, [n, output], in FP8 forward and back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, of_gradient: torch.dtype
    ) -> torch.Tensor:
        """`of_gradient`: the format of the result's gradient; all else is e4m3."""
        (a, of_a), (b, of_b) = (cast(each, torch.float8_e4m3fn) for each in (x, weight))
        ctx.save_for_backward(a, b, of_a, of_b)
        ctx.kind = of_gradient
        return product(a, b, (of_a, of_b), x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """The gradients of x and the weight."""
        (a, b, of_a, of_b), dtype = ctx.saved_tensors, grads[0].dtype
        g, of_g = cast(grads[0], ctx.kind)
        of_x = product(g, b.t().contiguous(), (of_g, of_b), dtype)
        of_weight = product(g.t().contiguous(), a.t().contiguous(), (of_g, of_a), dtype)
        return of_x, of_weight, None


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, *, of_gradient: torch.dtype
) -> torch.Tensor:
    """x [s, b, input] to [s, b, output]."""
    made = ScaledProduct.apply(x.reshape(-1, x.shape[-1]), weight, of_gradient)
    made = made.view(*x.shape[:-1], -1)
    return made if bias is None else made + bias


FORMATS = {"hybrid": "float8_e5m2", "e4m3": "float8_e4m3fn"}
"""Of gradients, by Transformer Engine's names; torch has them from 2.1 on."""


def take_products(gpt: Any, fp8: str) -> None:
    """Have the products of a model's layers in FP8, with gradients in that format."""
    for module in gpt.modules():
        if isinstance(module, compiled.CompiledColumn | compiled.CompiledRow):
            module.product = partial(linear, of_gradient=getattr(torch, FORMATS[fp8]))
