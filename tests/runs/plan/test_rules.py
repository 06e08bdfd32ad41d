"""What is refused of a run's options, by Megatron's own rules, before it starts."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import series
from launcher.base.errors import LauncherError, UsageError
from launcher.runs.plan import layout, program_options, render, rules
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.program import program
from launcher.runs.plan.program_options import Value
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin
from launcher.runs.runfile.values import parse_gpus
from tests.conftest import ROOT
from tests.plans import HOST, MINIMAL, STAMP, Planner, plan_of
from tests.tables import table

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


@table("release", "sets", "key", "told")
def test_what_megatron_ends_at_is_refused(
    plan: Planner, release: str, sets: list[str], key: str, told: str
) -> None:
    """Each was taken, and ended the run once all its processes had started."""
    with pytest.raises(UsageError) as caught:
        plan(FILE, *sets, facts=ImageFacts(release, True))
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
        ("0.16.1", (f"{VIRTUAL}=8",)),
        ("0.9.0", (*SAMPLES, "training.rampup_batch_size=[8, 8, 100]")),
        ("0.19.0", ("training.rampup_batch_size=[8, 8, 100]",)),
        ("0.19.0", ("data.vocab_size=null",)),
        ("0.9.0", ("megatron_args.deterministic_mode=true", "env.NCCL_ALGO=Ring")),
        ("0.9.0", ("megatron_args.yaml_cfg=/x.yaml", f"{VIRTUAL}=2")),
        ("9.9.9", (f"{VIRTUAL}=8",)),
    ],
)
def test_what_a_release_takes_is_taken(plan: Planner, release: str, sets: tuple[str, ...]) -> None:
    assert plan(FILE, *sets, facts=ImageFacts(release, True))


ON_CPU = FILE.replace("gpus: 8", "gpus: 0")
LOCAL = (
    "model.transformer_impl=local",
    "megatron_args.no_persist_layer_norm=true",
    "megatron_args.no_gradient_accumulation_fusion=true",
)


def test_without_a_gpu_there_is_no_transformer_engine_and_no_apex(plan: Planner) -> None:
    """pretrain_gpt.py died with a NameError, then by its layer norm, then by its first product."""
    with pytest.raises(UsageError, match="there is no Transformer Engine") as caught:
        plan(ON_CPU, facts=ImageFacts("0.9.0", True))
    assert "model.transformer_impl to local" in str(caught.value)
    assert "no_persist_layer_norm to true" in str(caught.value)
    assert "no_gradient_accumulation_fusion to true" in str(caught.value)
    with pytest.raises(UsageError, match="there is no Apex"):
        plan(ON_CPU, *LOCAL[:2], facts=ImageFacts("0.13.1", True))
    assert plan(ON_CPU, *LOCAL, facts=ImageFacts("0.13.1", True))


def test_a_rule_holds_for_what_is_behind_dashes_too(plan: Planner) -> None:
    with pytest.raises(UsageError, match="-- --recompute-granularity: full needs"):
        plan(FILE, rest=("--recompute-granularity", "full"), facts=ImageFacts("0.9.0", True))


@table("values", "release", "told")
def test_what_is_ignored_is_told(values: dict[str, Value], release: str, told: str) -> None:
    options = rules.RuleInput(values, Layout(1, 1, 1, 1))
    found = "".join(problem for problem, _ in rules.broken(rules.IGNORED, options, release, str))
    assert (told in found) if told else not found


def test_every_rule_is_of_options_that_there_are() -> None:
    options = set(map(program_options.plain, program_options.table().megatron))
    assert not [one.option for one in (*rules.RULES, *rules.IGNORED) if one.option not in options]


@pytest.mark.parametrize("release", ["0.9.0", "0.16.1", "0.19.0"])
@table("given", "instead")
def test_an_option_that_is_taken_only_to_end_at_is_refused(
    plan: Planner, release: str, given: str, instead: str
) -> None:
    """The last one ended the run with 0 and no word but its own, once all ranks had started."""
    option = "--" + given.partition("=")[0].replace("_", "-")
    with pytest.raises(UsageError, match=f"knows {option}, but ends if it is given") as refused:
        plan(FILE, f"megatron_args.{given}", facts=ImageFacts(release, True))
    assert f"Write {instead}" in str(refused.value)


def test_a_series_that_nobody_has_described_is_not_taken_for_another(plan: Planner) -> None:
    """It was taken for the newest known, in silence."""
    with pytest.raises(UsageError, match=r"gpt doesn't know Megatron 0\.31\.2") as refused:
        plan(MINIMAL, facts=ImageFacts("0.31.2", True))
    assert f'megatron: {{as: "{series.known()[-1]}"}}' in str(refused.value)
    with pytest.raises(UsageError, match=r"no series 0\.31 is known"):
        plan(MINIMAL, "megatron.as='0.31'", facts=ImageFacts("0.16.1", True))
    assert plan(FILE, facts=ImageFacts("0.31.2", True))  # of upstream's programs Megatron is asked


def test_numbers_that_are_none_break_nothing_else() -> None:
    """A value of the wrong type is told as that: `{expert_tensor_parallel_size: two}`."""
    names = {*map(program_options.plain, program_options.table().megatron)} - {*rules.ELSEWHERE}
    for value in ("two", "0", "-1", "nan", "1e400", "--x"):
        given = rules.RuleInput(dict.fromkeys(names, value), Layout(8, 1, 1, 1))
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
    plan(OURS, *experts, facts=ImageFacts("0.16.1", True))
    with pytest.raises(UsageError) as caught:
        plan(OURS, *experts, *sets, facts=ImageFacts(release, True))
    assert told in str(caught.value)
    where = str(caught.value).partition(": ")[0]
    assert any(one.partition("=")[0] in where for one in sets)


CHECKOUT = os.environ.get("MEGATRON_CHECKOUT", "")
PYTHON = os.environ.get("MEGATRON_PYTHON", "")
FILES = 600

BASE: dict[str, dict[str, Any]] = {
    "model": {
        "num_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 64,
        "max_position_embeddings": 64,
    },
    "training": {"micro_batch_size": 2, "train_iters": 100, "lr": 1e-3, "bf16": True},
    "data": {"mock": True, "vocab_size": 1000},
}  # fmt: skip
SIZES: dict[str, list[Any]] = {
    "model.num_layers": [4, 6, 7, 12],
    "model.hidden_size": [256, 250, 384],
    "model.ffn_hidden_size": [512, 500],
    "model.num_attention_heads": [4, 8, 12, 6],
    "model.num_query_groups": [1, 2, 4, 3, 8],
    "model.kv_channels": [32, 20],
    "model.seq_length": [32, 64, 1000, 60],
    "model.max_position_embeddings": [64, 1024, 32],
    "model.position_embedding_type": ["rope", "none", "learned_absolute"],
    "model.swiglu": [True],
    "model.disable_bias_linear": [True],
    "model.normalization": ["RMSNorm"],
    "model.transformer_impl": ["local", "transformer_engine"],
}
STEPS: dict[str, list[Any]] = {
    "training.micro_batch_size": [1, 2, 3],
    "training.global_batch_size": [8, 16, 24, 32, 64],
    "training.rampup_batch_size": [[8, 8, 100], [16, 16, 100], [64, 8, 100], [128, 8, 100]],
    "training.train_samples": [1000],
    "training.train_iters": [100, None],
    "training.lr": [1e-3, 1e-5],
    "training.min_lr": [1e-4, 1e-2],
    "training.lr_decay_style": ["cosine", "WSD", "inverse-square-root", "constant"],
    "training.lr_decay_iters": [10, 100],
    "training.lr_decay_samples": [100, 1000],
    "training.lr_warmup_fraction": [0.1, 1.0],
    "training.lr_warmup_iters": [5, 100, 200],
    "training.lr_warmup_samples": [50, 1000],
    "training.fp16": [True],
    "training.bf16": [True, False],
    "training.optimizer": ["adam", "sgd"],
    "training.weight_decay": [0.1],
}
SPREAD: dict[str, list[Any]] = {
    "parallel.tensor_model_parallel_size": [1, 2, 4, 8],
    "parallel.pipeline_model_parallel_size": [1, 2, 4],
    "parallel.context_parallel_size": [1, 2],
    "parallel.expert_model_parallel_size": [1, 2, 4],
    "parallel.num_layers_per_virtual_pipeline_stage": [1, 2, 3],
    "parallel.sequence_parallel": [True],
    "parallel.use_distributed_optimizer": [True],
    "parallel.overlap_grad_reduce": [True],
    "parallel.overlap_param_gather": [True],
}
PASSED: dict[str, list[Any]] = {
    "num_experts": [4, 8, 6, 0],
    "expert_tensor_parallel_size": [1, 2],
    "fp8_format": ["hybrid"],
    "recompute_granularity": ["full", "selective"],
    "recompute_method": ["uniform", "block"],
    "recompute_num_layers": [1, 2, "two"],
    "recompute_activations": [True],
    "eod_mask_loss": [True, 5],
    "lr_wsd_decay_iters": [10, 1.5],
    "distributed_timeout_minutes": [10, "ten"],
    "ckpt_format": ["torch", "torch_dist", "zip"],
    "rotary_percent": [0.5, "half"],
    "deterministic_mode": [True],
    "loss_scale": [1024, "large"],
}

LATER = ("heads aren't divisible by", "which virtual stages need", "which FP8 needs")
"""What Megatron ends at when it has begun: in layers, in the pipeline's schedule."""

