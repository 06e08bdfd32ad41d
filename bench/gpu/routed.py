"""Trains as `python3 -m launcher.trainer.gpt`, and reports how uneven a mixture's routing is.

`python3 -m bench.gpu.routed OPTIONS` is a rank's program in place of the trainer's, such as a job
of bench.gpu.schedule with `program` starts. At the end rank 0 prints, for steps further and further
on, how many rows the busiest of 2, 4 and 8 ranks would have, of the mean of all: a mean over
layers, and each one's. With expert parallelism the group's tokens are counted, else this rank's.
ROUTED_TOGETHER: micro-batches that those ranks would have at a time (1).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

LAYERS = 1 << 17
"""Layers' passes that there is room for."""

WINDOWS = (1, 3, 10, 30, 60, 100, 200, 300, 500, 1000)
"""Steps at which one mean ends and the next begins."""

RANKS = (2, 4, 8)


class Counts:
    """Rows of each expert in each pass of a layer, in their order; a CUDA graph may count too."""

    def __init__(self) -> None:
        self.table: Any = None

    def add(self, counts: Any) -> None:
        """`counts`: int [experts]."""
        import torch

        if self.table is None:  # in a first step, which no graph has captured
            self.table = torch.zeros(LAYERS, len(counts), device=counts.device, dtype=torch.int32)
            self.next = torch.zeros(1, device=counts.device, dtype=torch.int64)
        self.table.index_copy_(0, self.next, counts.int().unsqueeze(0))
        self.next.add_(1)

    def lines(self, steps: int, layers: int, together: int) -> list[str]:
        """What is printed of the passes of so many `steps`; evaluations come after them."""
        each = int(self.next) // steps
        if each % (layers * together):
            return [f"routed: {each} passes in a step of {layers} layers: not read"]
        table = self.table[: steps * each].double().cpu()
        table = table.view(steps, -1, together, layers, table.shape[1]).sum(2)
        told = []
        for first, after in zip((0, *WINDOWS), WINDOWS, strict=False):
            if first >= steps:
                break
            some = table[first:after]
            loads = []
            for ranks in RANKS:
                if some.shape[-1] % ranks == 0:
                    shares = some.unflatten(-1, (ranks, -1)).sum(-1)
                    busiest = shares.amax(-1) / shares.mean(-1)
                    by_layer = " ".join(f"{one:.2f}" for one in busiest.mean((0, 1)))
                    loads.append(f"of {ranks} {busiest.mean():.3f} ({by_layer})")
            told.append(f"routed: steps {first + 1} to {min(after, steps)}: {', '.join(loads)}")
        return told


def main(argv: Sequence[str]) -> int:
    """The exit code of training."""
    import torch
    from megatron.core.transformer.moe import router

    from launcher.agent import compat
    from launcher.trainer.gpt import __main__ as trainer
    from launcher.trainer.gpt import arguments as command_line

    compat.prepare()
    arguments, counts = command_line.parse(argv), Counts()
    routing = router.TopKRouter.routing

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Megatron's own, where experts aren't grouped."""
        found = routing(self, *args, **kwargs)
        if self.training:
            counts.add(found[1].sum(0))
        return found

    router.TopKRouter.routing = counted
    if find_spec("triton"):
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        from launcher.trainer.fast import experts

        class Rows(experts.Rows):
            """Rows that are counted."""

            def __init__(self, chosen: Any, *args: Any) -> None:
                super().__init__(chosen, *args)
                numbers = torch.arange(arguments.num_experts, device=chosen.device)
                counts.add((chosen.reshape(-1, 1) == numbers).sum(0))

        experts.Rows = Rows  # type: ignore[misc]
    code = trainer.main(argv)
    if int(os.environ.get("RANK", 0)) == 0 and counts.table is not None:
        together = int(os.environ.get("ROUTED_TOGETHER", 1))
        print(*counts.lines(arguments.train_iters, arguments.num_layers, together), sep="\n")
    return code


if __name__ == "__main__":
    from launcher.agent.ranks import exit_codes

    exit_codes.leave(main(sys.argv[1:]))
