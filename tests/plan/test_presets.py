"""Every preset's dry run, kept as text: what is printed is what runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.backends import docker
from launcher.cli.describe import describe
from launcher.machine import memory
from launcher.plan import model, source
from launcher.plan.image import Facts
from launcher.plan.layout import layout
from launcher.plan.plan import Plan
from launcher.plan.render import values_of

GOLDEN = Path(__file__).parent / "golden"
DRY_RUNS = {
    "gpt2.gpus-1": ("gpt2", "gpus=1"),
    "gpt2.gpus-2": ("gpt2", "gpus=2"),
    "gpt2.gpus-4": ("gpt2", "gpus=4"),
    "gpt2.gpus-8": ("gpt2", "gpus=8"),
    "gpt2.devices": ("gpt2", "gpus='device=1,3'"),
    "gpt2.cpu": ("gpt2", "gpus=0"),
    "gpt2.data": ("gpt2", "data.path=/data sets/corpus, one", "checkpoint.save=it's here"),
    "demo": ("demo", "data.path=corpus"),
    "gpt2-tiny": ("gpt2-tiny",),
    "gpt2-tiny.gpus-2": ("gpt2-tiny", "gpus=2"),
    "simple": ("simple",),
    "simple.cpu": ("simple", "gpus=0"),
    "gpt3-175b": ("gpt3-175b",),
    "llama3-8b": ("llama3-8b",),
    "llama3.2-1b": ("llama3.2-1b",),
    "qwen3-0.6b": ("qwen3-0.6b",),
    "qwen3-30b-a3b": ("qwen3-30b-a3b",),
    "mixtral-8x7b": ("mixtral-8x7b",),
    "llama-tiny": ("llama-tiny",),
    "qwen3-tiny": ("qwen3-tiny",),
    "mixtral-tiny": ("mixtral-tiny",),
    "qwen-moe-tiny": ("qwen-moe-tiny",),
}

# Of the published config.json: hidden_size, num_hidden_layers, num_attention_heads,
# num_key_value_heads, head_dim, intermediate_size (an expert's), experts, vocab_size, whether
# embeddings are tied and heads normalised; and the parameters that the model's page counts.
PUBLISHED = {
    "llama3-8b": ((4096, 32, 32, 8, 128, 14336, 0, 128256, False, False), 8_030_261_248),
    "llama3.2-1b": ((2048, 16, 32, 8, 64, 8192, 0, 128256, True, False), 1_235_814_400),
    "qwen3-0.6b": ((1024, 28, 16, 8, 128, 3072, 0, 151936, True, True), 596_049_920),
    "qwen3-30b-a3b": ((2048, 48, 32, 4, 128, 768, 128, 151936, False, True), 30_532_122_624),
    "mixtral-8x7b": ((4096, 32, 32, 8, 128, 14336, 8, 32000, False, False), 46_702_792_704),
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_prints_what_it_did(name: str, plan: Callable[..., Plan]) -> None:
    preset, *sets = DRY_RUNS[name]
    made = plan(preset, *sets, facts=Facts("0.9.0", True))
    text = f"{describe(made)}\n{docker.show(made)}"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "UPDATE_GOLDEN=1 writes it anew"


def test_every_preset_has_a_dry_run_and_no_text_is_left_over() -> None:
    presets = {path.stem for path in source.PRESETS.glob("*.yaml")}
    assert presets == {preset for preset, *_ in DRY_RUNS.values()}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(DRY_RUNS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_parameters(name: str) -> None:
    """Sum the published configuration's matrices; padding the vocabulary would add to them."""
    (hidden, layers, heads, groups, head, ffn, experts, words, tied, qk), published = PUBLISHED[
        name
    ]
    attention = hidden * head * (2 * heads + 2 * groups) + (2 * head if qk else 0)
    mlp = 3 * hidden * ffn * max(1, experts) + experts * hidden
    total = layers * (attention + mlp + 2 * hidden) + hidden + words * hidden * (1 if tied else 2)
    assert total == published
    config = source.load(name, [])[0]
    where = layout(config, int(config.gpus))
    shape = model.shape(config.program, values_of(config, where))
    assert shape
    assert shape.parameters == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_fits_on_8_gpus(name: str) -> None:
    """Those with experts say that they are for GPUs of 141 GB."""
    config = source.load(name, [])[0]
    where = layout(config, 8)
    assert where.world == 8
    needed = memory.estimate(config, where, (9, 0))
    assert needed
    room = 141e9 if "H200" in (source.PRESETS / f"{name}.yaml").read_text("utf-8") else 80e9
    assert needed.total < room * 0.9


@pytest.mark.parametrize("preset", sorted(path.name for path in source.PRESETS.glob("*.yaml")))
def test_a_preset_says_first_what_it_is_for(preset: str) -> None:
    assert (source.PRESETS / preset).read_text(encoding="utf-8").startswith("# ")
