"""Measures matrix products and copies on this machine, as a line of JSON; `rate.py bf16`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

SIZES = {"cuda": (8192, 1 << 31), "cpu": (1024, 1 << 27)}
"""The width of the matrices, and the bytes of a copy."""

SECONDS = 0.5
"""Of work that is timed, and as much before it."""


def main(precision: str) -> None:
    """TFLOP/s of products of square matrices, and TB/s of copies, read and written."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, size = SIZES[device]
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    one = torch.randn(width, width, device=device, dtype=kinds.get(precision, torch.float32))
    source = torch.ones(size, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def seconds(work: Callable[[], object]) -> float:
        """Of one call, in many that are started together."""
        count, took = 1, 0.0
        while took < SECONDS:
            count = 2 * count if took < SECONDS / 2 else int(count * SECONDS / took) + 1
            wait()
            begun = time.perf_counter()
            for _ in range(count):
                work()
            wait()
            took = time.perf_counter() - begun
        return took / count

    tflops = 2 * width**3 / seconds(lambda: one @ one) / 1e12
    copied = 2 * size / seconds(lambda: target.copy_(source)) / 1e12
    print(json.dumps({"device": device, "tflops": tflops, "memory": copied}))


if __name__ == "__main__":
    main(sys.argv[1])
