"""Checkpoint folders: which are complete, which to set aside, which to remove.

It needs only the standard library, so that the launcher can look at a folder from outside.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from launcher.agent.checkpoints import lineage
from launcher.base import files, owned

TRACKER = "latest_checkpointed_iteration.txt"
"""Upstream's and ours: the newest complete iteration, or "release" for a converted model."""

PARTIAL = ".partial"
"""Ends a folder's name while `launcher.trainer.gpt` writes it."""

READY = ".ready"
"""Ends its name when it is whole, until it has its own."""

SHAPE = re.compile(rf"iter_(\d{{1,18}})((?:\.{lineage.ID})?\{PARTIAL}|\{READY})?")
"""The name of a checkpoint's folder, of one that is written, and of one that is to be named."""

REPLACED = ".replaced"
"""Ends the name of an older one of the same iteration, until it is removed."""

INCOMPLETE = ".incomplete"
"""Ends the name of one that was set aside; our marker is in it where its saving was interrupted."""

SET_ASIDE = re.compile(rf"iter_(\d{{1,18}})\{INCOMPLETE}(\.\d+)?")

REJECTED = ".rejected"
"""Ends the name of a checkpoint that a run has gone back past: nothing goes on from it."""

INTERRUPTED = "its saving was interrupted"
RELEASE = "release"
LONGEST = 64
"""Bytes that a tracker may have."""


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint's folder; `problem` is "" where it is complete, else what it lacks."""

    iteration: int
    folder: Path
    problem: str = ""


def folder(root: str | Path, iteration: int) -> Path:
    """The folder of an iteration's checkpoint."""
    return Path(root) / f"iter_{iteration:07d}"


def partial(root: str | Path, iteration: int, mine: lineage.LineageNote | None = None) -> Path:
    """The same while it is written; its name says for which run."""
    return folder(root, iteration).with_suffix(f".{mine.run}{PARTIAL}" if mine else PARTIAL)


