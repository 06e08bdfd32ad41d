"""The register of backends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.base.errors import UsageError
from launcher.runs.backends import backend


def test_the_nearest_backend_is_named() -> None:
    with pytest.raises(UsageError, match="Did you mean 'docker'"):
        backend("dokcer")


def test_a_dry_run_of_docker_needs_no_docker() -> None:
    code = (
        "import sys; from launcher.runs.backends import backend; backend('docker');"
        "print(sorted({'docker', 'requests'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
