"""The time of a step by a GPU's rates, and how far such times were off where they are known.

A step's time is the larger of two: what the host takes to launch its kernels, and what the card
takes for its matrix products and its memory traffic; then come communication between GPUs and the
bubble of a pipeline, (p - 1) / (v·m) of it for p stages of v parts and m micro-batches (Narayanan
et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2). The constants were fitted to the runs
of bench/gpu/runs.yaml that have `fit`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import comb
from types import MappingProxyType

from launcher.runs.checks import memory
from launcher.runs.plan import model_size
from launcher.runs.records import throughput
from launcher.tools.forecast.work import ALIKE, Work

PRODUCTS, TRAFFIC, LINK = 0.8, 0.9, 0.75
"""Shares of the published rates that are reached: on an H100, products of 798 of 989 TFLOP/s,
copies of 3.0 of 3.35 TB/s, and an all-reduce of 329 of 450 GB/s."""

MOVED_COMPILED, MOVED_EAGER = 6.0, 12.0
"""How often the bytes that a layer keeps for the way back go to memory and come from it, in all."""

MOVED_HIDDEN, MOVED_INSIDE = 14, 18
"""How often a row of grouped experts is moved by its tokens' size, and by an expert's, there and
back: what each product and kernel of trainer/fast/experts.py reads and writes."""

SCORES = 55
"""How often upstream's plain attention moves its scores, with the second time of recomputing."""

HOST = {
    "kernels": (0.0, 1.0),
    "graphed": (0.0, 1.0),
    "compiled": (1.2, 10.0),
    "eager": (3.6, 3.0),
    "upstream": (5.3, 20.0),
    "cpu": (4.0, 2.0),
}
"""ms that the host takes for each layer and micro-batch, and once a step.

From what GPT-2 took on H100s, which the host bounds in all but the first two. "cpu" only says how
runs on one machine go with each other: no number of it is shown unscaled.
"""

CAPACITY = re.compile(r"\d{1,6}(\.\d{1,6})?")

EXPERT = 2.9
"""ms that the host takes for each expert of a layer that a rank has, called one after the other."""

COMPILED = ("graphed", "compiled")  # by torch
BETWEEN = 0.2
"""ms that a layer's compiled kernels take more than what they move and multiply, for each
micro-batch: their beginnings and ends; as GPT-2 took on H100s by one GPU, TP, PP and DP.
"""

LATENCY = 0.03
"""ms before what ranks send each other in a layer begins to move: GPT-2, TP=2, on H100s."""

CPU_TFLOPS, CPU_MEMORY = 0.05, 0.02
"""A CPU's rates in TFLOP/s and TB/s, for how its runs go with each other alone, as "cpu" above."""

MACHINE, NETWORK = "within", "between"
"""The GPUs of a machine, and machines, as facts' links: runs/records/watch.py."""

NO_LINKS: Mapping[str, float] = MappingProxyType({})

BUSY, BUSY_EXPERTS = "upstream, busy", "upstream's experts, busy"
OFF = {
    "kernels": (0.82, 1.16),
    "graphed": (0.82, 1.16),
    "compiled": (0.82, 1.16),
    "experts": (0.82, 1.16),
    "eager": (0.80, 1.15),
    "upstream": (0.65, 1.45),
    BUSY: (0.72, 1.06),
    BUSY_EXPERTS: (0.34, 1.06),
}
"""The least and the most that the forecast was of the ms that runs on H100s and H200s took, by what
starts their kernels: machines differ in their hosts. Where these keep up with upstream's kernels,
those of bench/gpu/published.yaml too. tests/tools/forecast holds it to both."""

MEASURED_ON, ELSEWHERE = ("h100-80gb", "h200"), 1.25
PUBLISHED_ON = {BUSY: ("a100-80gb", "h100-80gb"), BUSY_EXPERTS: ("h100-80gb", "b200")}
MOST_MEASURED = 4
"""Where OFF comes from; for other cards and more GPUs, ranges are so much wider."""


@dataclass(frozen=True)
class GpuRates:
    """A GPU: TFLOP/s of matrix products and TB/s of its memory, as they are reached.

    link: GB/s to the other GPUs of its machine, in one direction; network: to those of others
    """

    name: str
    tflops: float
    memory: float
    link: float
    network: float | None = None


