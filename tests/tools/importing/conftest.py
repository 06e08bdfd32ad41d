"""What the tests of the importer share: a sandbox, and images to choose from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher.base.errors import UsageError
from launcher.tools.importing import sandbox
from launcher.tools.importing.from_script import import_script
from launcher.tools.importing.recording import Sandbox
from launcher.tools.importing.sandbox import find_sandbox
from launcher.tools.importing.shell_script import Images, ImportResult

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


@pytest.fixture(scope="session", autouse=True)
def _unhurried() -> Iterator[None]:
    """A script may take its time where the machine does other things beside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sandbox, "SECONDS", 300)
        yield


Imported = Callable[..., ImportResult]


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Imported:
    """Imports a text as a script that lies in a folder of its own, where the launcher is started.

    box: another sandbox than this machine's; files: what lies beside it.
    """
    monkeypatch.chdir(tmp_path)

    def imported(
        text: str, name: str = "train.sh", box: Sandbox | None = None, **files: str
    ) -> ImportResult:
        script = tmp_path / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(text)
        for beside, content in files.items():
            (tmp_path / beside).write_text(content)
        return import_script(script, text, IMAGES, box or sandbox_here())

    return imported