def noted(root: Path) -> str:
    """The tracker's iteration, or "release"; "" where there is none. Raises `OSError`."""
    try:
        return files.read_regular(root / TRACKER, LONGEST).decode("utf-8", "replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def publish(root: Path, iteration: int, mine: lineage.LineageNote | None = None) -> Path:
    """Give a checkpoint written under its partial name its own, and note it as the newest.

    It says that it is `mine`, or whose it is by the claim of `root`. All of it is on the disk
    before an older one of this iteration gives way, which goes last: killed at any moment, this
    leaves one of the two whole, and `recover` puts it where it belongs. Raises `OSError` on a full
    disk, and `FileExistsError` where another line's checkpoint has that name, or another process
    has claimed `root`: then nothing is done.
    """
    final, new = folder(root, iteration), partial(root, iteration, mine)
    make_room(final)
    with files.PendingFile(root / TRACKER) as tracker:
        tracker.file.write(str(iteration).encode())
        tracker.complete()
        lineage.sign(new, mine)
        files.sync_tree(new)
        lineage.check_claim(root, mine)
        _take_place(files.rename(new, final.with_suffix(READY)))
        tracker.publish()
    files.sweep(root / TRACKER)
    if final.with_suffix(REPLACED).exists():
        remove(final.with_suffix(REPLACED))
    return final


def make_room(path: Path) -> None:
    """See that a checkpoint's name is free, or its own line's.

    One that nobody is known to have made, as a program that was started by hand leaves it, is set
    aside. Raises `FileExistsError` for another line's, unless the claim allows that it goes.
    """
    if not os.path.lexists(path):
        return
    if not any(os.path.lexists(folder / lineage.NOTE) for folder in (path, path.parent)):
        _move_aside(path)
    elif not lineage.may_replace(path):
        raise FileExistsError(errno.EEXIST, f"{path.name} is there, of another run")


def recover(root: Path, mine: Callable[[Path], bool]) -> None:
    """Go on with the publishing of checkpoints of `mine` where it was killed. Raises `OSError`."""
    for ready in sorted(root.glob(f"iter_*{READY}")):
        if mine(ready):
            files.write(root / TRACKER, str(int(_take_place(ready).name.removeprefix("iter_"))))
    for replaced in root.glob(f"iter_*{REPLACED}"):
        if mine(replaced) and replaced.with_suffix("").exists():
            remove(replaced)


def _take_place(ready: Path) -> Path:
    """Name a checkpoint that is whole; one that has its name goes aside before."""
    final = ready.with_suffix("")
    if final.exists() and not final.with_suffix(REPLACED).exists():
        files.rename(final, final.with_suffix(REPLACED))
    return files.rename(ready, final)


def since_complete(root: Path) -> list[CheckpointFolder]:
    """The newest complete checkpoint and all that are newer, the oldest first.

    All of them where none is complete. The older ones' files, which may be many, aren't read.
    Raises as `newest_first`.
    """
    return [*_since_complete(root)][::-1]


def _since_complete(root: Path, line: str = "") -> Iterator[CheckpointFolder]:
    for each in newest_first(root, line):
        yield each
        if not each.problem:
            return


def newest_first(root: Path, line: str = "") -> Iterator[CheckpointFolder]:
    """All checkpoints under `root`, complete or not, the newest first; none where there is none.

    A complete one has a name of its own, isn't newer than what the tracker names, and its files
    are there in their length; each is looked into only when it is asked for. A full disk can empty
    the tracker of a run that saved well before: then files alone decide. A "release" is listed, as
    iteration 0, where the tracker names it. Of a `line`'s own alone, where one is given. Raises
    `OSError` where `root` can't be read.
    """
    newest = noted(root)
    named = [
        (int(match[1]), path)
        for path in (root.iterdir() if root.is_dir() else ())
        if (match := SHAPE.fullmatch(path.name)) and path.is_dir()
    ]
    release = [(0, root / RELEASE)] if newest == RELEASE and (root / RELEASE).is_dir() else []
    for iteration, path in [*sorted(named, reverse=True), *release]:
        if line in ("", lineage.owner(path)):
            yield CheckpointFolder(iteration, path, _unfinished(path, iteration, newest))


def _unfinished(path: Path, iteration: int, newest: str) -> str:
    if path.name.endswith(PARTIAL):
        return INTERRUPTED
    if not path.name.endswith((READY, RELEASE)):
        if newest == RELEASE or (newest.isdecimal() and iteration > int(newest)):
            return f"{INTERRUPTED}: {TRACKER} names {newest}"
        if not newest and not (path.parent / TRACKER).exists():
            return f"{INTERRUPTED}: there is no {TRACKER}"
    return _problem(path)


def _problem(path: Path) -> str:
    from launcher.agent.checkpoints import completeness

    return completeness.problem(path)


def newest_complete(root: Path, line: str = "") -> CheckpointFolder | None:
    """The newest complete checkpoint, of `line` where it is given, or None; raises as `scan`."""
    return next((each for each in newest_first(root, line) if not each.problem), None)


def lineage_of(root: Path, run: str, *, on: bool) -> str:
    """The line of a run in `root`: that of what it goes `on` from, or its own."""
    found = lineage.of_run(root, run)
    if on and not found:
        newest = newest_complete(root) or next(newest_first(root), None)
        found = lineage.owner(newest.folder) if newest else ""
    return found or run


def refusal(root: Path, line: str, *, on: bool) -> str:
    """Why a run of `line` may not save under `root`, for others' checkpoints; "" where it may.

    One that goes `on` from the newest complete one meets only what is newer. Raises as `scan`.
    """
    for each in newest_first(root):
        if on and not each.problem:
            break
        if (owner := lineage.owner(each.folder)) != line:
            whose = f"run {owner}'s" if owner else "not known to be this run's"
            if on:
                return f"{each.folder} is newer than what the run goes on from, and is {whose}"
            held = f"{root} holds checkpoints that aren't this run's"
            return f"{held}: {each.folder.name} is {whose}"
    return ""


def set_aside(root: Path, line: str) -> list[Path]:
    """Rename what of `line` is newer than its newest complete one, to iter_0000100.incomplete.

    The new paths. The tracker then names the newest complete one, and is removed where there is
    none: upstream would load what it names, and up to 0.9 refuses to save into a folder that is
    there. Where it names another line's it stays. Raises `OSError` where that isn't allowed.
    """
    recover(root, lambda path: lineage.said(path) == line)
    mine = [*_since_complete(root, line)]
    newest = mine.pop() if mine and not mine[-1].problem else None
    for each in mine:
        _give_up(each)
    moved = [_move_aside(each.folder) for each in reversed(mine)]
    _note(root, line, newest or (newest_complete(root) if moved else None), bool(moved))
    return moved


def _give_up(checkpoint: CheckpointFolder) -> None:
    """Let an interrupted one say whose it is, and that it may go: `clear` removes it.

    One that was complete, or has all its files where the tracker was edited to go back, stays.
    """
    path, interrupted = checkpoint.folder, checkpoint.problem.startswith(INTERRUPTED)
    if path.name.endswith(PARTIAL) or (interrupted and _problem(path)):
        with suppress(OSError):  # on a full disk it stays
            lineage.sign(path)
            owned.mark(path)


def reject(root: Path, line: str, after: int, run: str = "") -> list[Path]:
    """Rename what of `line` is newer than the iteration `after`, to iter_0000100.rejected.

    Of a `run` alone, where one is given. The new paths; the tracker as with `set_aside`. Raises
    `OSError` where that isn't allowed.
    """
    recover(root, lambda path: lineage.said(path) == line)
    later = [*takewhile(lambda each: each.iteration > after, newest_first(root, line))]
    own = [each.folder for each in later if not run or lineage.is_of(each.folder, run)]
    moved = [_move_aside(path, REJECTED) for path in reversed(own)]
    _note(root, line, newest_complete(root) if moved else None, bool(moved))
    return moved


def _note(root: Path, line: str, newest: CheckpointFolder | None, moved: bool) -> None:
    """Let the tracker name `newest`; another line's that it names, and is there, stays."""
    named = noted(root)
    path = folder(root, int(named)) if named.isdecimal() else root / RELEASE
    if named and path.is_dir() and lineage.owner(path) != line:
        return
    if newest and named != _name(newest):
        files.write(root / TRACKER, _name(newest))
    elif moved and not newest:
        owned.remove_file(root.absolute() / TRACKER, root.absolute(), missing_ok=True)


def _name(checkpoint: CheckpointFolder) -> str:
    """How the tracker names it."""
    return RELEASE if checkpoint.folder.name == RELEASE else str(checkpoint.iteration)


def _move_aside(path: Path, why: str = INCOMPLETE) -> Path:
    base = path.name.partition(".")[0] + why
    target, number = path.with_name(base), 1
    while target.exists():
        number += 1
        target = path.with_name(f"{base}.{number}")
    return files.rename(path, target)


def sign(root: Path) -> None:
    """Name the run in what is newly complete under `root`, as far as known. Raises OSError."""
    for each in newest_first(root):
        if lineage.said(each.folder):
            return
        if not each.problem:
            lineage.sign(each.folder)


def prune(root: Path, keep: int, line: str) -> list[Path]:
    """Remove the complete checkpoints of `line` that are older than its newest `keep`; their paths.

    Neither the one that the tracker names nor an incomplete one is counted out or removed.
    Raises `ValueError` for `keep` under 1, and `OSError` where removing isn't allowed.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, and has to be at least 1")
    complete = [each for each in newest_first(root, line) if not each.problem][::-1]
    named = noted(root)
    old = [each.folder for each in complete[:-keep] if _name(each) != named]
    if old:  # what stays has to be on the disk before
        files.sync_tree(complete[-1].folder)
        files.sync(root / TRACKER)
        files.sync(root)
    for path in old:
        remove(path)
    return old


def clear(root: Path, line: str) -> list[Path]:
    """Remove what kills have left of `line`; the paths of interrupted saves among that.

    Those are of an iteration that a complete one has reached since. Raises `OSError`.
    """
    found = {path: SET_ASIDE.fullmatch(path.name) for path in root.glob(f"iter_*{INCOMPLETE}*")}
    ours = {
        path: int(match[1])
        for path, match in sorted(found.items())
        if match and lineage.said(path) == line and owned.is_ours(path)
    }
    newest = newest_complete(root, line) if ours else None
    dead = [path for path, number in ours.items() if newest and number <= newest.iteration]
    left = [path for path in root.glob(f".iter_*{owned.REMOVED}") if lineage.said(path) == line]
    for path in [*left, *dead]:
        remove(path)
    return dead


def remove_partial(root: Path) -> None:
    """Remove what interrupted saves of `root`'s line left; several ranks may call it at once."""
    for path in root.glob(f"iter_*{PARTIAL}"):
        if lineage.is_claimed(path):
            remove(path)


def remove(path: Path) -> None:
    """Remove a checkpoint that its note, or the claim beside it, says is ours.

    Interrupted, it leaves nothing that looks whole. Raises `OSError`.
    """
    with suppress(OSError):  # on a full disk it is known by the claim alone
        lineage.sign(path)
    proof = lineage.NOTE if lineage.said(path) else ""
    with suppress(FileNotFoundError):
        owned.remove_folder(path.absolute(), path.parent.absolute(), proof)