DRIVER = """
import json, os, sys
from launcher.agent import validate
program, cases = sys.argv[1], json.load(sys.stdin)
try:
    validate._describe(1, (9, 0))
    validate._reached([program])
except SystemExit:
    pass
for argv, world in cases:
    here, there = os.pipe()
    if os.fork() == 0:
        os.write(there, json.dumps(validate.verdict([program, *argv], world, (9, 0))).encode())
        os._exit(0)
    os.close(there)
    os.wait()
    print(os.read(here, 1 << 16).decode() or "{}", flush=True)
    os.close(here)
"""


@dataclass(frozen=True)
class Case:
    """A run file, what is refused of it here, and what Megatron is asked."""

    config: RunConfig
    changes: tuple[str, ...]
    refused: str
    argv: list[str]
    world: int


def case(chance: random.Random, release: str) -> Case:
    """A run file with a few changes, most of them to the layout."""
    values = {section: dict(fields) for section, fields in BASE.items()} | {"parallel": {}}
    args: dict[str, Any] = {}
    changes = []
    for choices, most in ((SIZES, 2), (STEPS, 2), (SPREAD, 4), (PASSED, 2)):
        for key in chance.sample(sorted(choices), chance.randint(0, most)):
            value = chance.choice(choices[key])
            changes.append(f"{key}={value}")
            section, dot, field = key.partition(".")
            (values[section] if dot else args)[field if dot else section] = value
    world = chance.choice([1, 2, 4, 8, 8, 16, 16])
    file = {"name": "a", "image": {"name": "x"}, "program": "pretrain_gpt.py", "gpus": world}
    config = RunConfig.model_validate(file | values | {"megatron_args": args})
    return Case(config, (*changes, f"gpus={world}"), *_told(config, release, world))


