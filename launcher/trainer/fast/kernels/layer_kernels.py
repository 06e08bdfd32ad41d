"""Triton kernels between the matrix products of GPT-2's layers, forward and backward.

All are [n, width] and contiguous unless noted; statistics and partial sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROUNDS = 7
"""Of Philox: the fewest that pass all tests of https://doi.org/10.1145/2063384.2063405."""

ROWS, STRIPS, PACKERS = 792, 352, 528
"""Programs that walk over the rows, each with a partial sum of its own: the fastest of some that
were tried on an H100, of 132 multiprocessors."""

WIDE, HIGH, SUMMED = 1024, 4, (64, 32)
"""Columns and rows of a block of GELU's; parts and columns of one of `column_sums`."""


@triton.jit
def _keeps(seed, row, drops, BLOCK: tl.constexpr, R: tl.constexpr):
    """Which of a row's elements dropout keeps: Philox gives four numbers, of two halves each."""
    a, b, c, d = tl.randint4x(tl.load(seed), row * (BLOCK // 8) + tl.arange(0, BLOCK // 8), R)
    four = tl.join(tl.join(a, b), tl.join(c, d))
    eight = tl.join(four & 0xFFFF, (four >> 16) & 0xFFFF)
    return tl.reshape(eight, (BLOCK,)) >= drops


@triton.jit
def _add_norm(
    x, bias, residual, gain, shift, hidden, normed, means, scales, seed, width, eps, drops, factor,
    DROPS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    at, inside = row * width + column, column < width
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        y = tl.where(_keeps(seed, row, drops, BLOCK, R), y * factor, 0.0)
    if ADDS:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = y.to(hidden.dtype.element_ty)
    tl.store(hidden + at, rounded, mask=inside)
    h = rounded.to(tl.float32)
    mean = tl.sum(h, 0) / width
    away = tl.where(inside, h - mean, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(away * away, 0) / width + eps)
    tl.store(means + row, mean)
    tl.store(scales + row, scale)
    out = away * scale * tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    out += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, out.to(normed.dtype.element_ty), mask=inside)


def add_norm(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: torch.Tensor | None,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    p: float,
    seed: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """residual + dropout(x + bias), its layer norm, and the rows' means and inverse deviations,
    [2, n]. By the seed, int64 [1], dropout keeps 1 - p of the elements, p to 16 bits."""
    hidden, normed, (rows, width) = torch.empty_like(x), torch.empty_like(x), x.shape
    known, added = x.new_empty(2, rows, dtype=torch.float32), x if residual is None else residual
    _add_norm[(rows,)](
        *(x, bias, added, gain, shift, hidden, normed, *known, seed, width, eps, *_dropped(p)),
        **_shape(width) | {"DROPS": p > 0, "ADDS": residual is not None, "R": ROUNDS},
    )
    return hidden, normed, known


@triton.jit
def _add_norm_back(
    of_normed, of_hidden, hidden, means, scales, gain, of_x, of_residual, parts, seed,
    rows, width, drops, factor,
    DROPS: tl.constexpr, ADDS: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    gains = tl.zeros((BLOCK,), tl.float32)
    shifts = tl.zeros((BLOCK,), tl.float32)
    biases = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        at = row * width + column
        d = tl.load(of_normed + at, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(hidden + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        unit = tl.where(inside, (h - tl.load(means + row)) * scale, 0.0)
        w = d * g
        slope = (w - unit * (tl.sum(w * unit, 0) / width) - tl.sum(w, 0) / width) * scale
        if ADDS:
            slope += tl.load(of_hidden + at, mask=inside, other=0.0).to(tl.float32)
        rounded = slope.to(of_residual.dtype.element_ty)
        tl.store(of_residual + at, rounded, mask=inside)
        slope = tl.where(inside, rounded.to(tl.float32), 0.0)
        if DROPS:
            slope = tl.where(_keeps(seed, row, drops, BLOCK, R), slope * factor, 0.0)
            tl.store(of_x + at, slope.to(of_x.dtype.element_ty), mask=inside)
        gains += d * unit
        shifts += d
        biases += slope
    mine = parts + tl.program_id(0) * 3 * width + column
    tl.store(mine, gains, mask=inside)
    tl.store(mine + width, shifts, mask=inside)
    tl.store(mine + 2 * width, biases, mask=inside)


def add_norm_back(
    of_normed: torch.Tensor,
    of_hidden: torch.Tensor | None,
    gain: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    hidden: torch.Tensor,
    known: torch.Tensor,
    parts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and the residual; into parts [programs, 3, width] those of the norm's
    weight, its bias, and the bias that was added, for `column_sums`."""
    rows, width = hidden.shape
    of_residual = torch.empty_like(hidden)
    of_x = torch.empty_like(hidden) if p else of_residual
    added = of_normed if of_hidden is None else of_hidden
    _add_norm_back[(len(parts),)](
        *(of_normed, added, hidden, *known, gain, of_x, of_residual, parts, seed),
        *(rows, width, *_dropped(p)),
        **_shape(width) | {"DROPS": p > 0, "ADDS": of_hidden is not None, "R": ROUNDS},
    )
    return of_x, of_residual


@triton.jit
def _normal(z):
    """The normal distribution's integral and density, of one exponential, where erf takes another:
    26.2.17 of Abramowitz and Stegun's Handbook of Mathematical Functions, right to 7.5e-8."""
    density = 0.3989422804014327 * tl.exp(-0.5 * z * z)
    t = 1.0 / (1.0 + 0.2316419 * tl.abs(z))
    sums = t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429)))
    tail = density * t * (0.319381530 + sums)
    return tl.where(z > 0, 1.0 - tail, tail), density


@triton.jit
def _gelu(
    x, bias, y, rows, width, TANH: tl.constexpr, HIGH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    for i in tl.static_range(HIGH):
        row = tl.program_id(1) * HIGH + i
        at, inside = row * width + column, (column < width) & (row < rows)
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
        if TANH:
            out = z * tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
        else:
            out = z * _normal(z)[0]
        tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


def gelu(x: torch.Tensor, bias: torch.Tensor, tanh: bool) -> torch.Tensor:
    """GELU of x + bias: https://arxiv.org/abs/1606.08415, by its tanh form or exactly."""
    y, (rows, width) = torch.empty_like(x), x.shape
    block = min(WIDE, triton.next_power_of_2(width))
    _gelu[(triton.cdiv(width, block), triton.cdiv(rows, HIGH))](
        x, bias, y, rows, width, TANH=tanh, HIGH=HIGH, BLOCK=block, num_warps=4
    )
    return y


@triton.jit
def _gelu_back(
    x, bias, of_y, of_x, parts, rows, width, TANH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    b = tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        at = row * width + column
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + b
        if TANH:
            part = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
            inner = 1.5957691216057308 * (1.0 + 0.134145 * z * z)
            slope = part + z * part * (1.0 - part) * inner
        else:
            whole, density = _normal(z)
            slope = whole + z * density
        d = slope * tl.load(of_y + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(of_x + at, d.to(of_x.dtype.element_ty), mask=inside)
        total += d
    tl.store(parts + tl.program_id(1) * width + column, total, mask=inside)


def gelu_back(
    x: torch.Tensor, bias: torch.Tensor, of_y: torch.Tensor, tanh: bool, parts: torch.Tensor
) -> torch.Tensor:
    """The gradient of x; into parts [programs, 1, width] the bias's, for `column_sums`."""
    of_x, (rows, width) = torch.empty_like(x), x.shape
    block = min(WIDE, triton.next_power_of_2(width))
    _gelu_back[(triton.cdiv(width, block), len(parts))](
        x, bias, of_y, of_x, parts, rows, width, TANH=tanh, BLOCK=block, num_warps=4
    )
    return of_x


@triton.jit
def _pack(q, k, v, packed, parts, rows, width, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    source = q
    if which == 1:
        source = k
    if which == 2:
        source = v
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = column // SIZE * (3 * SIZE) + which * SIZE + column % SIZE
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(1), rows, tl.num_programs(1)):
        x = tl.load(source + row * width + column, mask=inside, other=0.0)
        tl.store(packed + row * 3 * width + place, x, mask=inside)
        total += x.to(tl.float32)
    tl.store(parts + tl.program_id(1) * 3 * width + place, total, mask=inside)


def pack(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int, parts: torch.Tensor
) -> torch.Tensor:
    """[n, heads × size] each to [n, heads × 3 × size]; into parts [programs, 1, …] its sums."""
    packed, (rows, width) = q.new_empty(len(q), 3 * q.shape[1]), q.shape
    _pack[(3, len(parts))](q, k, v, packed, parts, rows, width, SIZE=size, **_shape(width))
    return packed


@triton.jit
def _column_sums(parts, into, count, width, LINES: tl.constexpr, BLOCK: tl.constexpr):
    line, column = tl.program_id(1) * width, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, step = column < width, tl.num_programs(1) * width
    parts += tl.program_id(2).to(tl.int64) * count * step
    total = tl.zeros((LINES, BLOCK), tl.float32)
    for start in range(0, count, LINES):
        part = start + tl.arange(0, LINES)[:, None]
        at = part * step + line + column[None, :]
        total += tl.load(parts + at, mask=(part < count) & inside[None, :], other=0.0)
    at = into + tl.program_id(2) * step + line + column
    tl.store(at, tl.sum(total, 0).to(into.dtype.element_ty), mask=inside)


def column_sums(parts: torch.Tensor, into: torch.Tensor) -> None:
    """The sums of parts [several, programs, k, width] into [several, k, width]."""
    several, count, k, width = parts.shape
    lines, block = SUMMED
    _column_sums[(triton.cdiv(width, block), k, several)](
        parts, into, count, width, LINES=lines, BLOCK=block, num_warps=8
    )


def _dropped(p: float) -> tuple[int, float]:
    """Of 2^16 numbers those that drop, and the factor of what is kept."""
    drops = round(p * 2**16)
    return drops, 2**16 / (2**16 - drops)


def _shape(width: int) -> dict[str, Any]:
    """A block that holds a row, with eight elements to a thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}
