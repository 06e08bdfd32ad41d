"""Commands about machines: what they can run, which failed, and a private engine."""

from __future__ import annotations

import os
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base import names
from launcher.base.errors import EngineError, PreflightError, UsageError
from launcher.cli.command import argument, command, either, flag, image, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from launcher.runs.checks.machine_report import Line
    from launcher.runs.plan.job import Backend
    from launcher.runs.plan.plan import Plan

DEFAULT = "24.10"
NODES = ("NODE", "FAILURES", "OWN", "CAUSES", "LAST", "RUNS")


@command(
    argument("--gpus", "check for these GPUs: N, all, device=0,1; 0: CPU runs", "WHICH"),
    either(
        argument(
            "--tag",
            f"a row: check its CUDA against the driver; its image for --nccl ({DEFAULT})",
            type=names.argument(names.tag),
        ),
        image("NAME", "another image for --nccl", "--image"),
    ),
    argument("--backend", "docker or local (default: docker)", default="docker"),
    flag("--json", "the same as JSON"),
    flag("--nccl", "a short all-reduce over the GPUs, in the image"),
    argument("--nodes", "check that N machines reach each other: start it on each", "N", type=int),
    argument(
        "--node-rank",
        "this machine's number, unless a variable has it; 0 is the first",
        "N",
        type=int,
    ),
    argument("--master-addr", "the address of the first machine", "ADDRESS"),
    argument("--master-port", "its port (29500)", "PORT", type=int, default=29500),
    argument("--wait", "seconds to wait for all machines (60)", "S", type=float, default=60.0),
    epilog="Exit code: 0, 121 where a run would be refused; of --nccl 1 for a broken link.",
)
def doctor(args: Namespace) -> int:
    """Check whether this machine can train: engine, GPUs, memory, disk."""
    from launcher.runs.backends import backend

    if args.nodes is not None:
        return _print(_nodes(args), as_json=args.json)
    chosen = backend(args.backend)
    if args.nccl:
        return _all_reduce(args, chosen)
    return _print(_lines(args, chosen), as_json=args.json)


def _lines(args: Namespace, chosen: Backend) -> list[Line]:
    from launcher.base.settings import settings
    from launcher.images.matrix.matrix_file import find_row, load_matrix
    from launcher.runs.checks import gather, machine_report
    from launcher.runs.runfile.values import parse_gpus

    cuda = find_row(load_matrix(), args.tag).cuda if args.tag else None
    asked = parse_gpus(args.gpus) if args.gpus else None
    missing = list(_environment(chosen))
    try:
        api = gather.engine_of(chosen)
    except EngineError as error:
        api = None
        missing = [
            machine_report.Line("engine", machine_report.REFUSED, error.problem, error.remedy)
        ]
    machine = gather.machine(api, gpus=asked is None or asked.count != 0)
    cache = settings().cache
    found = machine_report.lines(machine, cuda, (str(cache), gather.free(cache)), asked=asked)
    return [*missing, *found]


def _nodes(args: Namespace) -> list[Line]:
    """Meet the other nodes. Raises UsageError for numbers that can't be."""
    from launcher.agent.ranks import alike
    from launcher.agent.ranks.rendezvous import Rendezvous
    from launcher.runs import payload
    from launcher.runs.backends.host import tell
    from launcher.runs.checks import gather, reachability
    from launcher.runs.runfile.origins import NODE_RANKS

    told = (os.environ[name] for name in NODE_RANKS if os.environ.get(name, "").isdecimal())
    rank = args.node_rank if args.node_rank is not None else int(next(told, -1))
    address = args.master_addr or os.environ.get("PET_MASTER_ADDR")
    if not 0 <= rank < args.nodes or args.nodes < 2:
        raise UsageError(f"--nodes {args.nodes} --node-rank {rank}", "0 is the first of them.")
    if not address:
        raise UsageError("--nodes needs --master-addr, the first one's address")
    gpus = gather.nvidia_gpus() or ()
    facts = alike.devices(len(gpus), gpus[0].driver if gpus else "")
    facts |= {"launcher": payload.digest()}
    place = Rendezvous(rank, args.nodes, address, args.master_port, tell)
    return reachability.look(place, facts, os.environ, args.wait)


