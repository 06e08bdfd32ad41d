"""Records which run saved a checkpoint, and the line of runs that it continues.

A line has the id of its first run. A checkpoint says its line in a file of its own, once it is
complete. What says nothing is that of the run which has claimed the folder, by a file beside, but
for what was there before; else it is somebody else's. It needs only the standard library.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.base import files, owned

NOTE = "launcher-run.json"
"""In a checkpoint, and beside checkpoints while they are saved."""

LONGEST = 1 << 20
PATIENCE_SECONDS = 20.0
"""How long a rank waits for a claim that isn't there to be made again."""

VARIABLE = "LAUNCHER_CLAIM"
"""Gives the runner its run, where it saves, and what it may find there: `SaveRequest`."""

HOLDER = "LAUNCHER_HOLDER"
"""Gives the ranks what they save for: the run, its line, and the token of the folder's hold."""

ANEW, ON, OVER = "anew", "on", "over"
ID = r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}"
FOLDER = re.compile(rf"iter_\d+((\.(?P<run>{ID}))?\.partial)?")


@dataclass(frozen=True)
class SaveRequest:
    """What a run asks of the folder that it saves to.

    on: it goes on from the newest checkpoint there; overwrite: it may replace another line's
    """

    run: str
    folder: str
    on: bool = False
    overwrite: bool = False

    def __str__(self) -> str:
        words = [ON if self.on else ANEW, *([OVER] if self.overwrite else [])]
        return f"{self.run} {'+'.join(words)} {self.folder}"


def save_request(environ: Mapping[str, str | None]) -> SaveRequest | None:
    """What the launcher says by `VARIABLE`; None where it says nothing that can be read."""
    told = re.fullmatch(rf"({ID}) ([a-z+]+) (.+)", environ.get(VARIABLE) or "", re.DOTALL)
    if told is None:
        return None
    words = told[2].split("+")
    return SaveRequest(told[1], told[3], on=ON in words, overwrite=OVER in words)


@dataclass(frozen=True)
class LineageNote:
    """Which run of which line saves, or has saved; `before` are names that were there already.

    In a claim, `holder` is the token of the process that holds the folder: see `hold`.
    """

    run: str
    line: str
    before: tuple[str, ...] = ()
    overwrite: bool = False
    holder: str = ""

    def __str__(self) -> str:
        return f"{self.run} {self.line} {self.holder}"


def saver(environ: Mapping[str, str]) -> LineageNote | None:
    """Who a rank saves for, as the runner says by `HOLDER`; None where it says nothing."""
    told = re.fullmatch(rf"({ID}) ({ID}) ({ID})", environ.get(HOLDER, ""))
    return LineageNote(told[1], told[2], holder=told[3]) if told else None


def claimed(root: Path) -> LineageNote | None:
    """The claim of a folder; None where there is none."""
    return _read(root)


def check_claim(root: Path, mine: LineageNote | None) -> None:
    """Raise `FileExistsError` where another process has claimed `root` than `mine`.

    A claim that isn't there was removed with the folder: the runner, which sees that within
    seconds, makes it again.
    """
    end = time.monotonic() + PATIENCE_SECONDS
    while mine and (found := _read(root)) is None and time.monotonic() < end:
        time.sleep(0.2)
    if mine and (found is None or found.holder != mine.holder):
        whose = f"run {found.run} has taken it over" if found else "the run's claim of it is gone"
        raise FileExistsError(errno.EEXIST, whose)


def owner(checkpoint: Path) -> str:
    """The line that a checkpoint, complete or not, belongs to; "" where nothing says so."""
    note = _owner(checkpoint)
    return note.line if note else ""


def is_of(checkpoint: Path, run: str) -> bool:
    """Whether a checkpoint, complete or not, is known to be of this run."""
    note = _owner(checkpoint)
    return note is not None and note.run == run


def said(checkpoint: Path) -> str:
    """The line that a checkpoint says by itself; "" where it says nothing."""
    note = None if checkpoint.is_symlink() else _read(checkpoint)
    return note.line if note else ""


def is_claimed(checkpoint: Path) -> bool:
    """Whether it is of the line that has claimed the folder it lies in."""
    claimed = _read(checkpoint.parent)
    return claimed is not None and claimed.line == owner(checkpoint)


def _owner(checkpoint: Path) -> LineageNote | None:
    if checkpoint.is_symlink():
        return None
    if os.path.lexists(checkpoint / NOTE):
        return _read(checkpoint)
    claim, name = _read(checkpoint.parent), FOLDER.fullmatch(checkpoint.name)
    if claim is None or checkpoint.name in claim.before:
        return None
    return claim if not name or name["run"] in (None, claim.run) else None


def of_run(root: Path, run: str) -> str:
    """The line that `run` saved for under `root`; "" where nothing says so."""
    claim = _read(root)
    notes = [claim, *(_owner(path) for path in _checkpoints(root))]
    return next((note.line for note in notes if note and note.run == run), "")


def claim(
    root: Path, run: str, of: str, *, overwrite: bool = False, holder: str = ""
) -> LineageNote:
    """The new claim: `run`, of the line `of`, saves under `root` from now on. Raises `OSError`."""
    earlier = _read(root)
    if earlier and earlier.line == of:  # one that was killed: what it left is its line's
        before = earlier.before
        if earlier.run != run:
            _sign_all(root)
    else:
        settle(root)
        before = tuple(path.name for path in _checkpoints(root) if not owner(path))
    note = LineageNote(run, of, before, overwrite, holder)
    put(root, note)
    return note


def settle(root: Path) -> None:
    """End the claim: what it held says so itself from now on. Raises `OSError`."""
    if not os.path.lexists(root / NOTE):
        return
    _sign_all(root)
    owned.remove_file(root.absolute() / NOTE, root.absolute(), missing_ok=True)


def _sign_all(root: Path) -> None:
    for path in _checkpoints(root):
        sign(path)


def sign(checkpoint: Path, mine: LineageNote | None = None) -> None:
    """Let a checkpoint say whose it is: `mine`, or what the claim says. Raises `OSError`."""
    note = mine or _owner(checkpoint)
    if note and not os.path.lexists(checkpoint / NOTE):
        put(checkpoint, LineageNote(note.run, note.line))


def may_replace(checkpoint: Path) -> bool:
    """Whether the claim is of the same line as a checkpoint, or allows another line's to go."""
    claimed = _read(checkpoint.parent)
    return claimed is not None and (claimed.overwrite or claimed.line == owner(checkpoint))


def _checkpoints(root: Path) -> Iterator[Path]:
    """The folders of checkpoints under `root`, complete or not."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root) as entries:
        for entry in entries:
            if FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def put(folder: Path, note: LineageNote) -> None:
    """Note something in a folder. Raises `OSError`."""
    files.write(folder / NOTE, json.dumps(asdict(note)) + "\n", 0o644)


def _read(folder: Path) -> LineageNote | None:
    """What is noted in a folder; None where nothing is, or not by us."""
    try:
        with open(files.open_own(folder / NOTE, os.O_RDONLY), "rb") as stream:
            said = json.loads(stream.read(LONGEST))
        over, holder = said.get("overwrite") is True, str(said.get("holder", ""))
        note = LineageNote(said["run"], said["line"], tuple(said["before"]), over, holder)
        known = re.fullmatch(ID, note.run) and re.fullmatch(ID, note.line)
    except (OSError, ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return None
    return note if known else None
