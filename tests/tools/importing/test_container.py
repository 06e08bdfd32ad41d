"""Where bubblewrap can't be had, a container of the engine is the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.tools.importing import sandbox
from launcher.tools.importing.from_script import import_script
from tests.tools.importing.conftest import IMAGES


@pytest.mark.engine
@pytest.mark.usefixtures("python_image")
def test_a_container_is_the_second_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no bubblewrap, every script would be refused."""
    box = sandbox.Container()
    assert box.unsupported() == ""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o755)  # for its ordinary user
    (tmp_path / "common.sh").write_text("LAYERS=3\n")
    script = tmp_path / "train.sh"
    script.write_text(
        ". ./common.sh; rm -rf *; echo x > common.sh; /bin/rm -f common.sh\n"
        "srun torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers $LAYERS --save $X\n"
    )
    done = import_script(script, script.read_text(), IMAGES, box)
    assert "num_layers: 3\n" in done.text
    assert "to be given: X (checkpoint.save)" in [left.what for left in done.told]
    assert (tmp_path / "common.sh").read_text() == "LAYERS=3\n"
