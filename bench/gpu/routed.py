"""Trains as `python3 -m launcher.trainer.gpt` with EP=2, and reports how uneven its routing is.

`python3 -m bench.gpu.routed OPTIONS` is a rank's program in place of the trainer's, such as a job
of bench.gpu.schedule with `program` starts. At the end rank 0 prints how many rows the busier of
the two ranks had in a layer, of what both would have if tokens were spread evenly.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any


def main(argv: Sequence[str]) -> int:
    """The exit code of training."""
    import torch

    from launcher.trainer.fast import experts
    from launcher.trainer.gpt import __main__ as trainer

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    sums = torch.zeros(2, device="cuda", dtype=torch.float64)  # in a CUDA graph too

    class Rows(experts.Rows):
        """Rows that are counted: both ranks' are all choices, so one's say the other's."""

        def __init__(self, chosen: Any, ranks: Any, backwards: bool) -> None:
            super().__init__(chosen, ranks, backwards)
            half = chosen.numel() / ranks.size
            sums[0] += (self.ends[-1].double() - half).abs() / half
            sums[1] += 1

    experts.Rows = Rows  # type: ignore[misc]
    code = trainer.main(argv)
    if int(os.environ.get("RANK", 0)) == 0:
        excess, layers = sums.tolist()
        busier = 1 + excess / max(1, layers)
        print(f"routed: {layers:.0f} layers, the busier rank had {busier:.4f}", flush=True)
    return code


if __name__ == "__main__":
    from launcher.agent.ranks import ending

    ending.leave(main(sys.argv[1:]))
