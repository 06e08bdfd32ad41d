"""How much memory a GPT takes on each GPU: weights, gradients, optimizer, activations, logits.

Activations are those of Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (https://arxiv.org/abs/2205.05198), section 4, with its sizes written out so that they hold
for grouped queries, SwiGLU, dropout of 0 and fp32 too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from launcher.plan import model
from launcher.plan.arguments import Value
from launcher.plan.config import RunConfig
from launcher.plan.layout import Layout
from launcher.plan.model import Shape
from launcher.plan.render import values_of

OVERHEAD = 1 << 30
"""Bytes for CUDA's context and the libraries' workspaces.

Measured with torch 2.11 on H200s: 1.0 GB on one GPU. Two with NCCL took 1.3 to 1.5 GB each, which
the margin of `fit.MARGIN` holds.
"""

FLASH = (8, 0)
"""Compute capability from which Transformer Engine has an attention that keeps no scores.

https://github.com/Dao-AILab/flash-attention: Ampere or newer.
"""

UNKNOWN = {
    "num_experts",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "use_torch_fsdp2",
    "optimizer_cpu_offload",
    "cpu_offloading_num_layers",
    "fp8_param_gather",
    "use_precision_aware_optimizer",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
}
"""Options of Megatron with which these sums don't hold, beside those of model.ELSEWHERE."""

TENSORS_OF_LAYER, OTHER_TENSORS = 12, 4
"""With all biases; the others are the embeddings and the last norm."""

BYTES_OF_PIECE, BYTES_OF_FILES = 2 << 10, 64 << 10
"""What a checkpoint has beside the values: for each tensor that a process saves, and once."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the GPU that needs most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    overhead: int = OVERHEAD

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def _shape(config: RunConfig, options: Mapping[str, Value]) -> Shape | None:
    """The sizes of the model of a run; None where the run file doesn't tell them, or more."""
    if config.program not in (model.GPT, model.UPSTREAM) or UNKNOWN & options.keys():
        return None
    return model.shape(config.program, options)


def bytes_of_states(
    program: str, options: Mapping[str, Value], sharers: int
) -> tuple[float, float, float] | None:
    """Bytes of weights, gradients and optimizer for each parameter, with Adam.

    Their sums are Megatron's own: 18 with bf16, 20 with fp16 whose gradients stay so, 16 with
    fp32; the distributed optimizer divides all but weights and gradients among `sharers`
    processes, those of data and context parallelism
    (https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html,
    megatron/core/optimizer/__init__.py). None for another optimizer.
    """
    if options.get("optimizer", "adam") != "adam":
        return None
    share = sharers if "use_distributed_optimizer" in options else 1
    if _width(options) == 4:
        return 4, 4, 8 / share
    accumulated = "accumulate_allreduce_grads_in_fp32" in options
    if "fp16" in options and program != model.GPT and not accumulated:
        return 2, 2, 16 / share  # fp32 copies of the gradients stand with the optimizer
    return 2, 4, 12 / share


def _width(options: Mapping[str, Value]) -> int:
    """Bytes of a weight, and of an activation."""
    return 2 if options.keys() & {"fp16", "bf16"} else 4


