"""A step's forward and backward passes, by Megatron's schedules."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from launcher.agent import compat
from launcher.trainer.gpt import context_parallel
from launcher.trainer.gpt.arguments import RankLayout


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean over the tokens that count; losses and loss_mask are [micro-batch, sequence]."""
    mask = loss_mask.reshape(-1)
    loss = context_parallel.share(torch.sum(losses.float().view(-1) * mask), mask.sum())
    # The schedules divide the loss in place, so what is logged has to be a copy.
    logged = {"lm loss": loss.detach().clone()}
    return loss * compat.loss_factor(parallel_state.get_context_parallel_world_size()), logged


def forward_step(batches: Iterator[dict[str, torch.Tensor]] | None, gpt: Any) -> Any:
    """One micro-batch through this rank's layers, and how to make its output a loss."""
    if batches is None:
        return gpt(None, None, None), None
    batch = {
        name: x.cuda(non_blocking=True)
        for name, x in context_parallel.own_part(next(batches)).items()
    }
    output = gpt(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(_loss, batch["loss_mask"])


def mean_over_data(value: torch.Tensor) -> float:
    """The replicas' mean; all of them call this."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(value, group=group)
    return float(value.item() / torch.distributed.get_world_size(group))


class Passes:
    """Passes of a model's parts, each under its data parallelism, over micro-batches."""

    def __init__(
        self, arguments: argparse.Namespace, layout: RankLayout, wrapped: list[Any]
    ) -> None:
        self.arguments, self.layout, self.wrapped = arguments, layout, wrapped
        self.schedule = get_forward_backward_func()

    def __call__(self, batches: Any, forward_only: bool = False) -> torch.Tensor | None:
        """The loss, fp32 [], a mean over the micro-batches; None where this rank has none."""
        losses = self.schedule(
            forward_step_func=forward_step,
            data_iterator=self._of_parts(batches),
            model=self.wrapped,
            num_microbatches=self.layout.micro_batches,
            seq_length=self.arguments.seq_length,
            micro_batch_size=self.arguments.micro_batch_size,
            decoder_seq_length=self.arguments.seq_length,
            forward_only=forward_only,
        )
        return torch.stack([each["lm loss"] for each in losses]).mean() if losses else None

    def _of_parts(self, batches: Any) -> Any:
        """The batches where they are used: the first stage's first part, the last one's last."""
        if len(self.wrapped) == 1:
            return batches
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        rest = [None] * (len(self.wrapped) - 1)
        return [batches, *rest] if first else [*rest, batches]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Without gradients and dropout meanwhile."""
        for part in self.wrapped:
            part.eval()
        with torch.no_grad():
            yield
        for part in self.wrapped:
            part.train()
