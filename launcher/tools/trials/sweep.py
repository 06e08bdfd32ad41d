"""Tries one cell after the other within limits, and skips what is finished."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import files
from launcher.base.errors import LauncherError, UsageError, nearest
from launcher.base.reference import parse_reference
from launcher.base.settings import ROOT, Settings
from launcher.images.builder.context import own_digest
from launcher.images.engine import disk
from launcher.images.matrix.dockerfile import dockerfile
from launcher.images.matrix.locked import Lock
from launcher.images.matrix.matrix_file import find_row, load_lock, load_matrix, patch_files
from launcher.images.matrix.recipe import Recipe, recipe
from launcher.images.matrix.schema import Matrix, misfit
from launcher.images.oci.inspection import find_image
from launcher.images.sources import fetch, megatron_source
from launcher.runs import payload
from launcher.tools.trials import image_probe, inside, quickstart_reload, trials
from launcher.tools.trials.cell import REPOSITORY
from launcher.tools.trials.result import LIMITS, ORDER, OUTSIDE, WHILE, Cell, CellResult

if TYPE_CHECKING:
    from docker import DockerClient

LEAVE_WITHIN = 90
"""Seconds that a cell has for ending what it started."""
LOOK_EVERY = 10
"""Seconds between two looks at the disk that a cell's images take."""


@dataclass(frozen=True)
class TrialOptions:
    """How cells are tried: with which images, on which GPUs, how far, and within what limits.

    base, builder: in place of the rows' own; {tag} in them is the row's tag
    train: whether trials are run; keep: whether images stay
    limit: seconds for a cell; run_limit: seconds for a training run; disk: bytes of a cell's images
    """

    base: str | None = None
    builder: str | None = None
    checkout: Path | None = None
    gpus: str = "0"
    train: bool = True
    keep: bool = False
    limit: float = 3 * 3600
    run_limit: float = 600
    disk: int | None = None

    def asked(self, cell: Cell) -> dict[str, Any]:
        """What a cell's process is asked to do."""
        return {
            "tag": cell.tag,
            "megatron": cell.megatron,
            "checkout": str(self.checkout) if self.checkout else None,
            "base": self.base and self.base.replace("{tag}", cell.tag),
            "builder": self.builder,
            "gpus": self.gpus,
            "train": self.train,
            "seconds": self.run_limit,
        }


