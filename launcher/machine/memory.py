"""How much memory a GPT takes on each GPU: weights, gradients, optimizer, activations, logits.

Activations are those of Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (https://arxiv.org/abs/2205.05198), section 4, with its sizes written out so that they hold
for grouped queries, SwiGLU, dropout of 0 and fp32 too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from launcher.plan.config import RunConfig
from launcher.plan.layout import Layout, micro_batch

PADDING = 128
"""Megatron's --make-vocab-size-divisible-by where it isn't given; times TP."""

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
    "multi_latent_attention",
    "mtp_num_layers",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "use_torch_fsdp2",
    "optimizer_cpu_offload",
    "cpu_offloading_num_layers",
    "fp8_param_gather",
    "use_precision_aware_optimizer",
    "heterogeneous_layers_config_path",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "spec",
}
"""Options of Megatron with which these sums don't hold."""

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


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT, its vocabulary padded; `positions` is 0 where none are learned."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head: int
    sequence: int
    positions: int
    vocabulary: int
    gated: bool = False
    bias: bool = True
    norm_bias: bool = True
    tied: bool = True

    def layer(self, tensor: int = 1) -> int:
        """Parameters of a layer on each of `tensor` processes."""
        queries, keys = self.heads * self.head, 2 * self.groups * self.head
        inner = self.ffn * (2 if self.gated else 1)
        divided = self.hidden * (queries + keys + queries + inner + self.ffn)
        whole = 2 * self.norm
        if self.bias:
            divided += queries + keys + inner
            whole += 2 * self.hidden
        return divided // tensor + whole

    @property
    def norm(self) -> int:
        """Parameters of a layer norm, or of an RMSNorm."""
        return self.hidden * (2 if self.norm_bias else 1)

    def words(self, tensor: int = 1) -> int:
        """Parameters of the words' embedding on each of `tensor` processes."""
        return self.vocabulary // tensor * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, its padding included."""
        embeddings = self.words() * (1 if self.tied else 2) + self.positions * self.hidden
        return embeddings + self.layers * self.layer() + self.norm


