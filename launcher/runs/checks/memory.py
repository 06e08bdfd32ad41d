"""Estimates a GPT's memory on each GPU: weights, gradients, optimizer, activations, logits.

Activations are those of Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models (https://arxiv.org/abs/2205.05198), section 4, with its sizes written out so that they hold
for grouped queries, SwiGLU, experts, dropout of 0 and fp32 too. Experts are taken to get as many
tokens each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from launcher.runs.plan import model_size
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.model_size import ModelShape
from launcher.runs.plan.program_options import Value
from launcher.runs.plan.render import values_of
from launcher.runs.runfile.config import RunConfig

OVERHEAD = 1 << 30
"""Bytes for CUDA's context and the libraries' workspaces, by torch 2.11 on one H200. With NCCL they
are 1.3 to 1.5 GB, for which `fit.MARGIN` is.
"""

WORKSPACE = 150 << 20
"""Bytes that a step in a CUDA graph keeps beside what is counted: bench/gpu/runs.yaml, on H100s."""

PARTS = (3 * 792, 3 * 528, 352)
"""Rows in which GPT-2's kernels keep parts of sums, fp32: those of hidden size of each norm, and
of each layer; those of the MLP's size of each layer (trainer/fast/kernels/layer_kernels.py)."""

PAIR = 2
"""Replicas that keep gradients in 16 bits, and no more: trainer/fast/gradients.py."""

LAID = 4
"""Bytes for each parameter of the largest buffer, while the fast path lays out a distributed
optimizer, whose masters and moments are there by then: trainer/fast/buffers.py, test_fast.py."""

EVALUATED = 10
"""Bytes of a logit where a model that is compiled whole evaluates: 16 bits, fp32, and softmax."""

POSITIONS = "position_embedding_type"
ROW = 20
"""Bytes of a row of grouped experts beside its numbers: places, token, order and factor."""

FLASH = (8, 0)
"""Compute capability from which Transformer Engine has an attention that keeps no scores:
https://github.com/Dao-AILab/flash-attention."""

UNKNOWN = {
    *"use_megatron_fsdp use_custom_fsdp use_torch_fsdp2 optimizer_cpu_offload".split(),
    *"cpu_offloading_num_layers use_precision_aware_optimizer fp8_param_gather".split(),
    *"pipeline_model_parallel_layout decoder_first_pipeline_num_layers".split(),
    *"decoder_last_pipeline_num_layers".split(),
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
    if program not in (model_size.GPT, model_size.UPSTREAM) or UNKNOWN & options.keys():
        return None
    return model_size.shape(program, options)


def bytes_of_states(
    program: str, options: Mapping[str, Value], sharers: int
) -> tuple[float, float, float] | None:
    """Bytes of weights, gradients and optimizer for each parameter; None but with Adam.

    The distributed optimizer divides its own among `sharers` processes, those of data and context
    parallelism
    (https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/dist_optimizer.html).
    """
    if options.get("optimizer", "adam") != "adam":
        return None
    share = sharers if "use_distributed_optimizer" in options else 1
    if _width(options) == 4:
        return 4, 4, 8 / share
    accumulated = "accumulate_allreduce_grads_in_fp32" in options
    if "fp16" in options and program != model_size.GPT and not accumulated:
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
    kernels: bool = True,
) -> MemoryEstimate | None:
    """The memory of the rank that needs most, of a pipeline's first stage or the last; None where
    the sizes aren't known. `capability` is the GPU's; `kernels`: whether layers like GPT-2's are
    left to those."""
    try:
        return _needed(program, options, where, capability, kernels)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):  # no number
        return None


