"""The rules between options that Megatron checks itself, minutes later, and what it ignores.

They are those of validate_args (megatron/training/arguments.py), ModelParallelConfig and
TransformerConfig, initialize_model_parallel, OptimizerParamScheduler, build_tokenizer and the
interleaved schedule. A release that isn't known is held to the rules that all releases have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from launcher.plan.arguments import table
from launcher.plan.keys import key
from launcher.plan.layout import Layout

ELSEWHERE = ("--yaml-cfg", "--use-checkpoint-args")
"""With one of these, another file has some of the arguments."""

ALWAYS = "0.9-"
EP = "--expert-model-parallel-size"
VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
UNEVEN = ("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers")


@dataclass(frozen=True)
class Options:
    """What a program is given: each option's values, the layout, and the variables around it.

    cpu: it runs without a GPU, and so without Transformer Engine and Apex
    """

    values: Mapping[str, tuple[str, ...]]
    where: Layout
    env: Mapping[str, object] = field(default_factory=dict)
    cpu: bool = False

    def has(self, *options: str) -> bool:
        """Whether one of them is given."""
        return any(option in self.values for option in options)

    def text(self, option: str, default: str = "") -> str:
        """Its first value."""
        return (self.values.get(option) or (default,))[0]

    def number(self, option: str, default: float = 0) -> float:
        """Its first value; the default where that is no number, which is told of its kind."""
        try:
            value = float(self.text(option, str(default)))
        except ValueError:
            return default
        return value if isfinite(value) else default


@dataclass(frozen=True)
class Rule:
    """What is wrong with an option, and the smallest mend, in the releases that say so."""

    option: str
    broken: Callable[[Options], bool]
    problem: str
    mend: str
    releases: str = ALWAYS


def needs(option: str, *others: str, releases: str = ALWAYS) -> Rule:
    """The option asks for one of the others."""
    return Rule(
        option,
        lambda given: given.has(option) and not given.has(*others),
        f"needs {' or '.join(map(key, others))}",
        f"Set {key(others[0])}, or leave {key(option)} out.",
        releases,
    )


def excludes(option: str, other: str, releases: str = ALWAYS) -> Rule:
    """The option goes without the other."""
    return Rule(
        option,
        lambda given: given.has(option) and given.has(other),
        f"doesn't go with {key(other)}",
        "Keep one of the two.",
        releases,
    )


def _piped(option: str, split: Callable[[Options], bool], releases: str) -> Rule:
    """Virtual stages are of a pipeline."""
    return Rule(
        option,
        lambda given: given.has(option) and given.where.pipeline == 1 and split(given),
        "virtual stages are of a pipeline, and there is none",
        f"Leave {key(option)} out, or set parallel.pipeline_model_parallel_size to 2 or more.",
        releases,
    )


def _interleaves(given: Options) -> bool:
    return given.has(*VIRTUAL) and given.where.pipeline > 1


def _one_chunk(given: Options) -> bool:
    """Whether a stage is one virtual stage, which from 0.13 on is none."""
    layers, each = given.number("--num-layers"), given.number(VIRTUAL[0])
    chunks = given.number(VIRTUAL[1]) or (layers / given.where.pipeline / each if each else 1)
    return chunks <= 1


def _ragged(given: Options) -> bool:
    """Whether a step's micro-batches leave fewer than one for each stage at the end."""
    stages, step = given.where.pipeline, given.number("--micro-batch-size") * given.where.data
    group = given.number("--microbatch-group-size-per-virtual-pipeline-stage") or stages
    whole = given.number("--global-batch-size") or step
    batches = [whole, given.number("--rampup-batch-size")]
    return any(0 < size / step % group < stages for size in batches if step and size % step == 0)


def _uneven(given: Options) -> bool:
    """Whether the layers left by the first and last stages can't be dealt out to the others."""
    ends = [given.number(option) for option in UNEVEN if given.has(option)]
    layers, stages = given.number("--num-layers") - sum(ends), given.where.pipeline - len(ends)
    if not ends or not given.has("--num-layers"):
        return False
    return layers % stages != 0 or layers <= 0 if stages > 0 else layers != 0


