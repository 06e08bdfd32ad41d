"""What lies at both ends of a GPT: the sum of rows for an embedding, and cross-entropy."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from launcher.train.gpt.kernels.layer import row_shape

PIECE = 8192
"""Of a row of logits, that is held at once."""


@triton.jit
def _cross_entropy(logits, wanted, losses, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += row * width
    label = tl.load(wanted + row)
    chosen = tl.load(logits + label).to(tl.float32)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + column
        x = tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32)
        before, most = most, tl.maximum(most, x)
        above = tl.where(most == float("-inf"), 0.0, most)
        total = total * tl.exp(before - above) + tl.exp(x - above)
    top = tl.max(most, 0)
    whole = tl.sum(total * tl.exp(most - top), 0)
    tl.store(losses + row, tl.log(whole) + top - chosen)
    tl.debug_barrier()  # all have read the label's
    for start in range(0, width, BLOCK):
        at = start + column
        x = tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32)
        slope = tl.exp(x - top) / whole - tl.where(at == label, 1.0, 0.0)
        tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < width)


def cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of logits [n, vocabulary] and labels int64 [n], fp32 [n]; logits become its gradient."""
    rows, width = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    block = min(PIECE, triton.next_power_of_2(width))
    _cross_entropy[(rows,)](logits, wanted, losses, width, BLOCK=block, num_warps=16)
    return losses


@triton.jit
def _add_rows(tokens, rows, sums, claimed, width, BLOCK: tl.constexpr):
    token, column = tl.load(tokens + tl.program_id(0)), tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(rows + tl.program_id(0) * width + column, mask=inside, other=0.0)
    tl.atomic_add(sums + token * width + column, x.to(tl.float32), mask=inside, sem="relaxed")
    tl.store(claimed + token, 0)


@triton.jit
def _move_rows(tokens, sums, claimed, into, width, BLOCK: tl.constexpr):
    token, column = tl.load(tokens + tl.program_id(0)), tl.arange(0, BLOCK)
    if tl.atomic_xchg(claimed + token, 1) == 0:
        inside, at = column < width, token * width + column
        x = tl.load(sums + at, mask=inside, other=0.0)
        x += tl.load(into + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(into + at, x.to(into.dtype.element_ty), mask=inside)
        tl.store(sums + at, tl.zeros((BLOCK,), tl.float32), mask=inside)


def add_rows(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    into: torch.Tensor,
    sums: torch.Tensor,
    claimed: torch.Tensor,
) -> None:
    """Add rows [n, width] to those of `into` [vocabulary, width] that tokens, int64 [n], name.

    sums: fp32 like `into`, zeros before and after; claimed: int32 [vocabulary], of any value.
    """
    count, width = rows.shape
    _add_rows[(count,)](tokens, rows, sums, claimed, width, **row_shape(width))
    _move_rows[(count,)](tokens, sums, claimed, into, width, **row_shape(width))
