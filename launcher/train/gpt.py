"""Train a GPT with Megatron-Core, on GPUs or, started with the redirection, on the CPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Parse, check, then import what is heavy; the process's exit code.

    Megatron starts processes that import the main module, so it must be light to import.
    """
    from launcher.train import arguments as command_line

    try:
        arguments = command_line.parse(argv)
        layout = command_line.layout(arguments, int(os.environ.get("WORLD_SIZE", 1)))
    except command_line.UsageError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"gpt: {error}", file=sys.stderr, flush=True)
        return 2
    from launcher.train import compat, cpu

    compat.prepare()
    arguments.on_cpu = cpu.is_installed()
    import torch

    from launcher.train import training

    training.initialise(arguments, layout)
    training.Trainer(arguments, layout).run()
    torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
