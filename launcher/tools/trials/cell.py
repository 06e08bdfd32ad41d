"""Tries one cell, in a process that can be ended: `python3 -m launcher.tools.trials.cell`.

Reads what to try as JSON from its standard input; writes a line of JSON as each stage begins, and
one with the result.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from launcher.base.errors import LauncherError
from launcher.base.screen import Progress
from launcher.runs.backends.keeper import PR_SET_PDEATHSIG
from launcher.tools.trials import result

REPOSITORY = "megatron-compat"
"""The name of the images that are made to be tried, beside the user's."""

STAGE_OF = {
    "pull": "pull",
    "look": "pull",
    "source:": "fetch",
    "fetch": "fetch",
    "patch": "patch",
    "build": "compile",
    "check": "import",
}
"""The stage by the first word of what a build says that it does."""

TellResult = Callable[[Mapping[str, Any]], None]


class Stages(Progress):
    """A build's progress, which reports each new stage."""

    def __init__(self, tell: TellResult, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self.tell = tell
        self.stage = ""

    def show(self, text: str) -> None:
        self.begin(STAGE_OF.get(text.partition(" ")[0], self.stage))
        super().show(text)

    def note(self, text: str) -> None:
        self.begin(STAGE_OF.get(text.partition(" ")[0], self.stage))
        super().note(text)

    def begin(self, stage: str) -> None:
        """Report that a stage begins, unless it has."""
        if stage != self.stage:
            self.stage = stage
            self.tell({"stage": stage})


def examine(asked: Mapping[str, Any], tell: TellResult) -> Mapping[str, Any]:
    """Build, ask and train in the image of a cell; the fields of its Result.

    asked: tag, megatron, checkout, base, builder, gpus, seconds (for a training run), train
    """
    from launcher.base.settings import settings
    from launcher.images.builder.image import BuildRequest, Builds
    from launcher.images.engine.connect import connect
    from launcher.runs.backends import backend
    from launcher.tools.trials import image_probe, trials

    progress, chosen = Stages(tell), backend("docker")
    checkout = Path(asked["checkout"]) if asked["checkout"] else None
    progress.begin("pull")
    try:
        builds = Builds(connect(timeout=600), settings(), progress, REPOSITORY, standin=True)
        request = BuildRequest(
            asked["tag"], asked["megatron"], checkout, asked["base"], asked["builder"]
        )
        image = {"name": builds.build(request).names[0]}
        progress.begin("import")
        found = image_probe.ask_image(chosen, image, asked["gpus"])
        told = {name: asdict(fact) for name, fact in found.items()}
        tried: dict[str, Any] = {}
        if asked["train"] and result.verdict(told, {})["verdict"] != "fails":
            progress.begin("train")
            came = trials.attempts(chosen, image, asked["gpus"], asked["seconds"], found)
            tried = {name: asdict(verdict) for name, verdict in came.items()}
        return {**result.verdict(told, tried), "facts": told, "trials": tried}
    except (LauncherError, OSError) as error:  # a full disk; or the engine's, which is gone
        reason, *tail = str(error).splitlines() or [repr(error)]
        return {"verdict": "fails", "stage": progress.stage, "reason": reason, "tail": tuple(tail)}


def main() -> int:
    """Try what standard input asks for; interrupted, as by a user, where the series is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are deaf

    def tell(record: Mapping[str, Any]) -> None:
        print(json.dumps(record), flush=True)

    tell({"result": examine(json.load(sys.stdin), tell)})
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
