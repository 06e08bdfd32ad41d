"""Run by the runner: a checkpoint of a folder a rank, as Megatron's own module writes and reads it.

ranks.py SAVED CONVERTED OUT: SAVED is loaded in the layout that it was saved with; each rank writes
its part to OUT as upstream does, and takes its part of CONVERTED, which has to be the same.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from launcher.agent import compat, cpu
from launcher.trainer.gpt import arguments as command_line


def main(saved: str, converted: str, out: str) -> None:
    compat.prepare()
    import torch
    from megatron.core import parallel_state

    from launcher.trainer.gpt import distributed_checkpoint, model, training

    known = distributed_checkpoint.common(Path(saved))
    arguments = Namespace(**known["args"])
    arguments.on_cpu = cpu.is_installed()
    layout = command_line.layout(arguments, int(os.environ["WORLD_SIZE"]))
    training.initialise(arguments, layout)
    part = model.build(arguments, known["vocabulary"])
    distributed_checkpoint.load_weights(Path(saved), [part])
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if layout.pipeline > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if layout.expert > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    own = part.state_dict_for_save_checkpoint()
    Path(out, name).mkdir(parents=True, exist_ok=True)
    state = {"args": arguments, "iteration": 30, "checkpoint_version": 3.0, "model": own}
    torch.save(state, Path(out, name, "model_optim_rng.pt"))
    path = Path(converted, name, "model_optim_rng.pt")
    theirs = torch.load(path, weights_only=False)["model"]
    assert own.keys() == theirs.keys(), own.keys() ^ theirs.keys()
    for key, values in own.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(values, theirs[key]), key
    part.load_state_dict(theirs)
    torch.distributed.destroy_process_group()

    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main(*sys.argv[1:])
