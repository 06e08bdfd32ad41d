"""Bisects two ends: makes their differences, tries points of them, keeps what came of each.

The folder of a bisect is one of the records: `bisect.json` says what is looked for, and each line
of `trials.jsonl` is a trial. Its name follows from what is looked for, so that the same command
goes on where it ended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from launcher.base import files
from launcher.base.errors import LauncherError, UsageError
from launcher.base.screen import Progress, duration
from launcher.base.settings import settings
from launcher.images.matrix.matrix_file import load_matrix
from launcher.runs.backends import backend
from launcher.runs.records import owner, record
from launcher.runs.runfile.origins import Override
from launcher.tools.bisect import axes, checkouts, ends, halving
from launcher.tools.bisect.axes import COMMIT, RELEASE, Axis, Differences
from launcher.tools.bisect.checkouts import Checkout
from launcher.tools.bisect.ends import End
from launcher.tools.bisect.halving import EndsAlikeError, Point, SearchResult, Verdict
from launcher.tools.bisect.judge import Judge, TrialOutcome
from launcher.tools.bisect.kept import REQUEST
from launcher.tools.bisect.trial import ShortRun, Trial

HERE = ("docker", "local")
TRIALS = "trials.jsonl"


class NothingFoundError(LauncherError):
    """The ends can't be told apart: BAD runs well here, or GOOD fails."""

    exit_code = 1


@dataclass(frozen=True)
class BisectRequest:
    """How it is tried.

    sets: laid over both ends. backend: None is that of BAD's run, else docker. seconds: of a run.
    check: the user's command, "" for none. run_file: what is run in a row or an image. history: a
    clone of Megatron-LM. fresh: anew what an earlier time has tried.
    """

    judge: Judge
    sets: tuple[Override, ...] = ()
    backend: str | None = None
    steps: int = 10
    seconds: float = 900.0
    check: str = ""
    run_file: str = ""
    history: Path | None = None
    fresh: bool = False


@dataclass
class Bisect:
    """Tries points of differences; `outcomes` has those that were tried, in their order.

    name: of its folder among the records; fresh: what an earlier time has tried is dropped
    """

    name: str
    differences: Differences
    trial: Trial
    judge: Judge
    progress: Progress
    fresh: bool = False
    outcomes: dict[Point, TrialOutcome] = field(default_factory=dict)
    verdicts: dict[Point, Verdict] = field(default_factory=dict)

    def find(self) -> SearchResult:
        """What makes it fail. Raises NothingFoundError, and EngineError where that is lost.

        Where another process is at the same, this one waits, and then knows its trials.
        """
        end = self.differences.end
        with files.folder_lock(record.folder(self.name)), owner.following(self.name):
            self._load()
            try:
                if self.judge.compares:
                    self.ask((0,) * len(end))
                return halving.find(end, self.ask)
            except EndsAlikeError as error:
                raise self._alike(error) from error

    def _load(self) -> None:
        """Take in what an earlier time has tried; lines of another launcher's kind are left out.

        They are written again, as one may be cut off, behind which another would be lost.
        """
        path, kept = record.folder(self.name) / TRIALS, b""
        for line in () if self.fresh else record.read_lines(path):
            with suppress(LookupError, TypeError):
                self.outcomes[tuple(line["point"])] = TrialOutcome(**line["outcome"])
                kept += f"{json.dumps(line)}\n".encode()
        record.put_bytes(self.name, TRIALS, kept)

    def ask(self, point: Point) -> Verdict:
        """The verdict of a point, which is tried unless it was."""
        is_new = point not in self.outcomes
        outcome, start = self._outcome(point), (0,) * len(point)
        good, bad = self.outcomes.get(start), self.outcomes.get(self.differences.end)
        verdict = self.verdicts[point] = self.judge.verdict(outcome, good, bad)
        number = [*self.outcomes].index(point) + 1
        took = duration(outcome.seconds) if is_new else "known"
        what = f"trial {number}: {self.differences.told(point)}: {verdict.value} ({took})"
        is_shown = verdict is Verdict.SKIPPED or point in (start, self.differences.end)
        self.progress.note(f"{what}: {outcome.told}" if is_shown else what)
        return verdict

    def _outcome(self, point: Point) -> TrialOutcome:
        """What came of a point, tried unless it was, and kept."""
        if point not in self.outcomes:
            number, what = len(self.outcomes) + 1, self.differences.told(point)
            self.progress.show(f"trial {number}: {what}")
            outcome = self.trial(self.differences.at(point), number)
            line = {"point": point, "is": what, "outcome": asdict(outcome)}
            record.append(self.name, TRIALS, line)
            self.outcomes[point] = outcome
        return self.outcomes[point]

    def _alike(self, error: EndsAlikeError) -> NothingFoundError:
        outcome = self.outcomes[error.end]
        name = "BAD" if error.end == self.differences.end else "GOOD"
        log = f"Its log: {outcome.log}" if outcome.log else ""
        if error.verdict is Verdict.SKIPPED:
            return NothingFoundError(f"{name} can't be judged: {outcome.told}", log)
        if name == "GOOD":
            return NothingFoundError(f"GOOD fails here as well: {outcome.told}", log)
        more = "Where it fails later, give more --steps; or judge by --loss, --ms or --check."
        return NothingFoundError(f"BAD doesn't fail here: {outcome.told}", f"{more}\n  {log}")


