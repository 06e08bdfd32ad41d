"""Adam without device-to-host synchronisation: norm, clipping and overflow stay on the GPU."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from launcher.trainer.fast.buffers import Buffer, gather
from launcher.trainer.fast.peer_memory import Peer
from launcher.trainer.gpt.arguments import learning_rate

KINDS = ("Float16OptimizerWithFloat16Params", "FP32Optimizer", "DistributedOptimizer")
"""Megatron's optimizers of one Adam each."""

BY_GROUP = ("FusedAdam", "CountingAdam")
"""Those that count steps by groups of parameters: Apex's and TransformerEngine's, and ours."""


class DeviceAdam:
    """The step of Megatron's optimizer, in a few kernels that a CUDA graph can hold.

    The masters, moments and loss scale stay Megatron's own, as views of whole buffers, so its
    checkpoints are written and read as ever. `norm` is the gradient's before clipping, `taken`
    whether the last step was taken: an overflow of fp16 skips it. The formula is that of
    torch.optim.AdamW; the rule of the loss scale is Megatron's DynamicGradScaler's.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        optimizer: Any,
        steps: int,
        compiled: Callable[[Any], Any],
    ) -> None:
        """To be made once the optimizer has loaded what it loads; `steps` are those taken so far.

        Raises `ValueError` for an optimizer that isn't one Adam with its own masters.
        """
        self.arguments, self.inners = arguments, _each(optimizer)
        self.scaler: Any = getattr(self.inners[0], "grad_scaler", None)
        self.group = parallel_state.get_model_parallel_group()
        self.replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.shared = list(getattr(self.inners[0], "model_chunks", []))  # each replica's own share
        made = [list(gather(inner, whole=not arguments.on_cpu)) for inner in self.inners]
        self.common, self.of_experts = made[0], [one for each in made[1:] for one in each]
        device = self.common[0].master.device
        table = [learning_rate(arguments, step) for step in range(arguments.train_iters + 1)]
        self.rates = torch.tensor(table, device=device)
        self.steps = torch.full((1,), steps, device=device)
        self.norm = torch.zeros((), device=device)
        self.taken = torch.ones((), dtype=torch.bool, device=device)
        self.dynamic = hasattr(self.scaler, "growth_interval")
        if self.dynamic:
            assert self.scaler
            trackers = (self.scaler._growth_tracker, self.scaler._hysteresis_tracker)
            self.growth, self.hysteresis = (torch.tensor(x, device=device) for x in trackers)
        self.halves: list[Buffer] = []
        self.spread: Callable[[], None] = self._gather
        self.arrive: Callable[[], None] = lambda: None  # once the other replica's gradients have
        self.compile_with(compiled)

    def _gather(self) -> None:
        """Have the replicas' shares of the parameters in all of them."""
        for part in self.shared:
            part.start_param_sync()

    def compile_with(self, compiled: Callable[[Any], Any]) -> None:
        """Have the arithmetic done by what `compiled` makes of it."""
        functions = (_squares, _prepare, _update)
        self._squares, self._prepare, self._update = map(compiled, functions)

    def read(
        self, buffers: Sequence[Buffer], own: torch.Tensor, other: torch.Tensor | None
    ) -> None:
        """Take gradients from where they lie in 16 bits as the fp32 ones would, [elements]: a
        replica's own, or the mean of its own and the other's."""
        for each in buffers:
            start = each.gradient.storage_offset()
            here = slice(start, start + each.gradient.numel())
            each.gradient, each.other = own[here], None if other is None else other[here]

    def write(self, theirs: torch.Tensor, peer: Peer) -> None:
        """Write the parameters of a share to the other replica's too, as all lie in `theirs`,
        rather than have them gathered."""
        for each in self.common:
            assert each.model is not None
            start = each.model.storage_offset()
            each.there = theirs[start : start + len(each.model)]
        self.spread = peer.meet

    def halve(self, parameters: Iterable[Any], peer: Peer) -> int | None:
        """Step a half of the one buffer, where each of two replicas would step all, and write it to
        the other's; where the second half begins, None for parameters that don't lie in one.

        The other half's masters and moments are old until `unite`.
        """
        whole = self.common[0]
        if len(self.common) > 1 or whole.model is None:
            return None
        whole.model, theirs = peer.lay(whole.model, parameters)
        half = whole.half()
        self.halves = [whole.part(slice(0, half)), whole.part(slice(half, len(whole.model)))]
        self.common = [self.halves[peer.rank]]
        self.write(theirs, peer)
        return half

    def unite(self) -> None:
        """Have both halves' masters and moments, which a checkpoint has."""
        ranks = torch.distributed.get_process_group_ranks(self.replicas)
        for rank, half in zip(ranks, self.halves, strict=False):
            for each in (half.master, half.mean, half.square):
                torch.distributed.broadcast(each, rank, group=self.replicas)

    @torch.no_grad()
    def step(self) -> tuple[torch.Tensor | bool, torch.Tensor | None]:
        """Whether the step was taken, bool [], and the gradient's norm, fp32 [], if it's known.

        Without a loss scale it always is, and says so without the device.
        """
        given, scaled = self.arguments, self.scaler is not None
        normed = given.clip_grad > 0 or scaled
        of_experts = self._squares_of(self.of_experts) if normed and self.of_experts else None
        self.arrive()
        squares = self._all_squares(of_experts) if normed else None
        scale = self.scaler.scale.view(()) if scaled else None
        kept = (self.rates, self.steps, self.norm, self.taken)
        betas = (given.adam_beta1, given.adam_beta2)
        scalars = self._prepare(squares, scale, *kept, given.clip_grad, given.weight_decay, betas)
        constants = (*betas, given.adam_eps)
        for each in (*self.common, *self.of_experts):
            read = (each.gradient, each.other)
            state = (each.master, each.mean, each.square, each.decayed, each.model, each.there)
            self._update(*read, *state, *scalars, self.taken if scaled else None, constants)
            if each.pairs:
                torch._foreach_copy_(*map(list, zip(*each.pairs, strict=True)))
        self.spread()
        if self.dynamic:
            self._rescale()
        return self.taken if scaled else True, self.norm if given.clip_grad > 0 else None

    def _all_squares(self, of_experts: torch.Tensor | None) -> torch.Tensor:
        """The sum of squares of all the gradients, fp32 [], in the same bits on all ranks."""
        squares = self._squares_of(self.common)
        several = torch.distributed.get_world_size(self.replicas) > 1
        shared = self.shared or self.halves
        if several and shared:
            torch.distributed.all_reduce(squares, group=self.replicas)
        split = torch.distributed.get_world_size(self.group) > 1
        if split:
            torch.distributed.all_reduce(squares, group=self.group)
        if of_experts is not None:
            torch.distributed.all_reduce(of_experts, group=_where_summed(self.inners[1]))
            squares = squares + of_experts
        if several and (split or not shared):  # each has summed for itself
            first = torch.distributed.get_process_group_ranks(self.replicas)[0]
            torch.distributed.broadcast(squares, first, group=self.replicas)
        return squares

    def _squares_of(self, buffers: Sequence[Buffer]) -> torch.Tensor:
        each = [self._squares(x.gradient, x.other, x.counted) for x in buffers]
        return torch.stack(each).sum()

    def _rescale(self) -> None:
        """Halve the loss scale after overflows, and double it after long without."""
        scaler, taken = self.scaler, self.taken
        self.growth.copy_(torch.where(taken, self.growth + 1, 0))
        self.hysteresis.sub_((~taken).to(self.hysteresis.dtype))
        grows = self.growth == scaler.growth_interval
        shrinks = ~taken & (self.hysteresis <= 0)
        scale = torch.where(grows, scaler._scale * scaler.growth_factor, scaler._scale)
        lower = torch.maximum(scaler._scale * scaler.backoff_factor, scaler.min_scale)
        scaler._scale.copy_(torch.where(shrinks, lower, scale))
        self.growth.masked_fill_(grows, 0)
        self.hysteresis.masked_fill_(grows, scaler.hysteresis)

    def settle(self) -> int:
        """The steps taken, set in Megatron's optimizer too, which a checkpoint is made of."""
        steps = int(self.steps)
        same = torch.tensor(float(steps))  # on the host, where a save looks at it
        for inner in self.inners:
            if type(inner.optimizer).__name__ in BY_GROUP:
                for group in inner.optimizer.param_groups:
                    group["step"] = steps
                continue
            for state in inner.optimizer.state.values():
                state["step"] = same
        if self.dynamic:
            self.scaler._growth_tracker = int(self.growth)
            self.scaler._hysteresis_tracker = int(self.hysteresis)
        return steps


