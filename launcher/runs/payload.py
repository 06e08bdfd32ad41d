"""The payload: the agent and the trainer as a folder named by its digest, which each run brings.

The launcher, its checks and what runs are so always of one version, and an image needs nothing of
ours. A container sees the folder at `TARGET`.
"""

from __future__ import annotations

import bz2
import io
import os
import tarfile
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from launcher.agent import start
from launcher.base import files, owned
from launcher.base.errors import EngineError
from launcher.base.names import LABEL
from launcher.base.trust import require_trusted

PYTHON = "python3"
"""What starts it, unless a run file names another."""

TARGET = "/opt/launchpad"
ENTRY = "launcher/agent/start.py"
KEY = "payload"
"""The key of its mount in a plan, and the end of its label."""

FOLDER = ".payloads"
"""Below the folder of the records: a payload is kept as long as one of them names it."""

JUST_TAKEN = 3600
"""Seconds."""

_PACKAGE = Path(__file__).parents[1]
_OWN = (
    "__init__.py",
    "base/__init__.py",
    "base/files.py",
    "base/owned.py",
    "agent/**/*.py",
    "agent/series/*.json",
    "trainer/**/*.py",
)
"""What travels: the agent, the trainer, and what the two take from the rooms below them."""


@dataclass(frozen=True)
class Payload:
    """The payload's digest, and its folder on this machine."""

    digest: str
    folder: str


NONE = Payload("", "")
"""Of a plan that is never carried out."""


def entry(folder: str = TARGET) -> str:
    """The file that Python starts, of the payload in a folder."""
    return f"{folder}/{ENTRY}"


@cache
def contents() -> dict[str, bytes]:
    """This launcher's modules, as bytes by path; read once, so that no edit reaches a run."""
    paths = [path for pattern in _OWN for path in _PACKAGE.glob(pattern)]
    return {
        f"launcher/{path.relative_to(_PACKAGE).as_posix()}": path.read_bytes() for path in paths
    }


@cache
def digest() -> str:
    """Of this launcher's own payload, in 32 hexadecimal digits."""
    return start.digest(contents())


def write_payload(runs: Path, wanted: str = "") -> Payload:
    """The payload in the folder of the records: this launcher's, written where it isn't there.

    Or the one with the digest `wanted`, of an earlier run. Raises EngineError where it can't be
    written, isn't there, or isn't what its name says; ForeignFileError where others could change
    it.
    """
    wanted = wanted or digest()
    folder = runs / FOLDER / wanted
    try:
        if not folder.exists() and wanted == digest():
            _write(folder)
        require_trusted(folder)
        found = start.contents(str(folder))
    except files.ForeignFileError:
        raise
    except OSError as error:
        raise EngineError(
            f"the launcher's payload can't be kept in {folder}: {error.strerror}",
            "export LAUNCHER_RUNS=FOLDER, one you may write to.",
        ) from error
    if not found:
        raise EngineError(f"{folder}: the payload of that run isn't there any more")
    if start.digest(found) != wanted:
        raise EngineError(f"{folder} isn't what was written there", f"rm -r {folder}")
    with suppress(OSError):  # another user's, of a shared disk
        os.utime(folder)  # for `sweep`
    return Payload(wanted, str(folder))


def _write(folder: Path) -> None:
    """Write this launcher's payload, so that nobody sees half of it; others' users may read it."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with owned.scratch(folder.parent) as aside:
        new = owned.make_folder(aside / KEY)
        for path, content in contents().items():
            at = new / path
            at.parent.mkdir(parents=True, exist_ok=True)
            at.write_bytes(content)
        for each in [new, *new.rglob("*")]:
            each.chmod(0o755 if each.is_dir() else 0o644)
        files.sync_tree(new)
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.exists():  # else another launcher has just written the same
                raise


def sweep(runs: Path, used: Collection[str]) -> int:
    """Remove payloads neither `used` nor taken in the last hour, by a start; the bytes freed."""
    freed, below = 0, runs / FOLDER
    for folder in below.glob("[0-9a-f]" * 32):
        if folder.name not in used and time.time() - folder.lstat().st_mtime > JUST_TAKEN:
            freed += sum(path.lstat().st_size for path in folder.rglob("*"))
            owned.remove_folder(folder, below)
    return freed


def archive(folder: str) -> bytes:
    """The payload in a folder as a compressed tar of TARGET, the same bytes each time."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for path, content in sorted(start.contents(folder).items()):
            member = tarfile.TarInfo(f"{TARGET.lstrip('/')}/{path}")
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return bz2.compress(packed.getvalue())


def diagnose(labels: Mapping[str, str]) -> list[str]:
    """The words that have a job, by its labels, write where its ranks are, as a tar.

    Jobs that older launchers started have the agent in their image.
    """
    if not labels.get(LABEL + KEY):
        return [PYTHON, "-m", "launcher.train.stall.stall"]
    return [labels.get(f"{LABEL}python", PYTHON), entry(), "stall.stall"]
