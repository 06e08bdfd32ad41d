"""The command line, run as a user runs it; and this repository's tests, run in an image."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launcher.settings import ROOT

if TYPE_CHECKING:
    from docker import DockerClient


def launcher(*args: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m launcher` with `args` and, beside this environment, `env`."""
    return subprocess.run(
        [sys.executable, "-m", "launcher", *args],
        cwd=cwd,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """Assert one clear message, the documented exit code, and no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "launcher: " in done.stderr
    for text in said:
        assert text in done.stderr


def pytest_in(engine: DockerClient, image: str, *arguments: str, **more: Any) -> tuple[int, str]:
    """Run pytest in a container of `image`: its exit code, and what it printed.

    pytest and the launcher's packages come from this environment, behind the image's own.
    """
    environment = {
        "PYTHONPATH": "/opt/megatron/lib:/opt/packages/lib:/testing",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": "-p no:cacheprovider -p pytest_timeout",
    }
    container = engine.containers.create(
        image,
        ["python3", "-m", "pytest", "-m", "megatron", *arguments],
        init=True,
        network_mode="none",
        working_dir="/repo",
        environment=environment | more.pop("environment", {}),
        volumes={
            str(ROOT): {"bind": "/repo", "mode": "ro"},
            str(Path(pytest.__file__).parents[1]): {"bind": "/testing", "mode": "ro"},
        },
        **more,
    )
    try:
        container.start()
        return container.wait()["StatusCode"], container.logs().decode()
    finally:
        container.remove(force=True)


def random_file(name: str, size: int) -> bytes:
    """A tar of one file, whose bytes are as good as random and the same each time."""
    blocks = (hashlib.sha256(f"{name} {n}".encode()).digest() for n in range(size // 32))
    content = b"".join(blocks)
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return file.getvalue()
