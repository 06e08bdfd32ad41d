"""What a series tries, what it takes for the same, and what it leaves in the engine."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from docker import DockerClient
from docker.errors import APIError, NotFound

from launcher.base.errors import UsageError
from launcher.base.settings import ROOT, Settings
from launcher.images.engine import disk
from launcher.images.matrix.locked import Lock
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.schema import Matrix
from launcher.tools.trials import sweep
from launcher.tools.trials.cell import REPOSITORY
from launcher.tools.trials.result import Cell, CellResult
from launcher.tools.trials.sweep import Series, TrialOptions
from tests.e2e.site import until
from tests.tools.conftest import Here

MATRIX, LOCK = load_matrix(), load_lock()
CELL = Cell("24.10", "0.9.0")


BASE = MATRIX.rows["24.10"].base
BUILDER = MATRIX.builders["cp310"]
GB = 10**9


class Engine:
    """Images of 20 GB: their names by their IDs; one without a name is gone, as Docker has it.

    told: what its images take, as it tells it one time after the other; None: it refuses to
    """

    def __init__(self, images: dict[str, list[str]], told: Sequence[int | None] = (0,)) -> None:
        self.images, self.told = images, [*told]
        self.api = SimpleNamespace(
            images=lambda: [self.inspect(one) for one in self.images],
            inspect_image=self.inspect,
            remove_image=self.remove,
            timeout=600,
        )

    def inspect(self, name: str) -> dict[str, Any]:
        for id, names in self.images.items():
            if name in (id, *map(in_full, names)) or in_full(name) in map(in_full, names):
                tags = [one for one in names if "@" not in one]
                digests = [one for one in names if "@" in one]
                return {"Id": id, "Size": 20 * GB, "RepoTags": tags, "RepoDigests": digests or None}
        raise NotFound(name)

    def remove(self, name: str) -> None:
        id = self.inspect(name)["Id"]
        self.images[id] = [one for one in self.images[id] if in_full(one) != in_full(name)]
        if not self.images[id]:
            del self.images[id]

    def pull(self, id: str, *names: str) -> None:
        """The tags move to it from whatever had them."""
        for other in self.images.values():
            other[:] = [one for one in other if one not in names]
        self.images.setdefault(id, []).extend(names)

    def df(self) -> dict[str, Any]:
        size = self.told.pop(0) if len(self.told) > 1 else self.told[0]
        if size is None:
            raise APIError("a disk usage operation is already running")
        return {"LayersSize": size}


def in_full(name: str) -> str:
    """A name as an engine takes it: those of Docker Hub are shown without it."""
    return name.removeprefix("docker.io/").removeprefix("library/")


def a_series(site: Settings, folder: Path, engine: object = None, **changed: Any) -> Series:
    given = {"matrix": MATRIX, "lock": LOCK, "options": TrialOptions(), "say": lambda line: None}
    client = cast("DockerClient", engine)
    return Series(lambda: client, site=site, folder=folder, **given | changed)


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """In place of a cell's process, what it does; it runs."""

    def does(something: Callable[[], object]) -> None:
        def in_process(self: Series, cell: Cell) -> dict[str, Any]:
            something()
            return {"verdict": "runs"}

        monkeypatch.setattr(Series, "_in_process", in_process)

    return does


