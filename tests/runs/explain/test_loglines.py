"""How lines of a log are read: their words without prefixes, and who says them."""

from __future__ import annotations

from launcher.runs.explain.loglines import MOST_PREFIXES, by_source, parse
from tests.tables import table


@table("line", "words", "source")
def test_a_line_is_read_without_what_stands_before_its_words(
    line: str, words: str, source: str
) -> None:
    """An anchored expression fitted no line of a rank, a node or a log with times."""
    found = parse(1, line)
    assert (found.text, found.source) == (words, source)


def test_a_line_of_prefixes_alone_ends() -> None:
    """What is all prefixes is prose, and costs no more than a few looks."""
    assert parse(1, "[rank1]: " * 99).text.startswith("[rank1]: ")
    assert parse(1, "[rank1]: " * MOST_PREFIXES).text == ""


@table("line", "speaker")
def test_who_says_a_line(line: str, speaker: str) -> None:
    assert parse(1, line).speaker == speaker


def test_the_lines_of_each_rank_come_together() -> None:
    """Tracebacks that ranks wrote at once, line by line, made one of nobody's."""
    lines = ["[rank0]: a", "[rank1]: x", "[rank0]: b", "[rank1]: y"]
    read = by_source([parse(number, line) for number, line in enumerate(lines, start=1)])
    assert [(line.number, line.text) for line in read] == [(1, "a"), (3, "b"), (2, "x"), (4, "y")]


def test_an_ignored_exception_of_a_rank_empties_no_line_of_another() -> None:
    """The only error of rank 1 was gone."""
    lines = [
        "[rank0]: Exception ignored in: <f>",
        "[rank1]: ValueError: no",
        "[rank0]: KeyError: 1",
    ]
    read = by_source([parse(number, line) for number, line in enumerate(lines, start=1)])
    assert [line.text for line in read] == ["Exception ignored in: <f>", "", "ValueError: no"]
    alone = by_source([parse(number, line) for number, line in enumerate(lines[:2], start=1)])
    assert alone[-1].text == "ValueError: no"
