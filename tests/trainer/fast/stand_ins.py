"""In place of Triton's kernels, where there is no Triton: the same by torch, and what it should be.

`install` lets `launcher.trainer.fast.block` take these.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.functional import cross_entropy as entropy
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import layer_norm

from launcher.trainer.fast import peer_memory


class Peer:
    """Files in $SHARED that two ranks have in memory, in place of two GPUs."""

    made = 0

    def __init__(self, group: Any) -> None:
        self.rank = torch.distributed.get_rank(group)

    def empty(self, like: Any) -> Any:
        Peer.made += 1
        torch.distributed.barrier()
        names = [
            f"{os.environ['SHARED']}/{Peer.made}-{rank}" for rank in (self.rank, 1 - self.rank)
        ]
        given = {"shared": True, "size": like.numel(), "dtype": like.dtype}
        mine = torch.from_file(names[0], **given).view(like.shape)
        torch.distributed.barrier()
        return mine, torch.from_file(names[1], **given).view(like.shape)

    lay = peer_memory.Peer.lay

    def meet(self) -> None:
        torch.distributed.barrier()

    beside = nullcontext

    def join(self) -> None:
        pass


ROWS = STRIPS = PACKERS = 2


def keeps(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """What dropout makes of ones."""
    numbers = torch.rand(x.shape, generator=torch.Generator().manual_seed(int(seed)))
    return (numbers >= p).float() / (1 - p)


def leaf(x: torch.Tensor) -> torch.Tensor:
    """fp32, of which a gradient is asked for."""
    return x.detach().float().clone().requires_grad_()


def add_norm(
    x: Any, bias: Any, residual: Any, gain: Any, shift: Any, eps: float, p: float, seed: Any
) -> Any:
    residual = 0 * x if residual is None else residual
    hidden = (residual.float() + (x.float() + bias.float()) * keeps(x, p, seed)).to(x.dtype)
    return hidden, layer_norm(hidden, hidden.shape[1:], gain, shift, eps), torch.tensor(eps)


def add_norm_back(
    of_normed: Any,
    of_hidden: Any,
    gain: Any,
    p: float,
    seed: Any,
    hidden: Any,
    known: Any,
    parts: Any,
) -> Any:
    given, weight, shift = leaf(hidden), leaf(gain), leaf(gain)
    with torch.enable_grad():
        normed = layer_norm(given, given.shape[1:], weight, shift, float(known))
        grads = torch.autograd.grad(normed, (given, weight, shift), of_normed.float())
    whole = grads[0] + (0 if of_hidden is None else of_hidden.float())
    of_x = whole * keeps(hidden, p, seed)
    parts.copy_(torch.stack((grads[1], grads[2], of_x.sum(0))) / len(parts))
    return of_x.to(hidden.dtype), whole.to(hidden.dtype)


def gelu(x: Any, bias: Any, tanh: bool) -> Any:
    return torch_gelu(x.float() + bias.float(), approximate=("none", "tanh")[tanh]).to(x.dtype)


def gelu_back(x: Any, bias: Any, of_y: Any, tanh: bool, parts: Any) -> Any:
    given = leaf(x.float() + bias.float())
    with torch.enable_grad():
        y = torch_gelu(given, approximate=("none", "tanh")[tanh])
    of_x = torch.autograd.grad(y, given, of_y.float())[0]
    parts.copy_(of_x.sum(0) / len(parts))
    return of_x.to(x.dtype)


def pack(q: Any, k: Any, v: Any, size: int, parts: Any) -> Any:
    assert all(x.is_contiguous() for x in (q, k, v))
    packed = torch.stack([x.view(len(x), -1, size) for x in (q, k, v)], 2).reshape(len(q), -1)
    parts.copy_(packed.float().sum(0) / len(parts))
    return packed


def column_sums(parts: Any, into: Any) -> None:
    into.copy_(parts.sum(1))


def cross_entropy(logits: Any, wanted: Any) -> Any:
    given = leaf(logits)
    with torch.enable_grad():
        losses = entropy(given, wanted, reduction="none")
    logits.copy_(torch.autograd.grad(losses, given, torch.ones_like(losses))[0])
    return losses.detach()


def weigh(x: Any, by: Any) -> Any:
    return (x.float() * by[:, None]).to(x.dtype)


def add_rows(rows: Any, tokens: Any, into: Any, sums: Any, last: Any) -> None:
    each = torch.zeros_like(sums).index_add_(0, tokens, rows.float())
    assert not sums.any()
    into.copy_(into.float() + each)


def spread(x: Any, tokens: Any, ends: Any) -> Any:
    return torch.where(here(tokens, ends)[:, None], x[tokens.long()], float("nan"))


def collect(rows: Any, places: Any, ends: Any) -> Any:
    known = torch.where((places < ends[-1])[..., None], rows[places.clamp(max=len(rows) - 1)], 0)
    return known.float().sum(1).to(rows.dtype)


def swiglu(x: Any, factors: Any, ends: Any) -> Any:
    gate, up = x.float().chunk(2, -1)
    y = torch.nn.functional.silu(gate) * up * factors[:, None]
    return torch.where(here(x, ends)[:, None], y, float("nan")).to(x.dtype)


def swiglu_back(x: Any, factors: Any, slopes: Any, ends: Any) -> Any:
    given, weights, nothing = leaf(x), leaf(factors), torch.full_like(ends[-1:], len(x))
    with torch.enable_grad():
        y = swiglu(given, weights, nothing)
        of_x, of_factors = torch.autograd.grad(y, (given, weights), slopes.float())
    known = here(x, ends)
    each = (of_x, of_factors[:, None], y.detach())
    of_x, of_factors, y = (torch.where(known[:, None], one, float("nan")) for one in each)
    return of_x.to(x.dtype), of_factors[:, 0], y.to(x.dtype)


def put(x: Any, into: Any, factor: float, adds: bool) -> None:
    into.copy_(x.float() * factor + (into.float() if adds else 0))


def of_rows(rows: Any, weights: Any, ends: Any) -> Any:
    each = zip(torch.tensor_split(rows[: ends[-1]], ends[:-1].tolist()), weights, strict=True)
    return torch.cat([mine @ weight for mine, weight in each])


def of_experts(left: Any, right: Any, ends: Any) -> Any:
    halves = (torch.tensor_split(x[: ends[-1]], ends[:-1].tolist()) for x in (left, right))
    return torch.stack([a.t() @ b for a, b in zip(*halves, strict=True)])


def here(rows: Any, ends: Any) -> Any:
    """Which rows are some expert's: what is in the others is nobody's business."""
    return torch.arange(len(rows)) < ends[-1]


def install() -> None:
    """Before `block` and `experts` are imported."""
    for name in ("layer_kernels", "tokens", "expert_kernels", "products"):
        sys.modules[f"launcher.trainer.fast.kernels.{name}"] = sys.modules[__name__]
