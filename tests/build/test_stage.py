"""The steps inside a build: the same bytes whatever the machine, the seed and the umask."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from launcher.build import stage

# What a .pyc of Python 3.10 keeps in the order of the seed: a frozenset, and names in one.
SOURCE = "def known(name):\n    return name in {names}\n"


def runs(program: str) -> bool:
    """Whether there is such a Python: a version manager's stand-in may be there without one."""
    found = shutil.which(program)
    return bool(found) and not subprocess.run([str(found), "-V"], capture_output=True).returncode


def compiled(python: str, folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Byte-compile a folder as a build does: the hash of each .pyc."""
    for old in folder.rglob("*.pyc"):
        old.unlink()
    code = f"import stage, pathlib; stage.compile_python(pathlib.Path({str(folder)!r}))"
    at = str(Path(stage.__file__).parent)
    subprocess.run([python, "-c", code], cwd=at, env={**os.environ, **env}, check=True)
    found = {
        one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in folder.rglob("*.pyc")
    }
    assert len(found) == 8
    return found


@pytest.mark.parametrize("python", [sys.executable, "python3.10"])
def test_compiled_files_are_the_same_for_every_seed_and_number_of_processors(
    python: str, tmp_path: Path
) -> None:
    if not runs(python):
        pytest.skip(f"there is no {python}")
    for number in range(8):
        names = "{" + ", ".join(repr(f"name{number}{place}") for place in range(9)) + "}"
        (tmp_path / f"module{number}.py").write_text(SOURCE.format(names=names))
    one = compiled(python, tmp_path, {"PYTHONHASHSEED": "1"})
    other = compiled(python, tmp_path, {"PYTHONHASHSEED": "2", "PYTHONWARNINGS": "error"})
    assert one == other
    # Alone on a single processor, if the system has a way to say so.
    if hasattr(os, "sched_setaffinity"):
        own = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(own)})
        try:
            assert compiled(python, tmp_path, {"PYTHONHASHSEED": "1"}) == one
        finally:
            os.sched_setaffinity(0, own)


def test_every_file_is_in_one_share(tmp_path: Path) -> None:
    for number in range(stage.SHARES * 2 + 1):
        (tmp_path / f"module{number}.py").write_text("")
    counts = []
    for share in range(stage.SHARES):
        stage.compile_share(tmp_path, share)
        counts.append(len(list(tmp_path.rglob("*.pyc"))))
    assert counts[-1] == stage.SHARES * 2 + 1
    assert counts == sorted(set(counts))


def test_a_build_s_own_python_runs_with_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 3.10 the seed decides what a frozenset in a .pyc looks like."""
    seen: list[Mapping[str, str]] = []

    def run(
        argv: list[str], env: Mapping[str, str], check: bool
    ) -> subprocess.CompletedProcess[str]:
        seen.append(env)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setenv("PYTHONHASHSEED", "random")
    monkeypatch.setattr(stage.subprocess, "run", run)
    stage.compile_python(Path("folder"))
    assert len(seen) == stage.SHARES
    assert {env["PYTHONHASHSEED"] for env in seen} == {"0"}


def test_no_folders_name_begins_that_of_its_metadata(tmp_path: Path) -> None:
    for name in ("einops", "einops-0.8.2.dist-info", "six-1.17.0.dist-info", "PyYAML-6.dist-info"):
        (tmp_path / name).mkdir()
    (tmp_path / "six.py").touch()
    info = tmp_path / "einops-0.8.2.dist-info/METADATA"
    info.write_text("Metadata-Version: 2.1\nName: einops\nVersion: 0.8.2\n")
    stage.set_apart(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("Einops-0.8.2.dist-info", "PyYAML-6.dist-info", "einops", "six-1.17.0.dist-info"),
        "six.py",
    ]
    (found,) = metadata.distributions(name="einops", path=[str(tmp_path)])
    assert found.version == "0.8.2"
