"""Extensions: locked commits with their submodules, a Python by its hash, what a stage makes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from launcher.base.errors import BuildError, UsageError
from launcher.base.settings import Settings
from launcher.images.builder import stage
from launcher.images.matrix.locked import LockedExtension
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import recipe, sha256_of_pin
from launcher.images.matrix.schema import Extension, GitSource, Interpreter
from launcher.images.sources import extensions, fetch, megatron_source
from tests.images.builder.conftest import Place, commit_all
from tests.images.builder.made import RECIPE, inputs_of

MATRIX, LOCK = load_matrix(), load_lock()
HUB = "https://github.com/"


def git(folder: Path, *args: str) -> str:
    options = ["-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "core.autocrlf=false"]
    command = ["git", "-C", str(folder), *options, "-c", "protocol.file.allow=always", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def repository(folder: Path, files: dict[str, str]) -> None:
    """A repository with one commit of `files`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    commit_all(folder)


@pytest.fixture
def mirrored(tmp_path: Path, empty_site: Settings) -> Settings:
    """A site whose GitHub is a folder: a/kernels with two submodules, a/headers and a/tests."""
    hub = tmp_path / "hub/a"
    repository(hub / "kernels.git", {"setup.py": "import setuptools\n"})
    for name in ("headers", "tests"):
        repository(hub / f"{name}.git", {f"include/{name}.h": f"// {name}\n"})
        git(hub / "kernels.git", "submodule", "add", "-q", str(hub / f"{name}.git"), f"lib/{name}")
    git(hub / "kernels.git", "commit", "-q", "-m", "submodules")
    return replace(empty_site, git_mirror=f"file://{tmp_path}/hub/")


def wanted(site: Settings, *submodules: str) -> Extension:
    kernels = Path(site.git_mirror.removeprefix("file://"), "a/kernels.git")
    commit = git(kernels, "rev-parse", "HEAD")
    return Extension(
        git=GitSource(url=f"{HUB}a/kernels.git", commit=commit),
        submodules={f"lib/{name}": f"{HUB}a/{name}.git" for name in submodules},
        package="kernels",
        modules=["kernels_ext"],
    )


def locked(site: Settings, extension: Extension) -> LockedExtension:
    commit = extension.git.commit
    assert commit is not None
    own = extensions.locked_git(extension.git.url, commit, None, site)
    return extensions.lock("kernels", extension, own, site)


def test_a_commit_is_unpacked_with_the_submodules_that_it_needs(
    mirrored: Settings, tmp_path: Path
) -> None:
    extension = wanted(mirrored, "headers")
    lock = locked(mirrored, extension)
    assert set(lock.links) == {"lib/headers", "lib/tests"}
    assert lock.submodules["lib/headers"].commit == lock.links["lib/headers"]
    found = extensions.from_git("kernels", extension, lock, mirrored)
    found.unpack(tmp_path / "tree")
    assert (tmp_path / "tree/lib/headers/include/headers.h").read_text() == "// headers\n"
    assert not [*(tmp_path / "tree/lib/tests").iterdir()]
    assert found.record()["commits"] == {
        "": extension.git.commit,
        "lib/headers": lock.links["lib/headers"],
    }


@pytest.mark.parametrize("part", ["git", "links", "submodules"])
def test_another_tree_or_submodule_than_the_locked_one_is_refused(
    mirrored: Settings, tmp_path: Path, part: str
) -> None:
    extension = wanted(mirrored, "headers")
    lock = locked(mirrored, extension)
    other = {
        "git": {"git": lock.git.model_copy(update={"tree": "0" * 40})},
        "links": {"links": {**lock.links, "lib/tests": "0" * 40}},
        "submodules": {
            "submodules": {
                "lib/headers": lock.submodules["lib/headers"].model_copy(update={"tree": "0" * 40})
            }
        },
    }[part]
    found = extensions.from_git("kernels", extension, lock.model_copy(update=other), mirrored)
    with pytest.raises(BuildError, match="has another tree than the locked one"):
        found.unpack(tmp_path / "tree")


def test_a_lock_of_other_commits_or_submodules_is_told(mirrored: Settings) -> None:
    extension = wanted(mirrored, "headers")
    lock = locked(mirrored, extension)
    for changed in (
        wanted(mirrored, "headers", "tests"),
        extension.model_copy(update={"git": GitSource(url=f"{HUB}a/kernels.git", commit="0" * 40)}),
    ):
        with pytest.raises(UsageError, match=r"kernels: matrix\.lock holds another commit"):
            extensions.from_git("kernels", changed, lock, mirrored)
    nowhere = extension.model_copy(update={"submodules": {"lib/nowhere": f"{HUB}a/headers.git"}})
    with pytest.raises(BuildError, match="no submodule at lib/nowhere") as caught:
        locked(mirrored, nowhere)
    assert "lib/headers, lib/tests" in caught.value.remedy


def test_everything_of_an_extension_is_in_the_key_and_the_context(
    mirrored: Settings, tmp_path: Path
) -> None:
    extension = wanted(mirrored, "headers")
    one = extensions.from_git("kernels", extension, locked(mirrored, extension), mirrored)
    megatron = megatron_source.MegatronSource(
        "path", "0.9.0", "i", "r", False, 1, tmp_path / "megatron"
    )
    (tmp_path / "megatron").mkdir()
    made = partial(inputs_of, megatron, patches=(), recipe=replace(RECIPE, pins={}))
    keys = [
        made(extensions=chosen, architectures=architectures).key()
        for chosen in ((), (one,), (replace(one, name="other"),))
        for architectures in ("80", "80 90")
    ]
    options = extension.model_copy(update={"options": ["--cpp_ext"]})
    keys += [
        made(extensions=(replace(one, wanted=options),), architectures="80").key(),
        made(interpreter=Path("/cache/sha256/abc/python.tar.gz")).key(),
        made(interpreter=Path("/cache/sha256/abd/python.tar.gz")).key(),
    ]
    assert len(set(keys)) == len(keys)


