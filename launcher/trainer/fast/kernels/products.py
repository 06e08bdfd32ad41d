"""Grouped matrix products in Triton, for a torch or a GPU without `torch._grouped_mm`.

Rows are sorted by expert, and `ends` int32 [experts] says where each expert's end; what comes after
the last one's is neither read nor written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

HIGH, WIDE, DEEP, TOGETHER = 128, 256, 64, 8
"""Of a block of the result rows and columns, of both factors what is between, and of how many
blocks one under the other a column is worked on at once, which the cache then has. On an H100, a
mixture of 8 experts is worked on at 521 to 684 TFLOP/s, by torch's at 619 to 723."""

SHAPE = {"HIGH": HIGH, "WIDE": WIDE, "DEEP": DEEP, "num_warps": 8, "num_stages": 3}


@triton.jit
def _of_rows(
    rows, weights, ends, into, experts, width, depth, tall, of_expert, of_deep, of_wide,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, EXPERTS: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    wide = tl.cdiv(width, WIDE)
    strip = tl.program_id(0) // (TOGETHER * wide)
    high = tl.minimum(tall - strip * TOGETHER, TOGETHER)
    inside = tl.program_id(0) % (TOGETHER * wide)
    tile, column = strip * TOGETHER + inside % high, inside // high
    expert = tl.arange(0, EXPERTS)
    end = tl.load(ends + expert, mask=expert < experts, other=0)
    start = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < experts), other=0)
    tiles = tl.cumsum(tl.where(expert < experts, (end - start + HIGH - 1) // HIGH, 0), 0)
    if tile < tl.max(tiles, 0):
        mine = tl.sum(tl.where(tiles <= tile, 1, 0), 0)
        before = tl.max(tl.where(tiles <= tile, tiles, 0), 0)
        first = tl.max(tl.where(expert == mine, start, 0), 0)
        last = tl.max(tl.where(expert == mine, end, 0), 0)
        at = first + (tile - before) * HIGH + tl.arange(0, HIGH)
        place, deep = column * WIDE + tl.arange(0, WIDE), tl.arange(0, DEEP)
        row = tl.cast(tl.minimum(at, last - 1), tl.int64)  # those of nobody are done twice
        left = rows + row[:, None] * depth + deep[None, :]
        right = weights + tl.cast(mine, tl.int64) * of_expert
        right += deep[:, None] * of_deep + (place % width)[None, :] * of_wide
        total = tl.zeros((HIGH, WIDE), tl.float32)
        for k in range(0, depth, DEEP):
            x = tl.load(left, mask=(k + deep)[None, :] < depth, other=0.0)
            w = tl.load(right, mask=(k + deep)[:, None] < depth, other=0.0)
            total = tl.dot(x, w, total)
            left += DEEP
            right += DEEP * of_deep
        target = into + row[:, None] * width + place[None, :]
        there = (at < last)[:, None] & (place < width)[None, :]
        tl.store(target, total.to(into.dtype.element_ty), mask=there)


def of_rows(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of rows [n, depth] and weights [experts, depth, width], however these lie: [n, width]."""
    (count, depth), (experts, _, width) = rows.shape, weights.shape
    into, tall = rows.new_empty(count, width), triton.cdiv(count, HIGH) + experts
    given = (rows, weights, ends, into, experts, width, depth, tall, *weights.stride())
    shape = SHAPE | {"EXPERTS": triton.next_power_of_2(experts), "TOGETHER": TOGETHER}
    _of_rows[(tall * triton.cdiv(width, WIDE),)](*given, **shape)
    return into


@triton.jit
def _of_experts(
    left, right, ends, into, height, width,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    expert, wide = tl.program_id(1), tl.cdiv(width, WIDE)
    first, last = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    at = tl.program_id(0) // wide * HIGH + tl.arange(0, HIGH)
    place = tl.program_id(0) % wide * WIDE + tl.arange(0, WIDE)
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for k in range(first, last, DEEP):
        row = k + tl.arange(0, DEEP)
        there, start = row < last, tl.cast(row, tl.int64)
        x = left + start[None, :] * height + (at % height)[:, None]
        y = right + start[:, None] * width + (place % width)[None, :]
        x = tl.load(x, mask=there[None, :], other=0.0)
        y = tl.load(y, mask=there[:, None], other=0.0)
        total = tl.dot(x, y, total)
    target = into + (tl.cast(expert, tl.int64) * height + at[:, None]) * width + place[None, :]
    there = (at < height)[:, None] & (place < width)[None, :]
    tl.store(target, total.to(into.dtype.element_ty), mask=there)


def of_experts(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Each expert's leftᵀ × right over its rows, of [n, height] and [n, width]: [experts, height,
    width], 0 for one without rows."""
    (_, height), width = left.shape, right.shape[1]
    into = left.new_empty(len(ends), height, width)
    grid = triton.cdiv(height, HIGH) * triton.cdiv(width, WIDE), len(ends)
    _of_experts[grid](left, right, ends, into, height, width, **SHAPE)
    return into
