"""The JSON Schema of a run file against the models that it stands for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from launcher.plan import source, values
from launcher.plan.config import RunConfig
from launcher.plan.schema import schema

SCHEMA = schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
IMPORTED = sorted((Path(__file__).parents[1] / "importing/golden").glob("import-*.out"))

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


@pytest.mark.parametrize(
    "right",
    [
        "image: 24.09",
        "image: a/b:1",
        "image: {tag: '24.10', megatron: 0.10.0}",
        "image: {name: x, tag: null}",
        "nodes: 2",
        "nodes: {count: 2, rank: 1, master_addr: a}",
        "mounts: [{source: a, target: /b, read_only: false}]",
        "megatron_args: {a: [1, x], b: true, c: null}",
        "resources: {shm_size: 1g, ipc: private, ulimits: {stack: -1}}",
    ],
)
def test_the_short_forms_are_taken_by_both(right: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    data = {"name": "a", "image": "cpu"} | yaml.safe_load(right)
    assert accepted(data)
    VALIDATOR.validate(data)


@pytest.mark.parametrize(
    "path", [*sorted(source.PRESETS.glob("*.yaml")), *IMPORTED], ids=lambda path: path.name
)
def test_presets_and_imported_files_fit(path: Path) -> None:
    text = path.read_text(encoding="utf-8").partition("\nimport-")[0]
    VALIDATOR.validate(yaml.safe_load(text))


@pytest.mark.parametrize(
    "wrong",
    [
        "nmae: a",
        "image: null",
        "name: -a",
        "name: null",
        "image: {}",
        "image: {tag: '24.10', nam: x}",
        "image: -1",
        "image: ''",
        "image: {tag: cpu, megatron: '0.9'}",
        "program: ''",
        "program: 3",
        "model: {num_layer: 2}",
        "model: {num_layers: 0}",
        "model: {num_layers: two}",
        "model: {num_layers: true}",
        "model: {hidden_dropout: 1.5}",
        "model: {swiglu: 1}",
        "model: null",
        "model: []",
        "training: {lr: fast}",
        "training: {lr: -1}",
        "training: {lr: true}",
        "training: {micro_batch_size: some}",
        "training: {micro_batch_size: 0}",
        "training: {rampup_batch_size: [1, 2]}",
        "data: {path: []}",
        "data: {path: [0.5]}",
        "data: {path: [true, a]}",
        "data: {path: ''}",
        "data: {mock: yeah}",
        "checkpoint: {keep: 0}",
        "megatron_args: {a: {b: c}}",
        "megatron_args: {a: [[b]]}",
        "gpus: -1",
        "gpus: device=",
        "gpus: [0]",
        "gpus: true",
        "gpus: 1.5",
        "processes: 0",
        "nodes: 0",
        "nodes: {count: 0}",
        "nodes: {master_port: 70000}",
        "env: {A-B: x}",
        "env: {A: [x]}",
        "secrets: {A: 3}",
        "mounts: [{source: a}]",
        "mounts: [{source: a, target: relative}]",
        "max_restarts: -1",
        "resources: {ipc: hosst}",
        "resources: {shm_size: big, ipc: private}",
        "resources: {shm_size: 1g}",
        "resources: {shm_size: 1g, ipc: host}",
        "resources: {user: root}",
        "resources: {stop_grace: 1.5}",
    ],
)
def test_both_refuse_what_is_wrong(wrong: str) -> None:
    data = {"name": "a", "image": "cpu"} | yaml.safe_load(wrong)
    assert not accepted(data)
    assert not VALIDATOR.is_valid(data)


def test_a_key_says_which_option_it_is_and_its_values() -> None:
    parts = SCHEMA["$defs"]
    training, model = parts["Training"]["properties"], parts["Model"]["properties"]
    assert training["lr"]["description"] == "--lr"
    assert model["attention_backend"]["description"] == (
        "--attention-backend; Megatron has it from 0.11 on; not for the program gpt"
    )
    assert {"auto", "flash", None} <= set(model["attention_backend"]["enum"])
    assert parts["Logging"]["properties"]["check_replicas_interval"]["description"] == (
        "--check-replicas-interval; for the program gpt alone"
    )
    assert not VALIDATOR.is_valid({"name": "a", "image": "cpu", "training": {"optimizer": "adma"}})


def test_every_key_of_the_file_is_told() -> None:
    for key, value in SCHEMA["properties"].items():
        inner = SCHEMA["$defs"].get(value.get("$ref", "").rpartition("/")[2], {})
        assert value.get("description") or inner.get("description"), key
