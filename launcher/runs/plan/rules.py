"""Rules between options that Megatron checks only after the start, and options that it ignores.

Megatron itself is asked in the image, or by the first rank (agent/validate.py). The rules here are
for what it can't be asked (layers, schedules, tokenizers), and for common faults that would cost a
wait in a cluster's queue. Rare options are left to Megatron.

The comment above rules names the file of Megatron that they were read in; a fact names its own in
agent/series. A release that isn't known is held to the rules that all releases have. Options go by
their plain names: num_layers for --num-layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from launcher.agent import series
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.program_options import Value, key_of

ELSEWHERE = ("yaml_cfg", "use_checkpoint_args")
"""With one of these, another file has some of the arguments."""

EP = "expert_model_parallel_size"
VIRTUAL = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")


@dataclass(frozen=True)
class RuleInput:
    """What a program is given: each option's value, the layout, and the variables around it.

    cpu: it runs without a GPU, and so without Transformer Engine and Apex
    """

    values: Mapping[str, Value]
    where: Layout
    env: Mapping[str, object] = field(default_factory=dict)
    cpu: bool = False

    def has(self, *options: str) -> bool:
        """Whether one of them is given."""
        return any(option in self.values for option in options)

    def text(self, option: str, default: str = "") -> str:
        """Its first value."""
        value = self.values.get(option, True)
        values = value if isinstance(value, list) else [] if value is True else [value]
        return str(values[0]) if values else default

    def number(self, option: str, default: float = 0) -> float:
        """Its first value; the default where that is no number, which its type's check reports."""
        try:
            value = float(self.text(option, str(default)))
        except ValueError:
            return default
        return value if isfinite(value) else default


@dataclass(frozen=True)
class OptionRule:
    """What is wrong with an option, and the smallest mend.

    `fact`: the fact of a series that the rule goes by; "" for a rule of all series.
    `lacking`: apply the rule even when the option is absent.
    """

    option: str
    broken: Callable[[RuleInput], bool]
    problem: str
    mend: str
    fact: str = ""
    lacking: bool = False


def needs(option: str, *others: str, fact: str = "") -> OptionRule:
    """The option asks for one of the others."""
    problem = f"needs {' or '.join(map(key_of, others))}"
    mend = f"Set {key_of(others[0])}, or leave {key_of(option)} out."
    return OptionRule(option, lambda o: not o.has(*others), problem, mend, fact)


def excludes(option: str, other: str, fact: str = "") -> OptionRule:
    """The option goes without the other."""
    problem = f"doesn't go with {key_of(other)}"
    return OptionRule(option, lambda o: o.has(other), problem, "Keep one of the two.", fact)


def _splits(option: str, split: Callable[[RuleInput], bool], fact: str) -> OptionRule:
    """Virtual stages are of a pipeline."""
    return OptionRule(
        option,
        lambda o: o.where.pipeline == 1 and split(o),
        "virtual stages need a pipeline, and there is none",
        f"Leave {key_of(option)} out, or set parallel.pipeline_model_parallel_size to 2 or more.",
        fact,
    )


def _tokenizer(option: str, kinds: str, problem: str, mend: str, fact: str = "") -> OptionRule:
    """Tokenizers that have to be given an option."""
    return OptionRule(
        option,
        lambda o: o.text("tokenizer_type") in kinds.split() and not o.has(option),
        problem,
        mend,
        fact,
        lacking=True,
    )


def _is_split(o: RuleInput) -> bool:
    """Whether a stage is several virtual ones; from 0.13 on, one is none."""
    layers, each = o.number("num_layers"), o.number(VIRTUAL[0])
    return (o.number(VIRTUAL[1]) or (layers / o.where.pipeline / each if each else 1)) > 1


def _ragged(o: RuleInput) -> bool:
    """Whether a step's micro-batches leave fewer than one for each stage at the end."""
    stages, step = o.where.pipeline, o.number("micro_batch_size") * o.where.data
    group = o.number("microbatch_group_size_per_virtual_pipeline_stage") or stages
    batches = [o.number("global_batch_size") or step, o.number("rampup_batch_size")]
    return any(0 < size / step % group < stages for size in batches if step and size % step == 0)