def _experts(given: Options) -> bool:
    return (given.number(EP) or 1) > 1


def _apart(given: Options) -> bool:
    """Whether expert parallelism doesn't divide the processes that it is laid over."""
    tensor = given.number("--expert-tensor-parallel-size") or given.where.tensor
    return given.where.world % (tensor * (given.number(EP) or 1) * given.where.pipeline) != 0


def _shorter(unit: str) -> Rule:
    """The warm-up ends before the decay does."""

    def broken(given: Options) -> bool:
        decay = given.number(f"--lr-decay-{unit}") or given.number(f"--train-{unit}")
        warm = given.number(f"--lr-warmup-{unit}")
        return 0 < decay <= warm and not given.has("--skip-train")

    mend = f"Set it below training.lr_decay_{unit}, which is training.train_{unit} unless given."
    return Rule(f"--lr-warmup-{unit}", broken, "the warm-up is as long as the decay", mend)


def _recomputes(given: Options, how: str) -> bool:
    chosen = given.text("--recompute-granularity")
    return how == ("selective" if given.has("--recompute-activations") else chosen)


def _weight_decay_grows(given: Options) -> bool:
    return given.text("--weight-decay-incr-style", "constant") != "constant"


def _plain_gelu(given: Options) -> bool:
    """Whether bias and activation are fused, which only GELU and SwiGLU can be."""
    return not given.has("--no-bias-gelu-fusion", "--disable-bias-linear", "--swiglu")


def _names(given: Options, *kinds: str) -> bool:
    return given.text("--tokenizer-type") in kinds


def _lacks(option: str, *kinds: str) -> Callable[[Options], bool]:
    return lambda given: _names(given, *kinds) and not given.has(option)


NULL = "Set data.tokenizer_type: NullTokenizer for tokens that are made, or data."

