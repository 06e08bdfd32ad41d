"""Estimates a GPT's memory on each GPU: weights, gradients, optimizer, activations, logits.

Activations are those of Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (https://arxiv.org/abs/2205.05198), section 4, with its sizes written out so that they hold
for grouped queries, SwiGLU, experts, dropout of 0 and fp32 too. Experts are taken to get as many
tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from launcher.runs.plan import model
from launcher.runs.plan.arguments import Value
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.model import ModelShape
from launcher.runs.plan.render import values_of
from launcher.runs.runfile.config import RunConfig

OVERHEAD = 1 << 30
"""Bytes for CUDA's context and the libraries' workspaces.

Measured with torch 2.11 on H200s: 1.0 GB on one GPU. Two with NCCL took 1.3 to 1.5 GB each, which
the margin of `fit.MARGIN` holds.
"""

WORKSPACE = 150 << 20
"""Bytes that a step in a CUDA graph keeps beside what is counted: bench/gpu/runs.yaml, on H100s."""

STEPPED = 10
"""Bytes for each parameter of the largest buffer that the fast path's distributed optimizer steps,
once activations are gone: new masters, moments and 16-bit weights. By the three runs of four H100s
in bench/gpu/runs.yaml, 0 to 3 % above them; without that optimizer there was no such peak.
"""

FLASH = (8, 0)
"""Compute capability from which Transformer Engine has an attention that keeps no scores.

https://github.com/Dao-AILab/flash-attention: Ampere or newer.
"""

UNKNOWN = {
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
class MemoryEstimate:
    """Bytes on the GPU that needs most."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    workspace: int = 0
    overhead: int = OVERHEAD

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def _shape(program: str, options: Mapping[str, Value]) -> ModelShape | None:
    """The sizes of the model of a run; None where the run file doesn't give them, or has more."""
    if program not in (model.GPT, model.UPSTREAM) or UNKNOWN & options.keys():
        return None
    return model.shape(program, options)


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
) -> MemoryEstimate | None:
    """As `needed`, by a run file."""
    return needed(config.program, values_of(config, where), where, capability)


def needed(
    program: str,
    options: Mapping[str, Value],
    where: Layout,
    capability: tuple[int, int] | None = None,
) -> MemoryEstimate | None:
    """The memory of the rank that needs most; None where the sizes aren't known.

    That is the first stage of a pipeline, which holds the embedding and the activations of as
    many micro-batches as there are stages (1F1B), or the last, which makes the logits.
    `capability` is the GPU's.
    """
    try:
        return _needed(program, options, where, capability)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):  # no number
        return None


