"""A rank's own processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent.conftest import TINY, start

SCRIPT = """
import multiprocessing, sys
from launcher.trainer.gpt import __main__ as gpt

if __name__ == "__main__":
    code = gpt.main(sys.argv[1:])
    print("left:", [each.name for each in multiprocessing.active_children()], flush=True)
    sys.exit(code)
"""


@pytest.mark.megatron
@pytest.mark.long
def test_none_are_left_when_training_ends(tmp_path: Path) -> None:
    """Megatron's queue of results had cost 3 s of CPU; workers that pin memory were waited for, 5 s
    each, once the program had ended."""
    (script := tmp_path / "ended.py").write_text(SCRIPT)
    more = ("--mock-data", "--num-workers", "1", "--save", str(tmp_path / "saved"))
    run = start(1, str(script), *TINY, *more)
    assert run.code == 0, run.output
    assert "left: []" in run.output
