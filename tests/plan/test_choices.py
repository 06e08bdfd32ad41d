"""The values that options take, read from upstream's text, and what is refused by them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.plan import arguments
from launcher.plan.arguments import Option
from launcher.train.gpt.arguments import parser
from tools import extract

SOURCES = {
    "pretrain_gpt.py": "",
    "megatron/training/arguments.py": (
        "from megatron.training.parts import Options\n"
        "from megatron.training.kinds import Colour, Plain, Word\n"
        "def add(parser):\n"
        "    add = parser.add_argument\n"
        "    parser.add_argument('--word', type=str, choices=['b', 'a', None])\n"
        "    parser.add_argument('--level', type=int, choices=range(0, 3))\n"
        "    parser.add_argument('--number', type=int, choices=[4, 8])\n"
        "    parser.add_argument('--number-as-text', choices=[4, 8])\n"
        "    parser.add_argument('--lowered', type=str.lower, choices=['a'])\n"
        "    parser.add_argument('--member', type=lambda c: Colour[c], choices=list(Colour))\n"
        "    parser.add_argument('--by-value', type=str, choices=[w.value for w in Word])\n"
        "    parser.add_argument('--any', type=str)\n"
        "    parser.add_argument('--here', choices=['a'])\n"
        "    parser.add_argument('--here', choices=['b'])\n"
        "    parser.add_argument('--there', choices=['a'])\n"
        "    parser.add_argument('--there', type=str)\n"
        "    ArgumentGroupFactory(Options).build_group(parser)\n"
    ),
    "megatron/training/kinds.py": (
        "class Colour(enum.Enum):\n    red = 1\n    blue = 2\n"
        "class Word(enum.Enum):\n    ONE = 'one'\n    TWO = 'two'\n"
    ),
    "megatron/training/parts.py": (
        "from megatron.training.kinds import Colour\n"
        "class Options:\n"
        "    kind: Literal['x', 'y'] = 'x'\n"
        "    maybe: Optional[Literal['x']] = None\n"
        "    either: Literal[1, 2] | None = None\n"
        "    colour: Colour = Colour.red\n"
        "    device: torch.dtype = None\n"
        "    size: int = 1\n"
        "    renamed: Literal['x'] = field(default='x', metadata={'argparse_meta': "
        "{'arg_names': ['--other-name']}})\n"
        "    own: Literal['x'] = field(default='x', metadata={'argparse_meta': {'type': str}})\n"
    ),
}


def test_choices_are_read_where_they_are_written_out(tmp_path: Path) -> None:
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "core_v1.0.0"]):
        subprocess.run([*git, *command], check=True)
    assert extract.choices_of(extract.Checkout(tmp_path, "core_v1.0.0")) == {
        "--word": ("b", "a"),
        "--level": ("0", "1", "2"),
        "--number": ("4", "8"),
        "--member": ("red", "blue"),
        "--by-value": ("one", "two"),
        "--here": ("a", "b"),
        "--kind": ("x", "y"),
        "--maybe": ("x",),
        "--either": ("1", "2"),
        "--colour": ("red", "blue"),
        "--other-name": ("x",),
    }


KINDS = {
    "pretrain_gpt.py": "",
    "megatron/training/arguments.py": (
        "from megatron.training.parts import Options\n"
        "def add(parser):\n"
        "    parser.add_argument('--plain')\n"
        "    parser.add_argument('--count', type=int)\n"
        "    parser.add_argument('--three', type=float, nargs=3)\n"
        "    parser.add_argument('--any', nargs='*', default=None)\n"
        "    parser.add_argument('--on', action='store_true')\n"
        "    parser.add_argument('--off', action='store_false', dest='x')\n"
        "    parser.add_argument('--either', action=argparse.BooleanOptionalAction)\n"
        "    parser.add_argument('--own', type=frequency)\n"
        "    parser.add_argument('--twice', type=int)\n"
        "    parser.add_argument('--twice', type=float)\n"
        "    ArgumentGroupFactory(Options).build_group(parser)\n"
    ),
    "megatron/training/parts.py": (
        "class Options:\n"
        "    size: int = 1\n"
        "    rate: Optional[float] = None\n"
        "    most: int | None = None\n"
        "    shown: bool = True\n"
        "    levels: list[int] | None = None\n"
        "    level: Literal[1, 2] = 1\n"
        "    kind: Kind = Kind.a\n"
        "    ramp: list[int] | None = field(default=None, metadata={'argparse_meta': "
        "{'nargs': 3}})\n"
        "    text: int | str = field(default=1, metadata={'argparse_meta': {'type': str}})\n"
    ),
}


def test_kinds_are_type_and_number(tmp_path: Path) -> None:
    """`eod_mask_loss: 5` and `recompute_num_layers: two` were passed on, to die in argparse."""
    for name, text in KINDS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"], ["tag", "core_v1.0.0"]):
        subprocess.run([*git, *command], check=True)
    assert extract.kinds_of(extract.Checkout(tmp_path, "core_v1.0.0")) == {
        **{"--plain": "str", "--count": "int", "--three": "float 3", "--any": "str *"},
        **{"--on": "flag", "--off": "flag", "--either": "flag", "--no-either": "flag"},
        **{"--own": "str", "--size": "int", "--rate": "float", "--most": "int"},
        **{"--no-shown": "flag", "--disable-shown": "flag", "--levels": "int +"},
        **{"--level": "int", "--kind": "str", "--ramp": "int 3", "--text": "str"},
    }


def test_every_option_has_a_kind() -> None:
    for release in arguments.table().releases:
        kinds = arguments.table().kinds_of(f"{release}.0")
        assert kinds.keys() == arguments.table().of(f"{release}.0")
    assert arguments.table().kinds_of(None).keys() == arguments.table().gpt


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("--eod-mask-loss", ("5",), "takes no value, and is given 5"),
        ("--recompute-num-layers", ("two",), "takes a whole number, and is given two"),
        ("--recompute-num-layers", ("1.5",), "takes a whole number, and is given 1.5"),
        ("--recompute-num-layers", (), "takes a whole number, and is given none"),
        ("--recompute-num-layers", ("1", "2"), "takes a whole number, and is given 1 2"),
        ("--rotary-percent", ("half",), "takes a number, and is given half"),
        ("--data-path", ("--x",), "can't be given --x, which looks like an option"),
        ("--num-layers", ("-1",), ""),
        ("--data-path", (), ""),
        ("--rampup-batch-size", ("1", "2", "3"), ""),
        ("--lr", ("1e-4",), ""),
    ],
)
def test_values_are_of_the_options_type_and_number(
    name: str, values: tuple[str, ...], told: str
) -> None:
    given = [Option(name, list(values) or True, "run.yaml:3: megatron_args.x")]
    if told:
        with pytest.raises(UsageError, match=f"x: {name} of Megatron 0.9.0 {told}"):
            arguments.check_values(given, "0.9.0")
    else:
        arguments.check_values(given, "0.9.0")


def test_a_secret_of_the_wrong_type_is_not_told() -> None:
    with pytest.raises(UsageError, match="is given ") as caught:
        arguments.check_values([Option("--save-interval", "https://u:hunter2@h", "a")], None)
    assert "hunter2" not in str(caught.value)


def test_choices_have_the_spans_of_their_releases() -> None:
    few, more = {"--a": ("x",)}, {"--a": ("x", "y"), "--b": ("z",)}
    assert extract.restricted({"1.0": few, "1.1": more, "1.2": {}, "1.3": few}) == {
        "--a": {"x": "1.0-1.0,1.3-", "x y": "1.1-1.1"},
        "--b": {"z": "1.1-1.1"},
    }


def test_our_programs_choices_are_those_of_its_parser() -> None:
    assert arguments.table().gpt_choices == {
        action.option_strings[-1]: tuple(action.choices)
        for action in parser()._actions
        if action.choices
    }


def test_the_choices_are_of_options_that_there_are_and_sorted() -> None:
    data = json.loads(arguments.DATA.read_text(encoding="utf-8"))
    assert list(data["choices"]) == sorted(data["choices"])
    for release in data["releases"]:
        choices = arguments.table().choices_of(f"{release}.0")
        assert choices.keys() <= (arguments.table().of(release) or set())


@pytest.mark.parametrize(
    ("release", "option", "allowed"),
    [
        (None, "--lr-decay-style", ("constant", "linear", "cosine")),
        ("0.9.0", "--optimizer", ("adam", "sgd")),
        ("0.9.0", "--position-embedding-type", ("learned_absolute", "rope", "none")),
        ("0.9.0", "--attention-backend", None),
        ("0.12.3", "--attention-backend", ("flash", "fused", "unfused", "local", "auto")),
        ("0.19.0", "--attention-backend", ("flash", "fused", "unfused", "local", "auto")),
        ("0.19.0", "--normalization", ("LayerNorm", "RMSNorm")),
        ("0.99.0", "--optimizer", None),
    ],
)
def test_what_releases_take(release: str | None, option: str, allowed: object) -> None:
    assert arguments.table().choices_of(release).get(option) == allowed


def test_a_wrong_value_is_refused_with_place_nearest_and_all() -> None:
    wrong = Option("--normalization", "RMSNrom", "run.yaml:3: model.normalization")
    with pytest.raises(UsageError) as caught:
        arguments.check_values([wrong], "0.9.0")
    assert str(caught.value) == (
        "run.yaml:3: model.normalization: Megatron 0.9.0 takes no --normalization 'RMSNrom'\n"
        "  Did you mean 'RMSNorm'? Known: LayerNorm, RMSNorm"
    )
    with pytest.raises(UsageError, match="the program gpt takes no --lr-decay-style 'WSD'"):
        arguments.check_values([Option("--lr-decay-style", "WSD", "here")], None)


def test_an_option_of_two_lines_is_told_on_one() -> None:
    for check in (arguments.check_ours, lambda one: arguments.check_megatron(one, "0.9.0")):
        with pytest.raises(UsageError, match=r"run.yaml:2: a: .* no --a\\nb"):
            check({"--a\nb": "run.yaml:2: a"})


def test_right_values_and_options_without_choices_pass() -> None:
    options = [Option("--optimizer", "sgd", ""), Option("--data-path", "anything", "")]
    arguments.check_values([*options, Option("--fp16", True, "")], "0.9.0")
    arguments.check_values([Option("--optimizer", "new", "")], "0.99.0")


def test_words_are_options_with_their_values() -> None:
    words = ("left", "--a", "1", "2", "--b=x=y", "--c", "--api-key=z")
    assert arguments.given(words) == [
        Option("--a", ["1", "2"], "-- --a"),
        Option("--b", "x=y", "-- --b=x=y"),
        Option("--c", True, "-- --c"),
        Option("--api-key", "z", "-- --api-key=(hidden)"),
    ]


def test_what_any_release_takes_is_known_for_editors() -> None:
    assert "muon" in arguments.table().any_choices("--optimizer")
    assert arguments.table().any_choices("--data-path") == ()
