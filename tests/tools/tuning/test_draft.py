"""Run files to begin with: of each preset, of a model, of a script, for the GPUs there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher import cli
from launcher.base import yamlfile
from launcher.base.errors import UsageError
from launcher.runs.checks import gather, memory
from launcher.runs.plan import layout
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.tools.tuning import draft
from tests.runs.checks.conftest import GB, card
from tools import schema

PRESETS = sorted(origins.PRESETS.glob("*.yaml"))


def parsed(made: draft.Draft) -> RunConfig:
    return yamlfile.parse(made.written("mine.yaml"), RunConfig, "mine.yaml")


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_a_preset_s_draft_says_all_that_the_preset_does(preset: Path) -> None:
    """One that extends another would be a few lines, of which the most is elsewhere."""
    made = draft.of_preset(preset.name)
    assert parsed(made).model_dump() == origins.load(preset.name, [])[0].model_dump()
    written = made.written("mine.yaml")
    assert written.startswith(f"{draft.HEADER}{draft.SCHEMA}\n# `launcher run mine.yaml --dry-run`")
    assert written.count(draft.HEADER) == 1
    assert "\nextends:" not in written


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_editors_know_what_may_be_in_a_preset(preset: Path) -> None:
    """Nothing told an editor which keys there are."""
    assert preset.read_text("utf-8").startswith(f"{draft.HEADER}{draft.SCHEMA.name}\n")


def test_the_schema_beside_the_presets_is_that_of_run_files() -> None:
    """Editors would mark what is right, or not what is wrong."""
    assert draft.SCHEMA.read_text("utf-8") == schema.text(), "python3 -m tools.schema writes it"


@pytest.mark.parametrize(
    ("preset", "count", "where"),
    [
        ("gpt2", 2, (2, 1, 1)),
        ("gpt2", 0, (1, 1, 1)),
        ("llama3-8b", 4, (4, 4, 1)),
        ("gpt2-tiny", 4, (4, 2, 1)),
        ("gpt2-tiny", 0, (2, 2, 1)),
    ],
)
def test_the_layout_fits_the_gpus(preset: str, count: int, where: tuple[int, int, int]) -> None:
    config = parsed(draft.fitted(draft.of_preset(preset), count, ()))
    found = layout.layout(config, count or config.processes)
    assert (found.world, found.tensor, found.pipeline) == where
    assert config.gpus == str(count)
    assert config.image.tag == ("cpu" if "tiny" in preset or not count else "24.10")


def test_it_fits_into_the_memory_of_the_gpus() -> None:
    small = card(total=24 * GB, capability=(8, 0))
    made = draft.fitted(draft.of_preset("llama3.2-1b"), 1, (small,))
    config = parsed(made)
    needed = memory.estimate(config, layout.layout(config, 1), (8, 0))
    assert needed
    assert needed.total < small.total or "it doesn't fit" in " ".join(made.lines)


HF = {
    **{"model_type": "llama", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 176},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    **{"tie_word_embeddings": True, "torch_dtype": "bfloat16"},
}


def test_a_model_s_shape_is_taken_over(tmp_path: Path) -> None:
    """A user had to look up what Megatron calls each key of config.json."""
    (tmp_path / "my model").mkdir()
    folder = tmp_path / "my model"
    (folder / "config.json").write_text(json.dumps(HF))
    (folder / "tokenizer.json").touch()
    config = parsed(draft.fitted(draft.of_model(folder), 2, ()))
    model = config.model
    assert (model.num_layers, model.hidden_size, model.ffn_hidden_size) == (2, 64, 176)
    assert (model.num_query_groups, model.rotary_base, model.seq_length) == (2, 500000, 128)
    assert not model.untie_embeddings_and_output_weights
    assert (config.name, config.data.vocab_size, config.gpus) == ("my-model", 1000, "2")
    assert config.data.tokenizer_model == str(folder)
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(UsageError, match="an adapter of PEFT's"):
        draft.of_model(folder)


SCRIPT = (
    "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 64 "
    "--num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 "
    "--train-iters 10 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 255\n"
)


@pytest.mark.parametrize(("more", "gpus"), [([], "2"), (["--gpus", "4"], "4")])
def test_a_script_is_taken_over_for_as_many_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], gpus: str
) -> None:
    (tmp_path / "a.sh").write_text(SCRIPT)
    assert cli.main(["init", "--from-script", str(tmp_path / "a.sh"), *more]) == 0
    config = yamlfile.parse(capsys.readouterr().out, RunConfig, "mine.yaml")
    assert (config.program, config.gpus) == ("pretrain_gpt.py", gpus)


@pytest.mark.parametrize(("there", "name"), [(0, "gpt2-tiny"), (2, "gpt2")])
def test_without_a_name_it_is_what_this_machine_can_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: int, name: str
) -> None:
    monkeypatch.setattr(gather, "nvidia_gpus", lambda: tuple(card(n) for n in range(there)))
    target = tmp_path / "mine.yaml"
    assert cli.main(["init", "-o", str(target)]) == 0
    config = yamlfile.parse(target.read_text("utf-8"), RunConfig, "mine.yaml")
    assert (config.name, config.gpus) == (name, str(there))
    assert f"`launcher run {target} --dry-run`" in target.read_text("utf-8")
    assert cli.main(["init", "-o", str(target)]) == 2  # it is there already
    assert cli.main(["init", "gpt2", "--from-hf", "x"]) == 2
