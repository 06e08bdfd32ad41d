"""What another package brings is found by entry points, with no line about it here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launcher.base.settings import ROOT

BACKEND = """
from launcher.cli.command import argument, command
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.job import Backend

class Theirs(Backend):
    name = "theirs"
    shares_files = True

    def facts(self, image):
        return ImageFacts("0.16.1", True)

    def rootless(self):
        return False

    def jobs(self):
        print("theirs was asked for its jobs")
        return []

    def show(self, plan, *, full=False):
        return f"theirs {plan.image} on {plan.nodes} nodes: {plan.argv[0]}\\n"

@command(argument("number", "how far", "N", type=int))
def count(args):
    "Count."
    print(*range(args.number))
    return 0
"""


FAMILY = """
import dataclasses
from launcher.tools.weights.families import family

THEIRS = dataclasses.replace(family("llama"), name="theirs", model="TheirsForCausalLM")
"""


def launcher(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{folder}", "LAUNCHER_RUNS": str(folder / "runs")}
    command = [sys.executable, "-m", "launcher", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def test_another_packages_backend_command_and_family_are_found(tmp_path: Path) -> None:
    """It says only what is its own: the rest is the protocol's."""
    (tmp_path / "theirs.py").write_text(BACKEND)
    (tmp_path / "weights.py").write_text(FAMILY)
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[launchpad.backends]\ntheirs = theirs:Theirs\n[launchpad.commands]\ncount = theirs:count\n"
        "[launchpad.families]\ntheirs = weights:THEIRS\n"
    )
    done = launcher(tmp_path, "run", "gpt2-tiny", "--backend", "theirs", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("theirs megatron:cpu on 1 nodes: python3\n")
    unknown = launcher(tmp_path, "run", "gpt2-tiny", "--backend", "their")
    assert unknown.returncode == 2
    assert "no backend 'their'" in unknown.stderr
    assert "theirs" in unknown.stderr
    assert "theirs was asked for its jobs" in launcher(tmp_path, "ps").stdout
    assert launcher(tmp_path, "count", "3").stdout == "0 1 2\n"
    assert "invalid choice: 'counts'" in launcher(tmp_path, "counts").stderr
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "theirs"}')
    to = ("checkpoint", "import", "model", "--to", "made")
    assert (
        "num_attention_heads is None" in launcher(tmp_path, *to).stderr
    )  # it has got to the sizes
    (tmp_path / "model/config.json").write_text('{"model_type": "their"}')
    assert "no family of models 'their'\n  There are gpt2, " in launcher(tmp_path, *to).stderr
