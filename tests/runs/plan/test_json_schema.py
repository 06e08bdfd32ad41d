"""The schema of a run file, the presets, and Megatron's options as they are read from sources."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from launcher.base import yamlfile
from launcher.cli import runfile
from launcher.cli.describe import describe
from launcher.runs.backends.docker import docker_request
from launcher.runs.checks import auto, memory
from launcher.runs.checks.machine import Gpu
from launcher.runs.plan import model_size
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.layout import layout
from launcher.runs.plan.plan import make_plan
from launcher.runs.plan.render import values_of
from launcher.runs.plan.resolved import resolve
from launcher.runs.runfile import origins, values
from launcher.runs.runfile.config import RunConfig
from launcher.tools.json_schema import schema
from tests.plans import HOST, STAMP, load
from tests.tables import table
from tools import extract

SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
IMPORTED = sorted((Path(__file__).parents[2] / "tools/importing/golden").glob("*.out"))

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
NUMBER = st.floats(0, 1) | st.integers(0, 1) | st.sampled_from(["1e-4", ".5", "1_0e-1", " 0.1 "])
SCALAR = TEXT | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(-1e9, 1e9)
VALUES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (values.Text, TEXT),
    (values.Whole, st.integers(0, values.LARGEST)),
    (values.Positive, st.integers(1, values.LARGEST)),
    (values.Fraction, NUMBER),
    (values.NotNegative, NUMBER | st.floats(0)),
    (values.Name, st.from_regex(r"[A-Za-z][A-Za-z0-9_]{0,8}", fullmatch=True)),
    (values.Variable, st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True)),
    (values.Tag, st.sampled_from([24.1, 24.09, "24.10", "cpu", "mine_2"])),
    (values.Reference, st.sampled_from(["a/b:1", "localhost:5000/a@sha256:" + "0" * 64])),
    (values.Size, st.sampled_from(["512m", 512, "16G", "7"])),
    (values.GpuRequest, st.sampled_from([0, 8, "2", "all", " all ", "device=0,1", "device=GPU-a"])),
    (values.MicroBatch, st.integers(1, 10**6) | st.just("auto")),
    (values.Prefixes, TEXT | st.sampled_from([["a"], [0.3, "a", 1, "b"]])),
    (values.Scalars, SCALAR | st.lists(SCALAR, max_size=3)),
    (values.OneScalar, SCALAR),
    (values.Time, st.integers(0, 10**6) | st.sampled_from(["2-12:00:00", "12:00:00", "UNLIMITED"])),
]


def accepted(data: object) -> bool:
    try:
        RunConfig.model_validate(data)
    except ValidationError:
        return False
    return True


@given(st.data())
def test_what_the_models_take_the_schema_takes(data: st.DataObject) -> None:
    kind, values = data.draw(st.sampled_from(VALUES))
    value, taker = data.draw(values), TypeAdapter(kind)
    with suppress(ValidationError):
        taker.validate_python(value)
        jsonschema.validate(value, taker.json_schema())


@table("right")
def test_the_short_forms_are_taken_by_both(right: str) -> None:
    tree = yamlfile.tree(right, "")
    assert tree
    data = {"name": "a", "image": "cpu"} | yamlfile.value(tree, "")
    assert accepted(data)
    VALIDATOR.validate(data)


@pytest.mark.parametrize(
    "path", [*sorted(origins.PRESETS.glob("*.yaml")), *IMPORTED], ids=lambda path: path.name
)
def test_presets_and_imported_files_fit(path: Path) -> None:
    text = path.read_text(encoding="utf-8").partition(f"\n{path.stem}:")[0]
    text = text.partition("\nthe run file")[0]  # and what keeps it from running
    VALIDATOR.validate(yaml.safe_load(text))


@table("wrong")
def test_both_refuse_what_is_wrong(wrong: str) -> None:
    data = {"name": "a", "image": "cpu"} | yaml.safe_load(wrong)
    assert not accepted(data)
    assert not VALIDATOR.is_valid(data)


def test_a_key_says_which_option_it_is_and_its_values() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    parts = SCHEMA["$defs"]
    training, model = parts["Training"]["properties"], parts["Model"]["properties"]
    assert training["lr"]["description"] == "--lr"
    assert model["attention_backend"]["description"] == (
        "--attention-backend; Megatron has it from 0.11 on; not for the program gpt"
    )
    assert {"auto", "flash", None} <= set(model["attention_backend"]["enum"])
    assert parts["Logging"]["properties"]["check_replicas_interval"]["description"] == (
        "--check-replicas-interval; only for the program gpt"
    )
    assert not VALIDATOR.is_valid({"name": "a", "image": "cpu", "training": {"optimizer": "adma"}})


def test_every_key_of_the_file_is_told() -> None:
    for key, value in SCHEMA["properties"].items():
        inner = SCHEMA["$defs"].get(value.get("$ref", "").rpartition("/")[2], {})
        assert value.get("description") or inner.get("description"), key


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
def test_a_dry_run_prints_what_it_did(name: str) -> None:
    """Where no GPU is seen."""
    preset, *sets = DRY_RUNS[name]
    run = resolve(*load(preset, *sets), ImageFacts("0.9.0", True), HOST, STAMP.run)
    made = make_plan(auto.decide(run, ())[0], HOST, STAMP)
    text = f"{describe(made)}\n{docker_request.show(made)}"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "UPDATE_GOLDEN=1 writes it anew"


def test_every_preset_has_a_dry_run_and_no_text_is_left_over() -> None:
    presets = {path.stem for path in origins.PRESETS.glob("*.yaml")}
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
    config = load(name)[0]
    where = layout(config, int(config.gpus))
    shape = model_size.shape(config.program, values_of(config, where))
    assert shape
    assert shape.parameters == published


SIZES = {"llama3-8b": 2, "llama3.2-1b": 2, "qwen3-0.6b": 4, "qwen3-30b-a3b": 2, "mixtral-8x7b": 1}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_a_preset_fits_on_8_gpus(name: str, size: int) -> None:
    """By the largest micro-batch of the batch alone, llama3.2-1b would take twice an H100."""
    says_h200 = "H200" in (origins.PRESETS / f"{name}.yaml").read_text("utf-8")
    room = int(141e9 if says_h200 else 80e9)
    card = Gpu(0, "GPU-0", "", room, 0, (9, 0), "")
    run, _ = auto.decide(resolve(*load(name), ImageFacts(), HOST), [card] * 8)
    training = run.config.training
    assert (training.bf16, training.micro_batch_size) == (True, size)
    needed = memory.needed(run.config.program, run.values, run.layout, (9, 0))
    assert needed
    assert needed.total < room * 0.9


@pytest.mark.parametrize("path", sorted(origins.PRESETS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_preset_says_first_what_it_is_for_and_why_it_is_not_auto(path: Path) -> None:
    """All but gpt2 took a micro-batch of 1 on any GPU, a fraction of its speed."""
    text = path.read_text("utf-8")
    assert text.startswith("# ")
    for line in text.splitlines():
        if re.match(r" +(micro_batch_size|precision|bf16|fp16): (?!auto)", line):
            assert "  # " in line


# What is added by hand, and as a field; the options that come of it: kind, and any choices.
CALLS = {
    "'--plain'": {"--plain": "str"},
    "'--by-hand', '--by-hand-too', type=int": {"--by-hand": "int", "--by-hand-too": "int"},
    "'--both', action=argparse.BooleanOptionalAction": {"--both": "flag", "--no-both": "flag"},
    "'--three', type=float, nargs=3": {"--three": "float 3"},
    "'--any', nargs='*', default=None": {"--any": "str *"},
    "'--on', action='store_true'": {"--on": "flag"},
    "'--off', action='store_false', dest='x'": {"--off": "flag"},
    "'--own', type=frequency": {"--own": "str"},
    "'--twice', type=int": {},
    "'--twice', type=float": {"--twice": ""},
    "'--word', type=str, choices=['b', 'a', None]": {"--word": "str: b a"},
    "'--level', type=int, choices=range(0, 3)": {"--level": "int: 0 1 2"},
    "'--number', type=int, choices=[4, 8]": {"--number": "int: 4 8"},
    "'--number-as-text', choices=[4, 8]": {"--number-as-text": "str"},
    "'--lowered', type=str.lower, choices=['a']": {"--lowered": "str"},
    "'--member', type=lambda c: Colour[c], choices=list(Colour)": {"--member": "str: red blue"},
    "'--by-value', type=str, choices=[w.value for w in Word]": {"--by-value": "str: one two"},
    "'--here', choices=['a']": {},
    "'--here', choices=['b']": {"--here": "str: a b"},
    "'--there', choices=['a']": {},
    "'--there', type=str": {"--there": "str"},
}
META = "field(default=None, metadata={'argparse_meta': {%s}})"
FIELDS = {
    "plain_value: int = 1": {"--plain-value": "int"},
    "left_out: int = 1": {},
    "rate: Optional[float] = None": {"--rate": "float"},
    "most: int | None = None": {"--most": "int"},
    "levels: list[int] | None = None": {"--levels": "int +"},
    "ramp: list[int] | None = " + META % "'nargs': 3": {"--ramp": "int 3"},
    "text: int | str = " + META % "'type': str": {"--text": "str"},
    "drop: bool = False": {"--drop": "flag"},
    "keep: bool = True": {"--no-keep": "flag", "--disable-keep": "flag"},
    "unset: bool | None = None": {"--no-unset": "flag", "--disable-unset": "flag"},
    "fresh: bool = field(default=False)": {"--fresh": "flag", "--inherited": "int"},
    "inner: int = field(init=False)": {},
    "named: bool = " + META % "'arg_names': ['--other-name']": {"--other-name": "flag"},
    "SHARED: ClassVar[int] = 1": {},
    "kind: Literal['x', 'y'] = 'x'": {"--kind": "str: x y"},
    "maybe: Optional[Literal['x']] = None": {"--maybe": "str: x"},
    "either: Literal[1, 2] | None = None": {"--either": "int: 1 2"},
    "colour: Colour = Colour.red": {"--colour": "str: red blue"},
    "device: torch.dtype = None": {"--device": "str"},
    "mine: Literal['x'] = " + META % "'type': str": {"--mine": "str"},
}
INDENT = "\n    "
SOURCES = {
    "pretrain_gpt.py": "",
    "megatron/training/arguments.py": (
        "from megatron.training.parts import Options\n"
        "from megatron.training.kinds import Colour, Word\n"
        f"def add(parser):{INDENT}skip = ['left_out']{INDENT}"
        + INDENT.join(f"parser.add_argument({call})" for call in CALLS)
        + f"{INDENT}ArgumentGroupFactory(Options, exclude=skip).build_group(parser)\n"
    ),
    "megatron/training/kinds.py": (
        "class Colour(enum.Enum):\n    red = 1\n    blue = 2\n"
        "class Word(enum.Enum):\n    ONE = 'one'\n    TWO = 'two'\n"
    ),
    "megatron/training/parts/__init__.py": "from .options import Options\n",
    "megatron/training/parts/base.py": "class Base:\n    inherited: int\n    fresh: bool = True\n",
    "megatron/training/parts/options.py": (
        "from megatron.training.kinds import Colour\nfrom .base import Base as Parent\n"
        f"class Options(Parent):{INDENT}{INDENT.join(FIELDS)}\n"
    ),
}


def test_options_kinds_and_choices_are_read_from_calls_and_dataclasses(tmp_path: Path) -> None:
    """`eod_mask_loss: 5` and `recompute_num_layers: two` were passed on, to die in argparse."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "core_v1.0.0"]):
        subprocess.run([*git, *command], check=True)
    checkout = extract.Checkout(tmp_path, "core_v1.0.0")
    kinds, choices = extract.kinds_of(checkout), extract.choices_of(checkout)
    found = {
        name: ": ".join(filter(None, (kinds.get(name, ""), " ".join(choices.get(name, ())))))
        for name in extract.options_of(checkout)
    }
    every = {**CALLS, **FIELDS}.values()
    assert found == {name: said for options in every for name, said in options.items()}


def test_spans_have_gaps_where_an_option_was_gone() -> None:
    releases = {"1.0": {"--a", "--b"}, "1.1": {"--b"}, "1.2": {"--a", "--b"}}
    table = extract.upstreams(releases)
    assert table["megatron"] == {"--a": "1.0-1.0,1.2-", "--b": "1.0-"}
    few, more = {"--a": ("x",)}, {"--a": ("x", "y"), "--b": ("z",)}
    assert extract.restricted({"1.0": few, "1.1": more, "1.2": {}, "1.3": few}) == {
        "--a": {"x": "1.0-1.0,1.3-", "x y": "1.1-1.1"},
        "--b": {"z": "1.1-1.1"},
    }


def test_the_schema_is_printed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = runfile.schema.declare(argparse.ArgumentParser())
    assert runfile.schema(parser.parse_args([])) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    assert "yaml-language-server: $schema=" in (parser.epilog or "")
