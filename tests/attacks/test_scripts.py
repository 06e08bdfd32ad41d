"""Two hundred shell scripts, ours changed at random: each is read or refused, and soon."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from launcher.errors import LauncherError
from launcher.importing.shell_script import imported

from .conftest import bounded

SCRIPTS = sorted((Path(__file__).parents[1] / "importing/golden").glob("import-*.sh"))
IMAGES = {"24.10": ("0.9.0", "0.11.0"), "26.06": ("0.19.0",), "cpu": ("0.16.1",)}
ODD = [
    *("$A", "${A:-", "}", "$(", "$((", "))", "`", "'", '"', "\\", "<<E", "(", ")", "{", "&&", ";;"),
    *(
        "\n",
        "\r\n",
        "\x1b[2J",
        "é",
        "\u202e",
        "\ud800",
        "--",
        "--x=",
        "A=$A$A\n",
        "A+=($A ${A[@]})\n",
    ),
    *("if a; then\n", "fi\n", "for i in $A; do\n", "done\n", "f() {\n", "case $1 in\n", "esac\n"),
    *(
        'bash -c "',
        "eval ",
        "torchrun ",
        "python -m ",
        "#SBATCH --nodes=",
        "9" * 400,
        "0100",
        "[@]",
    ),
]


def changed(text: str, chance: random.Random) -> str:
    """The text with parts taken out, doubled, or put where they don't belong."""
    for _ in range(chance.randint(1, 8)):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        piece = text[at:to]
        text = chance.choice(
            [
                text[:at] + text[at + chance.randint(1, 20) :],
                text[:at] + chance.choice(ODD) * chance.choice([1, 1, 2, 40, 300]) + text[at:],
                text[:to] + piece + text[to:],
                text[:at] + piece[::-1] + text[to:],
            ]
        )
    return text


@pytest.mark.parametrize("number", range(200))
def test_any_script_is_read_or_refused(number: int) -> None:
    """Some took all memory, some the whole of Python's stack."""
    chance = random.Random(1300 + number)  # noqa: S311
    text = changed(chance.choice(SCRIPTS).read_text(encoding="utf-8"), chance)
    with bounded():
        try:
            done = imported(text, "a.sh", IMAGES, tag="24.10", bare={"cpu"}, positional=("x",))
        except LauncherError as error:
            assert str(error)
        else:
            assert done.text.startswith("# From a.sh")
