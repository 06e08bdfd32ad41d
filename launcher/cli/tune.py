"""Commands before and beside a run: `tune`, `bisect` by many short ones, `forecast` by none."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.base.screen import Progress
from launcher.cli.command import GPUS, above_zero, argument, checkout, command, either, flag
from launcher.cli.run import BACKEND, SET, SOURCE

if TYPE_CHECKING:
    from launcher.tools.tuning.search import Measurement


CONFIG = argument("config", "a run file, or the name of a preset: gpt2.yaml", "CONFIG")
TAG = argument("--tag", "the image's tag, such as 24.10")
USAGE = "%(prog)s CONFIG [options] [-- ARGS ...]"


@command(
    CONFIG,
    GPUS,
    TAG,
    SOURCE,
    SET,
    argument("--backend", "docker or local (default: docker)", default="docker"),
    argument("-o --output", "the tuned run file (default: NAME-tuned.yaml)", "FILE", type=Path),
    argument("--steps", "steps to measure for each setting (25)", "N", type=int, default=25),
    argument("--minutes", "minutes that a search may take (5)", "M", type=above_zero, default=5.0),
    flag("--any-precision", "also try bf16 in place of fp16, or fp16 in place of bf16"),
    flag("--fresh", "measure again what an earlier search measured"),
    flag("--json", "print one JSON object"),
    flag("--plan", "measure nothing: predict from the GPU's published rates"),
    argument("--card", "with --plan: the GPU (default: this machine's)", "NAME", default=""),
    usage=USAGE,
    epilog="Batch, sequence, schedule and order of the data stay. To continue, repeat the command.",
)
def tune(args: Namespace) -> int:
    """Find the fastest settings of a run file, and write them.

    Settings are measured by short runs that save nothing.
    """
    from launcher.cli.run import overrides
    from launcher.runs.backends import backend
    from launcher.runs.runfile import origins
    from launcher.runs.runfile.origins import RunRequest
    from launcher.tools.tuning import tuned, tuning

    laid = overrides(args)
    config, origin = origins.load(args.config, laid)
    chosen = backend(args.backend).configured(config)
    asked = RunRequest(config, origin, os.getcwd(), tuple(args.rest))
    wanted = tuning.TuneRequest(args.steps, args.minutes, args.any_precision, args.fresh, args.card)
    if args.plan:
        predicted = tuning.planned(asked, chosen, wanted)
        _print(args, predicted.tried, predicted.best, [*predicted.lines])
        return 0
    if args.card or args.steps < 1:
        raise UsageError("--card is for --plan, and --steps is above 0")
    target = args.output or Path(f"{config.name}-tuned.yaml")
    if target.exists():
        raise UsageError(f"{target} is there already", "Give another -o, or move it away.")
    progress = Progress()
    found = tuning.tune(asked, chosen, _words(args), wanted, progress)
    lines = [*found.lines, *found.table]
    tuned.write(target, args.config, config, laid, found.changes(asked), lines)
    _print(args, found.tried, found.best, [*found.lines, f"written: {target}"], str(target))
    return 0


def _print(
    args: Namespace,
    tried: Sequence[Measurement],
    best: Measurement | None,
    lines: Sequence[str],
    written: str | None = None,
) -> None:
    """Print the lines, or with --json the measurements, fastest first."""
    import json
    from dataclasses import asdict

    if not args.json:
        print("\n".join(lines))
        return
    rows = [asdict(one) | {"setting": dict(one.setting.changes)} for one in tried]
    fastest = dict(best.setting.changes) if best else None
    print(json.dumps({"best": fastest, "tried": rows, "written": written}, indent=1))


def _words(args: Namespace) -> list[str]:
    """What `run` is given for the same run."""
    words = [args.config, "--backend", args.backend]
    for name in ("gpus", "tag", "source"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name}", str(value)]
    return [*words, *(word for each in args.set for word in ("--set", each))]


@command(
    argument("good", "a run, a run file, RUN_FILE@COMMIT, a tag or an image that works", "GOOD"),
    argument("bad", "as GOOD, but one that fails", "BAD"),
    argument("--run", "the run file, if GOOD and BAD have none (gpt2-tiny)", "CONFIG", default=""),
    SET,
    argument("--backend", "docker or local (default: the backend of BAD's run, or docker)"),
    argument("--history", "a Megatron-LM clone in which to find a commit", "PATH", type=checkout),
    argument("--steps", "steps of each trial (10)", "N", type=int, default=10),
    argument("--seconds", "seconds a trial may take (900)", "S", type=above_zero, default=900.0),
    either(
        argument("--cause", "a trial is bad if `explain` names this cause", "TEXT", default=""),
        argument("--loss", "a trial is bad if its loss is this far from GOOD's", type=above_zero),
        argument("--ms", "a trial is bad if a step takes X times GOOD's", "X", type=above_zero),
        argument("--check", "a trial is bad if CMD fails (with 125: skipped)", "CMD", default=""),
    ),
    flag("--fresh", "repeat the trials of an earlier search"),
    flag("--json", "print one JSON object"),
    epilog="By default, a trial is bad if it fails as BAD does. To continue, repeat the command.",
)
def bisect(args: Namespace) -> int:
    """Find what makes BAD fail but not GOOD: base, extras, release, commit or key.

    1 where BAD runs well here, or GOOD fails as well.
    """
    import json

    from launcher.cli.run import overrides
    from launcher.tools.bisect import bisect_report
    from launcher.tools.bisect.bisect import BisectRequest, bisect
    from launcher.tools.bisect.judge import Judge

    judge = Judge(args.cause, args.loss, args.ms, bool(args.check))
    given = {name: getattr(args, name) for name in ("backend", "steps", "seconds", "check")}
    given |= {"run_file": args.run, "history": args.history, "fresh": args.fresh}
    request = BisectRequest(judge, tuple(overrides(args)), **given)
    found = bisect(args.good, args.bad, request, Progress())
    print(
        json.dumps(bisect_report.as_json(found), indent=1)
        if args.json
        else bisect_report.text(found)
    )
    return 0


@command(
    CONFIG,
    argument("--gpu", "a GPU such as h100-80gb (default: this machine's)", "CARD"),
    GPUS,
    argument("--nodes", "number of nodes", "N", type=int),
    argument(
        "--network",
        "rate of each GPU to other nodes (default: as in NVIDIA's DGX of this GPU)",
        "GB/S",
        type=above_zero,
    ),
    TAG,
    SOURCE,
    SET,
    argument("--backend", BACKEND, default="docker"),
    flag("--json", "print one JSON object"),
    usage=USAGE,
    epilog="It uses the records of earlier runs, else published rates.",
)
def forecast(args: Namespace) -> int:
    """Predict what a run will take: memory, time, disk, money.

    Nothing is started.
    """
    import json
    from dataclasses import replace
    from functools import partial

    from launcher.base.settings import settings
    from launcher.cli.run import overrides
    from launcher.runs.backends import backend
    from launcher.runs.follow.assemble import release
    from launcher.runs.runfile import origins
    from launcher.runs.runfile.origins import Override, RunRequest
    from launcher.tools.data.data_text import tokenized
    from launcher.tools.forecast import estimates, forecast_text

    laid = overrides(args)
    config, origin = origins.load(args.config, laid)
    if config.nodes.count > 1 and not config.nodes.master_addr:
        laid.append(Override("forecast", {"nodes.master_addr": "node0"}))
        config, origin = origins.load(args.config, laid)
    asked = RunRequest(config, origin, os.getcwd(), tuple(args.rest))
    chosen = backend(args.backend).configured(config)
    data = tokenized(config, origin, settings().cache, partial(release, asked, chosen))
    asked = replace(asked, config=data.config)
    found, planned = estimates.of_request(asked, chosen, args.gpu or "", args.network)
    if args.json:
        print(json.dumps(forecast_text.as_json(found), indent=1))
        return 0
    print("\n".join((*planned.notes, *forecast_text.lines(found))))
    return 0
