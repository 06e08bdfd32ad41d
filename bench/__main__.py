"""Runs the comparisons and prints each figure beside its goal: `python -m bench [NAME…]`."""

from __future__ import annotations

import os
import sys
import tempfile

from bench import compat, demo, export, launch, logs, rows, tokenize, transfer
from launcher.engine import acquire
from launcher.engine.connect import engine_host
from launcher.matrix.load import load_matrix
from launcher.screen import Progress
from launcher.settings import settings


def main(names: list[str]) -> int:
    """Run the named comparisons, or all; 1 where a goal is missed."""
    wanted = set(names or ["launch", "logs", "rows", "transfer", "compat", "demo"])
    figures = demo.figures() if "demo" in wanted else []
    if "tokenize" in wanted:  # only by name: it wants a checkout of upstream to compare with
        figures += tokenize.figures()
    if "export" in wanted:  # as that
        figures += export.figures()
    if wanted - {"demo", "tokenize", "export"}:
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
