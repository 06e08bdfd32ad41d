"""Mixtures of experts as grouped products, with nothing that the host waits for.

All shapes are known before the routing is: a rank has a row for each choice that could be one of
its experts', and the kernels leave out those that aren't. Over expert parallelism each rank gathers
all tokens of the group, and sums up what its experts make of them where they came from: an
all-to-all would send as much where a token has as many experts as there are ranks, and would need
to know on the host how much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor
from torch.nn.functional import linear, silu

from launcher.trainer.fast.kernels import expert_kernels as kernels
from launcher.trainer.fast.kernels import products
from launcher.trainer.fast.peer_memory import Peer

TINY = 1e-20
"""What scores are divided by at least: Megatron's router."""


class ExpertRanks:
    """The ranks that experts are over: `count` of them are here, from `first` on.

    `put` writes weights' gradients to where they belong, as `GatheredGradients.put`.
    """

    put: Callable[[Sequence[Any], Tensor, bool], bool] = staticmethod(lambda *_: False)

    def __init__(self, experts: int) -> None:
        self.group = parallel_state.get_expert_model_parallel_group()
        self.size = torch.distributed.get_world_size(self.group)
        self.count = experts // self.size
        self.first = torch.distributed.get_rank(self.group) * self.count
        self.sent: Callable[[], Tensor] | None = None
        self.boxes: Boxes | None = None

    def reach(self) -> None:
        """Have a run's two ranks write to each other's memory, where they can. A pipeline's would
        have several micro-batches' tokens at a time."""
        if self.size == torch.distributed.get_world_size() == 2:
            with suppress(RuntimeError):
                self.boxes = Boxes(Peer(self.group))

    def gathered(self, x: Tensor, box: str = "") -> Callable[[], Tensor]:
        """[n, …] of each rank to [ranks × n, …], once that is asked for; where there are boxes, in
        the `box` of that name, until the next is."""
        if self.size == 1:
            return lambda: x
        if self.boxes and box:
            return self.boxes.gathered(x, box)
        whole = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        given = {"group": self.group, "async_op": True}
        begun = torch.distributed.all_gather_into_tensor(whole, x.contiguous(), **given)
        return _ended(begun, whole)

    def send(self, x: Tensor, box: str) -> None:
        """Have tokens gathered, while it is found out who wants them."""
        self.sent = self.gathered(x.detach(), box)

    def tokens(self, x: Tensor) -> Tensor:
        """All ranks' tokens, of which `send` has sent these, x [n, h]."""
        begun, self.sent = self.sent or self.gathered(x), None
        return begun()

    def gradients(self, weights: Sequence[Any], made: Tensor, backwards: bool) -> list[Any]:
        """Of each of the weights, from those of all as they lie; None where `put` took them."""
        if self.put(weights, made, backwards):
            return [None] * len(weights)
        return list(made.unbind(0))[:: -1 if backwards else 1]

    def collected(self, y: Tensor, rows: Rows) -> Callable[[], Tensor]:
        """Of the experts' rows y, each of this rank's tokens' sum over all ranks, [n, h], once that
        is asked for."""
        if self.boxes:
            return self.boxes.summed(lambda each: kernels.collect(y, each, rows.ends), rows.places)
        return self.scattered(kernels.collect(y, rows.places, rows.ends))

    def scattered(self, x: Tensor) -> Callable[[], Tensor]:
        """[ranks × n, …] to this rank's [n, …] of the sum over all, once that is asked for."""
        if self.size == 1:
            return lambda: x
        mine = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        given = {"group": self.group, "async_op": True}
        begun = torch.distributed.reduce_scatter_tensor(mine, x.contiguous(), **given)
        return _ended(begun, mine)


