"""The commands, as people call them: by folder and by run, with and without numpy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher import cli
from launcher.base.settings import ROOT
from launcher.tools.weights import convert, reader
from launcher.tools.weights import given as weights

from .models import made, same

BARE = """
import sys
for name in ("numpy", "torch", "safetensors", "transformers"):
    sys.modules[name] = None
from launcher.cli import main
sys.exit(main(["checkpoint", "inspect", *sys.argv[1:]]))
"""


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    """An imported Mixtral."""
    convert.import_(made(tmp_path / "theirs", "mixtral"), tmp_path / "ours", padding=64)
    return tmp_path / "ours"


def test_inspect_needs_neither_torch_nor_numpy(ours: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BARE, ours], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "torch_dist, saved with TP=1 PP=1 EP=1" in done.stdout
    assert "4 layers, 4 experts" in done.stdout
    assert "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight  float32  192×64" in (
        done.stdout
    )
    assert "decoder.layers.1" not in done.stdout


def test_inspect_says_what_is_missing(ours: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (reader.find(ours) / "__0_0.distcp").unlink()
    assert cli.main(["checkpoint", "inspect", str(ours)]) == 2
    assert "__0_0.distcp is missing" in capsys.readouterr().err


def test_there_and_back_by_the_command_line(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--format mp_rank --expert-model-parallel-size 2".split()
    ranks, back = str(tmp_path / "ranks"), str(tmp_path / "back")
    assert cli.main(["checkpoint", "convert", str(ours), "--to", ranks, *options]) == 0
    assert cli.main(["checkpoint", "export", ranks, "--to", back, "--shard", "0.001"]) == 0
    assert "the optimizer's state isn't carried over" in capsys.readouterr().out
    same(tmp_path / "theirs", tmp_path / "back")
    assert cli.main(["checkpoint", "import", back, "--to", ranks]) == 2
    assert "isn't an empty folder" in capsys.readouterr().err
    assert cli.main(["checkpoint", "import", back, "--to", str(tmp_path / "again")]) == 0
    assert "the optimizer's state isn't imported" in capsys.readouterr().out


def test_a_checkpoint_without_a_tokenizer_is_asked_for_one(
    ours: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", str(ours), "Once"]) == 2
    assert "doesn't say its tokenizer" in capsys.readouterr().err
    (ours / convert.KEPT).mkdir()
    (ours / convert.KEPT / "tokenizer.json").write_text("{}")
    found = weights.tokenizer(weights.named(str(ours)), None)
    assert found
    assert (found.type, found.model) == ("HuggingFaceTokenizer", ours / "tokenizer/tokenizer.json")