Trying = Callable[[Callable[[], object]], None]
MIRRORS = {"nvcr.io": "mirror.example:5000/nvcr"}
AT_MIRROR = BASE.replace("nvcr.io", MIRRORS["nvcr.io"])
DIGEST = f"{AT_MIRROR.rpartition(':')[0]}@sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("there", "left"),
    [
        ({}, {}),
        ({"other": ["mine:1"]}, {"other": ["mine:1"]}),
        ({"base": ["mine:1"]}, {"base": ["mine:1"]}),
        ({"base": [AT_MIRROR, DIGEST]}, {"base": [AT_MIRROR, DIGEST]}),
        ({"base": [DIGEST]}, {"base": [DIGEST]}),
        ({"older": [AT_MIRROR, "mine:1"]}, {"older": ["mine:1"], "base": [AT_MIRROR]}),
    ],
)
def test_a_pulled_base_goes_with_its_mirrors_name_and_what_a_user_had_stays(
    site: Settings,
    tmp_path: Path,
    trying: Trying,
    there: dict[str, list[str]],
    left: dict[str, list[str]],
) -> None:
    engine = Engine({id: [*names] for id, names in there.items()})
    trying(lambda: engine.pull("base", BASE, AT_MIRROR, DIGEST))
    mirrored = replace(site, image_mirrors=MIRRORS)
    assert [one.verdict for one in a_series(mirrored, tmp_path, engine).run([CELL])] == ["runs"]
    assert {id: sorted(names) for id, names in engine.images.items()} == {
        id: sorted(names) for id, names in left.items()
    }
    on_hub, engine = MATRIX.rows["cpu"].base, Engine({})
    assert on_hub.startswith("docker.io/library/")
    trying(lambda: engine.pull("base", in_full(on_hub), f"python@sha256:{'0' * 64}"))
    assert len([*a_series(site, tmp_path, engine).run([Cell("cpu", "0.16.1")])]) == 1
    assert engine.images == {}


