"""The models people train, on the CPU: layouts agree, checkpoints carry on, presets learn."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.agent.conftest import ROOT, TINY, start

pytestmark = pytest.mark.megatron

SCRIPT = Path(__file__).with_name("variants.py")
SHORT = [*TINY, "--train-iters", "3", "--mock-data"]
TENSOR = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64 --sequence-parallel"
PIPELINE, CONTEXT = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
EXPERT = "--expert-model-parallel-size 2"
AGAIN = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LLAMA = (
    "--swiglu --normalization RMSNorm --disable-bias-linear --num-query-groups 2 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
)
QWEN3 = (
    "--swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear "
    "--num-query-groups 2 --kv-channels 16 --qk-layernorm --position-embedding-type rope "
    "--rotary-base 1000000"
)
MISTRAL = f"{LLAMA} --window-size 8,0"
MIXTRAL = f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 64 --moe-aux-loss-coeff 1e-2"
FOUR = "--num-layers 4 --micro-batch-size 1"

MODELS = {
    "Llama": (LLAMA, (TENSOR, CONTEXT, AGAIN)),
    "Mixtral": (MIXTRAL, (f"{EXPERT} --moe-token-dispatcher-type alltoall",)),
}
"""What `make test` trains, and in which layouts beside two replicas."""

ALL = {
    "Llama": (LLAMA, (TENSOR, TENSOR.removesuffix("--sequence-parallel"), PIPELINE, CONTEXT)),
    "Llama of four layers": (
        f"{LLAMA} {FOUR}",
        (PIPELINE, f"{PIPELINE} --num-layers-per-virtual-pipeline-stage 1"),
    ),
    "Dropout": ("--hidden-dropout 0.1 --attention-dropout 0.1", (AGAIN,)),
    "Llama 3.1's RoPE": (f"{LLAMA} --use-rope-scaling", (TENSOR,)),
    "Mistral": (MISTRAL, (TENSOR, CONTEXT)),
    "Qwen 2": (f"{LLAMA} --add-qkv-bias", (TENSOR,)),
    "Qwen 3": (QWEN3, (TENSOR, CONTEXT)),
    "Squared ReLU": ("--squared-relu", (TENSOR, PIPELINE)),
    "Mixtral": (
        MIXTRAL,
        (
            *(TENSOR, PIPELINE, CONTEXT, EXPERT, f"{EXPERT} {CONTEXT}"),
            f"{EXPERT} --moe-token-dispatcher-type alltoall",
        ),
    ),
    "Qwen 3 with experts": (f"{QWEN3} --num-experts 4 --moe-ffn-hidden-size 64", (EXPERT, TENSOR)),
    "Shared experts": (
        f"{MIXTRAL} --moe-shared-expert-intermediate-size 32",
        (EXPERT, f"{TENSOR} --moe-token-dispatcher-type alltoall"),
    ),
    "Sigmoid router": (
        f"{MIXTRAL} --moe-router-score-function sigmoid --moe-z-loss-coeff 1e-3",
        (EXPERT, TENSOR),
    ),
}


def trained(**variants: list[str]) -> dict[str, Any]:
    """What each variant has told. Fails unless all were trained, or refused."""
    run = start(2, str(SCRIPT), json.dumps(variants))
    assert run.code == 0, run.output
    told: dict[str, Any] = {}
    for line in run.output.splitlines():
        if line.startswith("variant "):
            told |= json.loads(line.removeprefix("variant "))
    assert told.keys() == variants.keys(), run.output
    return told


def compared(models: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, dict[str, str]]:
    """Each model's layouts, "" the two replicas that the others are compared with: why each is
    wrong, "" where it isn't, or what of Megatron-Core it needs."""
    asked = {f"{model}|": [*SHORT, *words.split()] for model, (words, _) in models.items()}
    for model, (words, layouts) in models.items():
        asked |= {f"{model}|{x}": [*SHORT, *f"{words} {x}".split()] for x in layouts}
    told, found = trained(**asked), {model: {} for model in models}
    for name, one in told.items():
        model, _, layout = name.partition("|")
        reference, wrong = told[f"{model}|"], [one["refused"]] if "refused" in one else []
        if not wrong:
            pairs = ((key, one[key], reference[key]) for key in ("losses", "validation", "norm"))
            wrong = [f"{k}: {x}, not {y}" for k, x, y in pairs if x != pytest.approx(y, abs=1e-3)]
            if not one["losses"][-1] < one["losses"][0]:
                wrong.append(f"{one['losses']} don't fall")
        found[model][layout] = "; ".join(wrong)
    return found


