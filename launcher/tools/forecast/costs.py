"""The time of a step by a GPU's rates, and how far such times were off where they are known.

A step's time is the larger of two: what the host takes to launch its kernels, and what the card
takes for its matrix products and its memory traffic; then come communication between GPUs and the
bubble of a pipeline, (p - 1) / m of it for p stages and m micro-batches (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2). The constants were fitted to the runs of
bench/gpu/runs.yaml that have `fit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from launcher.runs.checks import memory
from launcher.runs.plan import model
from launcher.runs.records import throughput
from launcher.tools.forecast.work import Work

PRODUCTS, TRAFFIC, LINK = 0.8, 0.9, 0.75
"""Shares of the published rates that are reached: on an H100, products of 798 of 989 TFLOP/s,
copies of 3.0 of 3.35 TB/s, and an all-reduce of 329 of 450 GB/s."""

MOVED_COMPILED, MOVED_EAGER = 6.0, 12.0
"""How often the bytes that a layer keeps for the way back go to memory and come from it, in all."""

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

OFF = {
    "kernels": (0.85, 1.06),
    "graphed": (0.85, 1.10),
    "compiled": (0.85, 1.06),
    "experts": (0.82, 1.16),
    "eager": (0.80, 1.15),
    "upstream": (0.65, 1.45),
}
"""The least and the most that the forecast was of the ms that runs on H100s and H200s took, by what
starts their kernels: machines differ in their hosts. tests/tools/forecast holds it to runs.yaml."""

MEASURED_ON, ELSEWHERE = ("h100-80gb", "h200"), 1.25
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


def published(name: str, precision: str, network: float | None = None) -> GpuRates | None:
    """A card by what is published of it; None where that isn't known.

    `network` is GB/s for each GPU to other machines, where it isn't that of NVIDIA's own machines.
    """
    card = throughput.card(name)
    if card is None or not (card.rates.get(precision) and card.rates.get("memory")):
        return None
    peak, traffic = card.rates[precision], card.rates["memory"]
    link = card.rates.get("link", 64) / 2  # PCIe 4.0 x16 has 64 GB/s, both ways
    reach = network or card.network
    return GpuRates(name, peak * PRODUCTS, traffic * TRAFFIC, link * LINK, reach and reach * LINK)


@dataclass(frozen=True)
class StepCost:
    """ms of a step: what each part takes, and all of it."""

    arithmetic: float
    traffic: float
    communication: float
    host: float
    bubble: float
    between: float = 0.0

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
    size, needed, where, options = work.shape, work.memory(), work.where, work.options
    if size is None or needed is None or not (work.micro and work.batch):
        return None
    count, layers, how = work.count, size.layers / where.pipeline, starts(work)
    ours = how in ("kernels", *COMPILED)
    moved = MOVED_COMPILED if ours else MOVED_EAGER
    traffic = needed.activations / min(where.pipeline, count) * moved + 2 * needed.logits
    traffic += 3 * needed.weights + 2 * needed.gradients  # read three times, and added to
    traffic = traffic * count + 2 * (needed.weights + needed.gradients + needed.optimizer)
    if options.get("transformer_impl") == "local" and how == "upstream":
        tokens = size.sequence * work.micro / where.context
        scores = size.heads / where.tensor * size.sequence * 2
        traffic += SCORES * tokens * scores * layers * count
    communication = _communication(work, size, needed, card)
    if communication is None:
        return None
    operations = size.operations(work.batch) / where.world
    operations *= 4 / 3 if options.get("recompute_granularity") == "full" else 1
    each, once = HOST[how]
    if how == "eager" and size.experts and "moe_grouped_gemm" not in options:
        over = work.number("expert_model_parallel_size", 1)
        each += EXPERT * size.experts / over * size.expert_layers / size.layers
    return StepCost(
        arithmetic=operations / card.tflops / 1e9,
        traffic=traffic / card.memory / 1e9,
        communication=communication,
        host=each * layers * count + once,
        bubble=(where.pipeline - 1) / count,
        between=BETWEEN * layers * count if how in COMPILED else 0.0,
    )


def starts(work: Work) -> str:
    """What starts a step's kernels; as trainer/fast/fast.py chooses, with torch 2.8 or newer."""
    options, where = work.options, work.where
    if work.on_cpu:
        return "cpu"
    if work.program != model.GPT:
        return "upstream"
    plain = options.get("transformer_impl") == "transformer_engine" or "no_fast" in options
    experts = "num_experts" in options
    grouped = where.tensor == where.context == 1 and {"swiglu", "bf16"} <= options.keys()
    if plain or (experts and not grouped):
        return "eager"
    if "num_layers_per_virtual_pipeline_stage" in options or "recompute_granularity" in options:
        return "compiled"
    learned = options.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    like_gpt2 = learned and "swiglu" not in options and work.kernels
    split = where.model > 1 or experts or "fp8_format" in options
    return "kernels" if like_gpt2 and work.precision == "bf16" and not split else "graphed"


