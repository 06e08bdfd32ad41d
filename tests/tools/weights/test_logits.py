"""Megatron's model and transformers' have the same logits, and what is trained says the same."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.tools.weights import convert, reader
from tests.agent.conftest import start

from .models import CONFIGS, same

pytestmark = pytest.mark.megatron

TOKENS = [5, 17, 99, 0, 42, 42, 8, 63, 1, 77, 30, 12]
TRAINED = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 "
    "--make-vocab-size-divisible-by 64 --micro-batch-size 4 --global-batch-size 8 --train-iters 30 "
    "--lr 1e-2 --log-interval 10 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 "
    "--mock-data --save-interval 30"
).split()
LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --num-query-groups 2 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights"
).split()

Logits = dict[str, tuple[Any, Any]]


def made(folder: Path, family: str) -> Any:
    """A model of transformers', random to its norms and biases, saved in a folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **CONFIGS[family])
    model = randomised(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.save_pretrained(folder)
    return model


def randomised(model: Any) -> Any:
    """The model, with random values for its norms and biases too."""
    import torch

    torch.manual_seed(3)
    model.eval()
    with torch.no_grad():
        for name, values in model.named_parameters():
            if values.ndim > 1:
                values.normal_(0, 0.08)
            else:
                values.add_(torch.randn_like(values), alpha=0.2)
            assert values.std() > 0.01, name
    return model


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory) -> Logits:
    """Of each family, transformers' and ours, of the same tokens."""
    import torch

    root = tmp_path_factory.mktemp("families")
    theirs, folders = dict[str, Any](), list[str]()
    for family in CONFIGS:
        model = made(root / family, family)
        with torch.no_grad():
            theirs[family] = model(torch.tensor([TOKENS])).logits
        convert.import_(root / family, root / f"{family}-ours", padding=64)
        folders.append(str(reader.find(root / f"{family}-ours")))
    program = str(Path(__file__).with_name("logits.py"))
    run = start(1, program, str(root / "out.pt"), *map(str, TOKENS), "--", *folders)
    assert run.code == 0, run.output
    ours = torch.load(root / "out.pt")
    return {
        family: (theirs[family], ours[folder])
        for family, folder in zip(CONFIGS, folders, strict=True)
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_logits_agree(logits: Logits, family: str) -> None:
    theirs, ours = logits[family]
    assert theirs.std() > 0.1
    assert (theirs - ours[:, :, :100]).abs().max() < 2e-5


@pytest.mark.parametrize(
    "family",
    [each if each == "mixtral" else pytest.param(each, marks=pytest.mark.long) for each in CONFIGS],
)
def test_it_is_loaded_there_without_a_warning(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of missing or unexpected keys, as there are where a layer is."""
    import transformers

    made(tmp_path / "theirs", family)
    convert.import_(tmp_path / "theirs", tmp_path / "ours", padding=64)
    convert.export(reader.opened(reader.find(tmp_path / "ours")), tmp_path / "exported")
    transformers.logging.enable_propagation()
    transformers.logging.set_verbosity_warning()

    def warned(folder: str = "exported") -> list[str]:
        caplog.clear()
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]

    assert warned() == warned("theirs")  # llama's: of a scaling for more positions than it has
    assert [each for each in warned() if "original_max_position_embeddings" not in each] == []
    config = tmp_path / "exported/config.json"
    layers = '"n_layer": 4' if family == "gpt2" else '"num_hidden_layers": 4'
    assert layers in config.read_text()
    config.write_text(config.read_text().replace(layers, layers.replace("4", "5")))
    assert any("MISSING" in each or "newly initialized" in each for each in warned())


FAMILIES = {
    "gpt2": (2, "--pipeline-model-parallel-size", "2"),
    "llama": (2, *LLAMA, "--tensor-model-parallel-size", "2", "--use-rope-scaling"),
    "qwen2": (1, *LLAMA[:-1], "--add-qkv-bias"),
    "qwen3_moe": (
        *(2, *LLAMA, "--qk-layernorm", "--num-experts", "4", "--moe-ffn-hidden-size", "48"),
        *("--expert-model-parallel-size", "2"),
    ),
    "mixtral": (1, *LLAMA, "--num-experts", "4", "--moe-ffn-hidden-size", "48"),
}


@pytest.mark.parametrize(
    "family",
    [each if each == "llama" else pytest.param(each, marks=pytest.mark.long) for each in FAMILIES],
)
def test_what_is_trained_says_the_same_there(family: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    processes, *options = FAMILIES[family]
    save = str(tmp_path / "saved")
    run = start(processes, "-m", "launcher.trainer.gpt", *TRAINED, "--save", save, *options)
    assert run.code == 0, run.output
    folder = reader.find(Path(save))
    saved = reader.opened(folder)
    done = convert.export(saved, tmp_path / "exported")
    convert.convert(saved, tmp_path / "ranks", reader.RANKS, saved.layout)
    given = (str(folder), str(reader.find(tmp_path / "ranks")), str(tmp_path / "megatrons"))
    run = start(processes, str(Path(__file__).with_name("ranks.py")), *given)
    assert run.code == 0, run.output
    convert.export(reader.opened(tmp_path / "megatrons"), tmp_path / "from-ranks")
    same(tmp_path / "exported", tmp_path / "from-ranks")
    assert done.shape.family == family
    model, said = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(said.values()), said
    tokens = [5, 6, 7, 60, 3]
    row = model.generate(
        torch.tensor([tokens]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    ids = [*map(str, tokens)]
    program = ("-m", "launcher.trainer.generate", "--load", str(folder), "--count", "20", "--ids")
    told = start(1, *program, *ids)
    assert told.code == 0, told.output
    found = re.search(r"tokens: (.*)", told.output)
    assert found, told.output
    assert found[1].split() == [str(one) for one in row[0, 5:].tolist()]
    assert len({*found[1].split()}) > 5


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_weights_go_from_one_expert_parallelism_to_another(
    before: int, after: int, tmp_path: Path
) -> None:
    """By themselves, as `convert` leaves them: a step of no length leaves every byte."""
    options = [*TRAINED, *LLAMA, "--num-experts", "4", "--moe-ffn-hidden-size", "48"]
    expert = "--expert-model-parallel-size"
    saves = ("-m", "launcher.trainer.gpt", *options, "--save", str(tmp_path / "saved"))
    run = start(2, *saves, expert, str(before))
    assert run.code == 0, run.output
    convert.export(reader.opened(reader.find(tmp_path / "saved")), tmp_path / "exported")
    on = [*options, "--lr", "0", "--train-iters", "31", "--log-interval", "1"]
    on += ["--save-interval", "31", "--save", str(tmp_path / "on"), expert, str(after)]
    saved = reader.opened(reader.find(tmp_path / "saved"))
    convert.convert(saved, tmp_path / "alone", reader.DISTRIBUTED, {})
    run = start(2, "-m", "launcher.trainer.gpt", *on, "--load", str(tmp_path / "alone"))
    assert run.code == 0, run.output
    convert.export(reader.opened(reader.find(tmp_path / "on")), tmp_path / "back")
    same(tmp_path / "exported", tmp_path / "back")


@pytest.mark.long
def test_an_imported_model_is_trained_on(tmp_path: Path) -> None:
    """In another layout than it was written in: a step of no length leaves every byte."""
    made(tmp_path / "theirs", "llama")
    convert.import_(tmp_path / "theirs", tmp_path / "ours", padding=64)
    options = "--num-layers 4 --ffn-hidden-size 96 --seq-length 32 --max-position-embeddings 64"
    options += " --rotary-base 500000 --use-rope-scaling --tensor-model-parallel-size 2"
    options += " --lr 0 --train-iters 1 --log-interval 1 --save-interval 1"
    where = ("--load", str(tmp_path / "ours"), "--save", str(tmp_path / "on"))
    run = start(2, "-m", "launcher.trainer.gpt", *TRAINED, *LLAMA, *options.split(), *where)
    assert run.code == 0, run.output
    assert "release: going on after iteration 0" in run.output
    assert run.losses[1] > 4.0
    convert.export(reader.opened(reader.find(tmp_path / "on")), tmp_path / "back")
    same(tmp_path / "theirs", tmp_path / "back")