def _environment(chosen: Backend) -> Iterator[Line]:
    """What runs without a container need of this environment: torch, and Megatron for most."""
    from launcher.runs.checks import machine_report

    if chosen.contained:
        return
    try:
        facts = chosen.facts("")
    except EngineError as error:
        yield machine_report.Line("python3", machine_report.REFUSED, error.problem, error.remedy)
        return
    if facts and facts.release:
        yield machine_report.Line(
            "python3", machine_report.OK, f"torch, and Megatron-Core {facts.release}"
        )
    else:
        mend = "Install megatron-core, or give --source PATH, a Megatron-LM checkout."
        yield machine_report.Line(
            "python3", machine_report.WARNING, "torch, but no Megatron-Core", mend
        )


def _print(found: list[Line], *, as_json: bool) -> int:
    import json
    from dataclasses import asdict

    from launcher.runs.checks import machine_report

    if as_json:
        print(json.dumps([asdict(line) for line in found], indent=2))
    else:
        print(machine_report.table(found), end="")
    refused = any(line.state == machine_report.REFUSED for line in found)
    return PreflightError.exit_code if refused else 0


def _all_reduce(args: Namespace, chosen: Backend) -> int:
    """Run the all-reduce as a run of its own; its exit code."""
    from dataclasses import replace

    from launcher.runs.follow.supervise import supervise

    plan = all_reduce_plan(args, chosen)
    if args.json:
        plan = replace(plan, argv=(*plan.argv, "--json"))
    return supervise(chosen, lambda attempt: chosen.start(plan, attach=True)).code


def all_reduce_plan(args: Namespace, chosen: Backend) -> Plan:
    """The plan of an all-reduce, which the payload brings along: any image with torch will do."""
    from dataclasses import replace

    from launcher.runs.follow.assemble import NO_PROGRAM, assemble, new_stamp
    from launcher.runs.runfile.origins import Origin, RunRequest, made

    image = {"name": args.image} if args.image else {"tag": args.tag or DEFAULT}
    values = {"name": "nccl", "image": image, "gpus": args.gpus or "all", "processes": 2}
    config = made(values | {"program": NO_PROGRAM}, "doctor --nccl")
    asked = RunRequest(config, Origin("doctor --nccl", {}, {}), os.getcwd())
    plan = assemble(asked, chosen, new_stamp()).plan
    mounts = tuple(mount for mount in plan.mounts if mount.key != "program")
    words = plan.argv[: plan.argv.index("--") + 1]
    return replace(plan, argv=(*words, "-m", "launcher.agent.allreduce"), mounts=mounts)


@command(
    argument("--since", "failed no longer ago than 30m, 12h, 7d", "AGE"),
    flag("--json", "print one JSON object a line"),
)
def nodes(args: Namespace) -> int:
    """List the machines that runs failed on, and faults of these machines."""
    import json
    from dataclasses import asdict

    from launcher.runs.records import failed_nodes, recorded_runs

    found = failed_nodes.failures(recorded_runs.ago(args.since) if args.since else None)
    if args.json:
        print("".join(f"{json.dumps(asdict(one))}\n" for one in found), end="")
        return 0
    rows = list[tuple[str, ...]]()
    for node in sorted({one.node for one in found}):
        its = [one for one in found if one.node == node]
        own = [one.cause for one in its if one.cause]
        of = [*dict.fromkeys(one.run for one in its)]
        causes = ", ".join(dict.fromkeys(own))
        rows.append((node, f"{len(its)}", f"{len(own)}", causes, its[0].ended, " ".join(of[:5])))
    print(table([NODES, *rows]), end="")
    return 0


@command()
def demo(args: Namespace) -> int:
    """Build the CPU image from Megatron's source and train a tiny GPT in it."""
    from launcher.base.settings import settings
    from launcher.tools import demo

    demo.run(settings())
    return 0


@command(
    argument(
        "folder",
        "the folder of its packages and images (default: that of `make demo`)",
        "FOLDER",
        type=Path,
        nargs="?",
    )
)
def engine(args: Namespace) -> int:
    """Run a private engine (Linux, root, apt) and print its DOCKER_HOST."""
    from launcher.base.settings import settings
    from launcher.images.engine.private.private import keep_up

    keep_up(args.folder or settings().cache / "engine", partial(print, flush=True))
    return 0