class Boxes:
    """Memory of two ranks, each of which copies what the other needs into the other's.

    Engines copy, where a collective's kernels would take processors that products need: EP=2 on two
    H200s 48.3 ms a step, by NCCL 49.3. A box is filled again only once the other rank has read it:
    gathers, also those by NCCL, and sums take turns, and each ends with a meeting of both.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer, self.pairs = peer, dict[Any, tuple[Tensor, Tensor]]()

    def _pair(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """One's own box, and the other's as seen from here."""
        if (name, like.shape) not in self.pairs:
            self.pairs[name, like.shape] = self.peer.empty(like)
        return self.pairs[name, like.shape]

    def gathered(self, x: Tensor, name: str) -> Callable[[], Tensor]:
        """As `ExpertRanks.gathered`."""
        mine, theirs = self._pair(name, x.new_empty(2, *x.shape))
        with self.peer.beside():
            theirs[self.peer.rank].copy_(x)
            mine[self.peer.rank].copy_(x)
            self.peer.meet()
        return self._joined(mine.flatten(0, 1), x)

    def summed(self, make: Callable[[Tensor], Tensor], places: Tensor) -> Callable[[], Tensor]:
        """The sum of what both ranks make of the places of this rank's tokens, once that is asked
        for; what is made for the other rank's is sent while its own are."""
        halves = places.unflatten(0, (2, -1))
        sent = make(halves[1 - self.peer.rank])
        mine, theirs = self._pair("sums", sent)
        with self.peer.beside():
            theirs.copy_(sent)
            self.peer.meet()
        own, joined = make(halves[self.peer.rank]), self._joined(mine, sent)
        return lambda: own + joined()

    def _joined(self, box: Tensor, sent: Tensor) -> Callable[[], Tensor]:
        """What gives the box once it is full, and holds what was sent until then."""
        held = [sent]

        def wait() -> Tensor:
            self.peer.join()
            held.clear()
            return box

        return wait


def _ended(begun: Any, made: Tensor) -> Callable[[], Tensor]:
    """What gives `made` once the work on it is waited for."""

    def wait() -> Tensor:
        begun.wait()
        return made

    return wait