def published(
    name: str, precision: str, network: float | None = None, links: Mapping[str, float] = NO_LINKS
) -> GpuRates | None:
    """A card by what is published of it; None where that isn't known.

    `network` is GB/s for each GPU to other machines, where it isn't that of NVIDIA's own machines.
    `links` are GB/s that were reached within a machine and between machines, where they are known.
    """
    card = throughput.card(name)
    if card is None or not (card.rates.get(precision) and card.rates.get("memory")):
        return None
    peak, traffic = card.rates[precision], card.rates["memory"]
    link = card.rates.get("link", 64) / 2  # PCIe 4.0 x16 has 64 GB/s, both ways
    reach = network or card.network
    within, between = links.get(MACHINE, link * LINK), reach and reach * LINK
    between = between if network else links.get(NETWORK, between)
    return GpuRates(name, peak * PRODUCTS, traffic * TRAFFIC, within, between)


@dataclass(frozen=True)
class StepCost:
    """ms of a step: what each part takes, and all of it.

    uneven: of it, what experts take more than with tokens spread evenly, as a mean of all steps;
    worst: what they would take more than `ms`
    """

    arithmetic: float
    traffic: float
    communication: float
    host: float
    bubble: float
    between: float = 0.0
    uneven: float = 0.0
    worst: float = 0.0

    @property
    def ms(self) -> float:
        return self.busy * (1 + self.bubble) + self.communication

    @property
    def busy(self) -> float:
        """Of one GPU, without the others."""
        return max(self.host, self.arithmetic + self.traffic + self.between)

    @property
    def parts(self) -> dict[str, float]:
        """What it takes most of, the largest first; the host hides the card's own, where longer."""
        found = {"communication": self.communication, "the pipeline": self.busy * self.bubble}
        if self.host > self.arithmetic + self.traffic + self.between:
            found["the host"] = self.host
        else:
            found |= {"arithmetic": self.arithmetic, "memory traffic": self.traffic + self.between}
        return dict(sorted(found.items(), key=lambda part: -part[1]))

    @property
    def bound(self) -> str:
        """What takes most of it."""
        return next(iter(self.parts))


def step(work: Work, card: GpuRates) -> StepCost | None:
    """The cost of a step; None where the model's sizes, or the nodes' network, aren't known."""
    even, most = _step(work, card, 1.0), highest_load(work)
    found, worst = _step(work, card, mean_load(work)), _step(work, card, most)
    if most == 1 or not (even and found and worst):
        return even
    return replace(found, uneven=found.ms - even.ms, worst=max(0.0, worst.ms - found.ms))


def highest_load(work: Work) -> float:
    """How many times as many rows as others a rank's experts have where all tokens choose the same
    experts, which are together on few ranks: 1 without expert parallelism."""
    if work.experts_over == 1 or not work.shape:
        return 1.0
    return _limited(work, memory.rows_of_token(work.shape, work.experts_over) / work.shape.routed)


def mean_load(work: Work) -> float:
    """The same of the busiest rank, as a mean of all steps. On a text, all tokens choose the same
    experts at first, which are anywhere; later, and on made-up tokens, all experts alike."""
    size, over = work.shape, work.experts_over
    if over == 1 or not (size and work.steps and work.learns_routing):
        return 1.0
    each, routed = size.experts // over, size.routed
    ways, same = comb(size.experts, routed), 0.0
    for most in range(routed):  # P(a rank has more than `most` of them)
        same += 1 - _ways(routed, over, each, most) / ways
    load = _limited(work, same * over / routed)
    return 1 + (load - 1) * min(1.0, ALIKE / work.steps)


def _ways(routed: int, ranks: int, each: int, most: int) -> int:
    """To choose so many experts of ranks with `each`, of no rank more than `most`."""
    counts = [1] + [0] * routed
    for _ in range(ranks):
        counts = [
            sum(comb(each, own) * counts[left - own] for own in range(min(left, most) + 1))
            for left in range(routed + 1)
        ]
    return counts[routed]


def _limited(work: Work, load: float) -> float:
    """By the capacity factor, beyond which tokens are dropped."""
    capacity = str(work.options.get("moe_expert_capacity_factor", ""))
    return max(1.0, min(load, float(capacity))) if CAPACITY.fullmatch(capacity) else load


