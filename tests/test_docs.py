"""README.md and docs/: plain sentences, tables made of the code, links and commands that hold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher import cli
from tools import options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
GENERATED = [DOCS / "failures.md"]
LONGEST = 30  # words of a sentence
INVENTED = re.compile(r"\b(told|tells?|said|of it)\b", re.IGNORECASE)
"""Words that DESIGN's plain English replaces by the usual ones: warn, report, print, show."""
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)


@cache
def text_of(path: Path) -> str:
    """A page's text."""
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """A page without its fences, tables, comments and addresses; `code` is one word."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("\n", text_of(path)), flags=re.DOTALL)
    text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]+`", "code", re.sub(r"\]\([^)]*\)", "]", text))
    return re.sub(r"[*\[\]]", "", text)


def sentences(path: Path) -> Iterator[str]:
    """The sentences of a page; a heading and an entry of a list end one, too."""
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-#]|\d+\.) )", prose(path)):
        yield from re.split(r"(?<=[.?!])\s+", " ".join(block.split()))


@each_page
def test_no_sentence_is_longer_than_thirty_words(path: Path) -> None:
    """They had grown to 60 words, which readers of English as a second language gave up."""
    long = [one for one in sentences(path) if len(re.findall(r"[^\W_][\w'’.-]*", one)) > LONGEST]
    assert long == []


@each_page
def test_words_are_the_usual_ones(path: Path) -> None:
    """A reader had to learn our own words for warn, report and print."""
    assert [one for one in sentences(path) if INVENTED.search(one)] == []


def test_the_front_page_stays_short() -> None:
    """It had 1,967 words, and nobody came to its end."""
    assert len(text_of(ROOT / "README.md").split()) <= 900


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_tables_are_those_of_the_code(path: Path) -> None:
    """They were written by hand, and a new option was missing there."""
    assert options.page(text_of(path)) == text_of(path), "python3 -m tools.options writes it"


def anchors(path: Path) -> set[str]:
    """What a link into a page may name, as GitHub and the site make it of the headings."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads} | {""}


def test_every_page_is_in_the_index_and_every_link_leads_somewhere() -> None:
    leads = {
        page: [
            ((page.parent / link).resolve() if link else page, anchor)
            for link, anchor in re.findall(
                r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", FENCE.sub("", text_of(page))
            )
        ]
        for page in PAGES
    }
    assert not [(page.name, str(to)) for page in PAGES for to, _ in leads[page] if not to.exists()]
    missing = [
        (page.name, to.name, anchor)
        for page in PAGES
        for to, anchor in leads[page]
        if to.suffix == ".md" and anchor not in anchors(to)
    ]
    assert not missing
    index = DOCS / "index.md"
    assert {*DOCS.glob("*.md")} <= {*(to for to, _ in leads[index]), index}


def commands(path: Path) -> Iterator[str]:
    """Each line of a page's shell blocks and transcripts that calls the launcher."""
    for language, body in FENCE.findall(text_of(path)):
        if language in ("sh", "console", "text"):
            for line in body.replace("\\\n", " ").splitlines():
                line = line.strip()
                if language != "sh" and not line.startswith("$ "):
                    continue
                for part in re.split(r"[;|] |<\(|\)$", line.removeprefix("$ ")):
                    words = part.split("  #")[0]
                    if re.match(r"(\w+=\S+ )*launcher \w", words):
                        yield words[words.index("launcher ") :]


def parsed(path: Path) -> int:
    """How many of a page's commands the real command line takes. Raises SystemExit for others."""
    count = 0
    for line in commands(path):
        argv = shlex.split(line.split(" > ")[0].split(" …")[0])[1:]
        if argv[0] in cli.WITH_REST and "--" in argv:
            argv = argv[: argv.index("--")]
        cli.parser(argv).parse_args(argv)
        count += 1
    return count


def test_the_command_line_takes_every_command_that_is_printed() -> None:
    """An option that was renamed stayed in the pages."""
    assert sum(map(parsed, PAGES)) > 80