def _each(optimizer: Any) -> list[Any]:
    """The optimizer of all parameters, or of all but experts that are over ranks and of these."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(parts) > 2 or (len(parts) == 2 and _is_scaled(parts)):
        raise ValueError("several optimizers")
    for part in parts:
        if (kind := type(part).__name__) not in KINDS:
            raise ValueError(f"Megatron's {kind}")
        if (adam := type(part.optimizer).__name__) not in ("Adam", "AdamW", *BY_GROUP):
            raise ValueError(f"an optimizer called {adam}")
    return list(parts)


def _is_scaled(parts: list[Any]) -> bool:
    return any(getattr(part, "grad_scaler", None) is not None for part in parts)


def _where_summed(inner: Any) -> Any:
    """The ranks that have the experts' gradients between them, each a part: None for all."""
    renamed = hasattr(inner, "get_grad_stats_parallel_group")  # of 0.10 and newer
    return (inner.get_grad_stats_parallel_group if renamed else inner.get_model_parallel_group)()


def _mean(gradient: torch.Tensor, other: torch.Tensor | None) -> torch.Tensor:
    """What is stepped by, fp32 [elements]: a gradient, or its mean with the other replica's."""
    return gradient.float() if other is None else (gradient.float() + other.float()) / 2


def _squares(
    gradient: torch.Tensor, other: torch.Tensor | None, counted: torch.Tensor | None
) -> torch.Tensor:
    """The sum of squares, fp32 []; padding between parameters is zero."""
    wide = _mean(gradient, other)
    counting = wide if counted is None else wide * counted
    return (counting * counting).sum()


