"""`launcher data tokenize` beside upstream's program and a floor, on the same files in one run.

The floor reads and parses each document with orjson and writes as many bytes as there are tokens'.
Upstream is run from a checkout: MEGATRON_CHECKOUT, by MEGATRON_PYTHON (a Python with torch and
regex; this one where it isn't set), with two worker counts, of which the better counts.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import statistics
import string
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.measure import ROOT, Figure, timed
from launcher.base.errors import UsageError
from launcher.images.engine.private import packages
from launcher.tools.data import vocabulary

CORPORA = {"10k documents of 8 kB": (10_000, 8200), "60k documents of 1 kB": (60_000, 1000)}
TURNS = 7
"""How often each is timed, in turn; upstream only in the first, since it takes a minute."""
LARGE = 24
"""How often the first corpus is repeated to make the large input: 2 GB."""

LONG = 16_000_000
"""Letters of the longest document."""

FLOOR = """
import sys, orjson
with open(sys.argv[1], "rb") as read, open(sys.argv[2], "wb") as write:
    for line in read:
        write.write(bytes(len(orjson.loads(line)["text"]) // 5 * 4))
"""
PEAK = """
import os, subprocess, sys, threading, time
process = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL)
most = 0
def tree(pid):
    try:
        kids = open(f"/proc/{pid}/task/{pid}/children").read().split()
        pss = open(f"/proc/{pid}/smaps_rollup").read().split("Pss:")[1].split()[0]
    except (OSError, IndexError):
        return 0
    return int(pss) + sum(map(tree, kids))
while process.poll() is None:
    most = max(most, tree(process.pid))
    time.sleep(0.02)
print(most / 1e3)
sys.exit(process.returncode)
"""


def figures() -> list[Figure]:
    """Throughput, memory and growth, each beside its goal.

    Raises UsageError without a checkout of upstream.
    """
    checkout = os.environ.get("MEGATRON_CHECKOUT")
    if not checkout:
        raise UsageError("no upstream to compare with", "MEGATRON_CHECKOUT=/path/to/Megatron-LM")
    with tempfile.TemporaryDirectory(prefix="launchpad-bench-") as name:
        folder = Path(name)
        text = _text(folder)
        found: list[Figure] = []
        for number, (corpus, (documents, size)) in enumerate(CORPORA.items()):
            path = _corpus(folder / f"{number}.jsonl", text, documents, size)
            found += _compared(corpus, path, folder, Path(checkout))
        _compare_chinese(folder, Path(checkout))
        return [*found, *_growth(folder / "0.jsonl", folder), *_lengths(text, folder)]


def _compare_chinese(folder: Path, checkout: Path) -> None:
    """The bytes alone, of the poems and sayings in Debian's fortunes-zh: 2 MB, too few to time."""
    packages.unpack(folder / "chinese", ["fortunes-zh"])
    files = sorted((folder / "chinese/usr/share/games/fortunes").iterdir())
    texts = [_opened(file).decode(errors="replace") for file in files if not file.suffix]
    path = _corpus(folder / "chinese.jsonl", "".join(texts), 5000, 300)
    timed(_upstream(checkout, path, folder / "theirs", 2))
    timed(_ours(path, folder / "ours"))
    _check_same("Chinese", folder)


def _opened(file: Path) -> bytes:
    content = file.read_bytes()
    return gzip.decompress(content) if file.suffix in (".gz", ".dz") else content


def _text(folder: Path) -> str:
    """The 41 MB of the GNU dictionary of English, from Debian's dict-gcide."""
    packages.unpack(folder / "debian", ["dict-gcide"])
    (path,) = (folder / "debian").rglob("gcide.dict.dz")
    return _opened(path).decode(errors="replace")


def _corpus(path: Path, text: str, documents: int, size: int) -> Path:
    """Cuttings of the text, of half to one and a half times `size` characters, the same always."""
    chance = random.Random(1)  # noqa: S311
    with path.open("w") as file:
        for _ in range(documents):
            at = chance.randrange(len(text) - 2 * size)
            cutting = text[at : at + chance.randrange(size // 2, size * 3 // 2)]
            file.write(json.dumps({"text": cutting}) + "\n")
    return path


def _ours(source: Path, prefix: Path, *more: str) -> list[str]:
    command = [sys.executable, "-m", "launcher", "data", "tokenize", str(source), *more]
    return [*command, "--output-prefix", str(prefix), "--append-eod"]


def _upstream(checkout: Path, source: Path, prefix: Path, workers: int) -> list[str]:
    vocab_file, merge_file = vocabulary.vocabulary_files(None, None)
    python = os.environ.get("MEGATRON_PYTHON", sys.executable)
    command = [python, str(checkout / "tools/preprocess_data.py"), "--input", str(source)]
    command += ["--output-prefix", str(prefix), "--tokenizer-type", "GPT2BPETokenizer"]
    command += ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
    return [*command, "--append-eod", "--workers", str(workers), "--log-interval", "1000000"]


def _compared(corpus: str, path: Path, folder: Path, checkout: Path) -> list[Figure]:
    cpus = len(os.sched_getaffinity(0))
    commands = {
        f"upstream, {workers} workers": _upstream(checkout, path, folder / "theirs", workers)
        for workers in (cpus, 2 * cpus)
    }
    commands["ours, 1 worker"] = _ours(path, folder / "ours", "--workers", "1")
    commands["ours"] = _ours(path, folder / "ours")
    commands["floor"] = [sys.executable, "-c", FLOOR, str(path), str(folder / "floor")]
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(TURNS):
        for name, command in commands.items():
            if turn == 0 or not name.startswith("upstream"):
                times[name].append(timed(command))
    taken = {name: statistics.median(seconds) for name, seconds in times.items()}
    print(corpus, {name: round(seconds, 2) for name, seconds in taken.items()}, flush=True)
    _check_same(corpus, folder)
    upstream = min(seconds for name, seconds in taken.items() if name.startswith("upstream"))
    return [
        Figure(f"tokenize, {corpus}, of upstream's time", 100 * taken["ours"] / upstream, 5, "%"),
        Figure(f"tokenize, {corpus}, of the floor's time", taken["ours"] / taken["floor"], 4, "x"),
        Figure(
            f"tokenize, {corpus}, of one worker's time",
            taken["ours"] / taken["ours, 1 worker"],
            1,
            "x",
        ),
        Figure(f"tokenize, {corpus}, peak", _peak(_ours(path, folder / "ours")), 400, "MB"),
    ]


def _check_same(corpus: str, folder: Path) -> None:
    for suffix in (".bin", ".idx"):
        theirs, ours = (folder / f"{one}_text_document{suffix}" for one in ("theirs", "ours"))
        if theirs.read_bytes() != ours.read_bytes():
            raise SystemExit(f"{corpus}: our {suffix} isn't upstream's")


def _peak(command: list[str]) -> float:
    """The most memory in MB of a command and its children, what they share counted once."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *command], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def _growth(path: Path, folder: Path) -> list[Figure]:
    """Time and memory of an input as it grows."""
    large = folder / "large.jsonl"
    with large.open("wb") as file:
        for _ in range(LARGE):
            with path.open("rb") as part:
                shutil.copyfileobj(part, file)
    small_time, large_time = (timed(_ours(one, folder / "ours")) for one in (path, large))
    small_peak, large_peak = (_peak(_ours(one, folder / "ours")) for one in (path, large))
    return [
        Figure(
            f"tokenize, {LARGE} times the input, of as many times",
            large_time / small_time / LARGE,
            1.1,
            "x",
        ),
        Figure(
            f"tokenize, {LARGE} times the input, peak of one's", large_peak / small_peak, 1.2, "x"
        ),
    ]


def _lengths(text: str, folder: Path) -> list[Figure]:
    """Time of one document as it grows: of real text, and of a single word."""
    chance = random.Random(2)  # noqa: S311
    letters = "".join(chance.choices(string.ascii_lowercase, k=LONG))
    found = []
    for name, content in {"document": text[:LONG], "word": letters}.items():
        seconds = []
        for length in (LONG // 8, LONG):
            path = folder / f"{name}-{length}.jsonl"
            path.write_text(json.dumps({"text": content[:length]}) + "\n")
            seconds.append(timed(_ours(path, folder / "ours")))
        short, long = seconds
        what = f"tokenize, a {name} of {LONG // 1_000_000} million letters, of 8 times an eighth's"
        found.append(Figure(what, long / short / 8, 1.1, "x"))
    return found
