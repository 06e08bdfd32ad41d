"""The launcher as a library: run files, runs and images as objects.

    from launcher import RunFile

    file = RunFile.load("gpt2-tiny.yaml", {"training.train_iters": 100})
    print(file.show("local"))                  # what --dry-run prints
    run = file.start("local")                  # returns at once
    for step in run.follow():                  # until the run has ended
        print(step["iteration"], step["loss"])
    run.frame().plot("iteration", "loss")      # with pandas
    longer = run.resume({"training.train_iters": 200})

Functions raise `LauncherError`, which says what is wrong and how to mend it. A run doesn't end with
the Python that started it: `Run.find` finds it again, and so does the command line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.agent.checkpoints import folders, lineage
from launcher.agent.checkpoints.folders import CheckpointFolder
from launcher.base.errors import EngineError, LauncherError, PreflightError, UsageError
from launcher.base.settings import ROOT, expanded, settings
from launcher.runs.backends import backend
from launcher.runs.follow import find, supervise
from launcher.runs.follow.assemble import PlannedRun, assemble, new_stamp
from launcher.runs.follow.launch import begin, check_start, record_plan, refuse_options
from launcher.runs.follow.live import tell
from launcher.runs.plan.job import Backend
from launcher.runs.records import owner, record
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin, Override, RunRequest

if TYPE_CHECKING:
    import pandas

    from launcher.images.builder.image import BuiltImage
    from launcher.runs.explain.failures import Explanation
    from launcher.runs.records.recorded_runs import RunSummary
    from launcher.tools.data.data_text import TokenizedRun

__all__ = [
    "EngineError", "LauncherError", "PreflightError", "Run", "RunFile", "UsageError",
    "build_image",
]  # fmt: skip

HERE = Origin("this RunFile", {}, {})
_followers: dict[str, subprocess.Popen[bytes]] = {}
"""The launchers that keep the log and the metrics of runs, by the runs' ids."""


@dataclass(frozen=True)
class RunFile:
    """A run file: `config.model`, `config.training` and the others are its sections.

    `arguments` go to the training program as they are. Relative paths start in `cwd`.
    """

    config: RunConfig
    origin: Origin = HERE
    arguments: tuple[str, ...] = ()
    cwd: str = field(default_factory=os.getcwd)

    @classmethod
    def new(cls, name: str, image: str, **sections: Any) -> RunFile:
        """A run file of its sections: `RunFile.new("a", "24.10", model={"num_layers": 2}, gpus=8)`.

        A section is a dictionary, or an object of `launcher.runs.runfile.config`. Raises
        UsageError.
        """
        return cls(origins.made({"name": name, "image": image, **sections}, HERE.name))

    @classmethod
    def load(cls, name: str | Path, changes: Mapping[str, Any] | None = None) -> RunFile:
        """A file or a preset, with changes by dotted keys laid over it. Raises UsageError."""
        return cls(*origins.load(str(name), _overrides(changes)))

    def changed(self, changes: Mapping[str, Any]) -> RunFile:
        """The same with other values: `{"training.lr": 1e-4, "gpus": 4}`. Raises UsageError."""
        return replace(self, config=origins.overridden(self.config, _overrides(changes)))

    def plan(self, on: str = "docker") -> PlannedRun:
        """What would be run on a backend, fully resolved; nothing is started. Raises UsageError."""
        asked, chosen, _ = self.request(on)
        return assemble(asked, chosen, new_stamp(), dry=True)

    def show(self, on: str = "docker") -> str:
        """The plan in words, and as commands that work in a shell. Raises UsageError."""
        from launcher.cli.describe import describe

        plan = self.plan(on).plan
        return f"{describe(plan)}\n{backend(on).configured(self.config).show(plan)}"

    def forecast(self, on: str = "docker", gpu: str = "") -> dict[str, Any]:
        """What it will take, as `launcher forecast --json`; `gpu` as there: "h100-80gb"."""
        from launcher.tools.forecast import estimates, forecast_text

        asked, chosen, _ = self.request(on)
        return forecast_text.as_json(estimates.of_request(asked, chosen, gpu)[0])

    def start(self, on: str = "docker", *, preflight: bool = True) -> Run:
        """Start it on a backend: docker, local, compose, slurm or kubernetes.

        Texts are tokenized first. Raises UsageError, EngineError, and PreflightError where the run
        can't work on this machine.
        """
        asked, chosen, data = self.request(on)
        if chosen.tasks:
            raise UsageError("slurm.array is several runs", "Start them with: launcher run")
        if data.text:
            check_start(asked, chosen, detach=False, preflight=preflight)
            data.make()
        return _started(asked, chosen, preflight=preflight)

    def request(self, on: str) -> tuple[RunRequest, Backend, TokenizedRun]:
        """What is asked of a backend, and the texts that are tokenized before it starts."""
        from launcher.runs.follow.assemble import release
        from launcher.tools.data import data_text

        config, origin = self.config, self.origin
        chosen = backend(on).configured(config)
        if not (chosen.every_node or chosen.scheduled):
            config, origin = origins.numbered(config, origin, os.environ)
        asked = RunRequest(config, origin, self.cwd, self.arguments)
        data = data_text.tokenized(
            config, origin, settings().cache, partial(release, asked, chosen)
        )
        return replace(asked, config=data.config), chosen, data


