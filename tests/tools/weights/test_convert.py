"""Weights to Megatron and back, without torch: nothing is lost, and what can't be is refused."""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.checkpoints import completeness
from launcher.base.errors import UsageError
from launcher.base.settings import ROOT
from launcher.tools.weights import convert, reader, safetensors, torch_file
from tests.tables import table

from .models import CONFIGS, made, same


def opened(folder: Path) -> reader.SavedModel:
    return reader.opened(reader.find(folder))


@pytest.mark.parametrize("family", CONFIGS)
def test_there_and_back_is_the_same(tmp_path: Path, family: str) -> None:
    theirs = made(tmp_path / "theirs", family, most=100_000)
    assert (theirs / safetensors.INDEX).exists()
    convert.import_(theirs, tmp_path / "ours", padding=64)
    saved = opened(tmp_path / "ours")
    assert saved.tensors["embedding.word_embeddings.weight"].shape == (128, 64)
    done = convert.export(saved, tmp_path / "back", shard=100_000)
    assert done.shape.family == family
    same(theirs, tmp_path / "back")
    was, now = (json.loads((f / "config.json").read_text()) for f in (theirs, tmp_path / "back"))
    assert was == {key: now.get(key) for key in was}
    convert.import_(tmp_path / "back", tmp_path / "again", padding=64)
    again = opened(tmp_path / "again")
    assert again.tensors.keys() == saved.tensors.keys()
    for name, tensor in saved.tensors.items():
        assert np.array_equal(tensor.read(), again.tensors[name].read()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "mixtral", "qwen2_moe"])
def test_a_folder_a_rank_and_back_is_the_same(tmp_path: Path, family: str, dtype: str) -> None:
    theirs = made(tmp_path / "theirs", family, dtype=dtype)
    convert.import_(theirs, tmp_path / "ours", padding=64)
    layout = {"tensor": 2, "pipeline": 2, "expert": 2 if "mix" in family else 1}
    convert.convert(opened(tmp_path / "ours"), tmp_path / "ranks", reader.RANKS, layout)
    ranks = opened(tmp_path / "ranks")
    assert ranks.layout == layout
    assert len([*ranks.folder.iterdir()]) == 2 * 2 * layout["expert"]
    convert.export(ranks, tmp_path / "direct")
    same(theirs, tmp_path / "direct")
    convert.convert(ranks, tmp_path / "one", reader.DISTRIBUTED, {})
    convert.export(opened(tmp_path / "one"), tmp_path / "back")
    same(theirs, tmp_path / "back")


ENGINES = {
    "self_attention.linear_qkv.layer_norm_": r"(?<=\d\.)input_layernorm\.",
    "mlp.linear_fc1.layer_norm_": r"(?<=\d\.)pre_mlp_layernorm\.",
}
GROUPED = r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d)\.weight"
"""What TransformerEngine's layers call what Megatron's local ones call otherwise, without experts.

By megatron/core/models/gpt/gpt_layer_specs.py and its extensions/transformer_engine.py.
"""


def engines(name: str, experts: int) -> str:
    """A weight's name in a model of TransformerEngine's layers, with its grouped experts."""
    for theirs, ours in [*ENGINES.items()][: 1 if experts else 2]:
        name = re.sub(ours, theirs, name)
    return re.sub(GROUPED, r"mlp.experts.\2.weight\1", name)


@pytest.mark.megatron
@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_layers_of_transformer_engine_have_other_names(tmp_path: Path, family: str) -> None:
    """It isn't here: its checkpoint is Megatron's own with the names and states that it would have.

    Up to 1.x a state is a stream, from then on a tensor of bytes.
    """
    import torch

    theirs = made(tmp_path / "theirs", family)
    convert.import_(theirs, tmp_path / "ours", padding=64)
    saved = opened(tmp_path / "ours")
    layout = {"tensor": 2, "pipeline": 2, "expert": 2 if saved.experts else 1}
    convert.convert(saved, tmp_path / "local", reader.RANKS, layout)
    said = {**saved.arguments, "transformer_impl": "transformer_engine", "moe_grouped_gemm": True}
    convert.convert(replace(saved, arguments=said), tmp_path / "engine", reader.RANKS, layout)
    for path in opened(tmp_path / "local").folder.rglob("*.pt"):
        state = torch.load(path, weights_only=False)
        model = {
            engines(name, saved.experts): values
            for name, values in state["model"].items()
            if isinstance(values, torch.Tensor)
        }
        ours = torch.load(str(path).replace("/local/", "/engine/"), weights_only=False)["model"]
        assert {name for name in ours if not name.endswith("_extra_state")} == model.keys()
        for name, values in model.items():
            assert torch.equal(values, ours[name]), name
        states = io.BytesIO(b"scales"), torch.zeros(5, dtype=torch.uint8)
        for name, some in zip([*model], itertools.cycle(states), strict=False):
            model[f"{name.rpartition('.')[0]}._extra_state"] = some
        torch.save({**state, "model": model}, path)
    for folder in ("local", "engine"):
        convert.export(opened(tmp_path / folder), tmp_path / f"from-{folder}")
        same(theirs, tmp_path / f"from-{folder}")