def _step(work: Work, card: GpuRates, load: float) -> StepCost | None:
    """`load`: of the busiest rank's experts, 1 where all have as much."""
    size, needed, where, options = work.shape, work.memory(), work.where, work.options
    if size is None or needed is None or not (work.micro and work.batch):
        return None
    count, layers, how = work.count, size.layers / where.pipeline, starts(work)
    ours = how in ("kernels", *COMPILED)
    moved = MOVED_COMPILED if ours else MOVED_EAGER
    again, kept = options.get("recompute_granularity") == "full", needed
    if again:  # all that a layer makes is moved, whatever is kept of it
        whole = {key: value for key, value in options.items() if not key.startswith("recompute_")}
        kept = memory.needed(work.program, whole, where) or needed
    traffic = kept.activations / min(where.pipeline, count) * moved * (4 / 3 if again else 1)
    traffic += 2 * needed.logits
    row = MOVED_HIDDEN * size.hidden + MOVED_INSIDE * size.expert_ffn
    rows = work.micro * size.sequence / where.context * size.routed * size.expert_layers
    rows /= where.pipeline
    if size.experts and how == "graphed":  # of whose rows only those that are used are moved
        over = work.experts_over
        inside = 2 * size.expert_ffn * memory.rows_of_token(size, over)
        traffic += 2 * rows * (row - moved * inside / size.routed)
    traffic += 3 * needed.weights + 2 * needed.gradients  # read three times, and added to
    traffic = traffic * count + 2 * (needed.weights + needed.gradients + needed.optimizer)
    if options.get("transformer_impl") == "local" and how == "upstream":
        tokens = size.sequence * work.micro / where.context
        scores = size.heads / where.tensor * size.sequence * 2
        traffic += SCORES * tokens * scores * layers * count
    virtual = max(1.0, layers / work.number("num_layers_per_virtual_pipeline_stage", size.layers))
    operations = size.operations(work.batch) / where.world * (4 / 3 if again else 1)
    if load > 1:
        inner = (3 if size.gated else 2) * size.expert_ffn
        operations += (load - 1) * 6 * rows * size.hidden * inner * count / where.tensor
        traffic += (load - 1) * 2 * rows * row * count / where.tensor
    each, once = HOST[how]
    alone = how in ("eager", "upstream") and "moe_grouped_gemm" not in options
    if alone and size.experts:
        over = work.number("expert_model_parallel_size", 1)
        each += EXPERT * size.experts / over * size.expert_layers / size.layers
    unsent = StepCost(
        arithmetic=operations / card.tflops / 1e9,
        traffic=traffic / card.memory / 1e9,
        communication=0.0,
        host=each * layers * count + once,
        bubble=(where.pipeline - 1) / count / virtual,
        between=BETWEEN * layers * count if how in COMPILED else 0.0,
    )
    sent = 1.0 if how in COMPILED else load  # compiled, all ranks have all tokens
    communication = _communication(work, size, needed, card, unsent, sent)
    return None if communication is None else replace(unsent, communication=communication)


def starts(work: Work) -> str:
    """What starts a step's kernels; as trainer/fast/fast.py chooses, with torch 2.8 or newer."""
    options, where = work.options, work.where
    if work.on_cpu:
        return "cpu"
    if work.program != model_size.GPT:
        return "upstream"
    how = memory.compiled(work.program, options, where)
    if not how:
        return "eager"
    if "num_layers_per_virtual_pipeline_stage" in options or "recompute_granularity" in options:
        return "compiled"
    kernels = work.kernels and work.precision == "bf16" and how == "whole" and where.model == 1
    size = work.shape
    return "kernels" if kernels and size and memory.like_gpt2(options, size) else "graphed"