def _prepare(
    squares: torch.Tensor | None,
    scale: torch.Tensor | None,
    rates: torch.Tensor,
    steps: torch.Tensor,
    norm: torch.Tensor,
    taken: torch.Tensor,
    clip: float,
    weight_decay: float,
    betas: tuple[float, float],
) -> tuple[torch.Tensor, ...]:
    """What all elements are stepped by, each fp32 []: the gradient's factor, the rate, the decay,
    and Adam's corrections of its moments; `steps`, `norm` and `taken` become this step's.

    Each alone would be a kernel of its own: 20 of 2 µs.
    """
    factor = torch.ones_like(norm) if scale is None else 1.0 / scale
    if squares is not None:
        norm.copy_(squares.sqrt() * factor)
        if clip > 0:
            factor = factor * torch.clamp(clip / (norm + 1e-6), max=1.0)
        if scale is not None:
            taken.copy_(torch.isfinite(squares))
    rate = rates.index_select(0, steps).view(())
    steps += taken
    count = steps.view(()).float()
    return factor, rate, rate * weight_decay, *[1 - beta**count for beta in betas]


def _update(
    gradient: torch.Tensor,
    other: torch.Tensor | None,
    master: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    decayed: torch.Tensor,
    model: torch.Tensor | None,
    there: torch.Tensor | None,
    factor: torch.Tensor,
    rate: torch.Tensor,
    decay: torch.Tensor,
    correction: torch.Tensor,
    correction_of_square: torch.Tensor,
    taken: torch.Tensor | None,
    constants: tuple[float, float, float],
) -> None:
    """One step of AdamW on whole buffers, in place: shapes as in `Buffer`, the rest fp32 []."""
    beta1, beta2, eps = constants
    scaled = _mean(gradient, other) * factor
    new_mean = mean + (scaled - mean) * (1 - beta1)
    new_square = square * beta2 + scaled * scaled * (1 - beta2)
    denominator = new_square.sqrt() / correction_of_square.sqrt() + eps
    decays = decayed.expand(-1, master.numel() // len(decayed)).reshape(-1)
    new = master * (1 - decay * decays) - rate / correction * new_mean / denominator
    if taken is not None:
        new = torch.where(taken, new, master)
        new_mean = torch.where(taken, new_mean, mean)
        new_square = torch.where(taken, new_square, square)
    master.copy_(new)
    mean.copy_(new_mean)
    square.copy_(new_square)
    if model is not None:
        model.copy_(new)
    if there is not None:
        there.copy_(new)
