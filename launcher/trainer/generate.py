"""Generates the most likely next tokens: python3 -m launcher.trainer.generate."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.agent import compat, cpu
from launcher.agent.ranks import exit_codes
from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt.arguments import RankLayout

ONE_RANK = {
    **{f"{kind}_model_parallel_size": 1 for kind in ("tensor", "pipeline", "expert")},
    **{"context_parallel_size": 1, "num_layers_per_virtual_pipeline_stage": None},
    **{"sequence_parallel": False, "bias_fusion": False, "no_fast": True},
    **{"hidden_dropout": 0.0, "attention_dropout": 0.0},
    **{"micro_batch_size": 1, "global_batch_size": 1},
}
"""What is otherwise than when it was trained."""


def main(argv: Sequence[str]) -> int:
    """Print them as `tokens: 1 2 3`; the process's exit code."""
    parser = ArgumentParser(prog="python3 -m launcher.trainer.generate")
    parser.add_argument("--load", required=True, help="a checkpoint's own folder", type=Path)
    parser.add_argument("--ids", required=True, nargs="+", type=int)
    parser.add_argument("--count", required=True, type=int)
    given = parser.parse_args(argv)
    return exit_codes.code(lambda: _print(given))


def _print(given: Namespace) -> None:
    compat.prepare()
    import torch

    print("tokens:", *load(given.load).after(given.ids, given.count), flush=True)
    torch.distributed.destroy_process_group()


def arguments_of(saved: Any) -> Namespace:
    """Our arguments, for one rank, from a checkpoint's own or upstream's. Raises `OptionError`."""
    known = dict(saved) if isinstance(saved, dict) else vars(saved) if saved else {}
    if not known:
        raise OptionError("the checkpoint doesn't say its model: it is older than this program")
    values = {each.dest: each.default for each in command_line.parser()._actions}
    values |= {name: value for name, value in known.items() if name in values}
    fused = known.get("bias_fusion") or known.get("bias_gelu_fusion")
    values["openai_gelu"] = bool(fused or values["openai_gelu"])  # the fused one is by tanh
    made = Namespace(**values | ONE_RANK, on_cpu=cpu.is_installed())
    if made.on_cpu:
        made.bf16 = made.fp16 = False
    return made


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, all of it on this rank."""

    model: Any
    arguments: Namespace

    def logits(self, row: Any) -> Any:
        """Of tokens [1, s], [1, s, padded vocabulary]."""
        import torch

        places = torch.arange(row.shape[1], device=row.device)[None]
        return self.model(row, places, None)

    def after(self, tokens: Sequence[int], count: int) -> list[int]:
        """`count` tokens, each the likeliest after all before it.

        Raises `OptionError` for tokens that the model doesn't know, or more than it takes.
        """
        import torch

        most, vocabulary = self.arguments.max_position_embeddings, self.arguments.vocab_size
        if max(tokens) >= vocabulary or len(tokens) + count > most:
            raise OptionError(f"it takes up to {most} tokens below {vocabulary}")
        row = torch.tensor([tokens], device=torch.cuda.current_device())
        with torch.no_grad():
            for _ in range(count):
                likely = self.logits(row)[:, -1, :vocabulary].argmax(-1, keepdim=True)
                row = torch.cat([row, likely], dim=1)
        return [int(one) for one in row[0, len(tokens) :]]


def load(source: Path) -> LoadedModel:
    """The model of a checkpoint. Raises `OptionError` for one that isn't our program's."""
    import torch

    from launcher.trainer.gpt import distributed_checkpoint, model, training

    known = distributed_checkpoint.common(source)
    arguments = arguments_of(known.get("args"))
    if not torch.distributed.is_initialized():
        training.initialise(arguments, RankLayout(1, 1, 1, 1))
    made = model.build(arguments, known["vocabulary"]).to(model.dtype(arguments)).cuda().eval()
    distributed_checkpoint.load_weights(source, [made])
    return LoadedModel(made, arguments)


if __name__ == "__main__":
    exit_codes.leave(main(sys.argv[1:]))
