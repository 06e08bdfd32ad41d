"""Triton kernels over tokens: the loss of each, and the embedding's gradient."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOGITS, PIECE, EACH = 264, 8192, 8
"""Rows of logits that are worked on at once, two on a multiprocessor of an H100, so that the second
pass finds them in the cache: 0.63 ms for GPT-2's, where half the threads and up to four took 0.68
to 0.89. Of a row, what a program and a thread of it hold at once."""


@triton.jit
def _cross_entropy(logits, wanted, losses, rows, width, BLOCK: tl.constexpr, EACH: tl.constexpr):
    by_two: tl.constexpr = 1.4426950408889634  # exp(x) is exp2(x * by_two), one instruction
    lane, several = tl.arange(0, BLOCK // EACH)[:, None], tl.arange(0, EACH)[None, :]
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        line = logits + tl.cast(row, tl.int64) * width
        label = tl.load(wanted + row)
        chosen = tl.load(line + label).to(tl.float32)
        most = tl.full((BLOCK // EACH,), float("-inf"), tl.float32)  # that a thread has seen
        total = tl.zeros((BLOCK // EACH,), tl.float32)
        for start in range(0, width, BLOCK):
            at = start + lane * EACH + several
            x = tl.load(
                line + at, mask=at < width, other=float("-inf"), eviction_policy="evict_last"
            ).to(tl.float32)
            before, most = most, tl.maximum(most, tl.max(x, 1))
            above = tl.where(most == float("-inf"), 0.0, most) * by_two
            total *= tl.exp2(before * by_two - above)
            total += tl.sum(tl.exp2(x * by_two - above[:, None]), 1)
        top = tl.max(most, 0)
        whole = tl.log(tl.sum(total * tl.exp2((most - top) * by_two), 0)) + top
        tl.store(losses + row, whole - chosen)
        tl.debug_barrier()  # all have read the label's
        for start in range(0, width, BLOCK):
            at = start + lane * EACH + several
            x = tl.load(line + at, mask=at < width, other=float("-inf")).to(tl.float32)
            slope = tl.exp2((x - whole) * by_two) - tl.where(at == label, 1.0, 0.0)
            slope = slope.to(logits.dtype.element_ty)
            tl.store(line + at, slope, mask=at < width, eviction_policy="evict_first")


def cross_entropy(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of logits [n, vocabulary] and labels int64 [n], fp32 [n]; logits become its gradient."""
    losses, (rows, width) = logits.new_empty(len(logits), dtype=torch.float32), logits.shape
    _cross_entropy[(min(rows, LOGITS),)](
        logits, wanted, losses, rows, width, BLOCK=PIECE, EACH=EACH, num_warps=32
    )
    return losses


@triton.jit
def _weigh(x, by, into, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    at, inside = row * width + column, column < width
    y = tl.load(x + at, mask=inside).to(tl.float32) * tl.load(by + row)
    tl.store(into + at, y.to(into.dtype.element_ty), mask=inside)


def weigh(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """The rows of x [n, width], each times its number in fp32 [n]."""
    into, width = torch.empty_like(x), x.shape[1]
    _weigh[by.shape](x, by, into, width, BLOCK=triton.next_power_of_2(width))
    return into


@triton.jit
def _sum_rows(tokens, rows, sums, last, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    token, inside = tl.load(tokens + row), column < width
    x = tl.load(rows + row * width + column, mask=inside).to(tl.float32)
    tl.atomic_add(sums + token * width + column, x, mask=inside, sem="relaxed")
    tl.store(last + token, row)


@triton.jit
def _move_rows(tokens, sums, last, into, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    token, inside = tl.load(tokens + row), column < width
    if tl.load(last + token) == row:  # of a token that comes several times, one alone
        at = token * width + column
        x = tl.load(into + at, mask=inside).to(tl.float32) + tl.load(sums + at, mask=inside)
        tl.store(into + at, x.to(into.dtype.element_ty), mask=inside)
        tl.debug_barrier()  # all have read their sums, which other threads may store to
        tl.store(sums + at, tl.zeros((BLOCK,), tl.float32), mask=inside)


def add_rows(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    into: torch.Tensor,
    sums: torch.Tensor,
    last: torch.Tensor,
) -> None:
    """Add rows [n, width] to those of `into` [vocabulary, width] that tokens int64 [n] name.

    They are summed in fp32 `sums` [vocabulary, width] before, zeros now and afterwards; `last`,
    int32 [vocabulary], needn't be anything.
    """
    width = rows.shape[1]
    block = triton.next_power_of_2(width)
    _sum_rows[tokens.shape](tokens, rows, sums, last, width, BLOCK=block)
    _move_rows[tokens.shape](tokens, sums, last, into, width, BLOCK=block)
