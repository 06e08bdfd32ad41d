"""Scripts changed at random: each is imported or refused in words, and soon."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from launcher.base.errors import LauncherError, UsageError
from launcher.tools.importing import sandbox
from launcher.tools.importing.from_script import import_script
from launcher.tools.importing.shell_script import Images
from tests.attacks import conftest as attacks

nothing_elsewhere_is_changed = attacks.nothing_elsewhere_is_changed

SCRIPTS = sorted((Path(__file__).parent / "golden").glob("import-*.sh"))
IMAGES = Images({"24.10": ("0.9.0", "0.11.0"), "26.06": ("0.19.0",)}, "24.10")
ODD = (
    *("$A", "${A:-", "}", "$(", "$((", "))", "`", "'", '"', "\\", "<<E", "(", ")", "{", "&&", ";;"),
    *("\n", "\r\n", "\x1b[2J", "é", "\u202e", "\ud800", "--", "--x=", "A=$A$A\n", "[@]", "0100"),
    *("if a; then\n", "fi\n", "for i in $A; do\n", "done\n", "f() {\n", "case $1 in\n", "esac\n"),
    *('bash -c "', "eval ", "torchrun ", "python -m ", "#SBATCH --nodes=", "9" * 400),
    "A+=($A ${A[@]})\n",
)


@pytest.mark.parametrize(
    "five", [0, 1, *(pytest.param(five, marks=pytest.mark.long) for five in range(2, 8))]
)
def test_a_shell_script(five: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts taken out, doubled, or put where they don't belong: some took all memory."""
    monkeypatch.setattr(sandbox, "SECONDS", 2)
    try:
        box = sandbox.find_sandbox()
    except UsageError as error:
        pytest.skip(str(error))
    for number in range(5 * five, 5 * five + 5):
        chance = random.Random(1300 + number)  # noqa: S311
        text = chance.choice(SCRIPTS).read_text(encoding="utf-8")
        for _ in range(chance.randint(1, 8)):
            at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
            odd = chance.choice(ODD) * chance.choice([1, 1, 2, 40, 300])
            less = text[:at] + text[at + chance.randint(1, 20) :]
            twice = (text[:to] + text[at:to] + text[to:], text[:at] + text[at:to][::-1] + text[to:])
            text = chance.choice([less, text[:at] + odd + text[at:], *twice])
        try:
            done = import_script(Path("a.sh"), text, IMAGES, box, arguments=("x",))
        except LauncherError as error:
            assert str(error), number
        else:
            assert done.text.startswith("# From a.sh"), number
