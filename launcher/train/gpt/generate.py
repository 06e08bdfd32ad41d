"""The likeliest tokens after some, of a checkpoint: python3 -m launcher.train.gpt.generate."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.train import compat, cpu
from launcher.train.gpt import arguments as command_line
from launcher.train.gpt.arguments import Layout, UsageError
from launcher.train.ranks import ending

DIVIDED = "tensor pipeline expert context".split()


def main(argv: Sequence[str]) -> int:
    """Print them as `tokens: 1 2 3`; the process's exit code."""
    parser = ArgumentParser(prog="python3 -m launcher.train.gpt.generate")
    parser.add_argument("--load", required=True, help="a checkpoint's own folder", type=Path)
    parser.add_argument("--ids", required=True, nargs="+", type=int)
    parser.add_argument("--count", required=True, type=int)
    given = parser.parse_args(argv)
    return ending.code(lambda: _print(given))


def _print(given: Namespace) -> None:
    compat.prepare()
    import torch

    print("tokens:", *generate(given.load, given.ids, given.count), flush=True)
    torch.distributed.destroy_process_group()


def arguments_of(saved: Any) -> Namespace:
    """Our program's arguments, for one rank, as a checkpoint has them: ours, or upstream's.

    Raises `UsageError` where it has none.
    """
    known = dict(saved) if isinstance(saved, dict) else vars(saved) if saved else {}
    if not known:
        raise UsageError("the checkpoint doesn't say its model: it is older than this program")
    made = command_line.parser()
    values = {action.dest: action.default for action in made._actions if action.dest != "help"}
    values |= {name: value for name, value in known.items() if name in values}
    values |= {f"{kind}_model_parallel_size": 1 for kind in DIVIDED[:3]}
    values |= {"context_parallel_size": 1, "sequence_parallel": False, "micro_batch_size": 1}
    values |= {"num_layers_per_virtual_pipeline_stage": None, "global_batch_size": 1}
    values |= {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "no_fast": True,
        "bias_fusion": False,
    }
    made_of = Namespace(**values, on_cpu=cpu.is_installed())
    if made_of.on_cpu:
        made_of.bf16 = made_of.fp16 = False
    return made_of


def generate(source: Path, tokens: Sequence[int], count: int) -> list[int]:
    """`count` tokens after these, each the likeliest; the whole model is on this rank.

    Raises `UsageError` for tokens that the model doesn't know, or more than it takes.
    """
    import torch

    from launcher.train.checkpoints import checkpoint
    from launcher.train.gpt import model, training

    known = checkpoint.common(source)
    arguments = arguments_of(known.get("args"))
    most, vocabulary = arguments.max_position_embeddings, arguments.vocab_size
    if not tokens or max(tokens) >= vocabulary or len(tokens) + count > most:
        raise UsageError(f"it takes up to {most} tokens below {vocabulary}")
    training.initialise(arguments, Layout(1, 1, 1, 1))
    gpt = model.build(arguments, known["vocabulary"]).to(model.dtype(arguments))
    gpt = gpt.cuda().eval()
    checkpoint.load_weights(source, [gpt])
    row = torch.tensor([tokens], device=torch.cuda.current_device())
    with torch.no_grad():
        for _ in range(count):
            places = torch.arange(row.shape[1], device=row.device)[None]
            logits = gpt(row, places, None)[:, -1, :vocabulary]
            row = torch.cat([row, logits.argmax(-1, keepdim=True)], dim=1)
    return [int(one) for one in row[0, len(tokens) :]]


if __name__ == "__main__":
    ending.leave(main(sys.argv[1:]))
