"""Train several models one after the other on the same ranks: {name: options} in, losses out.

A script for `start`: what is imported once serves all of them, and most of a short run is that.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from megatron.core import parallel_state

from launcher.agent import compat, cpu
from launcher.agent.ranks import exit_codes
from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.gpt import arguments, log, training


def train(options: list[str]) -> dict[str, object]:
    """The losses of each step and of the evaluation, known on the last rank."""
    given = arguments.parse(options)
    given.on_cpu = True
    layout = arguments.layout(given, torch.distributed.get_world_size())
    compat.check_model(given)
    trainer = training.begin(given, layout)
    told: dict[str, object] = {"losses": (losses := [])}
    line = log.training_line

    def noted(*args: object, **values: object) -> str:
        losses.append(values["loss"])
        told["norm"] = values["grad_norm"]
        return line(*args, **values)

    log.training_line = noted
    log.validation_line = lambda _, loss: told.update(validation=loss) or ""
    try:
        trainer.run()
    finally:
        log.training_line = line
        parallel_state.destroy_model_parallel()
        for left in [each for each in vars(parallel_state) if re.search("_GROUP|_RANKS", each)]:
            setattr(parallel_state, left, None)  # 0.9 forgets some
    return told


def main() -> None:
    """Each variant in turn; what a release lacks is its result."""
    torch.distributed.init_process_group("gloo")
    torch.distributed.init_process_group = lambda *args, **kwargs: None
    for name, options in json.loads(sys.argv[1]).items():
        try:
            told = train(options)
        except OptionError as error:
            told = {"refused": str(error)}
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            print("variant", json.dumps({name: told}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    cpu.write_whole_lines()
    compat.prepare()
    exit_codes.leave(exit_codes.code(main))