class Rows:
    """Which rows the experts here work on, of the choices [tokens, k] of all tokens.

    ends: int32 [experts], where each one's rows end; tokens: int32 [rows], whose they are; places:
    int32 [tokens, k], which rows a token has, from the last end on where other ranks have them;
    `backwards` where the last expert comes first.
    """

    def __init__(self, chosen: Tensor, ranks: ExpertRanks, backwards: bool) -> None:
        each, count = chosen.shape[1], ranks.count
        at = chosen.reshape(-1) - ranks.first
        if backwards:
            at = count - 1 - at
        if ranks.size > 1:
            at = torch.where((at >= 0) & (at < count), at, count)
        kind = torch.uint8 if count < 256 else torch.int32  # the sort's passes are by bytes
        ordered, order = at.to(kind).sort(stable=True)
        numbers = torch.arange(count, device=at.device, dtype=torch.int32)
        self.ends = torch.searchsorted(ordered.int(), numbers, right=True, out_int32=True)
        rows = len(order) if ranks.size == 1 else len(chosen) * min(each, count)
        places = torch.empty_like(order, dtype=torch.int32)
        places[order] = torch.arange(len(order), device=at.device, dtype=torch.int32)
        self.places, self.order = places.view_as(chosen), order[:rows]
        self.tokens = (self.order // each).int()

    def of_choices(self, values: Tensor) -> Tensor:
        """[tokens, k] as the rows have it, [rows]."""
        return values.reshape(-1)[self.order]

    def to_choices(self, values: Tensor) -> Tensor:
        """[rows] as [tokens, k], 0 for what other ranks' experts have."""
        here = self.places < self.ends[-1]
        return torch.where(here, values[torch.where(here, self.places, 0)], 0.0)


def laid(weights: Sequence[Tensor]) -> tuple[Tensor | None, bool]:
    """A view of all, [experts, …], and whether the last expert comes first in it.

    They lie at equal distances in the optimizer's and data parallelism's buffers, which have
    parameters in the opposite order; None where they don't.
    """
    places = [each.data_ptr() for each in weights]
    steps = {b - a for a, b in pairwise(places)} or {weights[0].nbytes}
    storages = {each.untyped_storage().data_ptr() for each in weights}
    if len(steps) > 1 or len(storages) > 1:
        return None, False
    step, first = steps.pop(), weights[places.index(min(places))].detach()
    distance = abs(step) // first.element_size()
    return first.as_strided((len(weights), *first.shape), (distance, *first.stride())), step < 0


def stacked(weights: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """[experts, output, input], and whether the last expert comes first: a view, or a copy."""
    view, backwards = laid(weights)
    return (torch.stack(tuple(weights)), False) if view is None else (view, backwards)


def product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Of rows [n, input] and weights [experts, input, output], each expert's of its own rows."""
    if _by_torch(rows):
        return torch._grouped_mm(rows, weights, offs=ends)
    return products.of_rows(rows, weights, ends)


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Of rows [n, output] and [n, input] each expert's sum of outer products, [experts, …]."""
    if _by_torch(left):
        return torch._grouped_mm(left.t(), right, offs=ends)
    return products.of_experts(left, right, ends)


def _by_torch(x: Tensor) -> bool:
    """Whether torch (2.8 and newer) has grouped products without the host, from Hopper on."""
    if not hasattr(torch, "_grouped_mm"):
        return False
    return not x.is_cuda or torch.cuda.get_device_capability() >= (9, 0)


class Experts(torch.autograd.Function):
    """What the chosen experts make of tokens x [n, h], weighed by `probs`, fp32 [n, k], and summed.

    Each is a SwiGLU between two products. Kept for the way back are the tokens and what the first
    product made; what is cheap is done again.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probs: Tensor, chosen: Tensor, ranks: ExpertRanks, *weights: Tensor
    ) -> Tensor:
        """`chosen` are numbers of experts, int [n, k]; `weights` all first and all second ones."""
        (first, backwards), (second, _) = _halves(weights)
        both = ranks.gathered(torch.cat((probs, chosen.float()), dim=1))()
        probs, numbers = both.chunk(2, dim=1)
        rows = Rows(numbers.int(), ranks, backwards)
        factors, x = rows.of_choices(probs), ranks.tokens(x)
        gates = product(kernels.spread(x, rows.tokens, rows.ends), first.mT, rows.ends)
        y = kernels.swiglu(gates, factors, rows.ends)
        y = product(y, second.mT, rows.ends)
        ctx.save_for_backward(x, gates, factors, *weights)
        ctx.rest = rows, ranks
        return ranks.collected(y, rows)()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradients of tokens, probabilities and weights."""
        (x, gates, factors, *weights), (rows, ranks) = ctx.saved_tensors, ctx.rest
        (first, backwards), (second, _) = _halves(tuple(weights))
        ends = rows.ends
        of_y = ranks.gathered(grads[0].contiguous(), "gradients")
        x = kernels.spread(x, rows.tokens, ends)  # while these are sent
        of_y = kernels.spread(of_y(), rows.tokens, ends)
        slopes = product(of_y, second, ends)
        of_gates, of_factors, y = kernels.swiglu_back(gates, factors, slopes, ends)
        of_x = ranks.collected(product(of_gates, first, ends), rows)
        of_probs = ranks.scattered(rows.to_choices(of_factors))
        half = len(weights) // 2
        each = ranks.gradients(weights[half:], outer(of_y, y, ends), backwards)
        each = ranks.gradients(weights[:half], outer(of_gates, x, ends), backwards) + each
        return of_x(), of_probs(), None, None, *each


def _halves(weights: tuple[Tensor, ...]) -> tuple[tuple[Tensor, bool], tuple[Tensor, bool]]:
    """The first and the second weights, `stacked` alike."""
    half = len(weights) // 2
    both = stacked(weights[:half]), stacked(weights[half:])
    if both[0][1] != both[1][1]:
        return (torch.stack(weights[:half]), False), (torch.stack(weights[half:]), False)
    return both


class ExpertLayer(MoELayer):
    """Megatron's layer, with its parameters, whose experts are grouped products unless `plain`."""

    plain = False
    ranks: ExpertRanks

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """[s, b, h] to the same, and no bias."""
        if self.plain:
            return super().forward(hidden_states, *args, **kwargs)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.ranks.size > 1:
            self._send(x)
        probs, chosen, loss = self.route_tokens(x, hidden_states.shape[0])
        out = self._experts(x, probs, chosen, loss).view(hidden_states.shape)
        shared = getattr(self, "shared_experts", None)
        return (out if shared is None else out + self._shared(hidden_states)), None

    def route_tokens(self, x: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Probabilities, fp32 [n, k], the experts' numbers, int32 [n, k], and the router's losses.

        By Megatron's formulas, with no precision lost after the logits; tokens x [n, h] are
        sequences of a `length`, one token of each after the other.
        """
        config, router = self.config, self.router
        logits = linear(x, router.weight, getattr(router, "bias", None)).float()
        by_sigmoid = getattr(config, "moe_router_score_function", "softmax") == "sigmoid"
        scores = logits.sigmoid() if by_sigmoid else logits.softmax(-1)
        each = config.moe_router_topk
        if by_sigmoid:
            probs, chosen = scores.topk(each, dim=-1)
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
            probs = probs / (probs.sum(-1, keepdim=True) + TINY) if each > 1 else probs
        elif config.moe_router_pre_softmax:
            probs, chosen = scores.topk(each, dim=-1)
        else:
            probs, chosen = logits.topk(each, dim=-1)
            probs = probs.softmax(-1)
        if factor := getattr(config, "moe_router_topk_scaling_factor", None):
            probs = probs * factor
        losses = self._losses(logits, scores, chosen, length) if self.training else []
        return probs, chosen.int(), sum(losses) if losses else None

    def _losses(self, logits: Tensor, scores: Tensor, chosen: Tensor, length: int) -> list[Tensor]:
        """Of the router: the balance over a micro-batch or each of its sequences, the logits' size.

        experts × Σ (share of the choices × mean score): https://arxiv.org/abs/2101.03961.
        """
        config, losses = self.config, list[Tensor]()
        over = {"aux_loss": len(logits), "seq_aux_loss": length}
        whole = over.get(config.moe_router_load_balancing_type, 0)
        if (coefficient := config.moe_aux_loss_coeff) and whole:
            experts, each = logits.shape[-1], chosen.shape[-1]
            taken = chosen.unsqueeze(-1) == torch.arange(experts, device=chosen.device)
            counts = taken.view(whole, -1, each, experts).sum((0, 2)).float()
            sums = scores.view(whole, -1, experts).sum(0)
            factor = coefficient * experts / (each * whole * whole * len(sums))
            losses.append((sums * counts).sum() * factor)
        if coefficient := config.moe_z_loss_coeff:
            losses.append(logits.logsumexp(-1).square().mean() * coefficient)
        return losses

    @torch._dynamo.disable
    def _send(self, x: Tensor) -> None:
        again = self.config.recompute_granularity  # which has no memory for a box of each layer
        self.ranks.send(x, "" if again else f"tokens of layer {self.layer_number}")

    @torch._dynamo.disable
    def _experts(self, x: Tensor, probs: Tensor, chosen: Tensor, loss: Tensor | None) -> Tensor:
        if loss is not None and torch.is_grad_enabled():
            probs = MoEAuxLossAutoScaler.apply(probs, loss)
        each = self.experts.local_experts
        weights = [one.linear_fc1.weight for one in each] + [one.linear_fc2.weight for one in each]
        return Experts.apply(x, probs, chosen, self.ranks, *weights)

    def _shared(self, x: Tensor) -> Tensor:
        """What the experts for all tokens make of them."""
        shared = self.shared_experts
        gate, up = linear(x, shared.linear_fc1.weight).chunk(2, dim=-1)
        out = linear(silu(gate) * up, shared.linear_fc2.weight)
        weight = getattr(shared, "gate_weight", None)
        return out if weight is None else out * linear(x, weight).sigmoid()
