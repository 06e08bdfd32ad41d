"""Asks an image, before a start, whether it runs a command and takes a run's options."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from launcher.base import files
from launcher.base.errors import LauncherError
from launcher.base.names import LABEL
from launcher.runs.backends import backend
from launcher.runs.checks.machine import Finding
from launcher.runs.follow.assemble import bare_plan
from launcher.runs.plan.program import ProgramKind, program

if TYPE_CHECKING:
    from launcher.runs.checks.machine import Machine
    from launcher.runs.plan.job import Backend
    from launcher.runs.plan.plan import Plan

DEADLINE = 60
"""Seconds that the answer may take; importing torch and Megatron takes most of them."""

ASKABLE = re.compile(r"/.*/pretrain_\w+\.py")
"""Upstream's programs. Ours checks its options itself, before it imports anything."""


def ask_image(plan: Plan, machine: Machine, chosen: Backend, cache: Path) -> Iterator[Finding]:
    """A refusal where the image runs no command, or its Megatron doesn't take the plan's options.

    A note where that can't be asked. The answers are kept in `cache`, by the image and by all that
    is asked of it. On a scheduler's machines the runner asks, once its ranks have failed.
    """
    asker = backend("docker") if chosen.every_node else chosen
    if chosen.has_engine:
        with suppress(LauncherError, OSError, ValueError, KeyError):
            yield from _entrypoint(plan, asker, cache)
    argv = plan.words
    upstreams = program(plan.program).kind is ProgramKind.UPSTREAM
    beside = chosen.has_engine and "--checkout" in plan.argv  # which the image alone hasn't
    if chosen.scheduled or beside or not (upstreams and argv and ASKABLE.fullmatch(argv[0])):
        return
    try:
        answer = _kept(plan, argv, machine, asker, cache)
    except (LauncherError, OSError, ValueError) as error:
        answer = {"unasked": str(error).partition("\n")[0]}
    except Exception as error:
        # An engine's own errors are many; none of them is a reason not to start.
        answer = {"unasked": f"{type(error).__name__}: {error}"}
    if "refused" in answer:
        yield Finding(
            f"{plan.image}: its Megatron doesn't take these options: {answer['refused']}",
            f"{answer['where']} would end the run once all its processes have started.",
            "Change what it names: each option is the key of the run file of the same name.",
        )
    elif "unasked" in answer:
        yield Finding(
            f"{plan.image} couldn't be asked whether its Megatron takes these options",
            f"{answer['unasked']}.",
            "The run is started anyway.",
            refuse=False,
        )


def _entrypoint(plan: Plan, asker: Any, cache: Path) -> Iterator[Finding]:
    """A refusal where the ENTRYPOINT of an image that isn't ours doesn't run what it is given."""
    config = asker.inspected(plan.image)["Config"]
    if not config.get("Entrypoint") or f"{LABEL}key" in (config.get("Labels") or {}):
        return
    image = str(asker.identity(plan.image)["id"])
    path = cache / "asked" / f"{hashlib.sha256(f'{image} entrypoint'.encode()).hexdigest()}.json"
    if not path.is_file():
        command = [plan.argv[0], "-c", "print('it ' + 'runs')"]
        runs = "it runs" in said(bare_plan(asker, {"name": image}, "0", command), asker, DEADLINE)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, json.dumps({"runs": runs}), mode=0o600)
    if not json.loads(path.read_text(encoding="utf-8"))["runs"]:
        yield Finding(
            f"{plan.image}: its ENTRYPOINT {config['Entrypoint']} doesn't run {plan.argv[0]}",
            "A run is started as a command of the image.",
            "Take an image without it: FROM this one, with ENTRYPOINT [].",
        )


def _kept(
    plan: Plan, argv: tuple[str, ...], machine: Machine, chosen: Backend, cache: Path
) -> Mapping[str, str]:
    """The answer, from the cache where the same was asked before."""
    words = [*plan.argv[:2], "validate", "--world-size", str(plan.nodes * plan.processes_per_node)]
    words += ["--capability", _capability(plan, machine), *argv]
    image = str(chosen.identity(plan.image)["id"])
    asked = json.dumps([image, words, plan.env], sort_keys=True)  # with the payload's digest
    path = cache / "asked" / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    if path.is_file():
        return _answer(path.read_text(encoding="utf-8"))
    if chosen.has_engine:
        mounts = (plan.payload_mount,) if plan.payload_mount else ()
        bare = replace(bare_plan(chosen, {"name": image}, "0", words), env=plan.env, mounts=mounts)
        answer = _answer(said(bare, chosen, DEADLINE))
    else:
        answer = _answer(_said_here(plan, words))
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(answer), mode=0o600)
    return answer


def _said_here(plan: Plan, words: Sequence[str]) -> str:
    """What the payload's `validate` prints in this environment. Raises OSError and EngineError."""
    env = {name: os.environ.get(name, "") if value is None else value for name, value in plan.env}
    try:
        done = subprocess.run(
            words, env=os.environ | env, cwd=plan.workdir, capture_output=True, timeout=DEADLINE
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.decode(errors="replace")


def _capability(plan: Plan, machine: Machine) -> str:
    """Of the first GPU, as far as that is known; Hopper's where it isn't, 0.0 on the CPU."""
    if not plan.gpus.count:
        return "0.0"
    known = next((gpu.capability for gpu in machine.gpus or () if gpu.capability), (9, 0))
    return ".".join(map(str, known))


def said(asking: Plan, chosen: Backend, seconds: float) -> str:
    """What a plan's run prints within so many seconds. Raises EngineError."""
    job = chosen.start(asking, attach=True)
    deadline = Timer(seconds, job.kill)
    deadline.start()
    try:
        return b"".join(piece.data for piece in job.output() if not piece.is_error).decode()
    finally:
        deadline.cancel()
        job.remove()


def _answer(text: str) -> Mapping[str, str]:
    """The last line as {"refused", "where"}, {"unasked"} or {}. Raises ValueError."""
    lines = text.strip().splitlines()
    told: Any = json.loads(lines[-1]) if lines else None
    if not isinstance(told, dict) or not all(isinstance(one, str) for one in told.values()):
        raise ValueError(f"it ended, or gave no answer within {DEADLINE} s")
    if "refused" in told and "where" not in told:
        raise ValueError("its answer can't be read")
    return told
