"""What a series tries, what it takes for the same, and what it leaves in the engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from docker import DockerClient
from docker.errors import APIError

from launcher.compat import series
from launcher.compat.result import Cell
from launcher.compat.series import Limits, Options, Series
from launcher.errors import UsageError
from launcher.matrix.load import load_lock, load_matrix
from launcher.matrix.schema import Lock, Matrix
from launcher.settings import ROOT, Settings
from tests.e2e.command import launcher

MATRIX, LOCK = load_matrix(), load_lock()
CELL = Cell("24.10", "0.9.0")


class Engine:
    """Images by their names, as Docker removes them: the last name takes the image with it."""

    def __init__(self, names: list[str], digests: list[str], sizes: list[int | None]) -> None:
        self.names, self.digests, self.sizes = names, digests, iter(sizes)
        self.api = SimpleNamespace(inspect_image=self.inspect, remove_image=self.remove)

    def inspect(self, name: str) -> dict[str, Any]:
        if name not in (*self.names, *self.digests):
            raise APIError(name)
        return {"RepoTags": [*self.names], "RepoDigests": [*self.digests]}

    def remove(self, name: str) -> None:
        self.inspect(name)
        self.names = [one for one in self.names if one != name]
        self.digests = [one for one in self.digests if one != name]

    def df(self) -> dict[str, Any]:
        if (size := next(self.sizes)) is None:
            raise APIError("a disk usage operation is already running")
        return {"LayersSize": size}


def a_series(site: Settings, folder: Path, engine: object = None, **changed: Any) -> Series:
    given = {"matrix": MATRIX, "lock": LOCK, "options": Options()} | changed
    client = cast("DockerClient", engine)
    return Series(lambda: client, site=site, folder=folder, say=lambda line: None, **given)


def test_a_pulled_base_goes_with_its_mirrors_name_and_a_users_own_stays(
    site: Settings, tmp_path: Path
) -> None:
    base = MATRIX.rows["24.10"].base
    mirrored = replace(site, image_mirrors={"nvcr.io": "mirror.example:5000/nvcr"})
    at_mirror = mirrored.mirrored(base)
    repository = at_mirror.rpartition(":")[0]
    engine = Engine([base, at_mirror, "mine:1"], [f"{repository}@sha256:{'0' * 64}"], [])
    a_series(mirrored, tmp_path, engine)._remove(CELL, base)
    assert (engine.names, engine.digests) == (["mine:1"], [])


def extension(matrix: Matrix) -> Matrix:
    name = matrix.rows["cuda-12.4"].extensions[1]
    other = matrix.extensions[name].model_copy(update={"options": ["--cpp_ext"]})
    return matrix.model_copy(update={"extensions": {**matrix.extensions, name: other}})


def interpreter(matrix: Matrix) -> Matrix:
    name = str(matrix.rows["cuda-12.4"].interpreter)
    by_platform = matrix.interpreters[name]
    other = by_platform.model_copy(update={"sha256": "0" * 64})
    return matrix.model_copy(update={"interpreters": {**matrix.interpreters, name: other}})


@pytest.mark.parametrize("change", [extension, interpreter])
def test_what_a_cell_is_compiled_from_is_in_its_key(
    site: Settings, tmp_path: Path, change: Callable[[Matrix], Matrix]
) -> None:
    keys = {
        a_series(site, tmp_path, matrix=matrix).key(Cell("cuda-12.4", "0.9.0"))
        for matrix in (MATRIX, change(MATRIX))
    }
    assert len(keys) == 2


def test_an_edited_checkout_is_another_one(site: Settings, tmp_path: Path) -> None:
    (tmp_path / "megatron/core").mkdir(parents=True)
    version = "MAJOR = 0\nMINOR = 9\nPATCH = 0\nPRE_RELEASE = ''\n"
    (tmp_path / "megatron/core/package_info.py").write_text(version)
    options = Options(checkout=tmp_path)
    before = a_series(site, tmp_path, options=options).key(CELL)
    (tmp_path / "megatron/core/new.py").write_text("")
    assert a_series(site, tmp_path, options=options).key(CELL) != before


@pytest.mark.parametrize("part", ["needs", "releases"])
def test_what_the_lock_lacks_is_told_before_the_first_cell(
    site: Settings, tmp_path: Path, part: str
) -> None:
    lock: Lock = LOCK.model_copy(update={part: {}})
    with pytest.raises(UsageError, match=r"matrix\.lock has no") as caught:
        next(a_series(site, tmp_path, lock=lock).run([CELL]))
    assert caught.value.remedy == "Run `make lock`."


def test_a_refused_question_for_the_disk_is_asked_again(site: Settings, tmp_path: Path) -> None:
    engine = Engine([], [], [None, 200, 210, 300])
    over = a_series(site, tmp_path, engine, options=Options(limits=Limits(disk=50)))._growth()
    assert over() == ""
    assert "images take" in over()


def test_cells_are_those_that_fit_each_once() -> None:
    assert series.cells(MATRIX, ["cpu"], ["0.16.1", "0.16.1"]) == [Cell("cpu", "0.16.1")]
    every = series.cells(MATRIX, ["24.10"], ["all"])
    assert Cell("24.10", "0.15.3") not in every  # it wants a newer torch
    assert {Cell("24.10", "0.9.0"), Cell("24.10", "0.12.3")} < {*every}
    with pytest.raises(UsageError, match=r"24\.10 × 0\.19\.0: .* requires python >=3.12"):
        series.cells(MATRIX, ["24.10"], ["0.19.0"])


def test_again_leaves_what_other_cells_gave(tmp_path: Path) -> None:
    other = tmp_path / "cells/24.09-0.9.0.json"
    other.parent.mkdir()
    other.write_text("{}")
    done = launcher(
        *("matrix", "compat", "cpu", "--again", "-o", str(tmp_path)),
        DOCKER_HOST="tcp://127.0.0.1:1",
    )
    assert done.returncode == 125
    assert other.read_text() == "{}"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--disk", "nan"), "isn't a number above 0"),
        (("--limit", "-1"), "isn't a number above 0"),
        (("--run-limit", "0"), "isn't a number above 0"),
        (("--gpus", "foo"), "isn't a request for GPUs"),
        (("--write", "--no-train"), "leave out --no-train"),
        (("--source", "/nonexistent"), "/nonexistent"),
    ],
)
def test_what_makes_no_sense_is_told_at_once(
    tmp_path: Path, wrong: tuple[str, ...], said: str
) -> None:
    done = launcher("matrix", "compat", "cpu", *wrong, "-o", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


STARTER = """
import json, subprocess, sys, time
cell = [sys.executable, "-m", "launcher.compat.cell"]
process = subprocess.Popen(cell, stdin=subprocess.PIPE, start_new_session=True)
process.stdin.write(sys.argv[1].encode())
process.stdin.close()
print(process.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def silent() -> Iterator[str]:
    """An engine that takes what it is asked, and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def test_a_cell_ends_with_the_series_that_started_it(silent: str) -> None:
    asked = json.dumps(Options().asked(CELL))
    environment = os.environ | {"DOCKER_HOST": silent, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, asked], env=environment, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        cell = Path("/proc", starter.stdout.readline().strip(), "stat")
        time.sleep(2)  # so that it is at work
        assert " Z " not in cell.read_text()
        starter.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while cell.exists() and " Z " not in cell.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