def _apart(o: RuleInput) -> bool:
    """Whether expert parallelism doesn't divide the processes that it is laid over."""
    tensor = o.number("expert_tensor_parallel_size") or o.where.tensor
    return o.where.world % (tensor * (o.number(EP) or 1) * o.where.pipeline) != 0


def _unreplicated(o: RuleInput) -> bool:
    """Whether it doesn't divide the replicas, which is 0.9's rule."""
    return o.where.data % (o.number(EP) or 1) != 0


SIXTEENS = 16
"""What both sizes of a product in FP8 are multiples of, in Transformer Engine's linear layers."""


def _ragged_in_fp8(o: RuleInput) -> bool:
    """Whether a process has a number of tokens of a sequence that FP8 can't take."""
    shares = o.where.context * (o.where.tensor if o.has("sequence_parallel") else 1)
    return o.number("seq_length") / shares % SIXTEENS != 0


def _narrow_in_fp8(o: RuleInput) -> bool:
    """Whether a linear layer is so wide on each process that FP8 can't take it."""
    hidden, heads = o.number("hidden_size"), o.number("num_attention_heads")
    if not hidden or not heads:
        return False
    grouped = o.number("num_query_groups", 1) if o.has("group_query_attention") else heads
    head = o.number("kv_channels") or hidden / heads
    usual = hidden * 8 / 3 // 64 * 64 if o.has("swiglu") else 4 * hidden
    ffn = o.number("ffn_hidden_size") or usual
    divided = [ffn, heads * head, (heads + 2 * grouped) * head]
    divided += [o.number(name) for name in ("moe_ffn_hidden_size",) if o.has(name)]
    return any(size % SIXTEENS for size in (hidden, *(each / o.where.tensor for each in divided)))


def _warms(unit: str) -> OptionRule:
    """The warm-up ends before the decay does."""

    def broken(o: RuleInput) -> bool:
        decay = o.number(f"lr_decay_{unit}") or o.number(f"train_{unit}")
        return 0 < decay <= o.number(f"lr_warmup_{unit}") and not o.has("skip_train")

    mend = f"Set it below training.lr_decay_{unit}, which is training.train_{unit} unless given."
    return OptionRule(f"lr_warmup_{unit}", broken, "the warm-up isn't shorter than the decay", mend)


