"""What is refused before a start against what Megatron's own checks refuse, over random run files.

Needs upstream's repository (MEGATRON_CHECKOUT) and a Python that imports it (MEGATRON_PYTHON).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import LauncherError
from launcher.plan import layout, render
from launcher.plan.config import RunConfig
from launcher.plan.image import Facts
from launcher.plan.plan import make_plan
from launcher.plan.program import program
from launcher.plan.source import Origin
from launcher.plan.values import parse_gpus
from tests.conftest import ROOT
from tests.plans import HOST, STAMP

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
    "moe_router_topk": [1, 2, "two"],
    "moe_ffn_hidden_size": [64, 50],
    "expert_tensor_parallel_size": [1, 2],
    "fp8_format": ["hybrid"],
    "moe_grouped_gemm": [True],
    "moe_token_dispatcher_type": ["alltoall", "allgather"],
    "moe_expert_capacity_factor": [1.0],
    "moe_pad_expert_input_to_capacity": [True],
    "recompute_granularity": ["full", "selective"],
    "recompute_method": ["uniform", "block"],
    "recompute_num_layers": [1, 2, "two"],
    "recompute_activations": [True],
    "distribute_saved_activations": [True],
    "eod_mask_loss": [True, 5],
    "reset_position_ids": [True],
    "lr_wsd_decay_iters": [10, 1.5],
    "lr_wsd_decay_style": ["linear", "none"],
    "weight_decay_incr_style": ["linear", "constant"],
    "start_weight_decay": [0.0],
    "end_weight_decay": [0.1],
    "fp32_residual_connection": [True],
    "fp16_lm_cross_entropy": [True],
    "distributed_timeout_minutes": [10, "ten"],
    "squared_relu": [True],
    "no_bias_gelu_fusion": [True],
    "apply_query_key_layer_scaling": [True],
    "decoder_first_pipeline_num_layers": [2, 3],
    "use_tp_pp_dp_mapping": [True],
    "tp_comm_overlap": [True],
    "accumulate_allreduce_grads_in_fp32": [True, "yes"],
    "ckpt_format": ["torch", "torch_dist", "zip"],
    "override_opt_param_scheduler": [True],
    "use_checkpoint_opt_param_scheduler": [True],
    "decoupled_lr": [1e-3, "fast"],
    "rotary_interleaved": [True],
    "rotary_percent": [0.5, "half"],
    "overlap_param_gather_with_optimizer_step": [True],
    "log_timers_to_tensorboard": [True],
    "no_position_embedding": [True],
    "add_qkv_bias": [True],
    "qk_layernorm": [True],
    "timing_log_level": [0, 1, 9],
    "clone_scatter_output_in_embedding": [True],
    "deterministic_mode": [True],
    "loss_scale": [1024, "large"],
    "data_args_path": [["a", "b"]],
}

LATER = ("heads aren't divisible by", "which virtual stages need", "which FP8 needs")
"""What Megatron ends at when it has begun: in layers, in the pipeline's schedule."""

OF_THE_IMAGE = "Please install"
"""What depends on packages that an image has and this Python may lack."""

DRIVER = """
import json, os, sys
from launcher.train import validate
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
    for table, most in ((SIZES, 2), (STEPS, 2), (SPREAD, 4), (PASSED, 2)):
        for key in chance.sample(sorted(table), chance.randint(0, most)):
            value = chance.choice(table[key])
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
        make_plan(config, origin, Facts(release, True), HOST, STAMP, gpus=parse_gpus(world))
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
@pytest.mark.parametrize("release", ["0.9.0", "0.16.1"])
def test_what_megatron_refuses_is_refused_before(release: str, tmp_path: Path) -> None:
    """Of 600 files 127 that 0.9.0 refuses were taken, and 12 refused that it takes."""
    chance = random.Random(13)  # noqa: S311 - the same files every time
    cases = [case(chance, release) for _ in range(FILES)]
    answers = theirs(cases, release, tmp_path)
    assert len(answers) == FILES
    wrong = []
    for one, answer in zip(cases, answers, strict=True):
        if OF_THE_IMAGE in answer.get("refused", "") or any(rule in one.refused for rule in LATER):
            continue
        if "unasked" in answer or bool(one.refused) != ("refused" in answer):
            wrong.append(f"{' '.join(one.changes)}: ours {one.refused!r}; theirs {answer}")
    assert not wrong, "\n".join([f"{len(wrong)} of {FILES}", *wrong])
