"""The example script of docs/example.md: `torchrun … megatron_core_training_example.py …`."""

# Megatron starts processes that import the main module, so this has to be light.
import sys

from launcher.train import example
from launcher.train.ranks import ending

if __name__ == "__main__":
    ending.leave(example.main(sys.argv[1:]))
