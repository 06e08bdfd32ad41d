"""The command about machines that runs failed on."""

from __future__ import annotations

from argparse import Namespace

from launcher.cli.command import argument, command, flag, table

HEADING = ("NODE", "FAILURES", "OWN", "CAUSES", "LAST", "RUNS")


@command(
    argument("--since", "failed no longer ago than 30m, 12h, 7d", "AGE"),
    flag("--json", "print one JSON object a line"),
)
def nodes(args: Namespace) -> int:
    """List the machines that runs failed on, and the causes that are their own."""
    import json
    from dataclasses import asdict

    from launcher.runs.records import nodes, runs

    found = nodes.failures(runs.ago(args.since) if args.since else None)
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
    print(table([HEADING, *rows]), end="")
    return 0
