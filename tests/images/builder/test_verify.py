"""What is looked for in a base and in an image: Megatron's import, and what a release refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.errors import BuildError
from launcher.images.builder import verify
from launcher.images.builder.verify import BuildFacts
from launcher.images.matrix.load import load_matrix

MATRIX = load_matrix()
NGC, CPU = MATRIX.rows["26.06"], MATRIX.rows["cpu"]
LIBCUDA = "ImportError: libcuda.so.1: cannot open shared object file: No such file"


def looked(folder: Path, core: str, training: str = "", seconds: int = 60) -> BuildFacts:
    """What LOOK prints where these are the texts of megatron.core and megatron.training."""
    for name, text in (("torch", ""), ("megatron/core", core), ("megatron/training", training)):
        module = folder / name / "__init__.py"
        module.parent.mkdir(parents=True)
        module.write_text(text)
    command = [sys.executable, "-c", verify.LOOK, verify.IMPORT, str(seconds), "megatron.core.x"]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120)
    assert len(done.stdout.splitlines()) == 1, "the import's own words are no answer"
    return BuildFacts(**json.loads(done.stdout))


@pytest.mark.parametrize(
    ("core", "training", "seen"),
    [
        ("print('hello', flush=True)", "import atexit; atexit.register(print, 'bye')", []),
        ("assert 0, 'at least\\n 0.6.0'", "", ["megatron.core", "AssertionError: at least 0.6.0"]),
        ("", "raise SystemExit(3)", ["megatron.training", "SystemExit: 3"]),
        (
            "import nowhere.to_be",
            "",
            ["megatron.core", "ModuleNotFoundError: No module named 'nowhere'"],
        ),
        ("import os; os.kill(os.getpid(), 9)", "", ["megatron.core", "no answer"]),
    ],
)
def test_megatron_is_imported_in_the_image(
    tmp_path: Path, core: str, training: str, seen: list[str]
) -> None:
    """An image whose Megatron can't be imported was given a name."""
    assert looked(tmp_path, core, training).unimported == seen


def test_an_import_that_never_ends_ends_the_look(tmp_path: Path) -> None:
    child = "import subprocess, time; subprocess.Popen(['sleep', '20']); time.sleep(600)"
    assert looked(tmp_path, child, seconds=1).unimported == ["megatron.core", "no answer"]


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        ("AssertionError: Minimum required nvidia-resiliency-ext package version is 0.6.0.", True),
        ("ModuleNotFoundError: No module named 'yaml'", True),
        ("ImportError: cannot import name 'x' from 'torch'", True),
        (LIBCUDA, False),
        ("RuntimeError: Found no NVIDIA driver on your system.", False),
        ("AssertionError: CUDA driver initialization failed", False),
        ("RuntimeError: 0 active drivers ([]). There should only be one.", False),
        ("no answer", False),
    ],
)
def test_what_a_gpu_would_mend_is_a_note_and_the_rest_is_refused(error: str, refused: bool) -> None:
    facts = BuildFacts("3.12", {}, unimported=["megatron.core", error])
    if not refused:
        assert error in str(verify.check_imports(facts, NGC))
        return
    with pytest.raises(
        BuildError, match=r"megatron\.core can't be imported in the image"
    ) as caught:
        verify.check_imports(facts, NGC)
    assert error in caught.value.problem
    assert ('EXTRAS="yaml"' in caught.value.remedy) == ("yaml" in error)


def test_cpu_torch_has_no_triton_and_a_cuda_row_s_has() -> None:
    """megatron.training 0.16 imports it, and the CPU row would no longer build."""
    facts = BuildFacts("3.11", {}, unimported=["megatron.training", f"{MISSING} 'triton'"])
    assert "CPU torch has none" in str(verify.check_imports(facts, CPU))
    with pytest.raises(BuildError):
        verify.check_imports(facts, NGC)


MISSING = "ModuleNotFoundError: No module named"


@pytest.mark.parametrize(
    ("release", "version", "refused"),
    [
        ("0.19.0", "0.5.0", True),
        ("0.19.0", "0.6.0", False),
        ("0.19.0", "0.6.1.dev2", False),
        ("0.19.0", None, False),
        ("0.16.1", "0.5.0", False),
    ],
)
def test_a_base_with_a_package_that_the_release_refuses_is_refused_by_name(
    release: str, version: str | None, refused: bool
) -> None:
    packages = {"nvidia-resiliency-ext": version} if version else {}
    facts, named = BuildFacts("3.12", packages), MATRIX.releases[release]
    if not refused:
        verify.check_needs(facts, named, "base")
        return
    with pytest.raises(BuildError, match=r"base: has nvidia-resiliency-ext 0\.5\.0: .*>=0\.6\.0"):
        verify.check_needs(facts, named, "base")
