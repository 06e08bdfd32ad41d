"""Predicts the time of a step from a GPU's published rates, and how accurate that is.

A step's time is the larger of two: what the host takes to launch its kernels, and what the card
takes for its matrix products and its memory traffic; then come communication between GPUs and the
bubble of a pipeline, (p - 1) / m of it for p stages and m micro-batches (Narayanan et al. 2021,
https://arxiv.org/abs/2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.runs.checks import memory
from launcher.runs.plan import layout, model
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.render import values_of
from launcher.runs.records import throughput
from launcher.runs.runfile import source
from launcher.runs.runfile.config import RunConfig
from launcher.tools.tuning.settings import KERNELS, Setting, Space, like_gpt2

PRODUCTS, TRAFFIC, LINK = 0.8, 0.9, 0.75
"""Shares of the published rates that are reached: on an H100, products of 798 of 989 TFLOP/s,
copies of 3.0 of 3.35 TB/s, and an all-reduce of 329 of 450 GB/s."""

MOVED_COMPILED, MOVED_EAGER = 6.0, 12.0
"""How often the bytes that a layer keeps for the way back go to memory and come from it, in all."""

HOST = {
    "kernels": (0.0, 1.0),
    "graphed": (0.0, 1.0),
    "compiled": (1.2, 10.0),
    "eager": (3.6, 3.0),
    "upstream": (5.3, 20.0),
}
"""ms that the host takes for each layer and micro-batch, and once a step.

From what GPT-2 took on H100s, which the host bounds in all but the first two.
"""


COMPILED = ("graphed", "compiled")  # by torch
BETWEEN = 0.2
"""ms that a layer's compiled kernels take more than what they move and multiply, for each
micro-batch: their beginnings and ends; as GPT-2 took on H100s by one GPU, TP, PP and DP.
"""


@dataclass(frozen=True)
class GpuRates:
    """A GPU: TFLOP/s of matrix products and TB/s of its memory, as they are reached.

    link: GB/s to the other GPUs, in one direction
    """

    name: str
    tflops: float
    memory: float
    link: float


def published(name: str, precision: str) -> GpuRates | None:
    """A card by what is published of it; None where that isn't known."""
    peak, traffic = throughput.peak(name, precision), throughput.peak(name, "memory")
    if not (peak and traffic):
        return None
    link = (throughput.peak(name, "link") or 64) / 2  # PCIe 4.0 x16 has 64 GB/s, both ways
    return GpuRates(name, peak * PRODUCTS, traffic * TRAFFIC, link * LINK)


@dataclass(frozen=True)
class Prediction:
    """ms of a step: what each part takes, and all of it."""

    arithmetic: float
    traffic: float
    communication: float
    host: float
    bubble: float
    between: float = 0.0

    @property
    def ms(self) -> float:
        busy = max(self.host, self.arithmetic + self.traffic + self.between)
        return busy * (1 + self.bubble) + self.communication

    @property
    def bound(self) -> str:
        """What takes most of it."""
        parts = {
            "arithmetic": self.arithmetic,
            "memory traffic": self.traffic,
            "communication": self.communication,
        }
        if self.host > self.arithmetic + self.traffic + self.between:
            parts = {"the host": self.host, "communication": self.communication}
        return max(parts, key=lambda name: parts[name])


def precision(config: RunConfig) -> str:
    """fp16, bf16 or fp32."""
    training = layout.with_precision(config).training
    return "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"