def test_a_row_s_needs_have_its_python_and_its_commits() -> None:
    row = recipe(MATRIX, LOCK, "cuda-12.4")
    assert row.interpreter == MATRIX.interpreters["3.10.16"]
    assert LOCK.extensions["apex-24.10"].git.commit in row.extension_commits
    assert set(LOCK.needs["cp310"].extensions) <= set(row.wheels)
    assert not set(LOCK.needs["cp310"].extensions) & set(recipe(MATRIX, LOCK, "24.10").wheels)
    files = {sha256_of_pin(pin) for pin in row.wheels}
    assert row.locked.git is not None
    lacks = row.lacks(files, [row.locked.git.commit])
    assert lacks == ["Python 3.10", *(f"commit {commit}" for commit in row.extension_commits)]
    assert len(lacks) == 4


def test_a_python_is_fetched_by_its_hash_and_once(
    place: Place, empty_site: Settings, tmp_path: Path
) -> None:
    site = replace(empty_site, git_mirror=f"{place.address}/")
    content = b"a Python" * 1000
    file = place.folder / "cpython.tar.gz"
    file.write_bytes(content)
    named = Interpreter(url=f"{HUB}cpython.tar.gz", sha256=hashlib.sha256(content).hexdigest())
    found = fetch.archive(named, site)
    assert found.read_bytes() == content
    assert found.name == "cpython.tar.gz"
    file.unlink()
    assert fetch.archive(named, site) == found
    found.write_bytes(b"changed")
    with pytest.raises(BuildError, match="its sha256 is not the locked one"):
        fetch.archive(named, site)


def test_another_python_than_the_one_of_the_matrix_is_refused(
    place: Place, empty_site: Settings, tmp_path: Path
) -> None:
    site = replace(empty_site, git_mirror=f"{place.address}/")
    named = Interpreter(url=f"{HUB}cpython.tar.gz", sha256="0" * 64)
    with pytest.raises(BuildError, match=r"can't be fetched: 404") as caught:
        fetch.archive(named, site)
    assert "LAUNCHER_GIT_MIRROR" in caught.value.remedy
    (place.folder / "cpython.tar.gz").write_bytes(b"other")
    with pytest.raises(BuildError, match=r"its sha256 is not the one in matrix\.yaml"):
        fetch.archive(named, site)
    assert not fetch.cached(hashlib.sha256(b"other").hexdigest(), site)


def test_wheels_of_either_machine_are_asked_for_by_its_name() -> None:
    amd64, arm64 = fetch.target_options("3.12"), fetch.target_options("3.12", "linux/arm64")
    assert "--platform=manylinux_2_28_x86_64" in amd64
    assert "--platform=manylinux_2_28_aarch64" in arm64
    assert not [option for option in arm64 if "x86_64" in option]
    assert not [option for option in arm64 if "manylinux1_" in option]  # there never was one


def test_architectures_are_written_as_torch_and_as_cmake_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_ARCHITECTURES", "80 90a 100 120f")
    monkeypatch.setenv("PYTHONPATH", "/opt/packages/lib")
    found = stage.compiling({"epoch": 7, "environment": {"NVTE_FRAMEWORK": "pytorch"}})
    assert found["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0a;10.0;12.0f"
    assert found["NVTE_CUDA_ARCHS"] == "80;90a;100;120f"
    assert found["NVTE_FRAMEWORK"] == "pytorch"
    assert found["SOURCE_DATE_EPOCH"] == "7"  # else two builds of one wheel differ in their times
    assert found["PYTHONPATH"] == "/build/tools:/build/native:/opt/packages/lib"


def test_a_wheel_without_its_modules_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "apex-0.1-cp310-cp310-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("apex_C.cpython-310-x86_64-linux-gnu.so", "apex/amp_C.py", "a/libte.so"):
            file.writestr(name, "")
    stage.check_modules(wheel, ["apex_C", "libte"])
    with pytest.raises(SystemExit, match=r"holds no compiled amp_C: see"):
        stage.check_modules(wheel, ["apex_C", "amp_C"])


def test_make_compiles_nothing_where_the_module_is_as_new_as_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage.os, "chown", lambda *_, **__: None)  # which root alone may
    (tmp_path / "Makefile").write_text("all: module.so\nmodule.so: helpers.cpp\n\tfalse\n")
    command = ["make", "-C", str(tmp_path)]
    assert subprocess.run(command, capture_output=True).returncode  # as without a module
    for name in ("helpers.cpp", "module.so"):
        (tmp_path / name).write_text(name)
    stage.normalise(tmp_path, 1_700_000_000)
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Nothing to be done" in done.stdout


@pytest.mark.parametrize(("asked", "compiled"), [(17, 17), (20, 20), (None, 17)])
def test_a_setup_that_names_an_older_cxx_compiles_by_the_one_that_torch_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, compiled: int
) -> None:
    """mamba-ssm failed at torch 2.14's first header, after minutes of nvcc."""
    header = tmp_path / "torch/include/ATen/ATen.h"
    header.parent.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    header.write_text(f"#error C++{asked} or later compatible compiler\n" if asked else "")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    script = tmp_path / "kernels/setup.py"
    script.parent.mkdir()
    script.write_text('["-std=c++17", "-std=c++23", "-O3"]')
    stage.raise_standard(script.parent)
    assert script.read_text() == f'["-std=c++{compiled}", "-std=c++23", "-O3"]'