def _needed(
    program: str,
    options: Mapping[str, Value],
    where: Layout,
    capability: tuple[int, int] | None,
    kernels: bool,
) -> MemoryEstimate | None:
    size = _shape(program, options)
    states = bytes_of_states(program, options, where.data * where.context)
    micro = options.get("micro_batch_size")
    if size is None or states is None or not isinstance(micro, int):
        return None
    how = compiled(program, options, where)
    halves = bool(how) and "bf16" in options
    kernels &= how == "whole" and where.context == 1 and halves and like_gpt2(options, size)
    rank = _Rank(program, options, size, where, capability, how, kernels)
    width, tensor, undivided = rank.width, where.tensor, rank.undivided
    batch = model_size.whole(options, "global_batch_size", micro * where.data)
    tokens = size.sequence * micro / where.context  # of a micro-batch, on one process
    layers, expert_layers = size.layers / where.pipeline, size.expert_layers / where.pipeline
    own, sharers = experts(options, size, where)
    of_experts = bytes_of_states(program, options, sharers) or states
    entering = tokens * size.hidden * width / undivided  # bytes of what goes into a layer
    routed, back = rank.bytes_of_routed(grouped=bool(how))
    whole = tokens * (rank.bytes_of_token() + size.expert_layers / size.layers * routed)
    activations_kept, once = _with_recomputing(options, layers, whole, entering)
    buffer, copies_of_scores = rank.bytes_of_scores()
    back = tokens * max(back, copies_of_scores)
    single = batch == micro * where.data
    parts_of_sums = rank.bytes_of_sums(tied=single) if kernels else 0
    left = bool(how) and tensor == 1 and "fp16" not in options  # which wasn't measured
    stages = []
    fast = program == model_size.GPT and "no_fast" not in options
    laid = fast and "use_distributed_optimizer" in options
    for first, last in [(True, True)] if where.pipeline == 1 else [(True, False), (False, True)]:
        in_flight, count = 1.0, max(1, batch // (micro * where.data))
        parameters = (layers - expert_layers) * size.layer(tensor)
        parameters += expert_layers * size.routing_layer(tensor)
        if first:
            in_flight = min(_in_flight(options, layers, where), count)
            parameters += size.words(tensor) + size.positions * size.hidden
        if last:
            parameters += size.norm
            if not (first and size.tied):  # a last stage has a copy of tied embeddings
                parameters += size.words(tensor)
        activations, logits = activations_kept * in_flight + once, 0.0
        if first and rank.drops("hidden_dropout"):
            activations += tokens * size.hidden * in_flight / undivided  # the embedding's mask
        if last:
            activations += 2 * entering  # the last norm's input and output
            # fp32, and what the output layer wrote; compiled, the latter alone, whose place the
            # gradient takes: trainer/fast, `output_loss`, `KernelOutputLoss`
            copies = width if left else 4 if width == 4 else 6
            logits = tokens * size.vocabulary / tensor * copies
        weights, gradients, optimizer = (
            int(parameters * each + expert_layers * own * of_expert)
            for each, of_expert in zip(states, of_experts, strict=True)
        )
        parts = (weights, gradients, optimizer, int(activations), int(logits))
        beside = max(tokens * buffer, back - logits)  # which are gone by then
        alike = halves and single and where.world == where.data * where.context
        apart = weights - int(parameters * states[0]) if sharers < where.world else 0  # experts'
        if how == "whole" and halves:
            kept = 2 * (parameters if single else 2 * size.words()) + parts_of_sums
            beside += WORKSPACE + kept
            if last and options.get("eval_iters") != 0:
                beside = max(beside, kept + logits / copies * EVALUATED - sum(parts[3:]))
        elif alike:  # as much in 16 bits: trainer/fast/gradients.py
            beside += apart * (sharers == 1) + (weights - apart) * (where.world <= PAIR)
        beside += (weights - apart) * (alike and where.world == PAIR)  # and the other replica's
        if laid:
            largest = max(parameters / (where.data * where.context), expert_layers * own / sharers)
            beside = max(beside, LAID * largest - sum(parts[3:]))
        if fast and tensor > 1:  # a flag of each, whether this rank counts it in the norm
            beside += parameters / (where.data * where.context if laid else 1)
        stages.append(MemoryEstimate(*parts, int(beside)))
    return max(stages, key=lambda memory: memory.total)


def like_gpt2(options: Mapping[str, Value], size: ModelShape) -> bool:
    """Whether layers are GPT-2's, for which trainer/fast has kernels of its own: fast.py's rule."""
    others = {"squared_relu", "window_size", "fp8_format", "overlap_grad_reduce"} & options.keys()
    same = (size.gated, size.qk_norm, size.groups) == (False, False, size.heads)
    same &= size.bias and size.norm_bias and size.positions > 0 and not others
    return same and size.heads * size.head == size.hidden <= 4096 and size.hidden % 32 == 0


def compiled(program: str, options: Mapping[str, Value], where: Layout) -> str:
    """What torch compiles, as trainer/fast/fast.py chooses on GPUs: "whole" for model and loss as
    one, "layers", or "" for nothing."""
    if program != model_size.GPT or "no_fast" in options:
        return ""
    experts = "num_experts" in options
    grouped = where.tensor == where.context == 1 and {"swiglu", "bf16"} <= options.keys()
    grouped &= "fp8_format" not in options
    if options.get("transformer_impl") == "transformer_engine" or (experts and not grouped):
        return ""
    again = {"recompute_granularity", "recompute_activations"} & options.keys()
    return "layers" if experts or again or where.tensor * where.pipeline > 1 else "whole"


def experts(options: Mapping[str, Value], size: ModelShape, where: Layout) -> tuple[float, int]:
    """The experts' parameters of a layer that a process has, and the processes with the same ones.

    Experts are split over tensor parallelism of their own, where that is given, in place of the
    model's (https://docs.nvidia.com/megatron-core/developer-guide/latest/api-guide/moe.html).
    """
    tensor = model_size.whole(options, "expert_tensor_parallel_size", where.tensor)
    over = model_size.whole(options, "expert_model_parallel_size", 1)
    sharers = max(1, where.world // (tensor * over * where.pipeline))
    return size.experts / over * size.mlp(size.expert_ffn, tensor) if size.experts else 0.0, sharers


def rows_of_token(size: ModelShape, over: int) -> float:
    """Rows that grouped experts over so many ranks keep for each of a rank's own tokens."""
    return over * min(size.routed, size.experts / over) if over > 1 else size.routed


@dataclass(frozen=True)
class _Rank:
    """A process by its program, options, model and layout, and its GPU's compute capability."""

    program: str
    options: Mapping[str, Value]
    size: ModelShape
    where: Layout
    capability: tuple[int, int] | None
    how: str
    kernels: bool

    @property
    def width(self) -> int:
        return _width(self.options)

    @property
    def undivided(self) -> int:
        """By how many processes that is divided which tensor parallelism alone leaves whole."""
        return self.where.tensor if "sequence_parallel" in self.options else 1

    def drops(self, dropout: str) -> bool:
        """Whether there is such a dropout; 0.1 is Megatron's default."""
        return bool(float(str(self.options.get(dropout, 0.1))))

    @property
    def is_plain(self) -> bool:
        """Whether attention makes sequence × sequence scores: not our program's, on any GPU."""
        options, backend = self.options, self.options.get("attention_backend")
        fused = "use_flash_attn" in options or backend in ("flash", "fused")
        slow = options.get("transformer_impl") == "local" or backend in ("unfused", "local")
        slow |= self.capability is not None and self.capability < FLASH
        return slow and not (self.program == model_size.GPT or fused)

    def bytes_of_token(self) -> float:
        """Bytes that a layer keeps of a token for the way back: all of it, without recomputing."""
        size, width = self.size, self.width
        masks = 2 if self.drops("hidden_dropout") and not self.kernels else 0
        # of what FP8's products read, norms' outputs are kept so, and what an MLP activates isn't
        eight = bool(self.how) and "fp8_format" in self.options
        outside = size.hidden * (4 * width + masks - 2 * eight)  # two norms' inputs and outputs
        if self.how and self.undivided > 1:  # gathered, the latter are kept whole
            outside += 2 * size.hidden * width * (self.undivided - 1)
        heads, keys = size.heads * size.head, 2 * size.groups * size.head
        attention = heads + keys + heads  # queries, keys and values, context
        if self.program == model_size.GPT:  # it repeats grouped keys; eager, it copies the context
            attention = (4 if self.how else 5) * heads
            if "qk_layernorm" in self.options:  # what goes into them; compiled, queries twice
                attention += 2 * heads + keys if self.how else heads + keys // 2
            if self.where.context > 1 and size.groups < size.heads:
                attention += keys + heads  # queries: views of what was exchanged; the context
        elif self._kept_of_score:  # upstream's plain one repeats grouped keys and values too
            attention = 4 * heads
            turned = "qk_layernorm" in self.options or self.options.get(POSITIONS) == "rope"
            if size.groups == size.heads:  # values are a view of the product, which stays whole
                attention += 2 * heads * turned
            elif "qk_layernorm" in self.options:  # which keeps that product
                attention += heads + keys
        inside = (attention + size.ffn * ((3 if size.gated else 2) - eight)) * float(width)
        inside += size.heads * size.sequence / self.where.context * self._kept_of_score
        return outside / self.undivided + inside / self.where.tensor

    def bytes_of_sums(self, *, tied: bool) -> float:
        """Bytes of sums over rows in GPT-2's kernels, if `tied` with the words' gradient."""
        size, (norms, layers, inside) = self.size, PARTS
        rows = norms * (2 * size.layers + 1) + layers * (size.layers + 1)
        width = rows * size.hidden + inside * (size.layers + 1) * size.ffn
        return 4.0 * (width + (size.words() if tied and size.tied else 0))

    def bytes_of_scores(self) -> tuple[float, float]:
        """Bytes of a token's scores in upstream's plain attention: of the buffer that Megatron
        keeps, and of all copies on the way back through a layer: the buffer, and four for the mask
        that is filled in place into a view (torch's CopySlices)."""
        if not self.is_plain:
            return 0.0, 0.0
        scores = self.size.heads / self.where.tensor * self.size.sequence / self.where.context
        return self.width * scores, (5 * self.width - self._kept_of_score) * scores

    @property
    def _kept_of_score(self) -> int:
        """Bytes: its softmax and, with dropout, what is left and a mask; 0 if it is made again."""
        selective = self.options.get("recompute_granularity") == "selective"
        if selective or "recompute_activations" in self.options or not self.is_plain:
            return 0
        return 2 * self.width + 1 if self.drops("attention_dropout") else self.width

    def bytes_of_routed(self, *, grouped: bool) -> tuple[float, float]:
        """Bytes that a layer with experts keeps of a token for the way back, less an MLP's; and
        those of the way back itself, one layer's at a time.

        Of each copy: what goes into an expert, is inside and comes out; of the router: scores,
        softmax and choice, in fp32. Grouped (trainer/fast/experts.py): the group's tokens, and of
        those that could be an expert's here what the first product made.
        """
        size, width, tensor = self.size, self.width, self.where.tensor
        if not size.experts:
            return 0.0, 0.0
        inside, router = 3 if size.gated else 2, 3 * 4 * size.experts / tensor
        beside = inside * (size.shared_ffn - size.ffn) * width / tensor + router
        if grouped:
            over = model_size.whole(self.options, "expert_model_parallel_size", 1)
            rows = rows_of_token(size, over)
            gathered = over * size.hidden * width if over > 1 else 0
            back = rows * width * (3 * size.hidden + 4 * size.expert_ffn) + gathered
            return rows * (2 * size.expert_ffn * width + ROW) + gathered + beside, back
        own = model_size.whole(self.options, "expert_tensor_parallel_size", tensor)
        copies = size.routed * width * (2 * size.hidden * own + inside * size.expert_ffn) / tensor
        return copies + beside, 0.0


def _with_recomputing(
    options: Mapping[str, Value], layers: float, whole: float, entering: float
) -> tuple[float, float]:
    """Bytes that `layers` layers keep, and those that full recomputing makes again at a time."""
    full = options.get("recompute_granularity") == "full"
    again = model_size.whole(options, "recompute_num_layers", 1) if full else 0
    if not again:
        return layers * whole, 0.0
    if options.get("recompute_method") != "block":
        return layers / again * entering, whole * again
    inputs = min(again, layers)
    return inputs * entering + (layers - inputs) * whole, whole


def _in_flight(options: Mapping[str, Value], layers: float, where: Layout) -> float:
    """The micro-batches whose activations the first stage holds at a time; interleaved schedules
    hold more: section 4.2.3 of the paper."""
    virtual = options.get("num_layers_per_virtual_pipeline_stage")
    if isinstance(virtual, int) and where.pipeline > 1:
        return where.pipeline * (1 + (where.pipeline - 1) / (where.pipeline * layers / virtual))
    return where.pipeline


def bytes_of_checkpoint(program: str, options: Mapping[str, Value], where: Layout) -> int | None:
    """Bytes of one checkpoint: weights, fp32 weights beside 16-bit ones, Adam's two moments, and
    what describes their pieces, as measured with 0.16.1."""
    size = _shape(program, options)
    if size is None or bytes_of_states(program, options, 1) is None:
        return None
    values = (2, 4, 4, 4) if _width(options) == 2 else (4, 4, 4)
    each = TENSORS_OF_LAYER * size.layers + 2 * size.experts * size.expert_layers
    pieces = len(values) * (each + OTHER_TENSORS) * where.tensor
    return size.parameters * sum(values) + pieces * BYTES_OF_PIECE + BYTES_OF_FILES