def _told(config: RunConfig, release: str, world: int) -> tuple[str, list[str], int]:
    origin, refused = Origin("run.yaml", {}, {}), ""
    try:
        plan_of(config, origin, ImageFacts(release, True), HOST, STAMP, gpus=parse_gpus(world))
    except LauncherError as error:
        refused = str(error)
    started = program(config.program)
    found = render.options(config, started.kind, layout.layout(config, world), release)
    return refused, [*render.words(found)], world


def theirs(cases: list[Case], release: str, folder: Path) -> list[dict[str, str]]:
    """What Megatron's own checks say of each."""
    git = ["git", "-C", CHECKOUT, "archive", f"core_v{release}"]
    archive = subprocess.run(git, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
    done = subprocess.run(
        [PYTHON, "-c", DRIVER, str(folder / "pretrain_gpt.py")],
        input=json.dumps([(one.argv, one.world) for one in cases]),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.skipif(not (CHECKOUT and PYTHON), reason="MEGATRON_CHECKOUT, MEGATRON_PYTHON")
@pytest.mark.parametrize("release", ["0.9.0", "0.16.1", "0.17.1", "0.18.2", "0.19.0"])
def test_nothing_is_refused_that_megatron_takes(release: str, tmp_path: Path) -> None:
    """Of 600 files 12 were. What Megatron refuses and we don't, it is asked before the start."""
    chance = random.Random(13)  # noqa: S311 - the same files every time
    cases = [case(chance, release) for _ in range(FILES)]
    answers = theirs(cases, release, tmp_path)
    assert len(answers) == FILES
    wrong = []
    for one, answer in zip(cases, answers, strict=True):
        late = any(rule in one.refused for rule in LATER)
        if one.refused and not late and "refused" not in answer:
            wrong.append(f"{' '.join(one.changes)}: ours {one.refused!r}; theirs {answer}")
    assert not wrong, "\n".join([f"{len(wrong)} of {FILES}", *wrong])
