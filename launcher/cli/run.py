"""Commands that start something: `run`, `resume`, `rerun` and `shell`."""

from __future__ import annotations

import gc
import sys
from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING

from launcher.cli.command import GPUS, RUN, SHOWN, argument, command, flag, image, shown

if TYPE_CHECKING:
    from launcher.runs.plan.job import Backend
    from launcher.runs.runfile.origins import Override, RunRequest
    from launcher.tools.data.data_text import TokenizedRun

BACKEND = "where it runs: docker, local, compose, slurm or kubernetes"
SOURCE = argument("--source", "a Megatron-LM checkout, used in place of the image's", "PATH")
SET = argument(
    "--set",
    "set a key of the run file: --set training.lr=3e-4 (may be repeated)",
    "KEY=VALUE",
    action="append",
    default=[],
)
RESTARTS = argument(
    "--max-restarts",
    "restart a failed run from its newest checkpoint, up to N times",
    "N",
    type=int,
)
PROCESSES = argument("--processes", "number of processes on the CPU, with --gpus 0", "N", type=int)
DRY = (
    flag("--dry-run", "show the plan and its command; start nothing"),
    flag("--full", "with --dry-run, on Kubernetes: also print the ConfigMap with our code"),
)
FOLLOWED = (
    SHOWN,
    flag("--detach", "start, print the run's id, and return"),
    flag("--tie", "save and stop the run when the launcher ends, even if it is killed"),
    flag("--no-preflight", "start without checking machine and image"),
)
"""How a run is started and followed."""


@command(
    argument("config", "a run file, or the name of a preset: gpt2.yaml", "CONFIG"),
    GPUS,
    PROCESSES,
    argument("--nodes", "number of nodes: machines, or containers (compose)", "N", type=int),
    argument("--node-rank", "number of this node; the first is 0", "N", type=int),
    argument("--master-addr", "address of the first node", "ADDRESS"),
    argument("--master-port", "port of the first node (29500)", "PORT", type=int),
    argument("--tag", "the image's tag, such as 24.10"),
    SOURCE,
    SET,
    *DRY,
    argument("--backend", BACKEND, default="docker"),
    RESTARTS,
    *FOLLOWED,
    usage="%(prog)s CONFIG [options] [-- ARGS ...]",
    epilog="Arguments after -- go to the training program unchanged.",
)
def run(args: Namespace) -> int:
    """Start the training that a run file describes.

    The training program's exit code is passed on.
    """
    gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
    if args.backend != "docker":
        return _run(args)
    from launcher.images.engine.connect import connecting

    with connecting():
        return _run(args)


def _run(args: Namespace) -> int:
    from dataclasses import replace

    from launcher.api import RunFile
    from launcher.runs.follow.launch import check_start, task
    from launcher.runs.runfile import origins

    file = RunFile(*origins.load(args.config, overrides(args)), tuple(args.rest))
    asked, chosen, data = file.request(args.backend)
    asked = replace(asked, tie=args.tie)
    if args.dry_run:
        if numbers := chosen.tasks:
            asked = task(asked, numbers[0])
        return _show(args, asked, chosen, data)
    if data.text:  # which may take hours
        check_start(asked, chosen, detach=args.detach, preflight=not args.no_preflight)
        data.make()
    return _start(args, asked, chosen, filter(None, [data.note]))


def _start(args: Namespace, asked: RunRequest, chosen: Backend, notes: Iterable[str] = ()) -> int:
    """Start it; `notes` are printed first. Its exit code."""
    from dataclasses import replace

    from launcher.runs.follow.launch import start
    from launcher.runs.follow.live import tell
    from launcher.tools.data.data_text import TokenizedRun

    for note in notes:
        tell(note)
    asked = replace(asked, tie=args.tie)
    if args.dry_run:
        return _show(args, asked, chosen, TokenizedRun(asked.config))
    chosen = chosen.configured(asked.config)
    preflight = not args.no_preflight
    return start(asked, chosen, detach=args.detach, preflight=preflight, shown=shown(args))


def overrides(args: Namespace) -> list[Override]:
    """The arguments that set keys of the run file; the options win over --set."""
    from launcher.runs.runfile.origins import Override, parse_set

    found = [parse_set(word) for word in args.set]
    if getattr(args, "tag", None) is not None:
        found.append(Override(f"--tag {args.tag}", {"image.name": None, "image.tag": args.tag}))
    keys = {"nodes": "nodes.count", "node_rank": "nodes.rank"}
    keys |= {name: f"nodes.{name}" for name in ("master_addr", "master_port")}
    keys |= {name: name for name in ("gpus", "processes", "source", "max_restarts")}
    for name, key in keys.items():
        if (value := getattr(args, name, None)) is not None:
            found.append(Override(f"--{name.replace('_', '-')} {value}", {key: value}))
    return found


def _show(args: Namespace, asked: RunRequest, chosen: Backend, data: TokenizedRun) -> int:
    """Print the plan, the command and the forecast; files that aren't there may come."""
    from launcher.cli.describe import describe
    from launcher.runs.follow.run_files import missing
    from launcher.tools.forecast import estimates, forecast_text

    forecast, assembled = estimates.of_request(asked, chosen)
    plan = assembled.plan
    print(f"{describe(plan)}\n{chosen.show(plan, full=args.full)}", end="")
    lines = [
        *filter(None, [data.note]),
        *assembled.notes,
        *([] if chosen.scheduled and not chosen.shares_files else missing(plan)),
    ]
    lines += [f"warning: {line}" for line in assembled.ignored]
    if data.text:  # data.path is where its tokens will be
        lines = [line for line in lines if not line.startswith("data.path:")]
        if not data.text.is_made:
            lines.append(f"data.text: it will be tokenized first, to {data.text.prefix}.bin")
    for line in lines:
        print(f"launcher: {line}", file=sys.stderr)
    print(*forecast_text.lines(forecast), sep="\n", file=sys.stderr)  # stdout ends with the command
    return 0


@command(
    RUN,
    GPUS,
    PROCESSES,
    SET,
    argument("--backend", BACKEND),
    RESTARTS,
    *DRY,
    *FOLLOWED,
)
def resume(args: Namespace) -> int:
    """Continue a run from its newest complete checkpoint, also on other GPUs."""
    from launcher.runs.backends import backend
    from launcher.runs.follow.from_record import resumed
    from launcher.runs.records import record

    chosen = backend(args.backend or record.find(args.run).backend)
    asked, notes = resumed(args.run, chosen, overrides(args))
    return _start(args, asked, chosen, notes)


@command(RUN, flag("--force", "run it even if something has changed"), *DRY, *FOLLOWED)
def rerun(args: Namespace) -> int:
    """Repeat a run exactly, or list what has changed since."""
    from launcher.runs.backends import backend
    from launcher.runs.follow.from_record import repeated
    from launcher.runs.records import record

    chosen = backend(record.find(args.run).backend)
    asked, notes = repeated(args.run, chosen, force=args.force)
    return _start(args, asked, chosen, notes)


@command(
    image("TAG", "a row, or an image's full name", "tag", nargs="?", default="24.10"),
    argument("--gpus", "N, all, 0 (none) or device=0,1", "WHICH", default="0"),
    SOURCE,
    argument("--backend", "docker or local", default="docker"),
    usage="%(prog)s [TAG] [options] [-- COMMAND ...]",
)
def shell(args: Namespace) -> int:
    """Open a shell in an image: shell [TAG] [-- COMMAND].

    Its exit code is passed on. This folder is the working folder, at /work.
    """
    from launcher.runs.follow.shell import shell

    return shell(args.tag, args.backend, args.gpus, args.source, args.rest)
