"""`launcher import` as a command."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from launcher.base.errors import UsageError
from launcher.cli.runfile import import_
from tests.tools.importing.conftest import sandbox_here

SCRIPT = """\
SAVE=$1
torchrun --nproc_per_node 2 pretrain_bert.py --num-layers 2 --mock-data --save $SAVE
"""


def run(argv: list[str], rest: list[str] | None = None) -> int:
    args = import_.declare(argparse.ArgumentParser()).parse_args(argv)
    args.rest = rest or []
    return import_(args)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    sandbox_here()  # it is run in one
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def test_the_run_file_goes_to_stdout_and_the_rest_to_stderr(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([str(script), "--tag", "24.09"]) == 0
    out, err = capsys.readouterr()
    assert out == (
        "# From train.sh, by `launcher import`.\n"
        'name: train\nimage: "24.09"\nprogram: pretrain_bert.py\ngpus: 2\n\n'
        "model:\n  num_layers: 2\n\ndata:\n  mock: true\n"
    )
    assert err == (f"{script}:2: to be given: $1 (checkpoint.save)\n")


def test_the_scripts_own_arguments_stand_behind_two_dashes(
    script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tmp_path / "train.yaml"
    assert run([str(script), "-o", str(made)], ["/ckpt"]) == 0
    assert capsys.readouterr() == ("", "")
    assert "checkpoint:\n  save: /ckpt\n" in made.read_text(encoding="utf-8")


def test_a_file_that_is_there_stays(script: Path, tmp_path: Path) -> None:
    made = tmp_path / "train.yaml"
    made.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match="is there already"):
        run([str(script), "-o", str(made)])
    assert made.read_text(encoding="utf-8") == "mine"


def test_what_keeps_the_file_from_running_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.sh"
    path.write_text("torchrun pretrain_gpt.py --fp16 --bf16 --mock-data\n", encoding="utf-8")
    assert run([str(path)]) == 0
    err = capsys.readouterr().err
    assert "Before it runs:\nthe run file:9: training.bf16: fp16 is set" in err
    assert "the run file: model.num_layers must be given: Megatron 0.9.0 ends without" in err


@pytest.mark.parametrize(("name", "said"), [("no.sh", "can't be read"), ("bad.sh", "not UTF-8")])
def test_a_script_that_can_not_be_read_is_told(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "bad.sh").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=said):
        run([str(tmp_path / name)])


def test_a_tag_that_is_not_in_the_matrix_is_refused(script: Path) -> None:
    with pytest.raises(UsageError, match=r"no tag '24\.11'"):
        run([str(script), "--tag", "24.11"])


def test_nothing_of_the_script_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.sh"
    touch = f"touch {tmp_path}/made"
    path.write_text(
        f"{touch}\nA=$({touch})\nB=`{touch}`\nbash -c '{touch}'\ntorchrun pretrain_gpt.py $A $B\n",
        encoding="utf-8",
    )
    assert run([str(path)]) == 0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.sh"]
