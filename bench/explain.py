"""`launcher explain` on a gigabyte that 64 ranks wrote after a failure, beside `grep -c`.

Both have one thread: times are the processor's, which others on the machine hardly lengthen. The
rate is of six times the million lines: of one million a fifth of the time was Python's start.
"""

from __future__ import annotations

import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from bench.measure import ROOT, Figure
from launcher.runs.explain import failures

WATCHED = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
LINES, RANKS, CAUSES, TURNS, COPIES = 1_000_000, 64, 10, 3, 6


def figures() -> list[Figure]:
    """Causes, planted where nothing else tells of them, that aren't found; the time a GB takes."""
    chance = random.Random(18)  # noqa: S311
    said_of = _said_of()
    first = [known for known in failures.table() if known.kind in ("cause", failures.STATED)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log")
        path.write_text("".join(_aftermath(chance)), encoding="utf-8")
        whole = path.read_bytes()
        missed = 0
        for known in chance.sample(first, CAUSES):
            at = whole.index(b"\n", chance.randrange(len(whole) - 1000)) + 1
            said = "".join(f"[rank17]: {one}\n" for one in said_of[known.name][0].splitlines())
            said = said.encode()
            found = failures.explain([whole[:at], said, whole[at:]]).signs
            line = whole.count(b"\n", 0, at) + 1
            there = found and found[0].said and 0 <= found[0].said.line - line < said.count(b"\n")
            missed += not there or found[0].failure.row != known.row
        with path.open("wb") as file:
            file.writelines([whole] * COPIES)
        launch = [sys.executable, "-m", "launcher", "explain", str(path)]
        count = ["grep", "-c", "rank17", str(path)]
        memory, size = _memory(launch), path.stat().st_size
        ours, theirs = map(
            min, zip(*[(_cpu(launch), _cpu(count)) for _ in range(TURNS)], strict=True)
        )
    return [
        Figure(f"{CAUSES} causes among {LINES:,} lines, not found at theirs", missed, 0, ""),
        Figure("explain, of a GB of them", ours * 1e9 / size, 5, "s"),
        Figure("explain, of grep -c", ours / theirs, 20, "x"),
        Figure("explain, its memory", memory / 1024, 60, "MB"),
    ]


def _said_of() -> dict[str, list[str]]:
    """What is really written, by the name of the known failure."""
    told: dict[str, list[str]] = yaml.safe_load((ROOT / "tests/runs/explain/said.yaml").read_text())
    return told


def _memory(command: list[str]) -> int:
    """The most that a command has had, in KiB, seen by a process that is itself small."""
    watch = [sys.executable, "-c", WATCHED, *command]
    told = subprocess.run(watch, cwd=ROOT, check=True, capture_output=True, text=True)
    return int(told.stdout)


def _cpu(command: list[str]) -> float:
    """The processor's seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _aftermath(chance: random.Random) -> Iterator[str]:
    said_of = _said_of()
    texts = [line for known in failures.table() if known.follows for line in said_of[known.name]]
    told = [text for each in texts for text in each.splitlines()]
    for number in range(LINES):
        rank = chance.randrange(RANKS)
        yield (
            f"[rank{rank}]: 2026-01-02T03:04:{number % 60:02}.{chance.randrange(10**6):06} "
            f"{told[number % len(told)]} comm 0x{chance.getrandbits(48):x} "
            f"peer 10.0.{rank}.{chance.randrange(256)}<{chance.randrange(65536)}>\n"
        )