def test_a_process_is_started_for_each_shape_and_not_for_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle is read by another process first: a model of 4 layers took 75 of them, and 6 s."""
    looked = list[bytes]()
    monkeypatch.setattr(torch_file, "KNOWN", set())
    monkeypatch.setattr(torch_file, "look", lambda stream: looked.append(stream.read()))
    convert.import_(made(tmp_path / "theirs", "qwen2_moe"), tmp_path / "ours")
    saved = opened(tmp_path / "ours")
    assert len(looked) == len({*looked}) < len(saved.tensors) / 2


def test_a_tied_model_has_one_embedding(tmp_path: Path) -> None:
    """Published ones have a second copy at times, which is no tensor of its own."""
    theirs = made(tmp_path / "theirs", "qwen2")
    assert "lm_head.weight" not in safetensors.entries(theirs)
    convert.import_(theirs, tmp_path / "ours")
    assert "output_layer.weight" not in opened(tmp_path / "ours").tensors


def test_nothing_is_left_where_it_fails(tmp_path: Path) -> None:
    theirs = made(tmp_path / "theirs", "llama")
    whole = (theirs / "model.safetensors").read_bytes()
    (theirs / "model.safetensors").write_bytes(whole[:-1])
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(UsageError, match="isn't whole"):
        convert.import_(theirs, tmp_path / "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    for was, now in ((b'"F32"', b'"F8"'), (b'"shape":[', b'"shape":{'), (b"[0,", b"[x,")):
        odd = whole.replace(was, now, 1)
        (theirs / "model.safetensors").write_bytes(odd)
        with pytest.raises(UsageError):
            convert.import_(theirs, tmp_path / "ours")
    (theirs / "model.safetensors").write_bytes(whole)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("mine")
    with pytest.raises(UsageError, match="isn't an empty folder"):
        convert.import_(theirs, tmp_path / "full")
    assert (tmp_path / "full/mine").read_text() == "mine"
    convert.import_(theirs, tmp_path / "ours")
    saved = opened(tmp_path / "ours")
    [one, *_] = saved.tensors.values()
    more = replace(saved, tensors={**saved.tensors, "decoder.layers.0.router.expert_bias": one})
    with pytest.raises(UsageError, match="expert_bias, which that has not"):
        convert.export(more, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_that_is_not_whole_or_says_too_little_is_refused(tmp_path: Path) -> None:
    theirs = made(tmp_path / "theirs", "llama")
    convert.import_(theirs, tmp_path / "ours")
    folder = reader.find(tmp_path / "ours")
    common = (folder / completeness.COMMON).read_bytes()
    with (folder / completeness.COMMON).open("wb") as file:
        torch_file.write(file, {"iteration": 3})
    with pytest.raises(UsageError, match="doesn't say num_attention_heads"):
        convert.export(reader.opened(folder), tmp_path / "back")
    given = convert.given(
        "--num-attention-heads 4 --max-position-embeddings=64 --vocab-size 100".split()
    )
    convert.export(reader.opened(folder), tmp_path / "back", given)
    same(theirs, tmp_path / "back")
    (folder / completeness.COMMON).write_bytes(common)
    data = folder / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-9])
    with pytest.raises(UsageError, match=r"has \d+ of \d+ bytes"):
        reader.opened(folder)


def test_tokenizer_files_go_along(tmp_path: Path) -> None:
    theirs = made(tmp_path / "theirs", "llama")
    (theirs / "tokenizer.json").write_text("{}")
    (theirs / "modeling.py").write_text("raise SystemExit")
    convert.import_(theirs, tmp_path / "ours")
    convert.export(opened(tmp_path / "ours"), tmp_path / "back")
    assert (tmp_path / "back/tokenizer.json").read_text() == "{}"
    assert not [*tmp_path.glob("back/*.py")]


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@given(plain)
def test_what_is_pickled_is_read_by_python(value: Any) -> None:
    assert pickle.loads(torch_file.pickled(value)) == value  # noqa: S301


PEAK = """
import re, sys
from pathlib import Path
from launcher.tools.weights import convert, reader
there, back = Path(sys.argv[1]), Path(sys.argv[2])
convert.import_(there, back / "ours")
convert.export(reader.opened(reader.find(back / "ours")), back / "back")
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def test_memory_holds_a_few_tensors_and_never_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 16}
    monkeypatch.setitem(CONFIGS, "llama", CONFIGS["llama"] | wide)
    theirs = made(tmp_path / "theirs", "llama", dtype="bfloat16")
    model = sum(path.stat().st_size for path in theirs.glob("*.safetensors")) >> 20
    largest = max(entry.read().nbytes for entry in safetensors.entries(theirs).values()) >> 20
    done = subprocess.run(
        [sys.executable, "-c", PEAK, theirs, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    peak = int(done.stdout) >> 10
    assert model > 250
    assert peak < 100 + 6 * largest, (peak, largest, model)


def changed(tmp_path: Path, family: str, change: dict[str, Any]) -> Path:
    """A folder of Hugging Face's whose config.json says something else."""
    theirs = made(tmp_path / "theirs", family)
    config = json.loads((theirs / "config.json").read_text()) | change
    (theirs / "config.json").write_text(json.dumps(config))
    return theirs


@table("family", "change", "told")
def test_a_config_that_says_another_model_is_refused_by_name(
    tmp_path: Path, family: str, change: dict[str, Any], told: str
) -> None:
    """It was believed, or what it said was left out, without a word."""
    with pytest.raises(UsageError, match=told):
        convert.import_(changed(tmp_path, family, change), tmp_path / "ours")


@table("family", "change")
def test_what_a_config_says_comes_back(tmp_path: Path, family: str, change: dict[str, Any]) -> None:
    convert.import_(changed(tmp_path, family, change), tmp_path / "ours")
    convert.export(opened(tmp_path / "ours"), tmp_path / "back")
    config = json.loads((tmp_path / "back/config.json").read_text())
    carried = {key: change[key] for key in change if key in config or family == "mixtral"}
    assert carried
    assert carried == {key: config[key] for key in carried}


def test_a_head_of_its_own_stays_where_the_config_says_that_it_is_tied(tmp_path: Path) -> None:
    """Fine-tunes are saved so; the head was dropped."""
    theirs = changed(tmp_path, "llama", {"tie_word_embeddings": True})
    convert.import_(theirs, tmp_path / "ours")
    convert.export(opened(tmp_path / "ours"), tmp_path / "back")
    same(theirs, tmp_path / "back")
    assert '"tie_word_embeddings": false' in (tmp_path / "back/config.json").read_text()


ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, 1e308, 1 << 40, 1 << 70, "4", "", [], {}, [4], {"a": 1}),
    *(float("inf"), float("-inf"), float("nan")),
]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 9))]
)
@pytest.mark.parametrize("family", CONFIGS)
def test_no_config_gives_a_traceback(tmp_path: Path, family: str, seed: int) -> None:
    """Infinity, no heads, or a shape beyond 64 bits did. What is taken has the same weights."""
    theirs = made(tmp_path / "theirs", family)
    whole = json.loads((theirs / "config.json").read_text())
    chance = random.Random(seed)  # noqa: S311
    refused, tried = 0, 40 if seed else 12
    for number in range(tried):
        names = chance.sample([*whole, "rope_parameters", "eos_token_id"], chance.choice((1, 1, 2)))
        (theirs / "config.json").write_text(
            json.dumps(whole | {name: chance.choice(ODD) for name in names})
        )
        target = tmp_path / f"ours-{number}"
        try:
            convert.import_(theirs, target)
            convert.export(opened(target), tmp_path / f"back-{number}")
        except UsageError:
            refused += 1
        else:
            same(theirs, tmp_path / f"back-{number}")
    assert 0 < refused < tried


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": ' * 100_000,
        b"[]",
        b'{"a": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, NaN]}}',
        b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [36893488147419103232], "data_offsets": [0, 4]}}',
        b'{"a": 3}',
    ],
)
def test_no_header_gives_a_traceback(tmp_path: Path, text: bytes) -> None:
    theirs = made(tmp_path / "theirs", "llama")
    length = len(text).to_bytes(8, "little")
    (theirs / "model.safetensors").write_bytes(length + text + bytes(64))
    with pytest.raises(UsageError):
        convert.import_(theirs, tmp_path / "ours")