def _communication(
    work: Work, size: model.ModelShape, needed: memory.MemoryEstimate, card: GpuRates
) -> float | None:
    """ms in which a GPU sends: rings send 2·(n - 1)/n of what they sum over n.

    A layer of tensor parallelism sums its output four times, forward and backward; a pipeline
    passes it on twice; context parallelism gives heads away and gets them back, and experts' tokens
    are sent and come back, forward and backward; data parallelism sums the gradients, half of which
    hides behind computing where that is overlapped. What goes beyond a machine takes its network:
    ranks of tensor parallelism are neighbours, then those of context, data and pipeline
    parallelism, as Megatron orders them.
    """
    where, options, count = work.where, work.options, work.count
    machine, layers = where.world // work.nodes, size.layers / where.pipeline
    far = {
        "tensor": where.tensor > machine,
        "context": where.tensor * where.context > machine,
        "data": where.data > 1 and where.world // where.pipeline > machine,
        "pipeline": where.pipeline > 1 and work.nodes > 1,
    }
    if any(far.values()) and card.network is None:
        return None
    over = work.number("expert_model_parallel_size", 1)
    output = work.micro * count * size.sequence / where.context * size.hidden * 2
    summed = 4 * layers * output
    hidden = 0.5 if "overlap_grad_reduce" in options else 1.0
    graphed = starts(work) in ("kernels", "graphed")
    gradients = hidden * needed.gradients * 2 * (where.data - 1) / where.data
    if graphed and where.data == where.world == 2 and count == 1:
        gradients = needed.gradients / 4  # half of them, in 16 bits: see trainer/fast/gradients.py
    heads = output * 2 * (size.heads + size.groups) * size.head / size.hidden / where.tensor
    sent = {
        "tensor": summed * 2 * (where.tensor - 1) / where.tensor,
        "pipeline": 2 * output * (where.pipeline > 1),
        "context": 2 * layers * heads * (where.context - 1) / where.context,
        "data": gradients,
    }
    if over > 1 and size.experts:
        routed = 4 * size.expert_layers / where.pipeline * output * size.routed
        sent["data"] += routed / where.tensor * (over - 1) / over
    times = (where.tensor > 1) + (where.context > 1) + (over > 1)
    ms = 0.0 if work.on_cpu else 4 * layers * count * LATENCY * times
    for ranks, size_of in sent.items():
        ms += size_of / ((card.network or 1) if far[ranks] else card.link) / 1e6
    return ms


def is_known(work: Work, card: str) -> bool:
    """Whether runs like it were measured: on such a card, and no more than two of them."""
    found = throughput.card(card)
    return bool(found and found.alias in MEASURED_ON) and work.where.world <= MOST_MEASURED


def usual_off(work: Work) -> tuple[float, float]:
    """OFF of what starts its kernels, where experts that are compiled are a kind of their own."""
    how = starts(work)
    return OFF["experts" if how in COMPILED and "num_experts" in work.options else how]


def off(work: Work, card: str) -> tuple[float, float]:
    """The least and the most that a forecast by published rates may be of what the step takes."""
    least, most = usual_off(work)
    wider = 1 if is_known(work, card) else ELSEWHERE
    return least / wider, most * wider


def fields(cost: StepCost) -> Mapping[str, float]:
    """The cost as JSON, ms by part."""
    return {name.replace(" ", "_"): round(ms, 3) for name, ms in cost.parts.items()}