def apart(models: dict[str, tuple[str, tuple[str, ...]]]) -> dict[str, dict[str, str]]:
    """What is wrong of them, but for what the release lacks."""
    wrong = {
        model: {x: why for x, why in layouts.items() if why and "needs Megatron-Core" not in why}
        for model, layouts in compared(models).items()
    }
    return {model: layouts for model, layouts in wrong.items() if layouts}


def test_layouts_agree() -> None:
    """Megatron's own CPU weights make another model of a gated MLP at each TP, and of experts at
    each EP; a CP that forgot a piece of the sequence, or its gradient, would show here too."""
    assert apart(MODELS) == {}


@pytest.mark.long
def test_all_layouts_of_all_models_agree() -> None:
    assert apart(ALL) == {}


def test_a_checkpoint_of_experts_carries_on(tmp_path: Path) -> None:
    """With TransformerEngine's names; in another layout where the optimizer is one, too."""
    words = [*SHORT, *MIXTRAL.split(), "--lr-decay-iters", "6"]
    six, expert, a, b = ["--train-iters", "6"], EXPERT.split(), tmp_path / "a", tmp_path / "b"
    told = trained(
        whole=[*words, *expert, *six],
        half=[*words, *expert, "--save", str(a)],
        resumed=[*words, *expert, *six, "--load", str(a)],
        alone=[*words, *six, "--load", str(a)],
        one=[*words, "--save", str(b)],
        tensor=[*words, *TENSOR.split(), *six, "--load", str(b)],
        apart=[*words, *expert, *six, "--load", str(b)],
    )
    assert told["half"]["losses"] == told["whole"]["losses"][:3]
    assert told["resumed"]["losses"] == told["whole"]["losses"][3:]
    for other in ("alone", "tensor", "apart"):
        assert told[other]["losses"] == pytest.approx(told["whole"]["losses"][3:], abs=1e-3)
    metadata = (a / "iter_0000003/.metadata").read_bytes()
    for name in (
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.pre_mlp_layernorm.weight",
        "decoder.layers.mlp.router.weight",
        "decoder.layers.mlp.experts.experts.linear_fc1.weight",
        "decoder.final_layernorm.weight",
    ):
        assert name.encode() in metadata, name


@pytest.mark.long
def test_a_checkpoint_of_an_interleaved_pipeline_carries_on(tmp_path: Path) -> None:
    words = [*SHORT, *LLAMA.split(), *FOUR.split(), "--lr-decay-iters", "6"]
    six, folder = ["--train-iters", "6"], str(tmp_path / "a")
    virtual = [*PIPELINE.split(), "--num-layers-per-virtual-pipeline-stage", "1"]
    told = trained(
        whole=[*words, *virtual, *six],
        half=[*words, *virtual, "--save", folder],
        resumed=[*words, *virtual, *six, "--load", folder],
        elsewhere=[*words, *TENSOR.split(), *six, "--load", folder],
    )
    if "refused" in told["half"]:
        pytest.skip(told["half"]["refused"])
    assert told["resumed"]["losses"] == told["whole"]["losses"][3:]
    assert told["elsewhere"]["losses"] == pytest.approx(told["whole"]["losses"][3:], abs=1e-3)


def of_preset(name: str) -> list[str]:
    """The options that a preset's dry run shows."""
    shown = (ROOT / f"tests/runs/plan/golden/{name}.txt").read_text(encoding="utf-8")
    command = shown.partition("-m launcher.trainer.gpt\n")[2].partition("\n\n")[0]
    return shlex.split(command)


@pytest.mark.long
def test_tiny_presets_learn() -> None:
    names = ("llama-tiny", "qwen-moe-tiny", "qwen3-tiny", "mixtral-tiny")
    told = trained(**{name: of_preset(name) for name in names})
    for name, one in told.items():
        assert one["validation"] < one["losses"][0] / 4, name


@pytest.mark.filterwarnings("ignore")
def test_scaled_frequencies_are_llamas() -> None:
    """By the published apply_scaling's three cases; wavelengths of 8192 / 4 and 8192 bound them."""
    import math

    import torch

    from launcher.trainer.gpt.model import scaled

    frequencies = 1.0 / 500000.0 ** (torch.arange(0, 128, 2) / 128)
    found = scaled(frequencies, 8.0)
    for before, after in zip(frequencies.tolist(), found.tolist(), strict=True):
        length = 2 * math.pi / before
        if length < 8192 / 4:
            assert after == pytest.approx(before)
        elif length > 8192:
            assert after == pytest.approx(before / 8)
        else:
            smooth = (8192 / length - 1) / (4 - 1)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