@dataclass(frozen=True)
class BisectResult:
    """What a bisect found; `untried` are differences that couldn't be tried, a reason each."""

    made: Bisect
    finding: SearchResult
    untried: tuple[str, ...] = ()


def bisect(good: str, bad: str, request: BisectRequest, progress: Progress) -> list[BisectResult]:
    """What makes BAD fail; of a release, then which of its commits does.

    Raises UsageError where the ends aren't there or don't differ, NothingFoundError where they
    can't be told apart by runs, and EngineError.
    """
    if request.steps < 1:
        raise UsageError("--steps is above 0")
    sets = [*request.sets]
    good_end, bad_end = (ends.find(text, request.run_file, sets) for text in (good, bad))
    on = request.backend or bad_end.backend or HERE[0]
    if on not in HERE:
        raise UsageError(
            f"--backend {on}: trials run on this machine", f"Take {' or '.join(HERE)}."
        )
    request = replace(request, backend=on)
    first = _bisect(differences(good_end, bad_end, on, progress), request, progress)
    finding = first.find()
    commits, why = _commits(first.differences, finding, request.history)
    found = BisectResult(first, finding, (*first.differences.untried, *([why] if why else [])))
    if commits is None:
        return [found]
    second = _bisect(commits, request, progress)
    try:
        return [found, BisectResult(second, second.find())]
    except NothingFoundError as error:
        why = f"the commits of the release: {error.problem}"
        return [replace(found, untried=(*found.untried, why))]


def differences(good: End, bad: End, on: str, progress: Progress) -> Differences:
    """What lies between two ends on a backend. Raises UsageError where nothing does."""
    contained, matrix = backend(on).contained, load_matrix(settings().matrix)
    commits: list[Checkout | None] = [good.checkout, bad.checkout]
    why = ""
    if good.checkout and bad.checkout:
        listed, why = checkouts.between(good.checkout, bad.checkout)
        commits = [*listed]
    packages = _packages(good, bad, progress) if contained else None
    found = axes.between(good, bad, matrix, commits, packages, contained=contained)
    if why:
        found = replace(found, untried=(*found.untried, f"the commits between: {why}"))
    if not found.axes:
        untried = "\n  ".join(found.untried)
        raise UsageError(f"{good.text} and {bad.text} differ in nothing that can be tried", untried)
    return found


def _packages(
    good: End, bad: End, progress: Progress
) -> tuple[Mapping[str, str], Mapping[str, str]] | None:
    """The versions of both ends' extras, where other ones were asked for; None where not."""
    first, last = good.build, bad.build
    if first is None or last is None or {*first.extras} == {*last.extras}:
        return None
    from launcher.tools.bisect.built import package_versions

    return package_versions(first, progress), package_versions(last, progress)


def _bisect(found: Differences, request: BisectRequest, progress: Progress) -> Bisect:
    """A bisect of differences, with a folder of its own."""
    how = {name: getattr(request, name) for name in ("backend", "steps", "seconds", "check")}
    whole = json.dumps([how, asdict(found)], default=str)
    name = f"bisect-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"
    record.put(name, REQUEST, {**how, "axes": [*_listed(found)]})
    folder = record.folder(name)
    run = ShortRun(
        folder, str(request.backend), request.steps, request.seconds, progress, request.check
    )
    return Bisect(name, found, run, request.judge, progress, request.fresh)


def _listed(found: Differences) -> Iterator[dict[str, object]]:
    """The axes as they are kept, without secrets."""
    for axis in found.axes:
        values = [axis.told(at) for at in range(len(axis.values))]
        yield {"kind": axis.kind, "name": axis.name, "values": values}


def _commits(
    first: Differences, finding: SearchResult, history: Path | None
) -> tuple[Differences | None, str]:
    """The commits between two neighbouring releases, of which the second fails.

    They run in place of the image's Megatron, in the image of the first. None where no release is
    to blame, or where they can't be tried, for the reason given.
    """
    steps = [one for one in finding.differences if first.axes[one.axis].kind == RELEASE]
    if not steps:
        return None, ""
    values = first.axes[steps[0].axis].values
    tags = [f"core_v{values[at]}" for at in (steps[0].good, steps[0].bad)]
    what = f"the commits from {tags[0]} to {tags[1]}"
    if history is None:
        return None, f"{what}: --history names a clone of Megatron-LM"
    try:
        good, bad = (checkouts.checkout(history, tag) for tag in tags)
        commits, why = checkouts.between(good, bad)
    except LauncherError as error:
        return None, f"{what}: {error.problem}"
    start = replace(first.at(finding.good), checkout=good)
    found = Differences(start, (Axis(COMMIT, "", tuple(commits)),))
    return (None, f"{what}: {why}") if why else (found, "")
