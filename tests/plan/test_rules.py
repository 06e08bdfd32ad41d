"""What Megatron would end at minutes later is refused before the start, and says how to mend it."""

from __future__ import annotations

import pytest

from launcher.errors import UsageError
from launcher.plan import arguments, rules
from launcher.plan.arguments import Value
from launcher.plan.image import Facts
from launcher.plan.layout import Layout
from tests.plans import Planner

FILE = """name: a
image: cpu
gpus: 8
program: pretrain_gpt.py
model: {num_layers: 8, hidden_size: 64, num_attention_heads: 8, seq_length: 64,
  max_position_embeddings: 64}
training: {micro_batch_size: 1, global_batch_size: 16, train_iters: 100, lr: 1.0e-3, bf16: true}
data: {mock: true, vocab_size: 100}
"""
PP = "parallel.pipeline_model_parallel_size"
VIRTUAL = "parallel.num_layers_per_virtual_pipeline_stage"
EP = "parallel.expert_model_parallel_size"
EXPERTS = "megatron_args.num_experts=8"
FP8 = "megatron_args.fp8_format=hybrid"
SAMPLES = ("training.train_iters=null", "training.train_samples=1000")

DIES: list[tuple[str, tuple[str, ...], str, str]] = [
    # Issue 22's list: taken, and ended minutes later by Megatron 0.9.0.
    ("0.9.0", (f"{VIRTUAL}=2",), VIRTUAL, "of a pipeline"),
    ("0.9.0", ("parallel.overlap_param_gather=true", "parallel.overlap_grad_reduce=true"),
     "overlap_param_gather", "needs parallel.use_distributed_optimizer"),
    ("0.9.0", ("parallel.overlap_param_gather=true", "parallel.use_distributed_optimizer=true"),
     "overlap_param_gather", "needs parallel.overlap_grad_reduce"),
    ("0.9.0", (f"{EP}=2",), EP, "needs experts"),
    ("0.9.0", (f"{EP}=3", "megatron_args.num_experts=9"), EP, "replicas aren't divisible"),
    ("0.9.0", (f"{EP}=2", "megatron_args.num_experts=5"), EP, "experts aren't divisible"),
    ("0.9.0", (f"{EP}=2", EXPERTS, "training.bf16=null", "training.fp16=true"), EP, "fp16"),
    ("0.9.0", (f"{EP}=2", EXPERTS, "parallel.tensor_model_parallel_size=2"), EP,
     "needs parallel.sequence_parallel"),
    ("0.9.0", ("training.lr_warmup_iters=100",), "lr_warmup_iters", "as long as the decay"),
    ("0.9.0", ("training.lr_warmup_iters=10", "training.lr_decay_iters=10"), "lr_warmup_iters",
     "as long as the decay"),
    ("0.9.0", (*SAMPLES, "training.lr_warmup_samples=1000"), "lr_warmup_samples",
     "as long as the decay"),
    ("0.9.0", ("training.lr_warmup_fraction=1.0",), "lr_warmup_fraction", "as long as the decay"),
    ("0.9.0", ("training.lr_decay_style=WSD",), "lr_decay_style", "lr_wsd_decay_iters"),
    ("0.9.0", ("data.vocab_size=null",), "data.vocab_file", "needs a vocabulary"),
    ("0.9.0", ("data.path=x",), "data.vocab_file", "needs a vocabulary"),
    ("0.9.0", ("data.path=x", "data.vocab_file=v"), "data.merge_file", "needs its merges"),
    ("0.9.0", ("data.path=x", "data.tokenizer_type=Llama2Tokenizer"), "data.tokenizer_model",
     "needs a model"),
    ("0.9.0", ("data.tokenizer_type=NullTokenizer", "data.vocab_size=null"), "data.vocab_size",
     "needs the vocabulary's size"),
    ("0.9.0", (f"{VIRTUAL}=2", f"{PP}=4", "training.global_batch_size=12"),
     "training.global_batch_size", "virtual stages need"),
    ("0.9.0", (*SAMPLES, "training.rampup_batch_size=[16, 8, 100]"), "rampup_batch_size",
     "begins at the global batch"),
    ("0.9.0", ("training.rampup_batch_size=[8, 8, 100]",), "rampup_batch_size", "train_iters"),
    # The rules between options of megatron_args.
    ("0.9.0", ("megatron_args.recompute_granularity=full",), "recompute_granularity",
     "recompute_method and recompute_num_layers"),
    ("0.9.0", ("megatron_args.squared_relu=true",), "squared_relu", "fused"),
    ("0.9.0", ("megatron_args.deterministic_mode=true",), "deterministic_mode", "NCCL_ALGO"),
    ("0.9.0", ("megatron_args.fp8_format=hybrid", "model.hidden_size=72"), "fp8_format", "16"),
    ("0.9.0", ("megatron_args.fp8_format=hybrid", "parallel.tensor_model_parallel_size=8"),
     "fp8_format", "width on each process"),  # a rank's share of 64 is 8
    # By release.
    ("0.11.0", ("megatron_args.moe_router_topk=1",), "moe_router_topk", "softmax"),
    ("0.16.1", (f"{EP}=3", "megatron_args.num_experts=9"), EP, "processes aren't divisible"),
    ("1.0", (f"{EP}=4", "megatron_args.num_experts=6"), EP, "experts aren't divisible"),
    ("1.0", (f"{EP}=3", "megatron_args.num_experts=6"), EP, "replicas aren't divisible"),
    ("0.16.1", ("model.seq_length=100", "model.max_position_embeddings=128", FP8), "fp8_format",
     "tokens of a sequence"),
    ("0.16.1", ("model.hidden_size=256", "parallel.tensor_model_parallel_size=8",
                "parallel.sequence_parallel=true", FP8), "fp8_format", "tokens of a sequence"),
    ("0.16.1", ("model.ffn_hidden_size=200", FP8), "fp8_format", "width"),
    ("0.16.1", ("megatron_args.moe_ffn_hidden_size=64",), "moe_ffn_hidden_size",
     "needs megatron_args.num_experts"),
    ("0.16.1", ("megatron_args.decoder_first_pipeline_num_layers=3", f"{PP}=4"),
     "decoder_first_pipeline_num_layers", "layers left"),
]  # fmt: skip


