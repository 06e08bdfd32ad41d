"""`matrix compat` over nine rows on stand-in bases, one made to fail at each stage."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.base.settings import ROOT
from launcher.images.matrix.matrix_file import load_lock
from launcher.images.sources import index
from launcher.tools.trials.cell import REPOSITORY
from tests.e2e.command import launcher, random_file

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.base.settings import Settings
    from launcher.images.engine.acquire import BaseNames
    from tests.e2e.registry import Registry

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

GOOD, EDITED, UNPATCHED, UNCOMPILED = "0.16.1", "0.15.3", "0.13.1", "0.14.0"
"""A release as it is, whose wheel other tests have built; one that fails where a base says so;
one that a patch doesn't fit; one that can't be compiled."""

BREAKS = "LAUNCHPAD_TEST_BREAKS"  # a variable of a base: the stage that fails on it

EDITS = {
    "megatron/core/datasets/helpers.cpp": (
        "PYBIND11_MODULE(helpers_cpp, m)\n{\n",
        f'PYBIND11_MODULE(helpers_cpp, m)\n{{\n  const char* breaks = std::getenv("{BREAKS}");\n'
        '  if (breaks && std::string(breaks) == "import") throw std::runtime_error("made to");\n',
    ),
    "megatron/core/models/gpt/gpt_model.py": (
        "import torch\n",
        f'import os\n\nif os.environ.get("{BREAKS}") == "train":\n    raise SystemExit("made to")\n'
        f'if os.environ.get("{BREAKS}") == "hang":\n    __import__("time").sleep(3600)\n\n'
        "import torch\n",
    ),
    "megatron/core/dist_checkpointing/serialization.py": (
        "    if torch.distributed.get_rank() == 0:\n        if MultiStorageClientFeature",
        f'    if __import__("os").environ.get("{BREAKS}") == "checkpoint":\n'
        '        raise OSError("dist_checkpointing: made to")\n'
        "    if torch.distributed.get_rank() == 0:\n        if MultiStorageClientFeature",
    ),
}
UNCOMPILABLE = {
    "megatron/core/datasets/helpers.cpp": ("#include <iostream>\n", "#error made to\n"),
}

ROWS = {  # tag: the stage that fails, and what is expected of the row
    "24.02": (None, "runs"),
    "24.03": (None, "imports"),
    "24.04": ("pull", "runs"),
    "24.05": ("patch", "runs"),
    "24.06": ("compile", "fails"),
    "24.07": ("import", "runs"),
    "24.08": ("train", None),
    "24.09": ("checkpoint", "runs"),
    "24.10": ("hang", "runs"),
}


def edited(release: str, edits: dict[str, tuple[str, str]], site: Settings) -> str:
    """A patch on the source distribution of a release: files, what stands there, what then does."""
    sdist = load_lock().releases[release].sdist
    assert sdist is not None
    pin = f"megatron-core=={release} --hash=sha256:{sdist.sha256}"
    lines: list[str] = []
    with tarfile.open(index.sdist(pin, site)) as tar:
        root = tar.getnames()[0].partition("/")[0]
        for name, (old, new) in edits.items():
            file = tar.extractfile(f"{root}/{name}")
            assert file is not None
            before = file.read().decode()
            assert old in before, name
            after = before.replace(old, new, 1)
            told = (before.splitlines(keepends=True), after.splitlines(keepends=True))
            lines += difflib.unified_diff(*told, f"a/{name}", f"b/{name}")
    return "".join(lines)


@pytest.fixture(scope="module")
def broken(engine: DockerClient, bases: BaseNames) -> Iterator[dict[str, str]]:
    """Bases on which a stage fails, by the stage."""
    made = {}
    for stage in ("import", "train", "checkpoint", "hang"):
        container = engine.containers.create(bases.base, ["true"])
        conf = {"Env": [f"{BREAKS}={stage}"]}
        made[stage] = container.commit("launchpad-test-breaks", stage, conf=conf).tags[0]
        container.remove()
    yield made
    for name in made.values():
        engine.images.remove(name)


@pytest.fixture(autouse=True)
def _no_image_left(engine: DockerClient) -> Iterator[None]:
    """A series leaves none of the images that it makes; an engine may have some of a killed one."""

    def made() -> set[str]:
        return {tag for image in engine.images.list(REPOSITORY) for tag in image.tags}

    before = made()
    yield
    assert made() <= before


@pytest.fixture
def matrix(site: Settings, bases: BaseNames, broken: dict[str, str], tmp_path: Path) -> Path:
    """A matrix of nine rows in a folder of its own."""
    data = yaml.safe_load((ROOT / "matrix.yaml").read_text(encoding="utf-8"))
    cpu = data["rows"]["cpu"]
    shutil.copy(ROOT / "Dockerfile.template", tmp_path)
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    for release, edits in ((EDITED, EDITS), (UNCOMPILED, UNCOMPILABLE)):
        patch = tmp_path / "patches" / release / "90-breaks.patch"
        patch.write_text(edited(release, edits, site))
    (tmp_path / "patches" / UNPATCHED / "90-breaks.patch").write_text(
        "--- a/setup.py\n+++ b/setup.py\n@@ -1,1 +1,1 @@\n-no such line\n+another\n"
    )
    rows: dict[str, Any] = {}
    for tag, (stage, expected) in ROWS.items():
        base = {"pull": "127.0.0.1:1/none:1"}.get(stage or "", broken.get(stage or "", bases.base))
        megatron = {"patch": UNPATCHED, "compile": UNCOMPILED}.get(stage or "", GOOD)
        megatron = EDITED if stage in broken else megatron
        rows[tag] = cpu | {"base": base, "megatron": megatron, "cuda": "12.1"}
        rows[tag] |= {"expected": expected} if expected else {}
        if not expected:
            del rows[tag]["expected"]
    data["builders"]["cp311"] = bases.builder
    data["moving"] = []
    data["rows"] = rows
    path = tmp_path / "matrix.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    lock = yaml.safe_load((ROOT / "matrix.lock").read_text(encoding="utf-8"))
    lock["packages"] = dict.fromkeys(ROWS, lock["packages"]["cpu"])
    path.with_suffix(".lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
    return path


def compat(matrix: Path, *args: str) -> subprocess.CompletedProcess[str]:
    output = ("-o", str(matrix.parent / "compat"))
    return launcher("matrix", "compat", *args, *output, LAUNCHER_MATRIX=str(matrix))


def cells(matrix: Path) -> dict[str, dict[str, Any]]:
    """What the report says of each row."""
    told = json.loads((matrix.parent / "compat/report.json").read_text(encoding="utf-8"))
    return {cell["tag"]: cell for cell in told["cells"]}


@pytest.mark.parametrize(
    ("tags", "more"),
    [
        (("24.03", "24.05"), ["--no-train"]),
        pytest.param(tuple(ROWS)[:8], [], marks=pytest.mark.long),
    ],
)
def test_each_row_is_told_with_the_stage_at_which_it_fails(
    matrix: Path, tags: tuple[str, ...], more: list[str]
) -> None:
    done = compat(matrix, *tags, *more)
    assert done.returncode == 1, done.stderr
    told = cells(matrix)
    for tag in tags:
        stage = ROWS[tag][0]
        verdict = ("fails", stage) if stage else ("imports" if more else "runs", "")
        assert (told[tag]["verdict"], told[tag]["stage"]) == verdict, (told[tag], done.stderr)
        assert told[tag]["reason"] or not stage
        if stage in ("import", "train"):
            reason = [*told[tag]["reason"].split(), *told[tag]["tail"]]
            assert "made to" in " ".join(reason)
    verdict = "imports | imports" if more else "runs | imports (better)"
    row = {
        "24.03": f"| 24.03 | 0.16.1 | {verdict} |",
        "24.06": "| 24.06 | 0.14.0 | fails: compile | fails |",
    }
    assert all(row[tag] in done.stdout for tag in row.keys() & tags)


@pytest.mark.long
def test_a_cell_that_takes_too_long_or_too_much_is_ended(
    engine: DockerClient, matrix: Path
) -> None:
    done = compat(matrix, "24.10", "--limit", "1.5")
    assert done.returncode == 1, done.stderr
    hung = cells(matrix)["24.10"]
    assert (hung["verdict"], hung["stage"]) == ("fails", "time limit"), hung
    assert hung["reason"] == "90 s, while at train"
    running = engine.containers.list(filters={"label": "megatron-launchpad.run"})
    assert not [one.name for one in running if one.name.startswith("entrypoint")]
    done = compat(matrix, "24.02", "--disk", "0.01")
    assert cells(matrix)["24.02"]["stage"] == "disk budget", done.stderr


@pytest.mark.long
def test_a_pulled_base_counts_and_is_removed(
    engine: DockerClient, bases: BaseNames, registry: Registry, matrix: Path
) -> None:
    base = f"{registry.address}/launchpad-test-pulled:1"
    container = engine.containers.create(bases.base, ["true"])
    container.put_archive("/", random_file("pulled", 60_000_000))
    image = container.commit(*base.rsplit(":", 1)).id
    container.remove()
    engine.images.push(base)
    engine.images.remove(base)
    options = ("24.02", "--base", base, "--no-train")
    builder = engine.api.inspect_image(bases.builder)["Size"] / 1e9
    for budget, told in ((builder + 0.05, ("fails", "disk budget")), (20, ("imports", ""))):
        done = compat(matrix, *options, "--disk", str(budget))
        cell = cells(matrix)["24.02"]
        assert (cell["verdict"], cell["stage"]) == told, (cell, done.stderr)
        assert image not in {one.id for one in engine.images.list(all=True)}


@pytest.mark.long
def test_one_that_is_killed_goes_on_and_tells_the_same(matrix: Path) -> None:
    asked = ("24.07", "24.05", "24.02", "--no-train")
    folder = matrix.parent / "compat"
    command = [sys.executable, "-m", "launcher", "matrix", "compat", *asked, "-o", str(folder)]
    environment = os.environ | {"LAUNCHER_MATRIX": str(matrix), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not (folder / "cells/24.05-0.13.1.json").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    finished = {path: path.stat().st_mtime_ns for path in (folder / "cells").glob("*.json")}
    assert len(finished) == 2
    done = compat(matrix, *asked)
    assert done.stderr.count("· kept") == 2, done.stderr
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    interrupted = report(matrix)
    assert compat(matrix, *asked, "--again").returncode == done.returncode
    assert report(matrix) == interrupted


def report(matrix: Path) -> dict[str, dict[str, Any]]:
    """What the report says, less how long things took."""
    return {tag: cell | {"seconds": None} for tag, cell in cells(matrix).items()}
