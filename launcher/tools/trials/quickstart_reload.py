"""Loads the checkpoint that upstream's quickstart left in ./ckpt, with tensor parallelism of 1."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

SCRIPTS = Path("/opt/megatron/src")
"""Where an image has upstream's scripts; a checkout has them beside the package."""


def main() -> None:
    """Build the quickstart's model on this one process, by its own functions, and load it."""
    core = importlib.import_module("megatron.core")
    folders = [folder / "examples" for folder in (Path(str(core.__file__)).parents[2], SCRIPTS)]
    sys.path[:0] = [str(folder) for folder in folders if folder.is_dir()]
    quickstart = importlib.import_module("run_simple_mcore_train_loop")
    quickstart.initialize_distributed(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    quickstart.model_parallel_cuda_manual_seed(123)
    model = quickstart.model_provider()
    model.to("cuda")
    quickstart.load_distributed_checkpoint(
        checkpoint_path=os.path.join(os.getcwd(), "ckpt"), gpt_model=model
    )
    print("reloaded at TP=1", flush=True)


if __name__ == "__main__":
    main()