# Rows of an option, what breaks the rule, what is wrong, how to mend it, and the releases.
# fmt: off
RULES = (
    # The CPU, which Transformer Engine and Apex don't serve: core/models/gpt/gpt_layer_specs.py
    OptionRule("transformer_impl", lambda o: o.cpu and o.text("transformer_impl") != "local",
         "without a GPU there is no Transformer Engine, whose layers Megatron takes",
         "Set model.transformer_impl to local.", lacking=True),
    # core/transformer/torch_norm.py (torch_layer_norm.py up to 0.9)
    OptionRule("no_persist_layer_norm", lambda o: (
             o.cpu and not o.has("no_persist_layer_norm")
             and o.text("normalization", "LayerNorm") == "LayerNorm"),
         "without a GPU there is no Apex, whose layer norm Megatron takes",
         "Set megatron_args.no_persist_layer_norm to true.", lacking=True),
    OptionRule("no_gradient_accumulation_fusion",  # core/tensor_parallel/layers.py
         lambda o: o.cpu and not o.has("no_gradient_accumulation_fusion"),
         "without a GPU there is no Apex, which adds to gradients as it multiplies",
         "Set megatron_args.no_gradient_accumulation_fusion to true.", lacking=True),

    # Pipelines: training/arguments.py
    _splits(VIRTUAL[0], lambda o: True, "virtual stages need a pipeline"),
    *(_splits(option, _is_split, "one virtual stage is none") for option in VIRTUAL),
    # core/pipeline_parallel/schedules.py
    OptionRule("global_batch_size",
         lambda o: o.has(*VIRTUAL) and o.where.pipeline > 1 and _ragged(o),
         "its micro-batches on each replica aren't divisible by the pipeline, which virtual stages "
         "need",
         "Set it to a multiple of micro-batch × replicas × pipeline, or leave "
         f"{key_of(VIRTUAL[0])} out.", lacking=True),

    # The distributed optimizer and what it overlaps: training/arguments.py
    needs("overlap_param_gather", "use_distributed_optimizer",
          fact="parameters are gathered for the distributed optimizer alone"),
    needs("overlap_param_gather", "use_distributed_optimizer", "use_megatron_fsdp",
          fact="parameters are gathered for FSDP too"),
    OptionRule("overlap_param_gather", lambda o: (
             not o.has("use_distributed_optimizer", "use_megatron_fsdp")
             and not o.text("optimizer").startswith("dist_")),
         "needs parallel.use_distributed_optimizer",
         "Set parallel.use_distributed_optimizer: true, or leave it out.",
         "parameters are gathered for optimizers of shards"),
    needs("overlap_param_gather", "overlap_grad_reduce"),

    # Experts: core/transformer/transformer_config.py
    OptionRule(EP, lambda o: o.number(EP) > 1 and not o.number("num_experts"),
         "expert parallelism needs experts",
         "Set megatron_args.num_experts, or leave it out."),
    # core/transformer/moe/moe_layer.py
    OptionRule(EP, lambda o: o.number(EP) > 1 and o.number("num_experts") % o.number(EP) != 0,
         "the experts aren't divisible by it",
         "Set it to a divisor of megatron_args.num_experts."),
    # core/parallel_state.py
    OptionRule(EP, lambda o: _unreplicated(o) and not _apart(o),
         "the replicas aren't divisible by it",
         "Set it to a divisor of the data-parallel size.", "experts divide the replicas"),
    OptionRule(EP, lambda o: _unreplicated(o) and _apart(o),
         "the replicas aren't divisible by it, and the processes aren't divisible by expert × "
         "tensor × pipeline parallelism",
         "Set it to a divisor of the data-parallel size."),
    OptionRule(EP, lambda o: _apart(o) and not _unreplicated(o),
         "the processes aren't divisible by expert × tensor × pipeline parallelism",
         "Set it to a smaller one, or megatron_args.expert_tensor_parallel_size: 1.",
         "experts divide the processes", lacking=True),
    # core/model_parallel_config.py
    OptionRule(EP, lambda o: (
             o.number(EP) > 1 and o.where.tensor > 1 and not o.has("sequence_parallel")),
         "with tensor parallelism it needs parallel.sequence_parallel",
         "Set parallel.sequence_parallel: true."),

    # Learning rate: core/optimizer_param_scheduler.py
    *(_warms(unit) for unit in ("iters", "samples")),
    OptionRule("lr_warmup_fraction",
         lambda o: o.number("lr_warmup_fraction") >= 1 and not o.has("skip_train"),
         "the warm-up isn't shorter than the decay", "Set it below 1."),
    OptionRule("lr_decay_style", lambda o: (
             o.text("lr_decay_style") == "WSD"
             and not o.has("lr_wsd_decay_iters", "lr_wsd_decay_samples")),
         "WSD needs megatron_args.lr_wsd_decay_iters (or _samples), the length of its decay",
         "Set that, or another style."),
    # training/arguments.py
    excludes("rampup_batch_size", "train_iters", "the batch grows"),
    # core/num_microbatches_calculator.py
    OptionRule("rampup_batch_size",
         lambda o: o.number("rampup_batch_size") >= o.number("global_batch_size", inf),
         "begins at the global batch or above",
         "Set its first number to less than training.global_batch_size, or leave it out.",
         "the batch grows"),

    # Recomputing: core/transformer/transformer_config.py
    OptionRule("recompute_granularity", lambda o: (
             o.text("recompute_granularity") == "full" and not o.has("recompute_activations")
             and not (o.has("recompute_method") and o.has("recompute_num_layers"))),
         "full needs megatron_args.recompute_method and recompute_num_layers",
         "Set recompute_method: uniform and recompute_num_layers: 1."),

    # Precision: Transformer Engine's assert_dim_for_fp8_exec, and cuBLAS beneath it
    OptionRule("fp8_format", _ragged_in_fp8,
         f"each process's tokens of a sequence aren't a multiple of {SIXTEENS}, which FP8 needs",
         f"Set model.seq_length to a multiple of {SIXTEENS} × context parallelism, and × tensor "
         "with parallel.sequence_parallel."),
    OptionRule("fp8_format", _narrow_in_fp8,
         f"a layer's width on each process isn't a multiple of {SIXTEENS}, which FP8 needs",
         "Let the hidden size, and heads, groups and MLP over tensor parallelism, be one of "
         f"{SIXTEENS}."),
    # training/arguments.py
    OptionRule("deterministic_mode", lambda o: "NCCL_ALGO" not in o.env,
         "needs the variable NCCL_ALGO", "Set env: {NCCL_ALGO: Ring}.",
         "deterministic mode needs NCCL_ALGO"),

    # Tokenizers: training/tokenizer/, from 0.17 on core/tokenizers/utils/build_tokenizer.py
    _tokenizer("vocab_file", "GPT2BPETokenizer",
         "GPT2BPETokenizer, which is taken unless data.tokenizer_type is given, needs a vocabulary",
         "Set data.tokenizer_type: NullTokenizer for tokens that are made, or data.vocab_file and "
         "data.merge_file.", "vocabulary files are needed"),
    OptionRule("merge_file", lambda o: (
             o.text("tokenizer_type") == "GPT2BPETokenizer"
             and o.has("vocab_file") and not o.has("merge_file")),
         "GPT2BPETokenizer needs its merges beside data.vocab_file",
         "Set data.merge_file.", "vocabulary files are needed", lacking=True),
    _tokenizer("vocab_file", "BertWordPieceLowerCase BertWordPieceCase",
         "this tokenizer needs a vocabulary", "Set data.vocab_file.",
         "vocabulary files are needed"),
    _tokenizer("tokenizer_model", "SentencePieceTokenizer GPTSentencePieceTokenizer "
         "Llama2Tokenizer TikTokenizer HuggingFaceTokenizer", "this tokenizer needs a model",
         "Set data.tokenizer_model to its file, or to its name for HuggingFaceTokenizer."),
    _tokenizer("vocab_size", "NullTokenizer NullMultimodalTokenizer",
         "this tokenizer needs the vocabulary's size", "Set data.vocab_size."),
)
"""What Megatron ends at."""

