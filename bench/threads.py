"""What `launcher explain` makes of errors that people have asked about in public threads.

    python -m bench.threads FOLDER [--fetch]

FOLDER has a text for each thread of threads.yaml, `owner+name+number.txt`: what the thread quotes
of the log. The texts are their writers' own and aren't kept here: --fetch gets what is missing
from GitHub, what a thread begins with, as a whole (with GITHUB_TOKEN, or 60 in an hour). A third
of the threads of `causes`, drawn by a seed, is only ever measured on: no row is written from their
texts. Those of `read` and `blind` were each measured once, before rows were written for them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from launcher.runs.explain.failures import explain

THREADS = Path(__file__).with_name("threads.yaml")


def held_out(seed: str, thread: str) -> bool:
    """Whether a thread is one of the third that rows are measured on."""
    return int(hashlib.sha256(f"{seed} {thread}".encode()).hexdigest(), 16) % 3 == 0


def text_file(folder: Path, thread: str) -> Path:
    """Where a thread's text is."""
    return folder / f"{thread.replace('/', '+').replace('#', '+')}.txt"


def fetch(folder: Path, threads: list[str]) -> None:
    """Write the texts that are missing."""
    token = os.environ.get("GITHUB_TOKEN")
    folder.mkdir(parents=True, exist_ok=True)
    for thread in threads:
        path = text_file(folder, thread)
        if path.exists():
            continue
        at = f"https://api.github.com/repos/{thread.replace('#', '/issues/')}"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(at, headers=headers)
        try:
            with urllib.request.urlopen(request) as answer:  # noqa: S310
                path.write_text(json.load(answer)["body"] or "", encoding="utf-8")
        except OSError as error:
            print(f"{thread}: {error}", file=sys.stderr)


def verdict(text: bytes, rows: list[str]) -> str:
    """right, wrong or unknown: whether the first sign is one of the rows that fit the thread."""
    signs = explain([text]).signs
    if not signs:
        return "unknown"
    return "right" if signs[0].failure.row in rows else "wrong"


def measured(folder: Path, known: dict[str, Any]) -> dict[str, Counter[str]]:
    """How many of the held-out third and of the rest are right, wrong, unknown or have no text."""
    found: dict[str, Counter[str]] = {"held out": Counter(), "the rest": Counter()}
    for cause in known["causes"] + known["read"]:
        for thread in cause["threads"]:
            path = text_file(folder, thread)
            is_held = held_out(known["seed"], thread) and cause not in known["read"]
            share = "held out" if is_held else "the rest"
            is_there = path.exists()
            found[share][verdict(path.read_bytes(), cause["rows"]) if is_there else "no text"] += 1
    return found


def main() -> int:
    """Print the shares; 1 where the held-out third has under 60 % right or over 2 % wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.threads")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fetch", action="store_true", help="get the texts that aren't there")
    given = parser.parse_args()
    known = yaml.safe_load(THREADS.read_text(encoding="utf-8"))
    if given.fetch:
        causes = known["causes"] + known["read"]
        fetch(given.folder, [thread for cause in causes for thread in cause["threads"]])
    found = measured(given.folder, known)
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
    sys.exit(main())
