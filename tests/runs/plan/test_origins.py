"""Finding a run file, and what is said of a wrong one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base import yamlfile
from launcher.base.errors import UsageError
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.runfile import origins
from launcher.runs.runfile.origins import Override
from tests.plans import HOST, MINIMAL, STAMP, load, plan_of
from tests.tables import table

Write = Callable[[str], str]


def refusal(path: str, *sets: str) -> str:
    """What is said of a run file."""
    with pytest.raises(UsageError) as caught:
        load(path, *sets)
    return str(caught.value)


def test_what_has_no_end_is_told() -> None:
    """It took all memory."""
    with pytest.raises(UsageError, match="has over 16 MB"):
        yamlfile.read(Path("/dev/zero"), "zero")


def test_what_is_no_run_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert origins.find("gpt2") == origins.find("gpt2.yaml")
    assert "Did you mean 'gpt2-tiny.yaml'" in refusal("gpt2-tin")
    assert "is a folder" in refusal(str(tmp_path))
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    assert "can't be read" in refusal(str(tmp_path / "bad.yaml"))
    (tmp_path / "bad.yaml").write_bytes("name: é\nimage: cpu\n".encode() + b"model: \xff\n")
    told = refusal(str(tmp_path / "bad.yaml"))
    assert "bad.yaml:3: can't be read: not UTF-8 text (byte 0xff)" in told
    monkeypatch.chdir(tmp_path)
    Path("gpt2.yaml").write_text("name: mine\nimage: cpu\n")  # it comes before a preset
    assert load("gpt2.yaml")[0].name == "mine"


@table("lines", "said")
def test_a_wrong_key_gives_line_and_nearest(write: Write, lines: str, said: str) -> None:
    assert said in refusal(write(f"name: a\nimage: cpu\n{lines}\n"))
    given = refusal(write("name: a\nimage: cpu\n"), "model.hiden_size=3")
    assert given.startswith("--set model.hiden_size=3: model.hiden_size: unknown key. Did you mean")


LAUGHS = "name: a\nimage: cpu\nenv:\n  a0: &a0 [x]\n" + "".join(
    f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "the file is empty"),
        ("- name\n", 1, "(the file): takes keys and their values"),
        ("name: a\nimage: cpu\nmodel:\n", 3, "model: empty. Give it keys, or leave it out"),
        ("name: a\nmodel:\n\tlr: 1\n", 3, "not YAML: a tab; indent by spaces"),
        ("name: a\n---\nname: b\n", 2, "a second document"),
        ("name: a\nname: b\n", 2, "name: repeated key, first on line 1"),
        ("name: a\nmodel: {lr: 1, lr: 2}\n", 2, "lr: repeated key, first on line 2"),
        ("name: a\n? [b]\n: c\n", 2, "a key must be a word"),
        ("name: a\nenv: *b\n", 2, "undefined alias"),
        ("name: a\nenv: &b {c: *b}\n", 2, "an alias stands within what it names"),
        (LAUGHS, 9, "more than 20000 values, aliases followed"),
        ("name: a\nenv: " + "[" * 200_000, 2, "nested deeper than 50 levels"),
        ("name: a\nenv: " + "{a: " * 200_000, 2, "nested deeper than 50 levels"),
        ("name: a\ngpus: " + "9" * 30, 2, "YAML takes this for a number of 19 digits or more"),
        ("name: a\ngpus: " + "9" * 5000, 2, "a number of 19 digits or more"),
        ("name: a\ngpus: 0x" + "f" * 5000, 2, "a number of 19 digits or more"),
        ("name: a\nimage: cpu\ngpus: !!float x\n", 3, "a value can't be read"),
        ("name: a\nimage: cpu\ngpus: !!bool x\n", 3, "a value can't be read"),
        ("name: a\ngpus: !!python/object:os.system x\n", 2, "could not determine a constructor"),
        ("name: a\nenv: {B: \x07}\n", 2, "not YAML: control characters are not allowed"),
        ('name: a\nimage: cpu\nenv: {"B\\nC": 1}\n', 3, "env.B\\nC: "),
        # wrong values
        ("name: a\nimage: cpu\nmodel: {num_layers: true}", 3, "num_layers"),
        ("name: a\nimage: cpu\ntraining: {lr: fast}", 3, "not a number"),
        ("name: a\nimage: cpu\ntraining: {lr: .nan}", 3, "not a finite number"),
        ("name: a\nimage: cpu\ntraining: {micro_batch_size: some}", 3,
         "neither a whole number above 0 nor auto"),
        ("name: a\nimage: cpu\ndata: {path: [0.5, 0.5]}", 3, "at least one path prefix"),
        ("name: a\nimage: cpu\ndata: {path: []}", 3, "neither a path prefix nor a list"),
        ("name: a\nimage: cpu\ngpus: device=", 3, "isn't a request for GPUs"),
        ("name: a\nimage: cpu\nenv: {A-B: x}", 3, "a variable's name"),
        ("name: a\nimage: cpu\nmegatron_args: {a: {b: c}}", 3, "not text, a number, true or false"),
        ("name: a\nimage: cpu\nmounts: [{source: a, target: relative}]", 3, "an absolute path"),
        ("name: a\nimage: cpu\nresources: {shm_size: 1g}", 3, "no effect with ipc: host"),
        ("name: a\nimage: cpu\nresources: {user: root}", 3, "auto, image or 1000:1000"),
        ("name: a\nimage: cpu\nnodes: {count: 2, rank: 2, master_addr: a}", 3, "rank 2"),
        ("name: a\nimage: cpu\nprogram: ''", 3, "program"),
        # an image's name that would be an option of docker's in the `docker run` line to paste
        *((f"name: a\nimage: {image}\n", 2, "image.name: doesn't look like an image's name")
          for image in ("-v/:/host", "{name: --privileged}", "a.b/../c:1", "'a b:1'")),
    ],
)  # fmt: skip
def test_what_is_odd_or_wrong_gives_line_and_reason(
    write: Write, text: str, line: int, said: str
) -> None:
    path = write(text)
    told = refusal(path)
    assert said in told
    assert told.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        *((word, "true or false") for word in ("on", "Off", "yes", "NO")),
        *((word, "for a date") for word in ("2026-01-02", "2026-01-02 10:00:00", "2020-99-99")),
        *((word, "without its _") for word in ("1_000", "1_000.5", "0_1", "0x1_0")),
        *((word, "octal") for word in ("0100", "-07", "00")),
        ("0b11", "binary"),
    ],
)
def test_what_yaml_would_change_in_silence_is_refused(write: Write, word: str, said: str) -> None:
    """`seq_length: 0100` was 64, and `on` in env was True."""
    for line in (f"env: {{A: {word}}}", f"env: {{{word}: a}}", f"model: {{seq_length: {word}}}"):
        told = refusal(write(f"name: a\nimage: cpu\n{line}\n"))
        assert "run.yaml:3: YAML takes " in told
        assert said in told
        assert "in quotes where it is text." in told
    with pytest.raises(UsageError, match=said):
        origins.parse_set(f"env.A={word}")


def test_a_secret_that_yaml_would_change_is_not_told(write: Write) -> None:
    assert "1234_5678" not in refusal(write("name: a\nimage: cpu\nenv: {B_TOKEN: 1234_5678}\n"))
    with pytest.raises(UsageError) as caught:
        origins.parse_set("env.B_TOKEN=1234_5678")
    assert "1234_5678" not in str(caught.value)


def test_a_byte_order_mark_windows_lines_and_an_alias_are_read(tmp_path: Path) -> None:
    text = "name: a\r\nimage: cpu\r\nenv:\r\n  A: &a 1\r\n  B: *a\r\n"
    (tmp_path / "run.yaml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    config, origin = load(str(tmp_path / "run.yaml"))
    assert config.env == {"A": 1, "B": 1}
    assert origin.lines["env.B"] == 5


def test_of_many_faults_the_first_are_told(write: Write) -> None:
    keys = "".join(f"  k{n}: 1\n" for n in range(50))
    told = refusal(write(f"name: a\nimage: cpu\nmodel:\n{keys}")).splitlines()
    assert len(told) == 21
    assert told[-1].endswith("run.yaml: 30 more like these")


TIMES = ("24:00:00", "1:30", "-190:20:30", "1:30.5")
"""`1:30` was 90, and was refused afterwards, though all who read YAML 1.2 take it for text."""


@pytest.mark.parametrize(
    ("lines", "key", "value"),
    [
        # a tag may stand without quotes, and a number without a dot
        *(
            (f"image: {text}", "image.tag", text.strip("'"))
            for text in ("24.10", "24.09", "'24.10'")
        ),
        ("image: site.example/megatron:9", "image.name", "site.example/megatron:9"),
        ("image: cpu\ntraining: {lr: 1e-4}", "training.lr", 1e-4),
        *((f"image: cpu\nenv: {{A: {time}}}", "env", {"A": time}) for time in TIMES),
        ("image: cpu\nmegatron_args: {a: 'on'}", "megatron_args", {"a": "on"}),
        ('image: cpu\nmegatron_args: {a: "0100"}', "megatron_args", {"a": "0100"}),
        ("image: cpu\nmegatron_args: {a: True}", "megatron_args", {"a": True}),
        ("image: cpu\nmegatron_args: {a: 0x1f}", "megatron_args", {"a": 31}),
        ("image: cpu\nmegatron_args: {a: -0}", "megatron_args", {"a": 0}),
        ("image: cpu\nmegatron_args: {a: 1.5e+3}", "megatron_args", {"a": 1500.0}),
    ],
)
def test_values_are_read_as_they_are_meant(
    write: Write, lines: str, key: str, value: object
) -> None:
    config, _ = load(write(f"name: a\n{lines}\n"))
    assert attrgetter(key)(config) == value


def test_a_time_needs_no_quotes_behind_set_either() -> None:
    assert [load("gpt2", f"env.A={time}")[0].env["A"] for time in TIMES] == [*TIMES]


def test_an_override_reaches_below_the_short_form(write: Write) -> None:
    path = write('name: a\nimage: "24.10"\n')
    config, _ = load(path, "image.megatron=0.10.0")
    assert (config.image.tag, config.image.megatron) == ("24.10", "0.10.0")
    tagged = Override("--tag cpu", {"image.name": None, "image.tag": "cpu"})
    assert origins.load(write("name: a\nimage: some/image\n"), [tagged])[0].image.tag == "cpu"
    found = load(path, "training.seed=1", "training.seed=2")[0]  # the last wins
    assert found.training.seed == 2


@pytest.mark.parametrize(
    ("text", "environ", "nodes"),
    [
        ("nodes: 2", {"SLURM_NODEID": "1", "PET_MASTER_ADDR": "10.0.0.1"}, (1, "10.0.0.1")),
        ("nodes: 2", {"SLURM_NODEID": "0", "PET_NODE_RANK": "1"}, (1, None)),
        ("nodes: {count: 2, rank: 0, master_addr: a}", {"OMPI_COMM_WORLD_RANK": "1"}, (0, "a")),
        ("nodes: 1", {"SLURM_NODEID": "3"}, (0, None)),
    ],
)
def test_which_node_it_is_comes_from_the_environment_where_nothing_says_it(
    write: Write, text: str, environ: dict[str, str], nodes: tuple[int, str | None]
) -> None:
    config, origin = origins.numbered(*load(write(f"{MINIMAL}{text}\n")), environ)
    assert (config.nodes.rank, config.nodes.master_addr) == nodes
    if nodes[0] and "PET_NODE_RANK" in environ:
        assert origin.place("nodes.rank") == "$PET_NODE_RANK: nodes.rank"


@pytest.mark.parametrize("rank", ["2", "x"])
def test_a_wrong_number_in_the_environment_is_told_with_its_variable(
    write: Write, rank: str
) -> None:
    loaded = load(write(f"{MINIMAL}nodes: 2\n"))
    with pytest.raises(UsageError, match=r"\$SLURM_NODEID: nodes"):
        origins.numbered(*loaded, {"SLURM_NODEID": rank})


@pytest.mark.parametrize("argument", ["", "a", "=1", "a..b=1", ".a=1", "a=[", "a=!!int x", "a=&"])
def test_a_set_that_is_no_key_and_value_is_refused(write: Write, argument: str) -> None:
    assert f"--set {argument}" in refusal(write("name: a\nimage: cpu\n"), argument)


def test_values_are_placed_by_file_line_or_argument(write: Write) -> None:
    path = write("name: a\nimage: cpu\nmodel:\n  num_layers: 2\n")
    _, origin = load(path, "training.lr=1.0")
    assert origin.place("model.num_layers") == f"{path}:4: model.num_layers"
    assert origin.place("model.hidden_size") == f"{path}:3: model.hidden_size"
    assert origin.place("training.lr") == "--set training.lr=1.0: training.lr"
    assert origin.place("gpus") == f"{path}: gpus"


PRESETS = {path.stem: path.read_text(encoding="utf-8") for path in origins.PRESETS.glob("*.yaml")}
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
WORDS = st.sampled_from(
    "null true false 0 -1 1e-4 1e999 .nan .inf 0x_ 2020-99-99 24.10 '' [] {} [1,x] {a:1} *a &a "
    "&a[*a] !!bool !!int <<: auto all device=0,0 \\0 \t | > - ? : , ] } # '\" % @ ` --- ... é 二"
    f" {'9' * 30} {'9' * 5000} {'[' * 60} 0x{'f' * 5000} ./x.py pretrain_gpt.py gpt /".split(" ")
)
GARBAGE = WORDS | st.text(max_size=6) | st.integers().map(str)


@st.composite
def spoiled_characters(draw: st.DrawFn) -> str:
    """A preset with characters put in, taken out or replaced."""
    text = PRESETS[draw(st.sampled_from(sorted(PRESETS)))]
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        gone = draw(st.integers(0, 3))
        text = text[:at] + draw(GARBAGE) + text[at + gone :]
    return text


def judged(path: Path, raw: bytes) -> str:
    """What is said of a run file with these bytes, up to its plan; "" where nothing is wrong."""
    path.write_bytes(raw)
    try:
        config, origin = load(str(path))
        facts = ImageFacts(draw_release(raw), True)
        plan_of(config, origin, facts, HOST, STAMP)
    except UsageError as error:
        told = str(error)
        for line in told.splitlines():  # of a preset that it extends, too
            assert re.match(rf"{re.escape(str(path))}:|preset [\w.-]+\.yaml:|  ", line), told
        return told
    return ""


def draw_release(raw: bytes) -> str:
    """One of the releases, by the file itself."""
    return ("0.9.0", "0.16.1", "0.99.0")[len(raw) % 3]


WRONG_VALUES = st.dictionaries(KEYS, VALUES, max_size=6).map(lambda data: yaml.safe_dump(data))
SPOILED = spoiled_characters().map(lambda text: text.encode(errors="surrogatepass"))


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(SPOILED, WRONG_VALUES, st.binary(max_size=60))
def test_what_is_wrong_with_any_file_has_a_place(
    tmp_path: Path, spoiled: bytes, values: str, raw: bytes
) -> None:
    """Of a preset, of wrong values and of any bytes: a message, and never another exception."""
    judged(tmp_path / "run.yaml", spoiled)
    judged(tmp_path / "run.yaml", values.encode())
    assert judged(tmp_path / "run.yaml", raw)


@given(st.text())
def test_no_set_argument_raises_anything_but_a_usage_error(argument: str) -> None:
    try:
        load("gpt2-tiny", argument)
    except UsageError as error:
        assert str(error)


def test_the_help_of_run_imports_nothing_heavy() -> None:
    code = (
        "import sys; from launcher import cli; cli.parser(['run']);"
        "print(sorted({'pydantic', 'yaml', 'docker', 'requests'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("name", origins.LOCAL_RANKS)
def test_a_second_launcher_of_a_node_is_refused(write: Write, name: str) -> None:
    """`srun --ntasks-per-node=8` started eight, of which seven said that a port was taken."""
    loaded = load(write(f"{MINIMAL}nodes: 2\n"))
    assert origins.numbered(*loaded, {name: "0", "SLURM_NODEID": "1"})[0].nodes.rank == 1
    with pytest.raises(UsageError, match=rf"task 3 of its node \(.{name}\)") as caught:
        origins.numbered(*loaded, {name: "3", "SLURM_NODEID": "1"})
    assert "--ntasks-per-node=1" in caught.value.remedy
    alone = load(write(f"{MINIMAL}nodes: 1\n"))
    assert origins.numbered(*alone, {name: "3"}) == alone


def test_a_file_is_laid_over_the_one_that_it_extends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value has its place, and a relative path starts in the folder of its own file."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/base.yaml").write_text("extends: gpt2-tiny\ngpus: 2\ntraining: {lr: 0.5}\n")
    file = tmp_path / "runs/mine.yaml"
    file.write_text("extends: base.yaml\nname: mine\nmodel:\n  num_layers: 4\n")
    monkeypatch.chdir(tmp_path)
    config, origin = load("runs/mine.yaml", "training.seed=7")
    assert (config.name, config.gpus, config.model.num_layers) == ("mine", "2", 4)
    assert (config.training.lr, config.training.seed, config.model.hidden_size) == (0.5, 7, 64)
    assert origin.place("model.num_layers") == "runs/mine.yaml:4: model.num_layers"
    assert origin.place("training.lr") == "runs/base.yaml:3: training.lr"
    assert origin.place("model.hidden_size").startswith("preset gpt2-tiny.yaml:")
    assert origin.place("training.seed") == "--set training.seed=7: training.seed"
    assert (
        plan_of(config, origin, ImageFacts("0.16.1", True)).processes_per_node == 2
    )  # not the CPU's


@table("text", "told")
def test_what_extends_wrongly_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(told)) as refused:
        load(str(file))
    assert str(refused.value).startswith(f"{file}:")