IGNORED = (
    # training/arguments.py
    OptionRule("sequence_parallel", lambda o: o.where.tensor == 1,
         "sequence parallelism is turned off, as there is no tensor parallelism",
         "Set parallel.tensor_model_parallel_size to 2 or more, or leave it out."),
    OptionRule("rampup_batch_size", lambda o: True,
         "this Megatron ignores it: every step takes the whole global batch",
         "Leave it out, or take an image with Megatron 0.17 or older.",
         "a growing batch is ignored"),
    OptionRule("tokenizer_type", lambda o: o.text("tokenizer_type") == "GPT2BPETokenizer",
         "this Megatron reads gpt2 of Hugging Face's hub for GPT2BPETokenizer, whatever "
         "data.vocab_file is, and fails where it can't reach it",
         "Take NullTokenizer for data that is tokenized, or HuggingFaceTokenizer with a folder as "
         "data.tokenizer_model.", "vocabularies are the hub's", lacking=True),
)
"""What a program goes on without."""
# fmt: on


def broken(
    rules: tuple[OptionRule, ...], told: RuleInput, release: str | None, place: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """What is wrong by the rules of `release`, with the mend; `place` says where it stands."""
    if told.has(*ELSEWHERE):
        return
    for rule in rules:
        asked = rule.lacking or told.has(rule.option)
        if asked and _holds(rule.fact, release) and rule.broken(told):
            yield f"{place(rule.option)}: {rule.problem}", rule.mend


def _holds(fact: str, release: str | None) -> bool:
    """Whether a rule's fact holds; a release that nobody has described keeps what all do."""
    return not fact or series.has(release if release and series.is_known(release) else None, fact)
