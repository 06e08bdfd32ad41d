"""Where bubblewrap can't be had, a container of the engine is the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.tools.importing import sandbox
from tests.tools.importing.conftest import Imported


@pytest.mark.engine
@pytest.mark.usefixtures("python_image")
def test_a_container_is_the_second_sandbox(tmp_path: Path, imported: Imported) -> None:
    """Where there is no bubblewrap, every script would be refused."""
    box = sandbox.Container()
    assert box.unsupported() == ""
    tmp_path.chmod(0o755)  # for its ordinary user
    text = (
        ". ./common.sh; rm -rf *; echo x > common.sh; /bin/rm -f common.sh\n"
        "srun torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers $LAYERS --save $X\n"
    )
    done = imported(text, box=box, **{"common.sh": "LAYERS=3\n"})
    assert "num_layers: 3\n" in done.text
    assert "to be given: X (checkpoint.save)" in [left.what for left in done.told]
    assert (tmp_path / "common.sh").read_text() == "LAYERS=3\n"
