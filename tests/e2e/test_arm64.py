"""linux/arm64: what is refused without an emulator, and a whole image by one."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder import verify
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.engine.private.debian import STANDIN_EPOCH, debian_base
from launcher.images.engine.private.packages import unpack
from launcher.images.oci.inspection import find_image
from tests.conftest import NAMES
from tests.e2e.command import built, in_image, launched, matrix_folder, tarred

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.e2e.registry import Registry

pytestmark = pytest.mark.engine

FORMATS = Path("/proc/sys/fs/binfmt_misc")
NO_MACHINE = 0xBEEF  # a processor that nobody has made, and nobody emulates
AARCH64 = 183
# Name, the first bytes of an executable file for arm64, and which of them count (kernel's
# Documentation/admin-guide/binfmt-misc.rst); F: opened now, so that containers have it too.
FORMAT = ":{name}:M::\\x7fELF\\x02\\x01\\x01{zeros}\\x02\\x00\\xb7\\x00:{mask}:{program}:F"
MASK = "\\xff" * 7 + "\\x00" * 9 + "\\xfe\\xff\\xff\\xff"
HELPERS = "/opt/megatron/lib/megatron/core/datasets"
CALL = f"""
import sys
sys.path.insert(0, {HELPERS!r})
import helpers_cpp, numpy
which, where = numpy.zeros(4, dtype=numpy.int16), numpy.zeros(4, dtype=numpy.int64)
helpers_cpp.build_blending_indices(which, where, numpy.array([0.5, 0.5]), 2, 4, False)
print(helpers_cpp.__file__, which.tolist(), where.tolist())
"""


def test_an_image_for_a_processor_that_nobody_emulates_is_refused_with_the_cure(
    engine: DockerClient,
) -> None:
    """The kernel's words came alone: exec format error."""
    program = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack("<HHI", 2, NO_MACHINE, 1)
    layer = tarred({"usr/bin/python3": program.ljust(64, b"\0")}, 0o755)
    dockerfile = "FROM scratch\nADD layer.tar /\nENV PATH=/usr/bin\n"
    image = built(engine, dockerfile, files={"layer.tar": layer})
    try:
        with pytest.raises(BuildError) as caught:
            verify.look(engine, image, "base")
    finally:
        engine.images.remove(image, force=True)
    assert "for another processor" in caught.value.remedy
    assert "qemu-user-static" in caught.value.remedy


@pytest.fixture
def _emulated(site: Settings) -> Iterator[None]:
    """The machine's emulator of arm64; where it has none, Debian's until the test ends."""
    if (FORMATS / "qemu-aarch64").exists():
        yield
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("no emulator of arm64 is registered here, and root and apt alone can do it")
    mount = ["mount", "-t", "binfmt_misc", "binfmt_misc", str(FORMATS)]
    mounted = not (FORMATS / "register").exists()
    if mounted and subprocess.run(mount, check=False).returncode:
        pytest.skip("this kernel, or this container, has no binfmt_misc")
    program = unpack(site.cache / "qemu", ["qemu-user-static"]) / "usr/bin/qemu-aarch64-static"
    name = f"{NAMES}-aarch64"
    if (FORMATS / name).exists():  # of a session of these tests that was killed
        (FORMATS / name).write_text("-1")
    said = FORMAT.format(name=name, zeros="\\x00" * 9, mask=MASK, program=program)
    (FORMATS / "register").write_text(said)
    yield
    (FORMATS / name).write_text("-1")  # removes it
    if mounted:
        subprocess.run(["umount", str(FORMATS)], check=True)


@pytest.fixture
def published(
    engine: DockerClient, registry: Registry, python_image: str, _emulated: None
) -> Iterator[str]:
    """A name at a registry: Debian with numpy for arm64, and the base of other tests for amd64."""
    repository, made = f"{registry.address}/arm64/base", f"{NAMES}-debian:arm64"
    debian_base(engine, made, STANDIN_EPOCH, more=["python3-numpy"], architecture="arm64")
    digests = {}
    for platform, image in (("linux/amd64", python_image), ("linux/arm64", made)):
        tag = platform.partition("/")[2]
        engine.api.tag(image, repository, tag)
        for event in engine.api.push(repository, tag, stream=True, decode=True):
            assert "error" not in event, event
        found = engine.api.inspect_distribution(f"{repository}:{tag}")
        digests[platform] = str(found["Descriptor"]["digest"])
        engine.images.remove(f"{repository}:{tag}")
    registry.index("arm64/base", "1", digests)
    yield f"{repository}:1"
    engine.images.remove(made)
    for image in engine.images.list(repository):
        engine.images.remove(image.id, force=True)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_whole_image_for_arm64_is_built_and_verified_on_another_machine(
    engine: DockerClient, site: Settings, published: str, tmp_path: Path
) -> None:
    """Nobody had built one: there is no wheel of megatron-core for aarch64 anywhere."""
    row = {"base": published, "python": "3.11", "megatron": "0.16.1", "source": "sdist"}
    own = replace(site, matrix=matrix_folder(tmp_path, {"25.09": row}))
    request = BuildRequest("25.09", builder=published, platform="linux/arm64")
    made = Builds(engine, own, Progress(), f"{NAMES}-arm64").build(request)
    name = made.names[0]
    try:
        assert engine.api.inspect_image(name)["Architecture"] == "arm64"
        assert find_image(engine, published) is None  # the name is this machine's platform's
        record = json.loads(in_image(engine, name, "cat", "/opt/megatron/build.json"))
        wheel = "megatron_core-0.16.1-cp311-cp311-linux_aarch64.whl"
        assert record["wheel"]["name"] == wheel
        library = f"{HELPERS}/helpers_cpp.cpython-311-aarch64-linux-gnu.so"
        called = in_image(engine, name, "python3", "-c", CALL)
        assert called == f"{library} [0, 1, 0, 1] [0, 0, 1, 1]\n"
        header = in_image(engine, name, "od", "-An", "-tu2", "-j18", "-N2", library)
        assert int(header) == AARCH64
        env = {"LAUNCHER_MATRIX": str(own.matrix)}
        done = launched("image", "verify", name, "--builder", published, **env)
        assert "identical: wheel, added layers and image" in done.stdout
    finally:
        engine.images.remove(made.id, force=True)
