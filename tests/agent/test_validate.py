"""Where a program of upstream's is held to be asked: at its first call of Megatron's."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from launcher.agent import validate

PRETRAIN = "def pretrain(provider, args_defaults={}, **more): raise SystemExit('went on')\n"
PARSES = """
def parse_and_validate_args(extra_args_provider=None, args_defaults={}):
    raise SystemExit("went on")
"""
OLD = "from megatron.training import pretrain\npretrain(args_defaults={'a': 1})\n"
NEW = (
    "from megatron.training import pretrain\n"
    "from megatron.training.arguments import parse_and_validate_args\n"
    "args = parse_and_validate_args(args_defaults={'a': 1})\n"
    "pretrain(args)\n"
)


@pytest.mark.parametrize(("parses", "program"), [("", OLD), (PARSES, NEW)])
def test_what_a_program_gives_its_parser_is_known_before_it_parses(
    parses: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.18 on programs parse by themselves: Megatron then refused to be asked once more."""
    package = tmp_path / "megatron/training"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(PRETRAIN)
    (package / "arguments.py").write_text(parses)
    (tmp_path / "pretrain_gpt.py").write_text(program)
    for name in [*sys.modules]:  # the program has our modules forgotten
        if name.partition(".")[0] in ("launcher", "megatron"):
            monkeypatch.setitem(sys.modules, name, sys.modules[name])
            if name[0] == "m":
                del sys.modules[name]
    for name in ("argv", "excepthook"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.syspath_prepend(str(tmp_path))
    found = validate._reached([str(tmp_path / "pretrain_gpt.py")])
    assert found == {"args_defaults": {"a": 1}}
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]


def test_a_program_finds_a_descriptor_behind_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's inference enables faulthandler, and each run was refused: fileno.

    No file: where nothing may be written, or the disk is full, there was no answer.
    """
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    monkeypatch.setattr(validate, "_describe", lambda *_: None)
    monkeypatch.setattr(validate, "_ask_upstreams", lambda _: sys.stderr.fileno())
    assert validate.verdict(["pretrain_gpt.py"], 1, (9, 0)) == {}