@dataclass(frozen=True)
class Series:
    """Cells of one matrix on one engine; `folder` keeps a file for each that is finished.

    again: finished cells are tried, too
    """

    connect: Callable[[], DockerClient]
    site: Settings
    matrix: Matrix
    lock: Lock
    options: TrialOptions
    folder: Path
    say: Callable[[str], None]
    again: bool = False

    @cached_property
    def client(self) -> DockerClient:
        """The engine, which is asked for nothing that is finished."""
        return self.connect()

    def run(self, cells: Sequence[Cell]) -> Iterator[CellResult]:
        """The result of each cell, as it comes; those that are kept at once.

        What failed at what it has from outside is tried again. Raises UsageError, before the first,
        where the lock lacks what one of them needs.
        """
        for cell in cells:
            self.key(cell)
        self.folder.mkdir(parents=True, exist_ok=True)
        for cell in cells:
            yield (None if self.again else self._kept(cell, OUTSIDE)) or self._tried(cell)

    def kept(self, cells: Iterable[Cell]) -> Iterator[CellResult]:
        """The results of earlier series, on any machine; of those cells that have one."""
        return filter(None, map(self._kept, cells))

    def _kept(self, cell: Cell, but: Sequence[str] = ()) -> CellResult | None:
        """The result of an earlier series, where all that it was tried with is the same.

        but: stages; what failed there isn't taken
        """
        with suppress(OSError, ValueError, TypeError):
            found = CellResult(**json.loads(self._file(cell).read_text(encoding="utf-8")))
            if found.stage not in but and found.key == self.key(cell, found.stage):
                self.say(f"{cell}: {found.told} · kept")
                return found
        return None

    def _tried(self, cell: Cell) -> CellResult:
        """Try a cell, and keep what came of it, unless what it is tried with changed meanwhile."""
        row = find_row(self.matrix, cell.tag)
        expected = row.expected if cell.megatron == row.megatron else None
        if expected and not self.options.train:
            expected = min(expected, "imports", key=ORDER.index)
        tried_with = self._tried_with(cell)
        base, _ = self._images(cell)
        is_pulled = find_image(self.client, base) is None
        there = _names(self.client.api.images())
        before = time.monotonic()
        found = self._in_process(cell)
        if not self.options.keep:
            self._remove(f"{REPOSITORY}:{cell.tag}-{cell.megatron}", f"{REPOSITORY}:{cell.tag}")
            if is_pulled:
                self._remove(*self._names_of(base, there))
                self.say(f"BuildKit may keep layers of {base}: docker builder prune frees them")
        key = self._digest(tried_with, found.get("stage", ""))
        result = CellResult(cell.tag, cell.megatron, key, expected=expected, **found)
        self.say(f"{cell}: {result.told} ({time.monotonic() - before:.0f} s)")
        if self._still(cell, tried_with):
            files.write(self._file(cell), json.dumps(asdict(result), indent=2) + "\n")
        else:
            self.say(f"{cell}: what it is tried with was changed meanwhile, so it isn't kept")
        return result

    def _in_process(self, cell: Cell) -> dict[str, Any]:
        """The fields of a cell's result, from a process of its own."""
        over = self._over(cell)
        if reason := over():
            return {"verdict": "fails", "stage": "disk budget", "reason": reason}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with subprocess.Popen(
            [sys.executable, "-m", "launcher.tools.trials.cell"],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process:
            watch = _Watch(process, self.options.limit, over)
            try:
                assert process.stdin is not None
                with process.stdin as stdin:
                    json.dump(self.options.asked(cell), stdin)
                return self._heard(cell, process, watch)
            finally:
                watch.end()

    def _heard(self, cell: Cell, process: subprocess.Popen[str], watch: _Watch) -> dict[str, Any]:
        """What a cell's process says, until its result or its end."""
        stages: list[tuple[str, float]] = []
        found: dict[str, Any] | None = None
        assert process.stdout is not None
        for line in process.stdout:
            try:
                told = json.loads(line)
            except ValueError:
                continue  # half of it: a process was killed as it wrote
            if stage := told.get("stage"):
                stages.append((stage, time.monotonic()))
                self.say(f"{cell}: {stage}")
            found = told.get("result", found)
        code = process.wait()
        seconds: dict[str, float] = {}
        for (stage, began), (_, ended) in pairwise([*stages, ("", time.monotonic())]):
            seconds[stage] = round(seconds.get(stage, 0.0) + ended - began, 1)
        during = stages[-1][0] if stages else "pull"
        if found is None:
            reason = f"its process ended with exit code {code}"
            if watch.limit:
                reason = f"{watch.reason}{WHILE}{during}"
            found = {"verdict": "fails", "stage": watch.limit or during, "reason": reason}
        return {**found, "seconds": seconds}

    def _over(self, cell: Cell) -> Callable[[], str]:
        """Asks why a cell takes too much disk: base, builder, and what images take more than now.

        It counts the same whether base and builder are pulled or there already.
        """
        most = self.options.disk
        if most is None:
            return lambda: ""
        own = [name for image in self._images(cell) for name in (image, self.site.mirrored(image))]
        found = filter(None, (find_image(self.client, name) for name in own))
        there = {one["Id"]: int(one["Size"]) for one in found}
        before = disk.used(self.client)
        if before is None:
            self.say("the engine doesn't report what its images take: what is added isn't counted")

        def over() -> str:
            now = None if before is None else disk.used(self.client)
            added = 0 if before is None or now is None else now - before
            if (taken := sum(there.values()) + added) <= most:
                return ""
            return f"its images take {taken / 1e9:.1f} GB, and may take {most / 1e9:.1f} GB"

        return over

    def _images(self, cell: Cell) -> list[str]:
        """The base and the builder of a cell."""
        asked, made = self.options.asked(cell), self._recipe(cell)
        return [asked["base"] or made.row.base, asked["builder"] or made.builder]

    def _remove(self, *names: str) -> None:
        from docker.errors import APIError, NotFound

        for name in names:
            try:
                self.client.api.remove_image(name)
            except NotFound:
                continue  # it was never made
            except APIError as error:
                self.say(f"{name} stays: {error.explanation or error}")

    def _names_of(self, base: str, there: Sequence[str]) -> list[str]:
        """The names that a base has by being pulled: its own, its mirror's, and their digests.

        there: names that the engine had before, which stay, and the image with them
        """
        own = [parse_reference(name) for name in (base, self.site.mirrored(base))]
        targets = {one.in_full: one.target for one in own}
        names = _names([find_image(self.client, base) or {}])
        found = [(name, parse_reference(name)) for name in names if name not in there]
        return [
            name
            for name, one in found
            if one.in_full in targets and ("@" in name or one.target == targets[one.in_full])
        ]

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{cell.tag}-{cell.megatron}.json"

    def key(self, cell: Cell, stage: str = "") -> str:
        """A sha256 over all that a cell is tried with, known without an engine or a network.

        stage: where it failed; one that went over a limit is tried again with another limit.
        Raises UsageError where the lock lacks what it needs, or for a checkout that is none.
        """
        return self._digest(self._tried_with(cell), stage)

    def _digest(self, tried_with: dict[str, Any], stage: str) -> str:
        limits = (self.options.limit, self.options.disk) if stage in LIMITS else None
        told = json.dumps({**tried_with, "limits": limits}, sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    def _tried_with(self, cell: Cell) -> dict[str, Any]:
        """All that a cell is tried with, less its limits."""
        root, made = self.site.matrix.parent, self._recipe(cell)
        patches = patch_files(root, made.named)
        template = (root / "Dockerfile.template").read_text(encoding="utf-8")
        probes = (
            Path(str(one.__file__)) for one in (image_probe, inside, quickstart_reload, trials)
        )
        identity = None
        if checkout := self.options.checkout:  # what is in it, edits and all
            version = megatron_source.release_of(
                checkout, self.matrix, cell.megatron, cell.megatron
            )
            identity = megatron_source.from_path(checkout, version, made.locked).identity
        return {
            "recipe": str(made),
            "checkout": identity,
            "dockerfile": dockerfile(self.matrix, cell.tag, template),
            "files": [
                hashlib.sha256(path.read_bytes()).hexdigest() for path in (*patches, *probes)
            ],
            "own": own_digest(),
            "payload": payload.digest(),
            "asked": self.options.asked(cell),
        }

    def _still(self, cell: Cell, tried_with: dict[str, Any]) -> bool:
        """Whether all is as it was, in the files as well, which a cell's process reads itself."""
        path = self.site.matrix
        with suppress(LauncherError, OSError):
            matrix, lock = load_matrix(path), load_lock(path.with_suffix(".lock"))
            return replace(self, matrix=matrix, lock=lock)._tried_with(cell) == tried_with
        return False

    def _recipe(self, cell: Cell) -> Recipe:
        """What a cell is built from on this machine's platform, else on its row's first."""
        machine = platform.machine()  # arm64 is aarch64 by Apple's name
        there = find_row(self.matrix, cell.tag).platforms
        where = (one for one in there if machine in (fetch.MACHINES[one], one.partition("/")[2]))
        return recipe(self.matrix, self.lock, cell.tag, cell.megatron, next(where, there[0]))


class _Watch:
    """Ends a process when its time is over, when `over` has a reason, or with what waits for it.

    limit: the one of result.STAGES that it went over, if any; reason: in words
    """

    def __init__(
        self, process: subprocess.Popen[str], seconds: float, over: Callable[[], str]
    ) -> None:
        self.process = process
        self.limit = self.reason = ""
        self._over = over
        self._ended = threading.Event()
        self._lock = threading.Lock()
        late = ("time limit", f"{seconds:g} s")
        self._clock = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._went_over, late)
        self._disk = threading.Thread(target=self._look)
        for thread in (self._clock, self._disk):
            thread.daemon = True
            thread.start()

    def _look(self) -> None:
        """Look at the disk, however long an engine takes to answer: the clock runs beside it."""
        while not self._ended.wait(LOOK_EVERY):
            if reason := self._over():
                self._went_over("disk budget", reason)

    def _went_over(self, limit: str, reason: str) -> None:
        """End it for the first limit that it goes over."""
        with self._lock:
            if not self._ended.is_set():
                self._ended.set()
                self.limit, self.reason = limit, reason
                self._end()

    def end(self) -> None:
        """Leave nothing of it."""
        self._ended.set()
        self._clock.cancel()
        for thread in (self._clock, self._disk):
            thread.join()
        self._end()

    def _end(self) -> None:
        """Interrupt it, so that it ends what it started; kill all of it where it doesn't."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LEAVE_WITHIN)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _names(images: Iterable[Mapping[str, Any]]) -> list[str]:
    """All tags and digests of images, as an engine lists them."""
    keys = ("RepoTags", "RepoDigests")
    return [name for one in images for key in keys for name in one.get(key) or ()]


def cells(matrix: Matrix, tags: Iterable[str], releases: Iterable[str]) -> list[Cell]:
    """Each row with each of the releases that fits it; with its own where none is named.

    `all` names all releases. Raises UsageError for a tag or a release that isn't in the matrix, and
    where no release fits any row.
    """
    wanted = [*dict.fromkeys(releases)]
    wanted = [*matrix.releases] if "all" in wanted else wanted
    for version in set(wanted) - set(matrix.releases):
        raise UsageError(
            f"no Megatron release {version!r} in the matrix",
            nearest(version, list(matrix.releases)),
        )
    rows = {tag: find_row(matrix, tag) for tag in tags}
    problems = {
        Cell(tag, version): misfit(row, version, matrix.releases[version])
        for tag, row in rows.items()
        for version in wanted or [row.megatron]
    }
    found = [cell for cell, problem in problems.items() if problem is None]
    if not found and problems:
        cell, problem = next(iter(problems.items()))
        raise UsageError(f"{cell}: {problem}", "Name a release that fits.")
    return found