def _needed(
    program: str, options: Mapping[str, Value], where: Layout, capability: tuple[int, int] | None
) -> MemoryEstimate | None:
    size = _shape(program, options)
    states = bytes_of_states(program, options, where.data * where.context)
    micro = options.get("micro_batch_size")
    if size is None or states is None or not isinstance(micro, int):
        return None
    width, tensor = _width(options), where.tensor
    batch = model.whole(options, "global_batch_size", micro * where.data)
    tokens = size.sequence * micro / where.context  # of a micro-batch, on one process
    undivided = tensor if "sequence_parallel" in options else 1  # what TP alone leaves whole
    layers = size.layers / where.pipeline
    expert_layers = size.expert_layers / where.pipeline
    own, sharers = _experts(options, size, where)
    of_experts = bytes_of_states(program, options, sharers) or states
    entering = tokens * size.hidden * width / undivided  # bytes of what goes into a layer
    whole = tokens * _bytes_of_token(program, options, size, where, capability, undivided)
    whole += tokens * size.expert_layers / size.layers * _bytes_of_routed(options, size, where)
    kept, once = _with_recomputing(options, layers, whole, entering)
    compiled, stages = _is_compiled(program, options, where), []
    on_device = program == model.GPT and "use_distributed_optimizer" in options
    on_device &= "bf16" in options and "no_fast" not in options
    for first, last in [(True, True)] if where.pipeline == 1 else [(True, False), (False, True)]:
        in_flight = 1.0
        parameters = (layers - expert_layers) * size.layer(tensor)
        parameters += expert_layers * size.routing_layer(tensor)
        if first:
            in_flight = min(
                _in_flight(options, layers, where), max(1, batch // (micro * where.data))
            )
            parameters += size.words(tensor) + size.positions * size.hidden
        if last:
            parameters += size.norm
            if not (first and size.tied):  # a last stage has a copy of tied embeddings
                parameters += size.words(tensor)
        activations, logits = kept * in_flight + once, 0.0
        if first and _rate(options, "hidden_dropout"):
            activations += tokens * size.hidden * in_flight / undivided  # the embedding's mask
        if last:
            activations += 2 * entering  # the last norm's input and output
            # fp32, and what the output layer wrote; compiled, the gradient takes their place
            copies = 2 if compiled else 4 if width == 4 else 6
            logits = tokens * size.vocabulary / tensor * copies
        weights, gradients, optimizer = (
            int(parameters * each + expert_layers * own * of_expert)
            for each, of_expert in zip(states, of_experts, strict=True)
        )
        parts = (weights, gradients, optimizer, int(activations), int(logits))
        as_made = parameters if batch == micro * where.data else 2 * size.words()
        beside = WORKSPACE + int(2 * as_made) if compiled else 0
        if on_device:
            largest = max(parameters / (where.data * where.context), expert_layers * own / sharers)
            beside = max(beside, int(STEPPED * largest) - sum(parts[3:]))
        stages.append(MemoryEstimate(*parts, beside))
    return max(stages, key=lambda memory: memory.total)


def _is_compiled(program: str, options: Mapping[str, Value], where: Layout) -> bool:
    """Whether model and loss are compiled as one in bf16: as trainer/fast/fast.py chooses.

    A single micro-batch's gradients are then kept as they were made, of several the largest: those
    of the words, of both their uses.
    """
    against = {"no_fast", "num_experts", "recompute_granularity", "recompute_activations"}
    split = (
        where.tensor * where.pipeline > 1 or options.get("transformer_impl") == "transformer_engine"
    )
    return program == model.GPT and "bf16" in options and not (split or against & options.keys())


def _experts(options: Mapping[str, Value], size: ModelShape, where: Layout) -> tuple[float, int]:
    """The experts' parameters of a layer that a process has, and the processes with the same ones.

    Experts are split over tensor parallelism of their own, where that is given, in place of the
    model's (https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/moe.html).
    """
    tensor = model.whole(options, "expert_tensor_parallel_size", where.tensor)
    over = model.whole(options, "expert_model_parallel_size", 1)
    sharers = max(1, where.world // (tensor * over * where.pipeline))
    return size.experts / over * size.mlp(size.expert_ffn, tensor) if size.experts else 0.0, sharers


def _bytes_of_routed(options: Mapping[str, Value], size: ModelShape, where: Layout) -> float:
    """Bytes that a layer with experts keeps of a token for the way back, less an MLP's.

    Of each of its copies: what goes into an expert and comes out, and what is inside; of the
    router: scores, their softmax and the choice, in fp32.
    """
    if not size.experts:
        return 0.0
    width, tensor = _width(options), where.tensor
    own = model.whole(options, "expert_tensor_parallel_size", tensor)
    inside = 3 if size.gated else 2
    copies = size.routed * width * (2 * size.hidden * own + inside * size.expert_ffn) / tensor
    shared = inside * (size.shared_ffn - size.ffn) * width / tensor
    return copies + shared + 3 * 4 * size.experts / tensor


def _rate(options: Mapping[str, Value], dropout: str) -> float:
    """A dropout's rate; 0.1 is Megatron's default."""
    return float(str(options.get(dropout, 0.1)))


def _keeps_scores(
    program: str, options: Mapping[str, Value], capability: tuple[int, int] | None
) -> bool:
    """Whether attention keeps its sequence × sequence scores for the way back.

    Our program's is torch's scaled dot product, which doesn't on any GPU; nor does selective
    recomputing.
    """
    backend, granularity = options.get("attention_backend"), options.get("recompute_granularity")
    if "recompute_activations" in options or granularity == "selective" or program == model.GPT:
        return False
    if "use_flash_attn" in options or backend in ("flash", "fused"):
        return False
    slow = options.get("transformer_impl") == "local" or backend in ("unfused", "local")
    return slow or (capability is not None and capability < FLASH)


def _bytes_of_token(
    program: str,
    options: Mapping[str, Value],
    size: ModelShape,
    where: Layout,
    capability: tuple[int, int] | None,
    undivided: int,
) -> float:
    """Bytes that a layer keeps of a token for the way back: all of it, without recomputing."""
    width = _width(options)
    masks = 2 if _rate(options, "hidden_dropout") else 0
    outside = size.hidden * (4 * width + masks)  # two norms' inputs and outputs, dropout
    heads, keys = size.heads * size.head, 2 * size.groups * size.head
    attention = heads + keys + heads  # queries, keys and values, context
    if program == model.GPT:  # it repeats grouped keys, and copies the context
        attention = 5 * heads + (heads + keys // 2 if "qk_layernorm" in options else 0)
    inside = (attention + size.ffn * (3 if size.gated else 2)) * float(width)
    if _keeps_scores(program, options, capability):
        weights = 2 * width + 1 if _rate(options, "attention_dropout") else width
        inside += size.heads * size.sequence / where.context * weights
    return outside / undivided + inside / where.tensor


def _with_recomputing(
    options: Mapping[str, Value], layers: float, whole: float, entering: float
) -> tuple[float, float]:
    """Bytes that `layers` layers keep, and those that full recomputing makes again at a time."""
    full = options.get("recompute_granularity") == "full"
    again = model.whole(options, "recompute_num_layers", 1) if full else 0
    if not again:
        return layers * whole, 0.0
    if options.get("recompute_method") != "block":
        return layers / again * entering, whole * again
    inputs = min(again, layers)
    return inputs * entering + (layers - inputs) * whole, whole


def _in_flight(options: Mapping[str, Value], layers: float, where: Layout) -> float:
    """The micro-batches whose activations the first stage holds at a time.

    Interleaved schedules hold more: section 4.2.3 of the paper.
    """
    virtual = options.get("num_layers_per_virtual_pipeline_stage")
    if isinstance(virtual, int) and where.pipeline > 1:
        return where.pipeline * (1 + (where.pipeline - 1) / (where.pipeline * layers / virtual))
    return where.pipeline


def bytes_of_checkpoint(program: str, options: Mapping[str, Value], where: Layout) -> int | None:
    """Bytes of one checkpoint: weights, fp32 weights beside 16-bit ones, and Adam's two moments.

    What describes the pieces of them counts where they are small: it was measured with 0.16.1.
    """
    size = _shape(program, options)
    if size is None or bytes_of_states(program, options, 1) is None:
        return None
    values = (2, 4, 4, 4) if _width(options) == 2 else (4, 4, 4)
    each = TENSORS_OF_LAYER * size.layers + 2 * size.experts * size.expert_layers
    pieces = len(values) * (each + OTHER_TENSORS) * where.tensor
    return size.parameters * sum(values) + pieces * BYTES_OF_PIECE + BYTES_OF_FILES