def _communication(
    work: Work,
    size: model_size.ModelShape,
    needed: memory.MemoryEstimate,
    card: GpuRates,
    alone: StepCost,
    load: float,
) -> float | None:
    """ms in which a GPU sends: rings send (n - 1)/n of what they sum over n, and of what they give.

    A layer of tensor parallelism sums its output four times, forward and backward; a pipeline
    passes it on twice; context parallelism gives heads away and gets them back, and experts' tokens
    are sent and come back, forward and backward. What goes beyond a machine takes its network:
    ranks of tensor parallelism are neighbours, then those of context, data and pipeline
    parallelism, as Megatron orders them. What overlaps is hidden as long as that it overlaps with
    takes, in `alone`, the step without it. Where experts get `load` times as many tokens, so many
    more are sent to them.
    """
    where, options, count = work.where, work.options, work.count
    machine, layers = where.world // work.nodes, size.layers / where.pipeline
    far = {
        "tensor": where.tensor > machine,
        "context": where.tensor * where.context > machine,
        "pipeline": where.pipeline > 1 and work.nodes > 1,
    }
    beyond = where.data > 1 and where.world // where.pipeline > machine
    if (beyond or any(far.values())) and card.network is None:
        return None
    over = work.number("expert_model_parallel_size", 1)
    output = work.micro * count * size.sequence / where.context * size.hidden * 2
    heads = output * 2 * (size.heads + size.groups) * size.head / size.hidden / where.tensor
    sent = {
        "tensor": 4 * layers * output * 2 * (where.tensor - 1) / where.tensor,
        "pipeline": 2 * output * (where.pipeline > 1),
        "context": 2 * layers * heads * (where.context - 1) / where.context,
    }
    took = {
        ranks: size_of / ((card.network or 1) if far[ranks] else card.link) / 1e6
        for ranks, size_of in sent.items()
    }
    together = max(1, machine // (where.tensor * where.context))  # each with a way out
    data = min(card.link, (card.network or 1) * together) if beyond else card.link
    if "tp_comm_overlap" in options:
        took["tensor"] = max(0.0, took["tensor"] - alone.arithmetic)
    if over > 1 and size.experts:
        routed = 4 * size.expert_layers / where.pipeline * output * size.routed * load
        took["experts"] = routed / where.tensor * (over - 1) / over / data / 1e6
    times = (where.tensor > 1) + (where.context > 1) + (over > 1)
    latency = 0.0 if work.on_cpu else 4 * layers * count * LATENCY * times
    return sum(took.values()) + latency + _of_replicas(work, size, needed, data, alone.busy / count)


def _of_replicas(
    work: Work, size: model_size.ModelShape, needed: memory.MemoryEstimate, rate: float, busy: float
) -> float:
    """ms in which replicas sum their gradients, and then have the sums, or weights by them.

    rate: GB/s; busy: ms of a micro-batch, of which a third goes forward. Experts have replicas of
    their own.
    """
    where, options = work.where, work.options
    if (
        starts(work) in ("kernels", "graphed")
        and where.data == where.world == 2
        and work.count == 1
    ):
        return needed.gradients / 4 / rate / 1e6  # half, in 16 bits: trainer/fast/gradients.py
    own, sharers = memory.experts(options, size, where)
    width = 2 if work.precision != "fp32" else 4
    share = own * size.expert_layers / where.pipeline * width / needed.weights
    rings = (1 - share) * (where.data - 1) / where.data + share * (sharers - 1) / sharers
    shared = "use_distributed_optimizer" in options
    summed = needed.gradients * rings / rate / 1e6
    given = (needed.weights if shared else needed.gradients) * rings / rate / 1e6
    if "overlap_grad_reduce" in options:
        summed = max(0.0, (summed if shared else summed + given) - busy * 2 / 3)
        given = given if shared else 0.0
    if "overlap_param_gather" in options:
        given = max(0.0, given - busy / 3)
    return summed + given


def is_known(work: Work, card: str, cost: StepCost) -> bool:
    """Whether runs like it were measured, or published: on such a card, and no more of them."""
    found = throughput.card(card)
    alias, few = found.alias if found else "", work.where.world <= MOST_MEASURED
    return (few and alias in MEASURED_ON) or alias in PUBLISHED_ON.get(kind(work, cost), ())


def kind(work: Work, cost: StepCost) -> str:
    """Which of OFF it is: experts that are compiled, and GPUs that the host keeps busy, alone."""
    how = starts(work)
    if how == "upstream":
        if "the host" in cost.parts:
            return how
        return BUSY_EXPERTS if "num_experts" in work.options else BUSY
    return "experts" if how in COMPILED and "num_experts" in work.options else how


def off(work: Work, card: str, cost: StepCost) -> tuple[float, float]:
    """The least and the most that a forecast by published rates may be of what the step takes."""
    least, most = OFF[kind(work, cost)]
    wider = 1 if is_known(work, card, cost) else ELSEWHERE
    return least / wider, most * wider


def fields(cost: StepCost) -> Mapping[str, float]:
    """The cost as JSON, ms by part."""
    return {name.replace(" ", "_"): round(ms, 3) for name, ms in cost.parts.items()}
