"""Upstream's options, with the values they take, read from its text without running it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools import extract

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