RULES = (
    # The CPU: Transformer Engine's layers, and Apex's normalisation, are of GPUs alone.
    Rule(
        "--transformer-impl",
        lambda given: given.cpu and given.text("--transformer-impl") != "local",
        "without a GPU there is no Transformer Engine, whose layers Megatron takes",
        "Set model.transformer_impl to local.",
    ),
    Rule(
        "--no-persist-layer-norm",
        lambda given: (
            given.cpu
            and not given.has("--no-persist-layer-norm")
            and given.text("--normalization", "LayerNorm") == "LayerNorm"
        ),
        "without a GPU there is no Apex, whose layer norm Megatron takes",
        "Set megatron_args.no_persist_layer_norm to true.",
    ),
    # Pipelines.
    _piped(VIRTUAL[0], lambda given: True, "0.9-0.12"),
    *(_piped(option, lambda given: not _one_chunk(given), "0.13-") for option in VIRTUAL),
    Rule(
        "--no-overlap-p2p-communication",
        lambda given: (
            given.has("--no-overlap-p2p-communication")
            and _interleaves(given)
            and given.where.pipeline == 2
        ),
        "virtual stages of a pipeline of 2 send and receive at once",
        "Leave it out, or set parallel.pipeline_model_parallel_size to 3 or more.",
    ),
    Rule(
        "--global-batch-size",
        lambda given: _interleaves(given) and _ragged(given),
        "its micro-batches on each replica aren't divisible by the pipeline, which virtual stages "
        "need",
        "Set it to a multiple of micro-batch × replicas × pipeline, or leave "
        f"{key(VIRTUAL[0])} out.",
    ),
    Rule(
        UNEVEN[0],
        _uneven,
        "the layers left aren't divisible by the stages between the first and the last",
        "Set megatron_args.decoder_first_pipeline_num_layers and _last_ so that they are.",
        "0.16-",
    ),
    # The distributed optimizer and what it overlaps.
    needs("--overlap-param-gather", "--use-distributed-optimizer", releases="0.9-0.13"),
    needs(
        "--overlap-param-gather",
        "--use-distributed-optimizer",
        "--use-megatron-fsdp",
        releases="0.14-0.16",
    ),
    Rule(
        "--overlap-param-gather",
        lambda given: (
            given.has("--overlap-param-gather")
            and not given.has("--use-distributed-optimizer", "--use-megatron-fsdp")
            and not given.text("--optimizer").startswith("dist_")
        ),
        "needs parallel.use_distributed_optimizer",
        "Set parallel.use_distributed_optimizer: true, or leave it out.",
        "0.17-",
    ),
    needs("--overlap-param-gather", "--overlap-grad-reduce"),
    needs("--overlap-param-gather-with-optimizer-step", "--use-distributed-optimizer"),
    needs("--overlap-param-gather-with-optimizer-step", "--overlap-param-gather"),
    needs("--overlap-param-gather-with-optimizer-step", *VIRTUAL),
    Rule(
        "--overlap-param-gather-with-optimizer-step",
        lambda given: (
            given.has("--overlap-param-gather-with-optimizer-step")
            and given.text("--ckpt-format", "torch_dist") != "torch"
        ),
        "can't save distributed checkpoints",
        "Set megatron_args.ckpt_format: torch, or leave it out.",
    ),
    # Experts.
    Rule(
        EP,
        lambda given: _experts(given) and given.number("--num-experts") == 0,
        "expert parallelism needs experts",
        "Set megatron_args.num_experts, or leave it out.",
    ),
    Rule(
        EP,
        lambda given: _experts(given) and given.number("--num-experts") % given.number(EP) != 0,
        "the experts aren't divisible by it",
        "Set it to a divisor of megatron_args.num_experts.",
    ),
    Rule(
        EP,
        lambda given: _experts(given) and given.has("--fp16"),
        "expert parallelism isn't for fp16",
        "Set training.bf16: true in place of training.fp16.",
        "0.9-0.15",
    ),
    Rule(
        EP,
        lambda given: given.where.data % (given.number(EP) or 1) != 0,
        "the replicas aren't divisible by it",
        "Set it to a divisor of the data-parallel size.",
        "0.9-0.9",
    ),
    Rule(
        EP,
        _apart,
        "the processes aren't divisible by expert × tensor × pipeline parallelism",
        "Set it to a smaller one, or megatron_args.expert_tensor_parallel_size: 1.",
        "0.10-",
    ),
    Rule(
        EP,
        lambda given: (
            _experts(given) and given.where.tensor > 1 and not given.has("--sequence-parallel")
        ),
        "with tensor parallelism it needs parallel.sequence_parallel",
        "Set parallel.sequence_parallel: true.",
    ),
    needs("--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor"),
    Rule(
        "--moe-expert-capacity-factor",
        lambda given: (
            given.has("--moe-expert-capacity-factor")
            and given.text("--moe-token-dispatcher-type", "allgather") == "allgather"
        ),
        "is for the alltoall dispatcher",
        "Set megatron_args.moe_token_dispatcher_type: alltoall, or leave it out.",
        "0.9-0.11",
    ),
    Rule(
        "--moe-router-topk",
        lambda given: (
            given.number("--moe-router-topk") == 1
            and not given.has("--moe-router-pre-softmax")
            and given.text("--moe-router-score-function", "softmax") == "softmax"
            and given.text("--moe-router-load-balancing-type") != "sinkhorn"
        ),
        "one expert for each token needs its softmax before the choice",
        "Set megatron_args.moe_router_pre_softmax: true.",
        "0.11-",
    ),
    # Learning rate and weight decay.
    *(_shorter(unit) for unit in ("iters", "samples")),
    Rule(
        "--lr-warmup-fraction",
        lambda given: given.number("--lr-warmup-fraction") >= 1 and not given.has("--skip-train"),
        "the warm-up is as long as the decay",
        "Set it below 1.",
    ),
    Rule(
        "--lr-decay-style",
        lambda given: (
            given.text("--lr-decay-style") == "WSD"
            and not given.has("--lr-wsd-decay-iters", "--lr-wsd-decay-samples")
        ),
        "WSD needs megatron_args.lr_wsd_decay_iters (or _samples), the length of its decay",
        "Set that, or another style.",
    ),
    Rule(
        "--start-weight-decay",
        lambda given: (
            given.has("--start-weight-decay", "--end-weight-decay")
            and not _weight_decay_grows(given)
        ),
        "a weight decay that grows needs megatron_args.weight_decay_incr_style",
        "Set it to linear or cosine, or training.weight_decay in place of start and end.",
    ),
    Rule(
        "--weight-decay-incr-style",
        lambda given: (
            _weight_decay_grows(given)
            and not (given.has("--start-weight-decay") and given.has("--end-weight-decay"))
        ),
        "needs megatron_args.start_weight_decay and end_weight_decay",
        "Set both, or leave it out.",
    ),
    excludes("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler", "0.9-0.15"),
    excludes("--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler", "0.16-"),
    excludes("--rampup-batch-size", "--train-iters", "0.9-0.17"),
    Rule(
        "--rampup-batch-size",
        lambda given: (
            given.number("--rampup-batch-size") >= given.number("--global-batch-size", inf)
        ),
        "begins at the global batch or above",
        "Set its first number to less than training.global_batch_size, or leave it out.",
        "0.9-0.17",
    ),
    # Recomputing.
    Rule(
        "--distribute-saved-activations",
        lambda given: given.has("--distribute-saved-activations") and given.where.tensor == 1,
        "saved activations are distributed over tensor parallelism, and there is none",
        "Leave it out, or set parallel.tensor_model_parallel_size to 2 or more.",
    ),
    Rule(
        "--distribute-saved-activations",
        lambda given: (
            given.has("--distribute-saved-activations") and not _recomputes(given, "full")
        ),
        "needs megatron_args.recompute_granularity: full",
        "Set that, or leave it out.",
    ),
    excludes("--distribute-saved-activations", "--sequence-parallel"),
    Rule(
        "--recompute-method",
        lambda given: _recomputes(given, "selective") and given.has("--recompute-method"),
        "is for recompute_granularity: full",
        "Leave it out.",
    ),
    Rule(
        "--recompute-num-layers",
        lambda given: _recomputes(given, "selective") and given.has("--recompute-num-layers"),
        "is for recompute_granularity: full",
        "Leave it out.",
    ),
    Rule(
        "--recompute-granularity",
        lambda given: (
            _recomputes(given, "full")
            and not (given.has("--recompute-method") and given.has("--recompute-num-layers"))
        ),
        "full needs megatron_args.recompute_method and recompute_num_layers",
        "Set recompute_method: uniform and recompute_num_layers: 1.",
    ),
    Rule(
        "--use-tp-pp-dp-mapping",
        lambda given: (
            given.has("--use-tp-pp-dp-mapping") and (_experts(given) or given.where.context > 1)
        ),
        "goes with neither context nor expert parallelism",
        "Leave it out.",
        "0.9-0.10",
    ),
    # Precision, kernels and positions.
    needs("--fp16-lm-cross-entropy", "--fp16"),
    needs("--fp32-residual-connection", "--bf16", "--fp16"),
    needs("--tp-comm-overlap", "--sequence-parallel"),
    Rule(
        "--tp-comm-overlap",
        lambda given: given.has("--tp-comm-overlap") and given.where.tensor == 1,
        "overlaps tensor parallelism, and there is none",
        "Leave it out, or set parallel.tensor_model_parallel_size to 2 or more.",
        "0.10-",
    ),
    Rule(
        "--moe-grouped-gemm",
        lambda given: given.has("--moe-grouped-gemm") and not given.has("--bf16"),
        "is for bf16",
        "Set training.bf16: true, or leave it out.",
        "0.9-0.15",
    ),
    Rule(
        "--squared-relu",
        lambda given: given.has("--squared-relu") and _plain_gelu(given),
        "can't be fused with the bias",
        "Set megatron_args.no_bias_gelu_fusion: true.",
    ),
    excludes("--squared-relu", "--swiglu"),
    excludes("--use-flash-attn", "--deterministic-mode"),
    excludes("--cross-entropy-loss-fusion", "--deterministic-mode"),
    Rule(
        "--deterministic-mode",
        lambda given: given.has("--deterministic-mode") and "NCCL_ALGO" not in given.env,
        "needs the variable NCCL_ALGO",
        "Set env: {NCCL_ALGO: Ring}.",
        "0.9-0.18",
    ),
    Rule(
        "--no-position-embedding",
        lambda given: (
            given.has("--no-position-embedding")
            and not given.has("--use-rotary-position-embeddings")
            and given.text("--position-embedding-type") != "rope"
        ),
        "goes with rotary positions alone",
        "Set model.position_embedding_type: none in its place.",
    ),
    Rule(
        "--rotary-interleaved",
        lambda given: given.has("--rotary-interleaved") and not given.has("--no-rope-fusion"),
        "doesn't go with the fused kernel of rotary positions",
        "Set megatron_args.no_rope_fusion: true.",
        "0.9-0.13",
    ),
    # Tokenizers.
    Rule(
        "--vocab-file",
        _lacks("--vocab-file", "GPT2BPETokenizer"),
        "GPT2BPETokenizer, which is taken unless data.tokenizer_type is given, needs a vocabulary",
        f"{NULL}vocab_file and data.merge_file.",
        "0.9-0.16",
    ),
    Rule(
        "--merge-file",
        lambda given: (
            _names(given, "GPT2BPETokenizer")
            and given.has("--vocab-file")
            and not given.has("--merge-file")
        ),
        "GPT2BPETokenizer needs its merges beside data.vocab_file",
        "Set data.merge_file.",
        "0.9-0.16",
    ),
    Rule(
        "--vocab-file",
        _lacks("--vocab-file", "BertWordPieceLowerCase", "BertWordPieceCase"),
        "this tokenizer needs a vocabulary",
        "Set data.vocab_file.",
        "0.9-0.16",
    ),
    Rule(
        "--tokenizer-model",
        _lacks(
            "--tokenizer-model",
            *("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"),
            *("TikTokenizer", "HuggingFaceTokenizer"),
        ),
        "this tokenizer needs a model",
        "Set data.tokenizer_model to its file, or to its name for HuggingFaceTokenizer.",
    ),
    Rule(
        "--vocab-size",
        _lacks("--vocab-size", "NullTokenizer", "NullMultimodalTokenizer"),
        "this tokenizer needs the vocabulary's size",
        "Set data.vocab_size.",
    ),
)
"""What Megatron ends at."""

IGNORED = (
    Rule(
        "--sequence-parallel",
        lambda given: given.has("--sequence-parallel") and given.where.tensor == 1,
        "sequence parallelism is turned off, as there is no tensor parallelism",
        "Set parallel.tensor_model_parallel_size to 2 or more, or leave it out.",
    ),
    Rule(
        "--rampup-batch-size",
        lambda given: given.has("--rampup-batch-size"),
        "this Megatron ignores it: every step takes the whole global batch",
        "Leave it out, or take an image with Megatron 0.17 or older.",
        "0.18-",
    ),
)
"""What a program goes on without."""


def broken(
    rules: tuple[Rule, ...], given: Options, release: str | None, place: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """What is wrong by the rules of `release`, with the mend; `place` tells where it stands."""
    if given.has(*ELSEWHERE):
        return
    for rule in rules:
        if table().spans(rule.releases, release) and rule.broken(given):
            yield f"{place(rule.option)}: {rule.problem}", rule.mend
