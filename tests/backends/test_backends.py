"""The register of backends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.backends import BACKENDS, backend
from launcher.errors import UsageError


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_has_what_the_command_needs(name: str) -> None:
    found = backend(name)
    for method in ("request", "show", "facts", "count_gpus", "start", "jobs", "shell", "inside"):
        assert callable(getattr(found, method))


def test_the_nearest_backend_is_named() -> None:
    with pytest.raises(UsageError, match="Did you mean 'docker'"):
        backend("dokcer")


def test_a_dry_run_of_docker_needs_no_docker() -> None:
    code = (
        "import sys; from launcher.backends import backend; backend('docker');"
        "print(sorted({'docker', 'requests'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
