"""What `launcher explain` makes of errors that people have asked about in public threads.

    python -m bench.threads FOLDER

FOLDER has a text for each thread of threads.yaml, `owner+name+number.txt`: what the thread's
first lines quote of the log. The texts are their writers' own and aren't kept here. A third of
the threads, drawn by a seed, is only ever measured on: no row is written from their texts.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from launcher.runs.records.failures import explain

THREADS = Path(__file__).with_name("threads.yaml")


def held_out(seed: str, thread: str) -> bool:
    """Whether a thread is one of the third that rows are measured on."""
    return int(hashlib.sha256(f"{seed} {thread}".encode()).hexdigest(), 16) % 3 == 0


def verdict(text: bytes, rows: list[str]) -> str:
    """right, wrong or unknown: whether the first sign is one of the rows that fit the thread."""
    signs = explain([text]).signs
    if not signs:
        return "unknown"
    return "right" if signs[0].failure.name in rows else "wrong"


def measured(folder: Path, known: dict[str, Any]) -> dict[str, Counter[str]]:
    """How many of the held-out third and of the rest are right, wrong, unknown or have no text."""
    found: dict[str, Counter[str]] = {"held out": Counter(), "the rest": Counter()}
    for cause in known["causes"]:
        for thread in cause["threads"]:
            path = folder / f"{thread.replace('/', '+').replace('#', '+')}.txt"
            share = "held out" if held_out(known["seed"], thread) else "the rest"
            is_there = path.exists()
            found[share][verdict(path.read_bytes(), cause["rows"]) if is_there else "no text"] += 1
    return found


def main(folder: Path) -> int:
    """Print the shares; 1 where the held-out third is less than 60 % right or 2 % wrong."""
    found = measured(folder, yaml.safe_load(THREADS.read_text(encoding="utf-8")))
    for share, counted in found.items():
        total = sum(counted.values()) - counted["no text"]
        told = ", ".join(
            f"{word} {counted[word]} ({100 * counted[word] / max(total, 1):.1f} %)"
            for word in ("right", "wrong", "unknown")
        )
        print(f"{share}: {total} texts: {told}; {counted['no text']} threads have no text there")
    held = found["held out"]
    total = sum(held.values()) - held["no text"]
    return 0 if held["right"] >= 0.6 * total and held["wrong"] <= 0.02 * total else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
