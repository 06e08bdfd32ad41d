"""An extension compiled by a real nvcc, in the real stage, on a base that has torch for CUDA."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.engine.private.debian import STANDIN_EPOCH, debian_base
from launcher.images.sources import extensions
from tests.conftest import NAMES
from tests.e2e.command import in_image, matrix_folder

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(7200)]

TORCH = "2.14.1"
# cuobjdump isn't there of 13.0; a newer one reads what an older nvcc wrote.
PACKAGES = [f"torch=={TORCH}", "numpy", "cuda-toolkit[cccl,nvcc]==13.0.3"]
PACKAGES += ["nvidia-cuda-cuobjdump==13.2.51"]
HOME = "/usr/local/lib/python3.11/dist-packages/nvidia/cu13"
# The packages have no lib64 and no library without a version in its name, as a toolkit has.
INSTALL = f"""
python3 -m pip install --no-index --no-deps --break-system-packages /wheels/*.whl
ln -s lib {HOME}/lib64
cd {HOME}/lib && for one in *.so.*; do ln -sf $one ${{one%%.so.*}}.so; done
"""
COMPILED = {"causal-conv1d-1.5.4": "causal_conv1d_cuda", "mamba-ssm-2.2.6": "selective_scan_cuda"}
WANTED = BuildRequest("25.09", architectures="80", jobs=2, extras=("mamba",))
FIND = "import torch, {0}; print({0}.__file__)"


@pytest.fixture
def builds(engine: DockerClient, site: Settings, tmp_path: Path) -> Builds:
    """Of a matrix with one row, whose extensions' sources are in the cache."""
    row = {"python": "3.11", "torch": TORCH, "megatron": "0.16.1", "source": "sdist"}
    own = replace(site, matrix=matrix_folder(tmp_path, {"25.09": row}), extras=tmp_path / "locks")
    found = Builds(engine, own, Progress(), f"{NAMES}-nvcc")
    try:
        extensions.sources(found.recipe(WANTED), own, Progress())
    except BuildError as error:
        pytest.skip(f"a source can't be had (LAUNCHER_GIT_MIRROR names another place): {error}")
    return found


@pytest.fixture
def base(engine: DockerClient, builds: Builds) -> Iterator[str]:
    """A Debian with torch and nvcc, of PyPI's packages of CUDA 13.0; made after `builds`."""
    plain, name = f"{NAMES}-nvcc:plain", f"{NAMES}-nvcc:1"
    debian_base(engine, plain, STANDIN_EPOCH)
    with tempfile.TemporaryDirectory() as folder:
        options = ["--quiet", "--only-binary=:all:", "--python-version=3.11", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, *PACKAGES], check=True)
        container = engine.containers.create(
            plain,
            ["sh", "-ec", INSTALL],
            network_mode="none",
            volumes={folder: {"bind": "/wheels", "mode": "ro"}},
        )
        try:
            container.start()
            assert container.wait(timeout=3600)["StatusCode"] == 0, container.logs().decode()
            changes = [f"ENV CUDA_HOME={HOME}", 'CMD ["/bin/bash"]']
            container.commit(*name.split(":"), changes=changes)
        finally:
            container.remove(force=True)
    yield name
    for image in (name, plain):
        engine.images.remove(image, force=True)


def test_the_mamba_set_is_compiled_for_the_gpu_that_is_named_alone(
    engine: DockerClient, builds: Builds, base: str
) -> None:
    """Their setup.py name seven GPUs, whatever is asked for, and an older C++ than torch takes."""
    name = builds.build(replace(WANTED, base=base, builder=base)).names[0]
    try:
        for extension, module in COMPILED.items():
            record = json.loads(in_image(engine, name, "cat", f"/opt/extensions/{extension}.json"))
            assert record["architectures"] == "80"
            library = in_image(engine, name, "python3", "-c", FIND.format(module)).strip()
            assert library.startswith(f"/opt/extensions/lib/{module}.")
            listed = in_image(engine, name, f"{HOME}/bin/cuobjdump", "--list-elf", library)
            codes = listed.splitlines()
            assert codes
            assert all(one.endswith(".sm_80.cubin") for one in codes), codes
        in_image(engine, name, "python3", "-c", "import mamba_ssm, megatron.core.ssm.mamba_mixer")
    finally:
        engine.images.remove(name, force=True)
