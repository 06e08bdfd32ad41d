"""Finding a run file, and what is said of a wrong one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.errors import UsageError
from launcher.run import source
from launcher.run.source import Override

Write = Callable[[str], str]


def refusal(path: str, *sets: str) -> str:
    """What is said of a run file."""
    with pytest.raises(UsageError) as caught:
        source.load(path, [source.parse_set(one) for one in sets])
    return str(caught.value)


def test_a_preset_is_found_by_name_with_and_without_its_ending() -> None:
    assert source.find("gpt2") == source.find("gpt2.yaml")
    assert source.find("gpt2")[1].parent == source.PRESETS


def test_a_file_comes_before_a_preset_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpt2.yaml").write_text("name: mine\nimage: cpu\n")
    assert source.load("gpt2.yaml", [])[0].name == "mine"


def test_the_nearest_preset_is_named() -> None:
    assert "Did you mean 'gpt2-tiny.yaml'" in refusal("gpt2-tin")


def test_a_folder_is_no_run_file(tmp_path: Path) -> None:
    assert "is a folder" in refusal(str(tmp_path))


def test_a_file_that_is_not_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    assert "can't be read" in refusal(str(tmp_path / "bad.yaml"))


def test_a_wrong_key_gives_line_and_nearest(write: Write) -> None:
    told = refusal(write("name: a\nimage: cpu\nmodel:\n  hiden_size: 3\n"))
    assert "run.yaml:4: model.hiden_size: unknown key. Did you mean 'hidden_size'" in told


def test_a_wrong_key_on_the_command_line_gives_the_same(write: Write) -> None:
    told = refusal(write("name: a\nimage: cpu\n"), "model.hiden_size=3")
    assert told.startswith("--set model.hiden_size=3: model.hiden_size: unknown key. Did you mean")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model: {num_layers: two}", "num_layers"),
        ("model: {num_layers: true}", "num_layers"),
        ("model: {num_layers: 0}", "greater than 0"),
        ("training: {lr: fast}", "not a number"),
        ("training: {lr: .nan}", "not a finite number"),
        ("training: {micro_batch_size: some}", "neither a whole number above 0 nor auto"),
        ("training: {fp16: 1}", "fp16"),
        ("data: {path: [0.5, 0.5]}", "at least one path prefix"),
        ("data: {path: []}", "neither a path prefix nor a list"),
        ("gpus: device=", "isn't a request for GPUs"),
        ("gpus: [0, 1]", "not a request for GPUs"),
        ("env: {A-B: x}", "a variable's name"),
        ("env: {A: [x]}", "not text, a number, true or false"),
        ("megatron_args: {a: {b: c}}", "not text, a number, true or false"),
        ("mounts: [{source: a, target: relative}]", "an absolute path"),
        ("resources: {shm_size: 1g}", "no effect with ipc: host"),
        ("resources: {shm_size: big, ipc: private}", "a size: 512m"),
        ("resources: {user: root}", "auto, image or 1000:1000"),
        ("nodes: 2", "master_addr"),
        ("nodes: {count: 2, rank: 2, master_addr: a}", "rank 2"),
        ("program: ''", "program"),
    ],
)
def test_a_wrong_value_gives_line_and_reason(write: Write, line: str, said: str) -> None:
    told = refusal(write(f"name: a\nimage: cpu\n{line}\n"))
    assert "run.yaml:3: " in told
    assert said in told


@pytest.mark.parametrize(
    ("text", "tag"), [("24.10", "24.10"), ("24.09", "24.09"), ('"24.10"', "24.10"), ("cpu", "cpu")]
)
def test_a_tag_may_stand_without_quotes(write: Write, text: str, tag: str) -> None:
    config, _ = source.load(write(f"name: a\nimage: {text}\n"), [])
    assert (config.image.tag, config.image.name) == (tag, None)


def test_a_name_with_a_registry_or_a_tag_is_a_full_name(write: Write) -> None:
    config, _ = source.load(write("name: a\nimage: site.example/megatron:9\n"), [])
    assert (config.image.tag, config.image.name) == (None, "site.example/megatron:9")


def test_a_number_without_a_dot_is_read_as_a_number(write: Write) -> None:
    config, _ = source.load(write("name: a\nimage: cpu\ntraining: {lr: 1e-4}\n"), [])
    assert config.training.lr == 1e-4


def test_an_override_reaches_below_the_short_form(write: Write) -> None:
    path = write('name: a\nimage: "24.10"\n')
    config, _ = source.load(path, [source.parse_set("image.megatron=0.10.0")])
    assert (config.image.tag, config.image.megatron) == ("24.10", "0.10.0")


def test_a_tag_replaces_a_full_name(write: Write) -> None:
    path = write("name: a\nimage: some/image\n")
    override = Override("--tag cpu", {"image.name": None, "image.tag": "cpu"})
    assert source.load(path, [override])[0].image.tag == "cpu"


def test_the_last_override_wins(write: Write) -> None:
    sets = [source.parse_set(f"training.seed={n}") for n in (1, 2)]
    assert source.load(write("name: a\nimage: cpu\n"), sets)[0].training.seed == 2


@pytest.mark.parametrize("argument", ["", "a", "=1", "a..b=1", ".a=1", "a=[", "a=!!int x", "a=&"])
def test_a_set_that_is_no_key_and_value_is_refused(write: Write, argument: str) -> None:
    assert f"--set {argument}" in refusal(write("name: a\nimage: cpu\n"), argument)


def test_values_are_placed_by_file_line_or_argument(write: Write) -> None:
    path = write("name: a\nimage: cpu\nmodel:\n  num_layers: 2\n")
    _, origin = source.load(path, [source.parse_set("training.lr=1.0")])
    assert origin.of("model.num_layers") == f"{path}:4: model.num_layers"
    assert origin.of("model.hidden_size") == f"{path}:3: model.hidden_size"
    assert origin.of("training.lr") == "--set training.lr=1.0: training.lr"
    assert origin.of("gpus") == f"{path}: gpus"


KEYS = st.sampled_from(
    "name image model training data gpus env mounts nodes resources num_layers lr path "
    "megatron_args count tag x processes program".split()
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates()
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_a_malformed_file_is_a_message_with_its_place(tmp_path_factory, data) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.getbasetemp() / "malformed.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    try:
        source.load(str(path), [])
    except UsageError as error:
        assert all(line.startswith((str(path), "  ")) for line in str(error).splitlines())


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_no_set_argument_raises_anything_but_a_usage_error(argument: str) -> None:
    try:
        override = source.parse_set(argument)
        source.load("gpt2-tiny", [override])
    except UsageError as error:
        assert str(error)


def test_the_help_of_run_imports_nothing_heavy() -> None:
    code = (
        "import argparse, sys, launcher.cli.run as r; r.arguments(argparse.ArgumentParser());"
        "print(sorted({'pydantic', 'yaml', 'docker', 'requests'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