def estimate(
    config: RunConfig, where: Layout, capability: tuple[int, int] | None = None
) -> Memory | None:
    """The memory of the rank that needs most; None where the sizes aren't known.

    That is the first stage of a pipeline, which holds the embedding and the activations of as
    many micro-batches as there are stages (1F1B), or the last, which makes the logits.
    `capability` is the GPU's.
    """
    options = values_of(config, where)
    size = _shape(config, options)
    states = bytes_of_states(config.program, options, where.data * where.context)
    micro = options.get("micro_batch_size")
    if size is None or states is None or not isinstance(micro, int):
        return None
    batch = config.training.global_batch_size or micro * where.data
    micro_batches = max(1, batch // (micro * where.data))
    scores = _keeps_scores(config.program, options, capability)
    layer = _Layer(config.program, options, size, where, micro, scores)
    stages = [
        _stage(layer, states, first, last, micro_batches) for first, last in _ends(where.pipeline)
    ]
    return max(stages, key=lambda memory: memory.total)


def _ends(stages: int) -> list[tuple[bool, bool]]:
    """Whether each of the stages worth looking at is the first, and the last."""
    return [(True, True)] if stages == 1 else [(True, False), (False, True)]


def _keeps_scores(
    program: str, options: Mapping[str, Value], capability: tuple[int, int] | None
) -> bool:
    """Whether attention keeps its sequence × sequence scores for the way back.

    Our program's is torch's scaled dot product, which doesn't on any GPU.
    """
    backend = options.get("attention_backend")
    if program == model.GPT or "use_flash_attn" in options or backend in ("flash", "fused"):
        return False
    slow = options.get("transformer_impl") == "local" or backend in ("unfused", "local")
    return slow or (capability is not None and capability < FLASH)


@dataclass(frozen=True)
class _Layer:
    """What a layer of a run keeps of one micro-batch for the way back."""

    program: str
    options: Mapping[str, Value]
    size: Shape
    where: Layout
    micro: int
    scores: bool

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return _width(self.options)

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one process."""
        return self.size.sequence * self.micro / self.where.context

    @property
    def undivided(self) -> int:
        """Processes that share what tensor parallelism alone leaves whole."""
        return self.where.tensor if "sequence_parallel" in self.options else 1

    def rate(self, dropout: str) -> float:
        """A dropout's rate; 0.1 is Megatron's default."""
        return float(str(self.options.get(dropout, 0.1)))

    @property
    def input(self) -> float:
        """Bytes of what goes into a layer."""
        return self.tokens * self.size.hidden * self.width / self.undivided

    @property
    def whole(self) -> float:
        """Bytes that a layer keeps: all of it, without recomputing."""
        size, each = self.size, self.width
        masks = 2 if self.rate("hidden_dropout") else 0
        outside = size.hidden * (4 * each + masks)  # two norms' inputs and outputs, dropout
        heads, keys = size.heads * size.head, 2 * size.groups * size.head
        attention = heads + keys + heads  # queries, keys and values, context
        if self.program == model.GPT:  # it repeats grouped keys, and copies the context
            attention = 5 * heads
        inner = size.ffn * (3 if size.gated else 2)
        inside = (attention + inner) * float(each)
        if self.scores and not self.selective:
            weights = 2 * each + 1 if self.rate("attention_dropout") else each
            inside += size.heads * size.sequence / self.where.context * weights
        return self.tokens * (outside / self.undivided + inside / self.where.tensor)

    @property
    def selective(self) -> bool:
        options = self.options
        return (
            "recompute_activations" in options
            or options.get("recompute_granularity") == "selective"
        )

    @property
    def again(self) -> int:
        """The layers that full recomputing makes again at a time; 0 where it isn't asked for."""
        if self.options.get("recompute_granularity") != "full":
            return 0
        return model.whole(self.options, "recompute_num_layers", 1)

    @property
    def by_block(self) -> bool:
        return self.options.get("recompute_method") == "block"

    def stage(self, layers: float) -> float:
        """Bytes that `layers` layers keep, with full recomputing where that is asked for."""
        if not self.again:
            return layers * self.whole
        if self.by_block:
            again = min(self.again, layers)
            return again * self.input + (layers - again) * self.whole
        return layers / self.again * self.input

    @property
    def once(self) -> float:
        """Bytes that full recomputing makes again at a time."""
        return self.whole * (1 if self.by_block and self.again else self.again)


def _stage(
    layer: _Layer,
    states: tuple[float, float, float],
    first: bool,
    last: bool,
    micro_batches: int,
) -> Memory:
    """The memory of the first or last stage of a pipeline, or of the only one."""
    size, where = layer.size, layer.where
    layers = size.layers / where.pipeline
    parameters = layers * size.layer(where.tensor)
    if first:
        parameters += size.words(where.tensor) + size.positions * size.hidden
    if last:
        parameters += size.norm
        if not (first and size.tied):  # a last stage has a copy of tied embeddings
            parameters += size.words(where.tensor)
    in_flight = min(_in_flight(layer, where), micro_batches * 1.0) if first else 1.0
    kept = layer.stage(layers) * in_flight + layer.once
    if first and layer.rate("hidden_dropout"):
        kept += layer.tokens * size.hidden * in_flight / layer.undivided  # the embedding's mask
    logits = 0.0
    if last:
        kept += 2 * layer.input  # the last norm's input and output
        copies = 4 if layer.width == 4 else 6  # fp32, and what the output layer wrote
        logits = layer.tokens * size.vocabulary / where.tensor * copies
    weights, gradients, optimizer = (int(parameters * each) for each in states)
    return Memory(weights, gradients, optimizer, int(kept), int(logits))


def _in_flight(layer: _Layer, where: Layout) -> float:
    """The micro-batches whose activations the first stage holds at a time.

    Interleaved schedules hold more: section 4.2.3 of the paper.
    """
    virtual = layer.options.get("num_layers_per_virtual_pipeline_stage")
    if isinstance(virtual, int) and where.pipeline > 1:
        chunks = layer.size.layers / where.pipeline / virtual
        return where.pipeline * (1 + (where.pipeline - 1) / (where.pipeline * chunks))
    return where.pipeline


def bytes_of_checkpoint(config: RunConfig, where: Layout) -> int | None:
    """Bytes of one checkpoint: weights, fp32 weights beside 16-bit ones, and Adam's two moments.

    What describes the pieces of them counts where they are small: it was measured with 0.16.1.
    """
    options = values_of(config, where)
    size = _shape(config, options)
    if size is None or bytes_of_states(config.program, options, 1) is None:
        return None
    values = (2, 4, 4, 4) if _width(options) == 2 else (4, 4, 4)
    pieces = len(values) * (TENSORS_OF_LAYER * size.layers + OTHER_TENSORS) * where.tensor
    return size.parameters * sum(values) + pieces * BYTES_OF_PIECE + BYTES_OF_FILES
