"""Runs the comparisons and prints each figure beside its goal: `python -m bench [NAME…]`."""

from __future__ import annotations

import os
import sys
import tempfile

from bench import (
    cluster,
    compat,
    demo,
    explain,
    export,
    importing,
    launch,
    logs,
    rows,
    tokenize,
    transfer,
)
from launcher.base.screen import Progress
from launcher.base.settings import settings
from launcher.images.engine import acquire
from launcher.images.engine.connect import engine_host
from launcher.images.matrix.matrix_file import load_matrix

ALONE = {
    "demo": demo.figures,
    "explain": explain.figures,
    "cluster": cluster.figures,
    "tokenize": tokenize.figures,
    "export": export.figures,
}
"""What needs no engine."""
NAMED = {"tokenize", "export"}
"""What runs where it is named alone: it needs more than the others, as it says."""
WITH_ENGINE = {"launch", "logs", "rows", "transfer", "compat"}


def main(names: list[str]) -> int:
    """Run the named comparisons, or all; 1 where a goal is missed."""
    if names[:1] == ["import"]:  # of a folder of scripts, which has no figures of its own
        return importing.main(names[1:])
    wanted = set(names) or (set(ALONE) | WITH_ENGINE) - NAMED
    figures = [one for name in ALONE if name in wanted for one in ALONE[name]()]
    if wanted & WITH_ENGINE:
        site, progress = settings(), Progress()
        with acquire.any_engine(site.cache / "engine", progress) as client:
            os.environ["DOCKER_HOST"] = engine_host(client)
            found = acquire.bases(client, load_matrix(), "cpu", site, progress)
            if "rows" in wanted:
                figures += rows.figures(client, site, found.base, found.builder)
            if "transfer" in wanted:
                figures += transfer.figures(client, site, found.base, found.builder)
            if "compat" in wanted:
                figures += compat.figures(found.base, found.builder)
            if "launch" in wanted:
                figures += launch.figures(client, found.base)
            if "logs" in wanted:
                figures += logs.figures(client, found.base)
    print("\n".join(map(str, figures)))
    return 0 if all(figure.value <= figure.goal for figure in figures) else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="launchpad-bench-") as runs:
        os.environ["LAUNCHER_RUNS"] = runs  # these are none of the user's runs
        sys.exit(main(sys.argv[1:]))