def shape(config: RunConfig, tensor: int) -> Shape | None:
    """The sizes of the model of a run; None where the run file doesn't tell them."""
    model = config.model
    needed = (model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length)
    if config.program not in ("gpt", "pretrain_gpt.py") or UNKNOWN & passed(config).keys():
        return None
    if not all(needed) or not config.data.vocab_size:
        return None
    layers, hidden, heads, sequence = (int(size or 0) for size in needed)
    multiple = (model.make_vocab_size_divisible_by or PADDING) * tensor
    learned = model.position_embedding_type in (None, "learned_absolute")
    return Shape(
        layers=layers,
        hidden=hidden,
        ffn=model.ffn_hidden_size or _ffn(hidden, bool(model.swiglu)),
        heads=heads,
        groups=model.num_query_groups or heads,
        head=model.kv_channels or hidden // heads,
        sequence=sequence,
        positions=(model.max_position_embeddings or sequence) if learned else 0,
        vocabulary=-(-config.data.vocab_size // multiple) * multiple,
        gated=bool(model.swiglu),
        bias=not model.disable_bias_linear,
        norm_bias=model.normalization != "RMSNorm",
        tied=not model.untie_embeddings_and_output_weights,
    )


def _ffn(hidden: int, gated: bool) -> int:
    """Megatron's hidden size of the MLP where none is given (megatron/training/arguments.py)."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden


def passed(config: RunConfig) -> dict[str, object]:
    """megatron_args by their names with underscores; what is switched off is left out."""
    return {
        name.lstrip("-").replace("-", "_"): value
        for name, value in config.megatron_args.items()
        if value is not None and value is not False
    }


def bytes_of_states(config: RunConfig, sharers: int) -> tuple[float, float, float] | None:
    """Bytes of weights, gradients and optimizer for each parameter, with Adam.

    Their sums are Megatron's own: 18 with bf16, 20 with fp16 whose gradients stay so, 16 with
    fp32; the distributed optimizer divides all but weights and gradients among `sharers`
    processes, those of data and context parallelism
    (https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html,
    megatron/core/optimizer/__init__.py). None for another optimizer.
    """
    if config.training.optimizer not in (None, "adam"):
        return None
    share = sharers if config.parallel.use_distributed_optimizer else 1
    if not (config.training.fp16 or config.training.bf16):
        return 4, 4, 8 / share
    accumulated = "accumulate_allreduce_grads_in_fp32" in passed(config)
    if config.training.fp16 and config.program != "gpt" and not accumulated:
        return 2, 2, 16 / share  # fp32 copies of the gradients stand with the optimizer
    return 2, 4, 12 / share


def estimate(
    config: RunConfig, where: Layout, capability: tuple[int, int] | None = None
) -> Memory | None:
    """The memory of the rank that needs most; None where the sizes aren't known.

    That is the first stage of a pipeline, which holds the embedding and the activations of as
    many micro-batches as there are stages (1F1B), or the last, which makes the logits.
    `capability` is the GPU's.
    """
    size, micro = shape(config, where.tensor), micro_batch(config, where)
    states = bytes_of_states(config, where.data * where.context)
    if size is None or states is None or not micro:
        return None
    batch = config.training.global_batch_size or micro * where.data
    micro_batches = max(1, batch // (micro * where.data))
    layer = _Layer(config, size, where, micro, _keeps_scores(config, capability))
    stages = [
        _stage(layer, states, first, last, micro_batches) for first, last in _ends(where.pipeline)
    ]
    return max(stages, key=lambda memory: memory.total)


def _ends(stages: int) -> list[tuple[bool, bool]]:
    """Whether each of the stages worth looking at is the first, and the last."""
    return [(True, True)] if stages == 1 else [(True, False), (False, True)]


def _keeps_scores(config: RunConfig, capability: tuple[int, int] | None) -> bool:
    """Whether attention keeps its sequence × sequence scores for the way back.

    Our program's is torch's scaled dot product, which doesn't on any GPU.
    """
    if config.program == "gpt":
        return False
    if "use_flash_attn" in passed(config) or config.model.attention_backend in ("flash", "fused"):
        return False
    local = config.model.transformer_impl == "local"
    slow = config.model.attention_backend in ("unfused", "local")
    return local or slow or (capability is not None and capability < FLASH)


@dataclass(frozen=True)
class _Layer:
    """What a layer of a run keeps of one micro-batch for the way back."""

    config: RunConfig
    size: Shape
    where: Layout
    micro: int
    scores: bool

    @property
    def width(self) -> int:
        """Bytes of an activation."""
        return 2 if self.config.training.fp16 or self.config.training.bf16 else 4

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one process."""
        return self.size.sequence * self.micro / self.where.context

    @property
    def undivided(self) -> int:
        """Processes that share what tensor parallelism alone leaves whole."""
        return self.where.tensor if self.config.parallel.sequence_parallel else 1

    def rate(self, dropout: str) -> float:
        """A dropout's rate; 0.1 is Megatron's default."""
        found = getattr(self.config.model, dropout)
        return 0.1 if found is None else float(found)

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
        if self.config.program == "gpt":  # it repeats grouped keys, and copies the context
            attention = 5 * heads
        inner = size.ffn * (3 if size.gated else 2)
        inside = (attention + inner) * float(each)
        if self.scores and not self.selective:
            weights = 2 * each + 1 if self.rate("attention_dropout") else each
            inside += size.heads * size.sequence / self.where.context * weights
        return self.tokens * (outside / self.undivided + inside / self.where.tensor)

    @property
    def selective(self) -> bool:
        options = passed(self.config)
        return (
            "recompute_activations" in options
            or options.get("recompute_granularity") == "selective"
        )

    def stage(self, layers: float) -> float:
        """Bytes that `layers` layers keep, with full recomputing where that is asked for."""
        options = passed(self.config)
        if options.get("recompute_granularity") != "full":
            return layers * self.whole
        count = int(str(options.get("recompute_num_layers", 1)))
        if options.get("recompute_method") == "block":
            again = min(count, layers)
            return again * self.input + (layers - again) * self.whole
        return layers / count * self.input

    @property
    def once(self) -> float:
        """Bytes that full recomputing makes again at a time."""
        options = passed(self.config)
        if options.get("recompute_granularity") != "full":
            return 0
        block = options.get("recompute_method") == "block"
        return self.whole * (1 if block else int(str(options.get("recompute_num_layers", 1))))


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
    in_flight = min(_in_flight(layer.config, where), micro_batches * 1.0) if first else 1.0
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


def _in_flight(config: RunConfig, where: Layout) -> float:
    """The micro-batches whose activations the first stage holds at a time.

    Interleaved schedules hold more: section 4.2.3 of the paper.
    """
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    if virtual and config.model.num_layers and where.pipeline > 1:
        chunks = config.model.num_layers / where.pipeline / virtual
        return where.pipeline * (1 + (where.pipeline - 1) / (where.pipeline * chunks))
    return where.pipeline


def bytes_of_checkpoint(config: RunConfig, where: Layout) -> int | None:
    """Bytes of one checkpoint: weights, fp32 weights beside 16-bit ones, and Adam's two moments.

    What describes the pieces of them counts where they are small: it was measured with 0.16.1.
    """
    size = shape(config, where.tensor)
    if size is None or bytes_of_states(config, 1) is None:
        return None
    values = (2, 4, 4, 4) if config.training.fp16 or config.training.bf16 else (4, 4, 4)
    pieces = len(values) * (TENSORS_OF_LAYER * size.layers + OTHER_TENSORS) * where.tensor
    return size.parameters * sum(values) + pieces * BYTES_OF_PIECE + BYTES_OF_FILES
