"""`launcher run`: a run file or preset, trained in a container."""

from __future__ import annotations

import argparse
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.backends import Backend
    from launcher.run.config import RunConfig
    from launcher.run.gpus import Gpus
    from launcher.run.image import Facts
    from launcher.run.plan import Host, Plan, Stamp
    from launcher.run.source import Origin, Override

HELP = "train as a run file says, in a container"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    parser.usage = "%(prog)s CONFIG [options] [-- ARGS ...]"
    parser.epilog = "What stands after -- goes to the training program as it is."
    add("config", metavar="CONFIG", help="a run file, or the name of a preset: gpt2.yaml")
    add("--gpus", metavar="WHICH", help="N, all, 0 (the CPU) or device=0,1")
    add("--tag", help="the image's tag: a row of the matrix")
    add("--backend", default="docker", help="what carries the run out (default: docker)")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the run file: --set training.lr=3e-4 (may be repeated)",
    )
    add("--dry-run", action="store_true", help="show the plan and its command; start nothing")
    add("--detach", action="store_true", help="start, print the container's id, and return")


def main(args: argparse.Namespace) -> int:
    """Carry the run out, or show it; the training program's exit code is passed on."""
    gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
    from launcher.backends import backend
    from launcher.run import files, source
    from launcher.run.plan import make_plan

    config, origin = source.load(args.config, _overrides(args))
    chosen = backend(args.backend)
    plan = make_plan(
        config,
        origin,
        _facts(config, origin, chosen, dry=args.dry_run),
        _host(),
        _stamp(),
        gpus=_gpus(config, chosen),
        rest=tuple(args.rest),
    )
    if args.dry_run:
        return _show(plan, chosen)
    files.prepare(plan)
    gc.freeze()  # what is imported stays, so it is looked at no more, not even at the end
    gc.enable()
    return chosen.launch(plan, detach=args.detach)


def _overrides(args: argparse.Namespace) -> list[Override]:
    """The arguments that set keys of the run file; --gpus and --tag win over --set."""
    from launcher.run.source import Override, parse_set

    found = [parse_set(argument) for argument in args.set]
    if args.tag is not None:
        found.append(Override(f"--tag {args.tag}", {"image.name": None, "image.tag": args.tag}))
    if args.gpus is not None:
        found.append(Override(f"--gpus {args.gpus}", {"gpus": args.gpus}))
    return found


def _facts(config: RunConfig, origin: Origin, chosen: Backend, *, dry: bool) -> Facts:
    """What is known of the image: from itself, or for a dry run without it from the matrix."""
    from dataclasses import replace

    from launcher.errors import EngineError
    from launcher.run import image

    try:
        found = chosen.facts(image.reference(config.image))
    except EngineError:
        if not dry:
            _planned(config, origin)  # a wrong tag is told before a missing engine
            raise
        found = None
    if found is not None:
        return replace(found, release=found.release or config.image.megatron)
    planned = _planned(config, origin)
    if not dry:
        raise image.absent(config.image)
    return planned


def _planned(config: RunConfig, origin: Origin) -> Facts:
    from launcher.matrix.load import load_matrix
    from launcher.run import image

    if config.image.name:
        return image.Facts(config.image.megatron)
    return image.planned(config.image, load_matrix(), origin.of)


def _gpus(config: RunConfig, chosen: Backend) -> Gpus:
    """The GPUs asked for; what all means is asked of the backend."""
    from dataclasses import replace

    from launcher.errors import EngineError
    from launcher.run.gpus import parse_gpus

    asked = parse_gpus(config.gpus)
    if not asked.everything:
        return asked
    count = chosen.count_gpus()
    if count is None:
        raise EngineError("no GPUs found, so --gpus all means nothing here", "Give their number.")
    return replace(asked, count=count)


def _host() -> Host:
    import os
    from pathlib import Path

    from launcher.run.plan import Host
    from launcher.settings import settings

    cache = str(settings().cache)
    return Host(os.getuid(), os.getgid(), str(Path.home()), os.getcwd(), cache)


def _stamp() -> Stamp:
    import os
    from datetime import datetime, timezone

    from launcher.run.plan import Stamp

    now = datetime.now(timezone.utc).replace(microsecond=0)
    return Stamp(run=os.urandom(4).hex(), created=now.isoformat())


def _show(plan: Plan, chosen: Backend) -> int:
    """Print the plan and the command; files that aren't there are told, as they may come."""
    import sys

    from launcher.run.describe import describe
    from launcher.run.files import missing

    print(f"{describe(plan)}\n{chosen.show(plan)}", end="")
    for line in missing(plan):
        print(f"launcher: {line}", file=sys.stderr)
    return 0
