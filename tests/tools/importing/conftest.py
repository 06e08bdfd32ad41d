"""What the tests of the importer share: a sandbox, and images to choose from."""

from __future__ import annotations

from functools import cache

import pytest

from launcher.base.errors import UsageError
from launcher.tools.importing.recording import Sandbox
from launcher.tools.importing.sandbox import find_sandbox
from launcher.tools.importing.shell_script import Images

IMAGES = Images(
    {"24.10": ("0.9.0", "0.11.0", "0.12.3"), "24.09": ("0.9.0",), "cpu": ("0.16.1",)}, "24.10"
)


@cache
def _found() -> Sandbox | str:
    try:
        return find_sandbox()
    except UsageError as error:
        return str(error)


def sandbox_here() -> Sandbox:
    """The sandbox of this machine; the test is skipped where there is none."""
    found = _found()
    if isinstance(found, str):
        pytest.skip(found)
    return found
