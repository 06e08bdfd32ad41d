"""A row that brings Python and compiles extensions, really built: with g++, as nvcc takes hours."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.matrix.matrix_file import load_lock
from launcher.images.matrix.schema import Extension, GitSource
from launcher.images.sources import extensions, fetch, lock
from tests.e2e.command import in_image, standin, tarred
from tests.images.builder.test_extensions import HUB, git, repository

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

TAG, NAMES = "cuda-12.4", "launchpad-test-cuda"
SETUP = """
import os, sys
from setuptools import Extension, setup
assert os.environ["KERNELS"] == "yes", "the extension's environment"
modules = []
if "--cpp_ext" in sys.argv:
    sys.argv.remove("--cpp_ext")
    built_for = [("BUILT_FOR", '"%s|%s|%s"' % (
        os.environ["TORCH_CUDA_ARCH_LIST"], os.environ["NVTE_CUDA_ARCHS"], os.environ["MAX_JOBS"]
    ))]
    modules = [Extension("kernels_ext", ["ext.c"], include_dirs=["lib/headers/include"],
                         define_macros=built_for)]
setup(name="Kernels.X", version="1.0", ext_modules=modules)
"""
SOURCE = """
#include <Python.h>
#include "headers.h"
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "kernels_ext", 0, -1, 0};
PyMODINIT_FUNC PyInit_kernels_ext(void) {
    PyObject *module = PyModule_Create(&definition);
    PyModule_AddStringConstant(module, "built_for", BUILT_FOR);
    PyModule_AddStringConstant(module, "header", HEADER);
    return module;
}
"""
WRAPPER = '#!/bin/sh\nBROUGHT=yes exec python3.11 "$@"\n'


def kernels(tmp_path: Path) -> tuple[str, Extension]:
    """A GitHub on this machine, and an extension there whose header is in a submodule."""
    hub = tmp_path / "hub/a"
    repository(hub / "headers.git", {"include/headers.h": '#define HEADER "a submodule\'s"\n'})
    repository(hub / "kernels.git", {"setup.py": SETUP, "ext.c": SOURCE})
    at = hub / "kernels.git"
    git(at, "submodule", "add", "-q", str(hub / "headers.git"), "lib/headers")
    git(at, "commit", "-q", "-m", "submodule")
    return f"file://{tmp_path}/hub/", Extension(
        git=GitSource(url=f"{HUB}a/kernels.git", commit=git(at, "rev-parse", "HEAD")),
        submodules={"lib/headers": f"{HUB}a/headers.git"},
        package="kernels-x",
        modules=["kernels_ext"],
        options=["--cpp_ext"],
        environment={"KERNELS": "yes"},
    )


def interpreter(folder: Path) -> Path:
    """An archive as those of the matrix: a Python in a folder named python."""
    path = folder / "cpython.tar.gz"
    files = {"python/bin/python3": WRAPPER.encode(), "python/lib/brought.py": b""}
    path.write_bytes(gzip.compress(tarred(files, 0o755)))
    return path


def own_matrix(tmp_path: Path, site: Settings, base: str, extension: Extension) -> Settings:
    """A site whose row cuda-12.4 is on a stand-in base, with its own lock beside it."""
    archive = interpreter(tmp_path)
    digest = fetch.sha256(archive)
    cached = site.cache / "sha256" / digest / archive.name
    cached.parent.mkdir(parents=True, exist_ok=True)
    archive.rename(cached)
    data = yaml.safe_load((ROOT / "matrix.yaml").read_text())
    data["interpreters"] = {"3.11.2": {"url": f"{HUB}cpython.tar.gz", "sha256": digest}}
    data["extensions"] = {"kernels": extension.model_dump(mode="json", exclude_none=True)}
    data["extras"] = {}  # those of the matrix name other extensions
    data["rows"] = {
        TAG: data["rows"][TAG]
        | {"base": base, "python": "3.11", "interpreter": "3.11.2", "packages": ["six"]}
        | {"megatron": "0.16.1", "source": "sdist", "torch": "2.6.0", "extensions": ["kernels"]}
    }
    data["moving"] = data["moving"][:1]
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    for name in ("Dockerfile.template", "patches"):
        (tmp_path / name).symlink_to(ROOT / name)
    old = load_lock(ROOT / "matrix.lock")
    own = lock._lock_git(extension.git, site)
    locked = extensions.lock("kernels", extension, own, site)
    six = [pin for pin in old.needs["cp311"].runtime if pin.startswith("six==")]
    found = old.model_copy(update={"packages": {TAG: six}, "extensions": {"kernels": locked}})
    lock.write(found, tmp_path / "matrix.lock")
    return replace(site, matrix=tmp_path / "matrix.yaml")


@pytest.mark.parametrize(
    ("asked", "jobs", "named", "made"),
    [
        (None, None, "80 90", "8.0;9.0|80;90|4 "),
        pytest.param("90a", 2, "90a", "9.0a|90a|2 ", marks=pytest.mark.long),
    ],
)
def test_it_brings_a_python_and_compiles_on_the_base_for_the_gpus_that_are_named(
    engine: DockerClient,
    site: Settings,
    bases: BaseNames,
    python_image: str,
    tmp_path: Path,
    asked: str | None,
    jobs: int | None,
    named: str,
    made: str,
) -> None:
    mirror, extension = kernels(tmp_path)
    base = standin(engine, python_image, "cuda")  # for NVIDIA's image, with a compiler
    own = own_matrix(tmp_path, replace(site, git_mirror=mirror), base, extension)
    builds = Builds(engine, own, Progress(), NAMES)
    request = BuildRequest(TAG, builder=bases.builder, architectures=asked, jobs=jobs)
    built = builds.build(request)
    ask = "import kernels_ext as k, os, six; print(k.built_for, k.header, os.environ['BROUGHT'])"
    said = in_image(engine, built.id, "python3", "-c", ask)
    assert said.strip() == f"{made}a submodule's yes"
    assert "/opt/extensions/lib" in in_image(
        engine, built.id, "python3", "-c", "import kernels_ext; print(kernels_ext.__file__)"
    )
    record = json.loads(in_image(engine, built.id, "cat", "/opt/extensions/kernels.json"))
    assert record["architectures"] == named
    labels = engine.api.inspect_image(built.id)["Config"]["Labels"]
    assert labels["megatron-launchpad.architectures"] == named
    assert set(record["commits"]) == {"", "lib/headers"}
    assert builds.build(request).reused
    for one in (built.id, base):
        engine.images.remove(one, force=True)
