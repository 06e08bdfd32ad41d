"""Train a GPT with Megatron-Core, on GPUs or, started with the redirection, on the CPU."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence

from launcher.agent import compat, cpu
from launcher.agent.ranks import exit_codes
from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt import measurements, writers
from launcher.trainer.gpt.arguments import RankLayout


def main(argv: Sequence[str]) -> int:
    """Train; the process's exit code, 2 for arguments that can't work together."""
    return exit_codes.code(lambda: train(*check_arguments(command_line.parse(argv))))


def check_arguments(arguments: Namespace) -> tuple[Namespace, RankLayout]:
    """The checked arguments and the layout, without heavy imports. Raises `OptionError`."""
    layout = command_line.layout(arguments, int(os.environ.get("WORLD_SIZE", 1)))
    command_line.check_files(arguments)
    if "RANK" not in os.environ:
        raise OptionError("start its ranks with python3 -m launcher.agent.runner")
    writers.check_packages(arguments)
    if arguments.performance_summary and os.environ["RANK"] == "0":
        measurements.check_summary(arguments.performance_summary)
    return arguments, layout


def train(arguments: Namespace, layout: RankLayout) -> None:
    """Import what is heavy, and train.

    Megatron starts processes that import the main module, so that has to be light.
    Raises `OptionError` and `RunError`.
    """
    cpu.write_whole_lines()
    compat.prepare()
    arguments.on_cpu = cpu.is_installed()
    compat.check_model(arguments)
    import torch

    from launcher.trainer.gpt import training

    trainer = training.begin(arguments, layout)
    with measurements.sampled(arguments):
        trainer.run()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    exit_codes.leave(main(sys.argv[1:]))