def predict(space: Space, setting: Setting, card: GpuRates) -> Prediction | None:
    """The prediction for a setting; None where the model's sizes aren't known."""
    config, where = space.of(setting), space.where(setting)
    options = values_of(config, where)
    size, needed = model.shape(config.program, options), memory.estimate(config, where)
    micro, batch = options.get("micro_batch_size"), config.training.global_batch_size
    if size is None or needed is None or not isinstance(micro, int) or not batch:
        return None
    count = max(1, batch // (micro * where.data))
    layers, how = size.layers / where.pipeline, _how(config, where, options.keys())
    in_flight = min(where.pipeline, count)
    moved = MOVED_COMPILED if how in ("kernels", *COMPILED) else MOVED_EAGER
    traffic = needed.activations / in_flight * moved + 2 * needed.logits
    traffic += 3 * needed.weights + 2 * needed.gradients  # read three times, and added to
    traffic = traffic * count + 2 * (needed.weights + needed.gradients + needed.optimizer)
    sent = _bytes_sent(size, needed, where, micro * count, options)
    if how in ("kernels", "graphed") and where.data == where.world == 2 and count == 1:
        sent = needed.gradients / 4  # half of them, in 16 bits: see trainer/fast/gradients.py
    operations = size.operations(batch) / where.world
    operations *= 4 / 3 if options.get("recompute_granularity") == "full" else 1
    each, once = HOST[how] if config.gpus != "0" else (0.0, 0.0)
    return Prediction(
        arithmetic=operations / card.tflops / 1e9,
        traffic=traffic / card.memory / 1e9,
        communication=sent / card.link / 1e6,
        host=each * layers * count + once,
        bubble=(where.pipeline - 1) / count,
        between=BETWEEN * layers * count if how in COMPILED and config.gpus != "0" else 0.0,
    )


def _how(config: RunConfig, where: Layout, options: object) -> str:
    """What starts a step's kernels; as trainer/fast/fast.py chooses."""
    if config.program != model.GPT:
        return "upstream"
    args = config.megatron_args
    if "no_fast" in args or where.context > 1 or "num_experts" in args:
        return "eager"
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    if virtual or "recompute_granularity" in args:
        return "compiled"
    off = str(config.env.get(KERNELS.partition(".")[2])) == "0"
    ours = like_gpt2(config) and precision(config) == "bf16" and not off
    return "kernels" if ours and where.tensor == where.pipeline == 1 else "graphed"


def _bytes_sent(
    size: model.ModelShape,
    needed: memory.MemoryEstimate,
    where: Layout,
    sequences: int,
    options: object,
) -> float:
    """Bytes that a GPU sends in a step: rings send 2·(n - 1)/n of what they sum over n.

    A layer of tensor parallelism sums its output four times, forward and backward; a pipeline
    passes it on twice; data parallelism sums the gradients, half of which hides behind computing
    where that is overlapped.
    """
    output = sequences * size.sequence / where.context * size.hidden * 2
    sent = 4 * size.layers / where.pipeline * output * 2 * (where.tensor - 1) / where.tensor
    sent += 2 * output * (where.pipeline > 1)
    hidden = 0.5 if isinstance(options, dict) and "overlap_grad_reduce" in options else 1.0
    return sent + hidden * needed.gradients * 2 * (where.data - 1) / where.data


H100, H200 = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
UPSTREAMS = ("program=pretrain_gpt.py", "model.transformer_impl=local")
KNOWN: tuple[tuple[str, int, tuple[str, ...], float], ...] = (
    (H100, 1, ("training.precision=bf16",), 16.25),
    (H100, 1, ("training.precision=bf16", "env.LAUNCHER_KERNELS=0"), 18.9),
    (H100, 1, ("training.precision=bf16", "training.micro_batch_size=8"), 19.7),
    (H100, 1, ("training.precision=bf16", "megatron_args.no_fast=true"), 45.8),
    (H100, 2, ("training.precision=bf16", "training.global_batch_size=32"), 16.85),
    (H100, 2, ("training.precision=bf16", "training.global_batch_size=32",
               "parallel.use_distributed_optimizer=true"), 16.9),
    (H100, 2, ("training.precision=bf16", "parallel.tensor_model_parallel_size=2"), 16.3),
    (H100, 2, ("training.precision=bf16", "training.micro_batch_size=4",
               "parallel.pipeline_model_parallel_size=2"), 21.2),
    (H100, 1, (*UPSTREAMS, "training.precision=bf16"), 92),
    (H100, 1, (*UPSTREAMS, "training.precision=fp16", "training.micro_batch_size=1"), 1095),
    (H200, 1, (*UPSTREAMS, "training.precision=bf16"), 63),
    (H200, 2, (*UPSTREAMS, "training.precision=bf16", "training.global_batch_size=32"), 85),
    (H200, 2, (*UPSTREAMS, "training.precision=bf16",
               "parallel.tensor_model_parallel_size=2"), 83),
    (H200, 2, (*UPSTREAMS, "training.precision=fp16", "training.micro_batch_size=2",
               "parallel.tensor_model_parallel_size=2"), 524),
)  # fmt: skip
"""What gpt2.yaml took with these keys, ms a step, on so many cards: bench/gpu/README.md."""


def reliability() -> tuple[float, float]:
    """The least and the most that a prediction was of what a known case took."""
    ratios = []
    for name, gpus, sets, ms in KNOWN:
        config, _ = source.load(
            "gpt2", [source.parse_set(each) for each in (*sets, f"gpus={gpus}")]
        )
        config = layout.with_precision(config)
        card = published(name, precision(config))
        found = predict(Space(config, gpus), Setting(), card) if card else None
        assert found
        ratios.append(found.ms / ms)
    return min(ratios), max(ratios)
