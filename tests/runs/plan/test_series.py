"""What series of Megatron do differently, by the names of facts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from launcher.agent import compat, series
from launcher.runs.plan import needs, program_options, rules
from launcher.tools.data import tokenizers

PACKAGE = Path(series.__file__).parents[1]


def asked() -> set[str]:
    """The facts that the code goes by."""
    found = {rule.fact for rule in (*rules.RULES, *rules.IGNORED)}
    found |= {fact for facts in tokenizers.RULES.values() for fact in facts}
    found |= {fact for _, fact in compat.NEEDED.values()} | {*compat.CHOICES_NEEDED.values()}
    found |= {compat.OVER_CONTEXT, compat.VIRTUAL_ON_CPU, compat.TORCH_SHARES}
    found |= {rule.fact for rule in needs.table()}
    for text in (path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(text)) if "has(" in text else ():
            name = getattr(getattr(node, "func", None), "attr", "") or getattr(
                getattr(node, "func", None), "id", ""
            )
            if isinstance(node, ast.Call) and name == "has" and len(node.args) == 2:
                of, fact = node.args  # of options, both are constants
                if isinstance(fact, ast.Constant) and not isinstance(of, ast.Constant):
                    found.add(fact.value)
    return found - {""}


def test_every_fact_is_asked_for_and_every_fact_that_is_asked_for_is_there() -> None:
    """A fact by another name would hold of no series, or of all."""
    told = {fact for name in series.known() for fact in series._files()[name].get("begins", ())}
    assert told == asked()


def test_a_series_ends_what_one_before_it_began_and_comes_after_it() -> None:
    before, now = "", frozenset[str]()
    for name in series.known():
        said = series._files()[name]
        assert said["after"] == before
        assert now >= {*said.get("ends", ())}
        assert not now - {*said.get("ends", ())} & {*said.get("begins", ())}
        before, now = name, series._facts()[name]


def test_options_and_facts_are_of_the_same_series() -> None:
    assert series.known() == [*program_options.table().releases]


@pytest.mark.parametrize(
    ("release", "holds"),
    [("0.9.0", True), ("0.16.1+abc", True), ("0.17.0", False), ("0.31.0", False), (None, False)],
)
def test_a_fact_holds_from_its_series_to_the_one_that_ends_it(
    release: str | None, holds: bool
) -> None:
    assert series.has(release, "vocabulary files are needed") == holds
    with pytest.raises(KeyError):
        series.has(release, "vocabulary files")