@pytest.mark.parametrize(("release", "sets", "key", "told"), DIES)
def test_what_megatron_ends_at_is_refused(
    plan: Planner, release: str, sets: tuple[str, ...], key: str, told: str
) -> None:
    """Each was taken, and ended the run once all its processes had started."""
    with pytest.raises(UsageError) as caught:
        plan(FILE, *sets, facts=Facts(release, True))
    (problem, mend) = str(caught.value).splitlines()
    assert key in problem.partition(": ")[0] or f"{key}: " in problem
    assert told in problem
    assert mend.strip()


@pytest.mark.parametrize(
    ("release", "sets"),
    [
        ("0.9.0", ()),
        ("0.9.0", (f"{VIRTUAL}=2", f"{PP}=4")),
        ("0.9.0", (f"{EP}=2", EXPERTS)),
        ("0.16.1", (f"{EP}=2", EXPERTS, "training.bf16=null", "training.fp16=true")),
        ("0.16.1", (f"{VIRTUAL}=8",)),
        ("0.9.0", ("megatron_args.moe_router_topk=1",)),
        ("0.9.0", (*SAMPLES, "training.rampup_batch_size=[8, 8, 100]")),
        ("0.19.0", ("training.rampup_batch_size=[8, 8, 100]",)),
        ("0.19.0", ("data.vocab_size=null",)),
        ("0.9.0", ("megatron_args.deterministic_mode=true", "env.NCCL_ALGO=Ring")),
        ("0.9.0", ("megatron_args.yaml_cfg=/x.yaml", f"{VIRTUAL}=2")),
        ("9.9.9", (f"{VIRTUAL}=8",)),
    ],
)
def test_what_a_release_takes_is_taken(plan: Planner, release: str, sets: tuple[str, ...]) -> None:
    assert plan(FILE, *sets, facts=Facts(release, True))


ON_CPU = FILE.replace("gpus: 8", "gpus: 0")
LOCAL = ("model.transformer_impl=local", "megatron_args.no_persist_layer_norm=true")


