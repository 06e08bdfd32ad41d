"""Triton kernels between the experts' products, over rows that are sorted by expert.

`ends` int32 [experts] says where each expert's rows end. What comes after the last one's belongs to
other ranks: it is neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WIDE, PIECE = 2048, 4096
"""Columns of a row, and elements of a gradient, that a program has at once."""


def _block(width: int) -> int:
    return min(WIDE, triton.next_power_of_2(width))


@triton.jit
def _spread(x, tokens, ends, experts, into, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(ends + experts - 1):
        source = x + tl.cast(tl.load(tokens + row), tl.int64) * width
        target = into + tl.cast(row, tl.int64) * width
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            tl.store(target + column, tl.load(source + column, mask=inside), mask=inside)


def spread(x: torch.Tensor, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The rows of x [tokens, width] that `tokens`, int32 [rows], names: [rows, width]."""
    into, width = x.new_empty(len(tokens), x.shape[1]), x.shape[1]
    _spread[(len(tokens),)](x, tokens, ends, len(ends), into, width, BLOCK=_block(width))
    return into


@triton.jit
def _collect(rows, places, ends, experts, into, width, EACH: tl.constexpr, BLOCK: tl.constexpr):
    token, last = tl.program_id(0), tl.load(ends + experts - 1)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, total = column < width, tl.zeros((BLOCK,), tl.float32)
        for each in range(EACH):
            row = tl.load(places + token * EACH + each)
            source = rows + tl.cast(row, tl.int64) * width + column
            total += tl.load(source, mask=inside & (row < last), other=0.0).to(tl.float32)
        target = into + tl.cast(token, tl.int64) * width + column
        tl.store(target, total.to(into.dtype.element_ty), mask=inside)


def collect(rows: torch.Tensor, places: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The sum, [tokens, width], of those of the rows that `places`, int32 [tokens, k], names for a
    token. In fp32, and in the same order each time."""
    (tokens, each), width = places.shape, rows.shape[1]
    into = rows.new_empty(tokens, width)
    given = (rows, places, ends, len(ends), into, width)
    _collect[(tokens,)](*given, EACH=each, BLOCK=_block(width))
    return into


@triton.jit
def _swiglu(x, factors, ends, experts, into, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(ends + experts - 1):
        gates = x + tl.cast(row, tl.int64) * width * 2
        target, factor = into + tl.cast(row, tl.int64) * width, tl.load(factors + row)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            gate = tl.load(gates + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(gates + width + column, mask=inside, other=0.0).to(tl.float32)
            y = gate * tl.sigmoid(gate) * up * factor
            tl.store(target + column, y.to(into.dtype.element_ty), mask=inside)


def swiglu(x: torch.Tensor, factors: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """silu(gate) × up × the row's factor, fp32 [rows]; x has both halves, [rows, 2 × width]."""
    rows, width = len(x), x.shape[1] // 2
    into = x.new_empty(rows, width)
    _swiglu[(rows,)](x, factors, ends, len(ends), into, width, BLOCK=_block(width))
    return into


@triton.jit
def _swiglu_back(x, factors, slopes, ends, experts, of_x, y, sums, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    if row < tl.load(ends + experts - 1):
        both, one = tl.cast(row, tl.int64) * width * 2, tl.cast(row, tl.int64) * width
        factor, total = tl.load(factors + row), tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            gate = tl.load(x + both + column, mask=inside, other=0.0).to(tl.float32)
            up = tl.load(x + both + width + column, mask=inside, other=0.0).to(tl.float32)
            slope = tl.load(slopes + one + column, mask=inside, other=0.0).to(tl.float32)
            share = tl.sigmoid(gate)
            silu = gate * share
            total += slope * silu * up
            slope *= factor
            of_gate = slope * up * (share + silu * (1.0 - share))
            kind = y.dtype.element_ty
            tl.store(of_x + both + column, of_gate.to(kind), mask=inside)
            tl.store(of_x + both + width + column, (slope * silu).to(kind), mask=inside)
            tl.store(y + one + column, (silu * up * factor).to(kind), mask=inside)
        tl.store(sums + row, tl.sum(total, 0))


def swiglu_back(
    x: torch.Tensor, factors: torch.Tensor, slopes: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `swiglu`'s x, by its result's [rows, width], and of the factors, and that
    result once more."""
    of_x, y, sums = torch.empty_like(x), torch.empty_like(slopes), torch.empty_like(factors)
    given = (x, factors, slopes, ends, len(ends), of_x, y, sums, slopes.shape[1])
    _swiglu_back[(len(x),)](*given, BLOCK=_block(slopes.shape[1]))
    return of_x, sums, y


@triton.jit
def _put(x, into, size, distance, factor, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    at, expert = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.cast(tl.program_id(1), tl.int64)
    inside, place = at < size, into + expert * distance + at
    y = tl.load(x + expert * size + at, mask=inside).to(tl.float32) * factor
    if ADDS:
        y += tl.load(place, mask=inside).to(tl.float32)
    tl.store(place, y.to(into.dtype.element_ty), mask=inside)


def put(x: torch.Tensor, into: torch.Tensor, factor: float, adds: bool) -> None:
    """Write x × factor to `into`, or add it; [experts, …], each expert's in one piece."""
    size = x[0].numel()
    grid = triton.cdiv(size, PIECE), len(x)
    given = (x, into, size, into.stride(0), factor)
    _put[grid](*given, ADDS=adds, BLOCK=PIECE, num_warps=8)
