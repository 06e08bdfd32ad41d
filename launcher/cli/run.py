"""`launcher run`: a run file or preset, trained on a backend."""

from __future__ import annotations

import argparse
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.follow.assemble import Assembled
    from launcher.plan.job import Backend
    from launcher.plan.source import Override
    from launcher.plan.text import Tokenized

HELP = "train as a run file says"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    parser.usage = "%(prog)s CONFIG [options] [-- ARGS ...]"
    parser.epilog = "What stands after -- goes to the training program as it is."
    add("config", metavar="CONFIG", help="a run file, or the name of a preset: gpt2.yaml")
    add("--gpus", metavar="WHICH", help="N, all, 0 (the CPU) or device=0,1")
    add("--nodes", type=int, metavar="N", help="all on this machine, with --backend compose")
    add("--tag", help="the image's tag: a row of the matrix")
    add("--source", metavar="PATH", help="a Megatron-LM checkout, in place of the image's")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the run file: --set training.lr=3e-4 (may be repeated)",
    )
    add("--dry-run", action="store_true", help="show the plan and its command; start nothing")
    start_arguments(parser)


def start_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every command that starts a run takes."""
    add = parser.add_argument
    add("--backend", default="docker", help="what carries the run out: docker, local or compose")
    add(
        "--max-restarts",
        type=int,
        metavar="N",
        help="start a run that failed again from its newest checkpoint, up to N times",
    )
    follow_arguments(parser)


def follow_arguments(parser: argparse.ArgumentParser) -> None:
    """Add how a run is started and followed."""
    add = parser.add_argument
    add("--detach", action="store_true", help="start, print the run's id, and return")
    add("--tie", action="store_true", help="the run ends with the launcher, even if that is killed")
    add("--no-preflight", action="store_true", help="start without looking whether it can work")


def main(args: argparse.Namespace) -> int:
    """Carry the run out, or show it; the training program's exit code is passed on."""
    gc.disable()  # imports leave no garbage, and looking for it takes a tenth of their time
    import os
    from dataclasses import replace
    from functools import partial

    from launcher.backends import backend
    from launcher.follow.assemble import assemble, new_stamp, release
    from launcher.follow.start import check, start
    from launcher.plan import source, text
    from launcher.plan.source import Asked
    from launcher.settings import settings

    config, origin = source.load(args.config, overrides(args))
    asked = Asked(config, origin, os.getcwd(), tuple(args.rest), tie=args.tie)
    chosen = backend(args.backend)
    data = text.tokenized(config, origin, settings().cache, partial(release, asked, chosen))
    asked = replace(asked, config=data.config)
    if args.dry_run:
        return _show(assemble(asked, chosen, new_stamp(), dry=True), chosen, data)
    if data.text:  # which may take hours
        check(asked, chosen, preflight=not args.no_preflight)
        data.make()
    return start(asked, chosen, detach=args.detach, preflight=not args.no_preflight)


def overrides(args: argparse.Namespace) -> list[Override]:
    """The arguments that set keys of the run file; the options win over --set."""
    from launcher.plan.source import Override, parse_set

    found = [parse_set(argument) for argument in args.set]
    if args.tag is not None:
        found.append(Override(f"--tag {args.tag}", {"image.name": None, "image.tag": args.tag}))
    if args.nodes is not None:
        found.append(Override(f"--nodes {args.nodes}", {"nodes.count": args.nodes}))
    return found + options(args, "gpus", "source", "max_restarts")


def options(args: argparse.Namespace, *keys: str) -> list[Override]:
    """The overrides of those options that set the key of their own name."""
    from launcher.plan.source import Override

    given = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    return [
        Override(f"--{key.replace('_', '-')} {value}", {key: value}) for key, value in given.items()
    ]


def _show(assembled: Assembled, chosen: Backend, data: Tokenized) -> int:
    """Print the plan and the command; files that aren't there are told, as they may come."""
    import sys

    from launcher.follow.files import missing
    from launcher.plan.describe import describe

    plan = assembled.plan
    print(f"{describe(plan)}\n{chosen.show(plan)}", end="")
    lines = missing(plan)
    lines += [f"warning: {line}" for line in assembled.ignored]
    if data.text:  # data.path is where its tokens will be
        lines = [line for line in lines if not line.startswith("data.path:")]
        if not data.text.is_made:
            lines.append(f"data.text: it will be tokenized first, to {data.text.prefix}.bin")
    for line in lines:
        print(f"launcher: {line}", file=sys.stderr)
    return 0
