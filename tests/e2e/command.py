"""The command line, run as a user runs it; tests that run in an image; images to begin with."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.base.settings import ROOT

if TYPE_CHECKING:
    from docker import DockerClient


# Builds the cpu row anew from the clone that it runs in, under the names of tests; prints its id.
BUILD = """
import sys
from pathlib import Path
import launcher
from launcher.images.builder.image import Builds, BuildRequest
from launcher.images.engine.connect import connect
from launcher.base.screen import Progress
from launcher.base.settings import settings
assert Path(launcher.__file__).is_relative_to(Path.cwd()), launcher.__file__
base, builder, names = sys.argv[1:]
request = BuildRequest("cpu", base=base, builder=builder, no_cache=True)
print(Builds(connect(600), settings(), Progress(), names).build(request).id)
"""


def launcher(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m launcher` with `args` and, beside this environment, `env`."""
    return subprocess.run(
        [sys.executable, "-m", "launcher", *args],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def launched(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """The same, which has to end with 0."""
    done = launcher(*args, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def killed(python: list[str], after: float, **env: str) -> bool:
    """Run Python with arguments for `after` seconds; whether it was still at it, and was killed."""
    with subprocess.Popen(
        [sys.executable, *python],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        time.sleep(after)
        at_work = process.poll() is None
        if at_work:
            os.killpg(process.pid, signal.SIGKILL)
    return at_work


def refused(done: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """Assert one clear message, the documented exit code, and no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "launcher: " in done.stderr
    for text in said:
        assert text in done.stderr


def contained(
    engine: DockerClient, image: str, command: list[str], **more: Any
) -> subprocess.CompletedProcess[str]:
    """A command in a container of its own without network, which is gone afterwards."""
    container = engine.containers.create(image, command, init=True, network_mode="none", **more)
    try:
        container.start()
        code = container.wait()["StatusCode"]
        out, err = (container.logs(stdout=one, stderr=not one).decode() for one in (True, False))
        return subprocess.CompletedProcess(command, code, out, err)
    finally:
        container.remove(force=True)


def pytest_in(
    engine: DockerClient,
    image: str,
    *arguments: str,
    chosen: str = "not long",
    workers: int = 2,
    **more: Any,
) -> tuple[int, str]:
    """Run the tests that need Megatron in a container of `image`: exit code, and what was printed.

    pytest and the launcher's packages come from this environment, behind the image's own.
    """
    environment = {
        "PYTHONPATH": "/opt/megatron/lib:/opt/packages/lib:/testing",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider -p pytest_timeout -p xdist --dist worksteal",
    }
    done = contained(
        engine,
        image,
        ["python3", "-m", "pytest", f"-n{workers}", "-m", f"megatron and {chosen}", *arguments],
        working_dir="/repo",
        environment=environment | more.pop("environment", {}),
        volumes={
            str(ROOT): {"bind": "/repo", "mode": "ro"},
            str(Path(pytest.__file__).parents[1]): {"bind": "/testing", "mode": "ro"},
        },
        **more,
    )
    return done.returncode, done.stdout + done.stderr


def tarred(files: dict[str, bytes], mode: int = 0o644) -> bytes:
    """A tar of these files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def random_file(name: str, size: int) -> bytes:
    """A tar of one file, whose bytes are as good as random and the same each time."""
    blocks = (hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(size // 32))
    return tarred({name: b"".join(blocks)})


def built(
    engine: DockerClient,
    dockerfile: str,
    name: str | None = None,
    files: Mapping[str, bytes] = {},
    labels: Mapping[str, str] = {},
) -> str:
    """The id of an image by the classic builder, made of a Dockerfile and files beside it."""
    context = io.BytesIO(tarred({"Dockerfile": dockerfile.encode(), **files}))
    image, _ = engine.images.build(
        fileobj=context,
        custom_context=True,
        tag=name,
        rm=True,
        network_mode="none",
        labels=dict(labels),
    )
    return str(image.id)


def in_image(engine: DockerClient, name: str, *command: str) -> str:
    """What a command prints in a container without network."""
    done = engine.containers.run(name, list(command), network_mode="none", remove=True)
    return str(done.decode())


def megatron_of(engine: DockerClient, image: str, folder: Path) -> Path:
    """The image's Megatron-Core in a new folder as a checkout has it: nothing is compiled."""
    container = engine.api.create_container(image)["Id"]
    try:
        pieces, _ = engine.api.get_archive(container, "/opt/megatron/lib/megatron")
        with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as archive:
            archive.extractall(folder, filter="data")
    finally:
        engine.api.remove_container(container)
    core = folder / "megatron/core"
    for path in [*core.rglob("*.so"), *core.rglob("__pycache__")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert list(core.glob("datasets/*.so")) == []
    return folder


def layers(engine: DockerClient, name: str) -> list[str]:
    """The digests of an image's layers, lowest first."""
    found: list[str] = engine.api.inspect_image(name)["RootFS"]["Layers"]
    return found


def matrix_folder(folder: Path, change: dict[str, dict[str, Any]]) -> Path:
    """A matrix of its own, with rows changed; beside it lock, template, patches."""
    data = yaml.safe_load((ROOT / "matrix.yaml").read_text())
    for tag, values in change.items():
        data["rows"][tag] |= values
    (folder / "matrix.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    for name in ("matrix.lock", "Dockerfile.template", "patches"):
        (folder / name).symlink_to(ROOT / name)
    return folder / "matrix.yaml"


PACKAGE = """FROM {}
LABEL megatron-launchpad.standin=test
RUN python3 -c "import sysconfig, pathlib; at = pathlib.Path(sysconfig.get_path('purelib')); \
info = at / '{}-{}.dist-info'; info.mkdir(parents=True); \
(info / 'METADATA').write_text('Name: {}\\\\nVersion: {}\\\\n')"
"""


def base_with(engine: DockerClient, on: str, name: str, version: str) -> str:
    """A stand-in base with the metadata of a package of this name and version."""
    text = PACKAGE.format(on, name.replace("-", "_"), version, name, version)
    built(engine, text, f"launchpad-test:{name}-{version}")
    return f"launchpad-test:{name}-{version}"


def standin(engine: DockerClient, python_image: str, name: str) -> str:
    """A base of its own: a stand-in for an NGC image, which has Python and no torch."""
    labelled = f"FROM {python_image}\nLABEL megatron-launchpad.standin=test\nENV STANDIN={name}\n"
    built(engine, labelled, f"launchpad-test:{name}")
    return f"launchpad-test:{name}"