@dataclass(frozen=True)
class Run:
    """A run that was started, here or by the command line, by its id."""

    id: str

    @classmethod
    def find(cls, text: str) -> Run:
        """The run of an id, the beginning of one, or a name, of several the newest.

        Raises UsageError where there is none.
        """
        return cls(record.find(text).run)

    @classmethod
    def all(cls, *states: str, name: str | None = None, since: str | None = None) -> list[Run]:
        """The runs that have a record, newest first: of some states, a name, an age ("7d")."""
        from launcher.runs.records import recorded_runs

        wanted = recorded_runs.Filter(states, name, recorded_runs.ago(since) if since else None)
        known = recorded_runs.known(job for _, job in find.jobs())
        return [cls(one.run) for one in known if wanted.takes(one)]

    @property
    def folder(self) -> Path:
        """The folder of its record: the log, the plan, the metrics."""
        return record.folder(self.id)

    @property
    def record(self) -> dict[str, Any]:
        """All that is kept of it, as `launcher runs show` prints it. Raises UsageError."""
        from launcher.runs.records import recorded_runs

        return recorded_runs.shown(self.id)

    @property
    def summary(self) -> RunSummary:
        """Its state, exit code, newest iteration and loss, and why it ended. Raises UsageError.

        Where its engine doesn't answer, the state is what its record says.
        """
        from launcher.runs.records import recorded_runs

        kept, alive = record.find(self.id), dict[str, str]()
        with suppress(EngineError):
            alive = recorded_runs.living(
                job for job in backend(kept.backend).jobs() if job.run == self.id
            )
        steps = self.metrics()
        return recorded_runs.summary(kept, str(self.folder), alive, steps[-1] if steps else {})

    @property
    def state(self) -> str:
        """running, paused, finished, stopped, failed or unknown."""
        return self.summary.state

    def follow(self, every: float = 0.5) -> Iterator[dict[str, Any]]:
        """The steps of training as they come, from the first one, until the run has ended."""
        follower, told, ended = self._follower(), 0, False
        while not ended:
            ended = follower.poll() is not None
            steps = self.metrics()
            yield from islice(steps, told, None)
            told = max(told, len(steps))
            if not ended:
                time.sleep(every)

    def wait(self) -> RunSummary:
        """Wait for its end."""
        self._follower().wait()
        return self.summary

    def metrics(self, kind: str = "step") -> list[dict[str, Any]]:
        """The metrics of its log: steps or validations, in which each iteration counts once.

        Of other kinds ("memory", "alarm") every line is returned. docs/watching.md has the keys.
        """
        from launcher.runs.records import plot

        found = plot.read_metrics(self.id)
        if kind in (plot.STEP, plot.VALIDATION):
            found = iter(plot.continued(found))
        return [one for one in found if one["kind"] == kind]

    def frame(self, kind: str = "step") -> pandas.DataFrame:
        """The same as a data frame. Raises UsageError where there is no pandas."""
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise UsageError("this Python has no pandas", "pip install pandas") from error
        return pandas.DataFrame(self.metrics(kind))

    def log(self) -> str:
        """What it has written until now, of all attempts that a launcher has followed."""
        return b"".join(map(Path.read_bytes, record.logs(self.folder))).decode(errors="replace")

    def output(self, *, follow: bool = False) -> Iterator[tuple[bool, bytes]]:
        """What it writes, each piece with whether it is stderr's; or what was kept of it."""
        try:
            _, job = find.job(self.id)
        except LauncherError as error:
            kept = list[Path]()
            with suppress(UsageError):
                kept = record.logs(Run.find(self.id).folder)
            if not kept:
                raise
            if isinstance(error, EngineError):
                tell("an engine doesn't answer; this is what was kept until now")
            for path in kept:
                with path.open("rb") as log:
                    yield from ((False, data) for data in iter(partial(log.read, 1 << 20), b""))
            return
        yield from ((is_error, data) for is_error, data, _ in job.output(follow=follow))

    def explain(self) -> Explanation:
        """What made it fail and what mends it, as `.lines`. Raises UsageError, EngineError."""
        from launcher.runs.explain import failures
        from launcher.runs.records import recorded_runs

        return failures.explain((data for _, data in self.output()), recorded_runs.cause(self.id))

    def stop(self, *, now: bool = False, grace: int | None = None) -> None:
        """Ask it to save a checkpoint and end, or end it `now`. Raises UsageError where it has."""
        try:
            _, job = find.job(self.id)
        except UsageError:
            if not owner.stop_in_pause(record.find(self.id).run):
                raise
            tell(f"run {self.id} is between two attempts, and won't be started again")
        else:
            supervise.stop(job, now=now, grace=grace)

    def resume(self, changes: Mapping[str, Any] | None = None, on: str | None = None) -> Run:
        """Go on from its newest complete checkpoint, also with another number of `gpus`.

        Raises UsageError where it still goes on, saved nothing, or fits no such number.
        """
        chosen = backend(on or record.find(self.id).backend)
        from launcher.runs.follow.from_record import resumed

        asked, _ = resumed(self.id, chosen, _overrides(changes))
        return _started(asked, chosen.configured(asked.config))

    def checkpoints(self) -> list[CheckpointFolder]:
        """Its checkpoints and its predecessors', newest first; `.problem` says what one lacks."""
        kept = record.find(self.id)
        save = kept.config.get("checkpoint", {}).get("save")
        root = Path(kept.cwd, expanded(save)) if save else None
        return [*folders.newest_first(root, lineage.of_run(root, self.id))] if root else []

    def _follower(self) -> subprocess.Popen[bytes]:
        """A launcher of its own that follows the run until its end, and keeps what it says."""
        if self.id not in _followers:
            search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
            _followers[self.id] = subprocess.Popen(
                [sys.executable, "-m", "launcher", "attach", self.id],
                env=os.environ | {"PYTHONPATH": search},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that Ctrl-C here is none there
            )
        return _followers[self.id]


def build_image(tag: str, **departures: Any) -> BuiltImage:
    """Build the image of a row of the matrix, or find it built: `build_image("24.10").names[0]`.

    What departs from the row are fields of `BuildRequest`: megatron="0.9.0", extras=("hf",).
    Raises UsageError, EngineError and BuildError.
    """
    from launcher.base.screen import Progress
    from launcher.images.builder.image import BuildRequest, Builds
    from launcher.images.engine.connect import connect

    builds = Builds(connect(timeout=600), settings(), Progress(), standin=True)
    return builds.build(BuildRequest(tag, **departures))


def _started(asked: RunRequest, chosen: Backend, *, preflight: bool = True) -> Run:
    refuse_options(asked, chosen, detach=False)  # its follower restarts it
    assembled = assemble(asked, chosen, new_stamp())
    asked = replace(asked, config=assembled.resolved.config)
    with owner.alone():
        plan = record_plan(assembled, asked, chosen, preflight=preflight)
        run = Run(begin(chosen, plan, attach=False).run)
    run._follower()
    return run


def _overrides(changes: Mapping[str, Any] | None) -> list[Override]:
    return [Override("changes", {key: value}) for key, value in (changes or {}).items()]