def test_without_a_gpu_there_is_no_transformer_engine_and_no_apex(plan: Planner) -> None:
    """pretrain_gpt.py died with a NameError, and then by its layer norm."""
    with pytest.raises(UsageError, match="there is no Transformer Engine") as caught:
        plan(ON_CPU, facts=Facts("0.9.0", True))
    assert "model.transformer_impl to local" in str(caught.value)
    assert "no_persist_layer_norm to true" in str(caught.value)
    with pytest.raises(UsageError, match="there is no Apex"):
        plan(ON_CPU, LOCAL[0], facts=Facts("0.13.1", True))
    assert plan(ON_CPU, *LOCAL, facts=Facts("0.13.1", True))


def test_a_rule_holds_for_what_is_behind_dashes_too(plan: Planner) -> None:
    with pytest.raises(UsageError, match="-- --recompute-granularity: full needs"):
        plan(FILE, rest=("--recompute-granularity", "full"), facts=Facts("0.9.0", True))


@pytest.mark.parametrize(
    ("values", "release", "told"),
    [
        ({"sequence_parallel": True}, "0.9.0", "turned off, as there is no tensor parallelism"),
        ({"rampup_batch_size": [8, 8, 9]}, "0.19.0", "ignores it"),
        ({"rampup_batch_size": [8, 8, 9]}, "0.17.1", ""),
    ],
)
def test_what_is_ignored_is_told(values: dict[str, Value], release: str, told: str) -> None:
    options = rules.Told(values, Layout(1, 1, 1, 1))
    found = "".join(problem for problem, _ in rules.broken(rules.IGNORED, options, release, str))
    assert (told in found) if told else not found


def test_every_rule_is_of_options_and_releases_that_there_are() -> None:
    options = set(map(arguments.plain, arguments.table().megatron))
    for rule in (*rules.RULES, *rules.IGNORED):
        assert rule.option in options
        assert any(
            arguments.table().spans(rule.releases, f"{release}.0")
            for release in arguments.table().releases
        )


def test_numbers_that_are_none_break_nothing_else() -> None:
    """A value of the wrong type is told as that: `{expert_tensor_parallel_size: two}`."""
    names = {*map(arguments.plain, arguments.table().megatron)} - {*rules.ELSEWHERE}
    for value in ("two", "0", "-1", "nan", "1e400", "--x"):
        given = rules.Told(dict.fromkeys(names, value), Layout(8, 1, 1, 1))
        for release in ("0.9.0", "0.16.1"):
            assert list(rules.broken(rules.RULES, given, release, str))


OURS = FILE.replace("pretrain_gpt.py", "gpt")
RELEASED = [
    ("0.16.1", (f"{EP}=4", "megatron_args.num_experts=6"), "--num-experts (6) is not divisible"),
    ("0.16.1", (f"{EP}=3", "megatron_args.num_experts=6"), "replicas × CP (8) is not divisible"),
    ("0.16.1", (f"{VIRTUAL}=3", f"{PP}=2"), "3"),
    ("0.10.0", ("megatron_args.moe_router_score_function=sigmoid",), "needs Megatron 0.11"),
    ("0.9.0", ("megatron_args.moe_shared_expert_intermediate_size=64",), "needs Megatron 0.10"),
    ("0.9.0", (f"{EP}=8", "parallel.context_parallel_size=2"), "over context parallelism needs"),
]


@pytest.mark.parametrize(("release", "sets", "told"), RELEASED)
def test_what_our_program_ends_at_is_refused(
    plan: Planner, release: str, sets: tuple[str, ...], told: str
) -> None:
    """By its own arithmetic, and by what the image's Megatron lacks."""
    experts = ("model.disable_bias_linear=true", EXPERTS)
    plan(OURS, *experts, facts=Facts("0.16.1", True))
    with pytest.raises(UsageError) as caught:
        plan(OURS, *experts, *sets, facts=Facts(release, True))
    assert told in str(caught.value)
    where = str(caught.value).partition(": ")[0]
    assert any(one.partition("=")[0] in where for one in sets)
