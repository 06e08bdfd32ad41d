"""The table of docs/models.md: which model trains with which release, in which layouts.

`python3 -m tools.trains 0.9.0=FOLDER 0.16.1=FOLDER …` trains all of tests/trainer/test_models.py on
the CPU with the `megatron` package of each folder, by a Python that has CPU torch and pytest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/models.md"
BEGIN, END = "<!-- trains: made by tools/trains.py -->\n", "<!-- /trains -->"
NAMES = {"sequence-parallel": "SP", "virtual": "VPP", "context": "CP", "expert": "EP"}
NAMES |= {"alltoall": "alltoall", "pipeline-model": "PP", "tensor-model": "TP"}


def short(layout: str) -> str:
    """'TP SP' of the options; 'DP' of none."""
    words = [name for word, name in NAMES.items() if word in layout]
    if "VPP" in words:
        words.remove("PP")
    return "+".join(sorted(words, key=list(NAMES.values()).index, reverse=True)) or "DP"


def cell(layouts: dict[str, str]) -> str:
    """'yes', or what isn't: the layouts that the release lacks, and those whose losses differ."""
    lacks = [short(x) for x, why in layouts.items() if "needs Megatron-Core" in why]
    wrong = [short(x) for x, why in layouts.items() if why and short(x) not in lacks]
    if len(lacks) == len(layouts):
        return "no"
    told = [f"not {', '.join(lacks)}"] if lacks else []
    return "; ".join([*told, *(f"differs: {x}" for x in wrong)]) or "yes"


def table(releases: dict[str, str]) -> Iterable[str]:
    """The lines of the table."""
    from tests.trainer import test_models

    found = {}
    for release, folder in releases.items():
        os.environ["PYTHONPATH"] = folder
        found[release] = test_models.compared(test_models.ALL)
        print(release, found[release], flush=True)
    yield f"| two ranks | layouts | {' | '.join(releases)} |"
    yield "|---|---|" + "---|" * len(releases)
    for model, (_, layouts) in test_models.ALL.items():
        tried = ", ".join(dict.fromkeys(["DP", *map(short, layouts)]))
        cells = (cell(found[release][model]) for release in releases)
        yield f"| {model} | {tried} | {' | '.join(cells)} |"


def main(argv: list[str]) -> int:
    """Train, and write the table between its marks."""
    lines = table(dict(word.split("=", 1) for word in argv))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    text = "".join(f"{line}\n" for line in lines)
    PAGE.write_text(before + BEGIN + text + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
