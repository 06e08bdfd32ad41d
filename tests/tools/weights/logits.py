"""Run by the runner: the logits of our program's model, of each checkpoint that is named.

logits.py OUT ID… -- FOLDER…: OUT.pt holds one tensor a folder, [1, tokens, padded vocabulary].
"""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.agent import compat
from launcher.trainer import generate


def main(argv: list[str]) -> None:
    compat.prepare()
    import torch

    at = argv.index("--")
    tokens = torch.tensor([[int(word) for word in argv[1:at]]])
    found = {}
    for folder in argv[at + 1 :]:
        loaded = generate.load(Path(folder))
        with torch.no_grad():
            found[folder] = loaded.logits(tokens)
    torch.save(found, argv[0])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
