"""`--source PATH`: an edited checkout runs in place of the image's Megatron, and stays as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.runs.datasets import indexed
from launcher.tools import demo
from tests.e2e.command import launched, launcher, megatron_of, refused

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

EDITED = '\nprint("an edited line", flush=True)\n'
SCRIPT = """\
import megatron.core, os, sys
from megatron.core.datasets import helpers
print(__file__, megatron.core.__file__, callable(helpers.build_sample_idx_int32), sys.argv[1:])
try:
    open(megatron.core.__file__, "a")
except OSError as error:
    print(error.strerror)
"""


@pytest.fixture
def checkout(engine: DockerClient, image: str, tmp_path: Path) -> Path:
    """The image's Megatron-Core as a checkout, with a line added."""
    folder = megatron_of(engine, image, tmp_path / "checkout")
    with (folder / "megatron/core/__init__.py").open("a") as stream:
        stream.write(EDITED)
    (folder / "tools").mkdir()
    (folder / "tools/look.py").write_text(SCRIPT)
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Every file and what is in it."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_an_edited_line_is_run_with_the_image_s_extension(
    image: str, checkout: Path, tmp_path: Path
) -> None:
    before = contents(checkout)
    indexed.write(tmp_path / "text", demo.text(), demo.VOCABULARY)
    sets = (
        *(f"image={image}", f"data.path={tmp_path / 'text'}", f"data.cache={tmp_path / 'index'}"),
        *(f"checkpoint.save={tmp_path / 'out'}", "checkpoint.load=null", "training.train_iters=2"),
        *("model.hidden_size=64", "model.seq_length=64", "training.lr_warmup_iters=1"),
    )
    done = launched(
        *("run", "demo.yaml", "--source", str(checkout)),
        *(word for one in sets for word in ("--set", one)),
    )
    assert "an edited line" in done.stdout
    assert "checkout: Megatron 0.16.1 from /opt/megatron/checkout" in done.stderr
    assert "stands in for what isn't compiled in the checkout" in done.stderr
    assert "finished after iteration 2" in done.stdout
    assert list((tmp_path / "index").rglob("*.npy"))
    assert contents(checkout) == before


def test_its_scripts_run_and_it_is_read_only(image: str, checkout: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        f"name: look\nimage: {{name: '{image}'}}\nprogram: tools/look.py\ngpus: 0\n"
        f"source: {checkout}\n"
    )
    done = launched("run", str(tmp_path / "run.yaml"), "--", "--flag", "a b")
    there = "/opt/megatron/checkout"
    line = f"{there}/tools/look.py {there}/megatron/core/__init__.py True ['--flag', 'a b']"
    assert line in done.stdout.splitlines()
    assert "Read-only file system" in done.stdout


def test_what_is_no_checkout_is_refused(image: str, tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "nosuch"):
        done = launcher("run", "demo.yaml", "--set", f"image={image}", "--source", str(source))
        refused(done, 2, str(source))
