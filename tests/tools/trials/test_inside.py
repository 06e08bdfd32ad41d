"""What is asked inside an image, a cell of a series, and the command."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import requests

from launcher import cli
from launcher.base.errors import EngineError
from launcher.base.settings import ROOT
from launcher.cli import main
from launcher.images.engine import connect
from launcher.tools.trials import cell, inside, sweep, trial_report
from launcher.tools.trials.result import Cell, CellResult
from launcher.tools.trials.sweep import TrialOptions
from tests.e2e.site import until
from tests.tools.trials.samples import RESULTS, result

TEXT = Path(inside.__file__).read_text(encoding="utf-8")


def tell(*names: str, folder: Path | None = None, **env: str) -> dict[str, dict[str, object]]:
    """What the text prints for `names`, by name; `folder` holds the packages there are."""
    path = {"PYTHONPATH": str(folder)} if folder else {}
    done = subprocess.run(
        [sys.executable, "-c", TEXT, *names],
        env={"PATH": os.environ["PATH"]} | path | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


def package(folder: Path, name: str, version: str, text: str = "") -> None:
    """Install a package of one module."""
    module = folder / name / "__init__.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_fact_is_told_where_there_is_nothing_but_python() -> None:
    told = tell(*inside.FACTS)
    assert list(told) == list(inside.FACTS)
    assert told["python"]["value"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert str(told["os"]["value"]).count(" ") == 1
    absent = [name for name, one in told.items() if one.get("value") is None]
    assert not [name for name in absent if "error" in told[name]]


def test_the_images_own_variables_are_taken_first() -> None:
    env = {
        "CUDA_VERSION": "12.6.2.004",
        "CUDA_DRIVER_VERSION": "560.35.03",
        "CUDNN_VERSION": "9.5.0.50",
        "NCCL_VERSION": "2.22.3",
    }
    told = tell("cuda", "driver", "cudnn", "nccl", **env)
    assert [one["value"] for one in told.values()] == [*env.values()]
    told = tell("cudnn", "nccl", CUDNN_VERSION="9.0.0.306+cuda12.3", NCCL_VERSION="2.20.5-1")
    assert [one["value"] for one in told.values()] == ["9.0.0.306", "2.20.5"]


TORCH = """\
import sys, types, warnings
version = types.SimpleNamespace(cuda="12.4")
def made(name, **what):
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(what)
made("torch.backends")
made("torch.backends.cudnn", version=lambda: {cudnn})
made("torch.cuda", device_count=lambda: 3, get_device_name=lambda n: "AB B".split()[n % 2])
made("torch.cuda.nccl", version=lambda: (2, 21, 5))
print("hello")
warnings.warn("old")
warnings.warn("old")
"""


@pytest.mark.parametrize(("number", "told"), [(90300, "9.3.0"), (8907, "8.9.7")])
def test_else_torch_is_asked(tmp_path: Path, number: int, told: str) -> None:
    package(tmp_path, "torch", "2.4.0a0+f70bd71a48", TORCH.replace("{cudnn}", str(number)))
    found = tell("torch", "cuda", "cudnn", "nccl", "gpus", folder=tmp_path)
    assert [one["value"] for one in found.values()] == [
        "2.4.0a0+f70bd71a48",
        "12.4",
        told,
        "2.21.5",
        "2 × AB, 1 × B",
    ]
    assert found["cuda"]["warnings"] == ["UserWarning: old"]


@pytest.mark.parametrize("library", ["nccl", "cudnn"])
def test_a_library_that_torch_brings_is_asked_of_torch_and_the_other_of_the_image(
    tmp_path: Path, library: str
) -> None:
    package(tmp_path, "torch", "2.5.1", TORCH.replace("{cudnn}", "90300"))
    (tmp_path / "nvidia" / library / "lib").mkdir(parents=True)
    env = {"NCCL_VERSION": "2.16.2-1", "CUDNN_VERSION": "9.8.0.87-1"}
    of_image, of_torch = (
        {"nccl": "2.16.2", "cudnn": "9.8.0.87"},
        {"nccl": "2.21.5", "cudnn": "9.3.0"},
    )
    told = tell("nccl", "cudnn", folder=tmp_path, **env)
    assert {name: one["value"] for name, one in told.items()} == {
        **of_image,
        library: of_torch[library],
    }


def test_a_package_that_fails_is_told_in_a_line(tmp_path: Path) -> None:
    package(tmp_path, "torch", "2.4.0", "raise OSError('libcudart.so.12: cannot open')")
    stated = {"NCCL_VERSION": "2.16.2-1", "CUDNN_VERSION": "9.8.0"}
    found = tell("cuda", "python", "nccl", "cudnn", folder=tmp_path, **stated)
    assert found["cuda"]["error"] == "OSError: libcudart.so.12: cannot open"
    assert "error" not in found["python"]
    assert [found[name]["value"] for name in ("nccl", "cudnn")] == ["2.16.2", "9.8.0"]


def test_a_fact_finds_the_programs_that_the_extension_did_without(tmp_path: Path) -> None:
    package(tmp_path, "megatron_core", "0.16.1")
    for name in ("megatron/core/datasets", "megatron/training"):
        (tmp_path / name).mkdir(parents=True)
    says = "import os; print(*map(os.environ.get, ('PATH', 'CC', 'CXX')), file=open({!r}, 'w'))"
    said = {name: tmp_path / name for name in ("helpers", "training")}
    (tmp_path / "megatron/core/datasets/helpers.py").write_text(says.format(str(said["helpers"])))
    (tmp_path / "megatron/training/__init__.py").write_text(says.format(str(said["training"])))
    found = tell("extension", "training", folder=tmp_path, CC="gcc-12")
    assert "error" in found["extension"]
    assert found["training"]["value"] == "megatron.training"
    assert said["helpers"].read_text() == " None None\n"
    assert said["training"].read_text() == f"{os.environ['PATH']} gcc-12 None\n"


def test_helpers_that_are_not_compiled_are_no_extension(tmp_path: Path) -> None:
    package(tmp_path, "megatron_core", "0.16.1")
    folder = tmp_path / "megatron/core/datasets"
    folder.mkdir(parents=True)
    (folder / "helpers.py").write_text("")
    found = tell("extension", folder=tmp_path)
    assert "No module named 'megatron.core.datasets.helpers_cpp'" in str(
        found["extension"]["error"]
    )


def test_a_series_in_the_background_can_end_it() -> None:
    """A shell starts background jobs deaf to SIGINT, and so are their children."""
    with subprocess.Popen(
        [sys.executable, "-m", "launcher.tools.trials.cell"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        until(lambda: not is_deaf(process.pid))
        process.send_signal(signal.SIGINT)  # once: a second one would break off its leaving
        try:
            assert process.wait(20) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("error", "reason", "tail"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "[Errno 28] No space left on device",
            (),
        ),
        (EngineError("the engine is gone", "Start it."), "the engine is gone", ("  Start it.",)),
        (OSError(), "OSError()", ()),
    ],
)
def test_what_system_or_engine_refuse_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, tail: tuple[str, ...]
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(connect, "connect", refuse)
    said: list[Mapping[str, Any]] = []
    found = cell.examine(TrialOptions().asked(Cell("24.10", "0.9.0")), said.append)
    assert found == {"verdict": "fails", "stage": "pull", "reason": reason, "tail": tail}


def is_deaf(pid: int) -> bool:
    """Whether a process ignores SIGINT."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    ignored = re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
    assert ignored is not None
    return bool(int(ignored[1], 16) >> (signal.SIGINT - 1) & 1)


Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on a matrix in a folder of its own, where trying finds what is given."""
    (tmp_path / "docs").mkdir()
    for name in ("matrix.yaml", "matrix.lock", trial_report.TABLE):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setenv("LAUNCHER_MATRIX", str(tmp_path / "matrix.yaml"))
    monkeypatch.setattr(connect, "connect", lambda **_: None)

    def run(results: Iterable[CellResult], *args: str) -> int:
        def found(self: sweep.Series, cells: Iterable[Cell]) -> Iterator[CellResult]:
            return iter(results)

        monkeypatch.setattr(sweep.Series, "run", found)
        return main(["matrix", "compat", "cpu", "-o", str(tmp_path / "out"), *args])

    return run


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()


def test_each_report_tells_of_each_cell(run: Run, tmp_path: Path) -> None:
    assert run(RESULTS) == 1
    out = tmp_path / "out"
    assert len(json.loads((out / "report.json").read_text())["cells"]) == len(RESULTS)
    assert ElementTree.parse(out / "report.xml").getroot().get("failures") == "2"  # noqa: S314
    page, table = (out / "report.html").read_text(), (out / "report.md").read_text()
    for one in RESULTS:
        assert f'id="{one.tag}-{one.megatron}"' in page
        assert f"| {one.tag} | {one.megatron} | {one.told} |" in table
    assert not (tmp_path / trial_report.RESULTS).exists()


@pytest.mark.parametrize(
    ("end", "code"),
    [(requests.exceptions.ConnectionError("engine gone"), 125), (KeyboardInterrupt(), 130)],
)
def test_a_series_that_ends_early_reports_what_it_has(
    run: Run, tmp_path: Path, end: BaseException, code: int
) -> None:
    def found() -> Iterator[CellResult]:
        yield from RESULTS[:2]
        raise end

    assert run(found(), "--write") == code
    out = tmp_path / "out"
    assert len(json.loads((out / "report.json").read_text())["cells"]) == 2
    assert {path.name for path in out.iterdir()} == {
        f"report.{k}" for k in "json xml md html".split()
    }
    assert not (tmp_path / trial_report.RESULTS).exists()


def test_make_hands_on_what_it_is_given() -> None:
    given = ["TAGS=24.09 cpu", "MEGATRON=0.9.0 0.12.3", "GPUS=device=0,1", "DISK=7.5", "BUILDER=c"]
    taken = {"tags": ["24.09", "cpu"], "megatron": ["0.9.0", "0.12.3"], "gpus": "device=0,1"}
    taken |= {"disk": 7.5, "builder": "c"}
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "compat", *given],  # make itself runs these tests
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(done.stdout.partition("-m launcher ")[2].replace("\\\n", ""))
    parser = cli.parser(words)
    usual = vars(parser.parse_args(["matrix", "compat"]))
    assert vars(parser.parse_args(words)) == {**usual, **taken}


def test_write_keeps_them_for_the_docs(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([result("24.02", "runs", "runs"), result("24.10", "runs")]) == 0
    assert run(RESULTS[:1], "--write") == 0
    assert "make render" in capsys.readouterr().err
    assert run(RESULTS[1:2], "--write") == 0
    assert trial_report.load_committed(tmp_path) == RESULTS[:2]
    shutil.copy(ROOT / "Dockerfile.template", tmp_path)
    assert main(["matrix", "render"]) == 0
    assert "| 24.03 | 0.9.0 | runs |" in (tmp_path / trial_report.TABLE).read_text(encoding="utf-8")
    assert main(["matrix", "render", "--check"]) == 0
    trial_report.commit([result("24.03", "imports")], tmp_path)
    assert main(["matrix", "render", "--check"]) == 1
    assert "docs/compat.md differs" in capsys.readouterr().err