def test_an_image_that_something_uses_is_told(
    site: Settings, tmp_path: Path, trying: Trying, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, made, said = Engine({}), f"{REPOSITORY}:24.10", list[str]()

    def refuse(name: str) -> None:
        raise NotFound(name) if name != made else APIError(name, explanation="conflict: in use")

    monkeypatch.setattr(engine.api, "remove_image", refuse)
    trying(lambda: None)
    [*a_series(site, tmp_path, engine, say=said.append).run([CELL])]
    assert [line for line in said if "stays" in line] == [f"{made} stays: conflict: in use"]


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


def test_a_checkout_that_is_edited_meanwhile_gives_its_result_to_no_other(
    site: Settings, tmp_path: Path, trying: Trying
) -> None:
    checkout, folder = tmp_path / "Megatron-LM", tmp_path / "cells"
    (checkout / "megatron/core").mkdir(parents=True)
    version = "MAJOR = 0\nMINOR = 9\nPATCH = 0\nPRE_RELEASE = ''\n"
    (checkout / "megatron/core/package_info.py").write_text(version)
    tried = a_series(site, folder, Engine({}), options=TrialOptions(checkout=checkout))
    key = tried.key(CELL)
    trying((checkout / "megatron/core/new.py").touch)
    assert [one.key for one in tried.run([CELL])] == [key]
    assert [*tried.kept([CELL])] == []
    (checkout / "megatron/core/new.py").unlink()
    assert [*tried.kept([CELL])] == []
    trying(lambda: None)
    assert [*tried.run([CELL])] == [*tried.kept([CELL])] != []


def test_a_matrix_that_is_edited_meanwhile_gives_its_result_to_no_other(
    site: Settings, tmp_path: Path, trying: Trying
) -> None:
    """A cell's process reads the file as it is then."""
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    for name in ("matrix.yaml", "matrix.lock", "Dockerfile.template"):
        shutil.copy(ROOT / name, tmp_path)
    path = tmp_path / "matrix.yaml"
    own = replace(site, matrix=path)
    before = path.read_text(encoding="utf-8")
    edits: list[Callable[[], object]] = [
        partial(path.write_text, before.replace(BASE, f"{BASE}-other"), encoding="utf-8"),
        partial(path.write_text, "rows: [", encoding="utf-8"),
        (tmp_path / "Dockerfile.template").unlink,
    ]
    for edit in edits:
        path.write_text(before, encoding="utf-8")
        tried = a_series(own, tmp_path / "cells", Engine({}), again=True)
        trying(edit)
        assert [one.verdict for one in tried.run([CELL])] == ["runs"]
        assert not [*(tmp_path / "cells").glob("*.json")]


def test_half_a_line_of_a_killed_process_is_no_result(site: Settings, tmp_path: Path) -> None:
    said = io.StringIO('{"stage": "train"}\n{"result": {"verdict": "ru')
    process = cast("Any", SimpleNamespace(stdout=said, wait=lambda: -9))
    watch = cast("Any", SimpleNamespace(limit="time limit", reason="9 s"))
    found = a_series(site, tmp_path)._heard(CELL, process, watch)
    assert (found["stage"], found["reason"]) == ("time limit", "9 s, while at train")


@pytest.mark.parametrize(("stage", "tried"), [("pull", 2), ("fetch", 2), ("patch", 1)])
def test_what_failed_at_what_comes_from_outside_is_tried_again(
    site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, tried: int
) -> None:
    asked: list[Cell] = []

    def fails(self: Series, cell: Cell) -> dict[str, Any]:
        asked.append(cell)
        return {"verdict": "fails", "stage": stage, "reason": "the registry can't be reached"}

    monkeypatch.setattr(Series, "_in_process", fails)
    for _ in range(2):
        (found,) = a_series(site, tmp_path, Engine({})).run([CELL])
    assert len(asked) == tried
    assert [*a_series(site, tmp_path).kept([CELL])] == [found]


def test_a_row_of_two_platforms_is_another_cell_on_each(
    site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keys(machine: str) -> list[str]:
        monkeypatch.setattr(sweep.platform, "machine", lambda: machine)
        return [a_series(site, tmp_path).key(cell) for cell in (CELL, Cell("26.06", "0.19.0"))]

    amd64, arm64 = keys("x86_64"), keys("aarch64")
    assert amd64[0] == arm64[0]
    assert amd64[1] != arm64[1]
    assert keys("arm64") == arm64


@pytest.mark.parametrize("part", ["needs", "releases"])
def test_what_the_lock_lacks_is_told_before_the_first_cell(
    site: Settings, tmp_path: Path, part: str
) -> None:
    lock: Lock = LOCK.model_copy(update={part: {}})
    with pytest.raises(UsageError, match=r"matrix\.lock has no") as caught:
        next(a_series(site, tmp_path, lock=lock).run([CELL]))
    assert caught.value.remedy == "Run `make lock`."


def over(
    site: Settings, folder: Path, engine: Engine, disk: int, say: Callable[[str], object] = print
) -> Callable[[], str]:
    options = TrialOptions(disk=disk)
    return a_series(site, folder, engine, options=options, say=say)._over(CELL)


@pytest.mark.parametrize(
    ("there", "pulled"),
    [
        ([], 40),
        ([BASE], 20),
        ([BUILDER], 20),
        ([BASE, BUILDER], 0),
        ([BASE.replace("nvcr.io", "mirror.example/nvcr"), BUILDER], 0),
    ],
)
def test_base_and_builder_count_the_same_whether_they_are_pulled_or_there(
    site: Settings, tmp_path: Path, there: list[str], pulled: int
) -> None:
    mirrored = replace(site, image_mirrors={"nvcr.io": "mirror.example/nvcr"})
    images = {"mine": ["mine:1"]} | {name: [name] for name in there}
    told = [None, 100 * GB, (100 + pulled + 1) * GB, (100 + pulled + 15) * GB]
    reason = over(mirrored, tmp_path, Engine(images, told), disk=42 * GB)
    assert reason() == ""
    assert reason() == "its images take 55.0 GB, and may take 42.0 GB"


def test_what_is_there_counts_where_the_engine_tells_no_more(
    site: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSES", (0.0,))
    said: list[str] = []
    engine = Engine({"base": [BASE]}, [None])
    assert over(site, tmp_path, engine, 20 * GB, said.append)() == ""
    assert over(site, tmp_path, engine, 19 * GB, said.append)().startswith("its images take 20.0")
    assert [line for line in said if "what is added isn't counted" in line] == said


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    """One that would go on for an hour."""
    command = [sys.executable, "-c", "print(flush=True); __import__('time').sleep(3600)"]
    with subprocess.Popen(
        command,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as started:
        assert started.stdout is not None
        started.stdout.readline()
        yield started
        started.kill()


def test_an_engine_that_does_not_answer_keeps_no_cell_alive(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.01)
    asked, answered = threading.Event(), threading.Event()

    def over() -> str:
        asked.set()
        answered.wait()
        return "too much"

    watch = sweep._Watch(process, 0.5, over)
    try:
        assert asked.wait(20)
        assert process.wait(20) != 0
    finally:
        answered.set()
        watch.end()
    assert (watch.limit, watch.reason) == ("time limit", "0.5 s")


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_disk_is_looked_at_until_it_is_too_much(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "LOOK_EVERY", 0.01)
    answers = iter(["", "", "its images take 2 GB"])
    watch = sweep._Watch(process, 1e20, lambda: next(answers))
    assert process.wait(20) != 0
    watch.end()
    assert (watch.limit, watch.reason) == ("disk budget", "its images take 2 GB")


def test_cells_are_those_that_fit_each_once() -> None:
    assert sweep.cells(MATRIX, ["24.10", "cpu"], []) == [CELL, Cell("cpu", "0.16.1")]
    assert sweep.cells(MATRIX, ["cpu"], ["0.16.1", "0.16.1"]) == [Cell("cpu", "0.16.1")]
    several = sweep.cells(MATRIX, ["24.02", "cpu"], ["0.9.0", "0.16.1"])
    assert Cell("24.02", "0.16.1") not in several  # which wants a newer torch
    every = sweep.cells(MATRIX, ["24.10"], ["all"])
    assert Cell("24.10", "0.15.3") not in every  # it wants a newer torch
    assert {Cell("24.10", "0.9.0"), Cell("24.10", "0.12.3")} < {*every}
    with pytest.raises(UsageError, match=r"24\.10 × 0\.19\.0: .* requires python >=3.12"):
        sweep.cells(MATRIX, ["24.10"], ["0.19.0"])
    with pytest.raises(UsageError, match=r"0\.9\.9"):
        sweep.cells(MATRIX, ["cpu"], ["0.9.9"])
    with pytest.raises(UsageError, match="no tag"):
        sweep.cells(MATRIX, ["23.01"], [])


def test_what_was_tried_elsewhere_with_the_same_is_taken_and_nothing_else_is(
    tmp_path: Path, site: Settings
) -> None:
    """As jobs of a workflow do; what is kept needs no engine."""
    cells = [Cell("24.09", "0.9.0"), CELL, Cell("cpu", "0.16.1")]
    elsewhere = a_series(replace(site, cache=tmp_path / "another"), tmp_path)
    found = [CellResult(cell.tag, cell.megatron, elsewhere.key(cell), "runs") for cell in cells[1:]]
    for one in (*found, replace(found[0], tag="24.09", key="old")):
        (tmp_path / f"{one.tag}-{one.megatron}.json").write_text(json.dumps(asdict(one)))
    assert [*a_series(site, tmp_path).kept(cells)] == found
    assert [*a_series(site, tmp_path, options=TrialOptions(gpus="all")).kept(cells)] == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--disk", "nan"), "isn't a number above 0"),
        (("--write", "--no-train"), "leave out --no-train"),
        (("--source", "/nonexistent"), "/nonexistent"),
    ],
)
def test_what_makes_no_sense_is_told_at_once(
    tmp_path: Path, wrong: tuple[str, ...], said: str, here: Here
) -> None:
    done = here("matrix", "compat", "cpu", *wrong, "-o", str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


STARTER = """
import json, subprocess, sys, time
cell = [sys.executable, "-m", "launcher.tools.trials.cell"]
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
    asked = json.dumps(TrialOptions().asked(CELL))
    environment = os.environ | {"DOCKER_HOST": silent, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", STARTER, asked], env=environment, stdout=subprocess.PIPE, text=True
    ) as starter:
        assert starter.stdout is not None
        cell = Path("/proc", starter.stdout.readline().strip(), "stat")
        time.sleep(2)  # so that it is at work
        assert " Z " not in cell.read_text()
        starter.send_signal(signal.SIGKILL)
    until(lambda: not cell.exists() or " Z " in cell.read_text())
