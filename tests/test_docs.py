"""README.md and docs/: plain sentences, tables made of the code, links and commands that hold."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from launcher import cli
from tests.conftest import missing
from tools import options

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LONGEST = 30  # words of a sentence
INVENTED = re.compile(r"\b(told|tells?|said|of it)\b", re.IGNORECASE)
"""Words that DESIGN's plain English replaces by the usual ones: warn, report, print, show."""
FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

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
    index = DOCS / "README.md"
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


NUMBER = r"\d[\d.,:]*(?:E[+-]\d+)?"
RUN_ID = r"\b[0-9a-f]{8}\b"
CONSOLE = [path for path in PAGES if "```console" in text_of(path)]


def shown(line: str) -> re.Pattern[str]:
    """What a line of a transcript may be at another time: … is anything, a number any other."""
    patterns = {"…": ".*", RUN_ID: RUN_ID, NUMBER: NUMBER, r"\s+": r"\s+"}
    parts = re.split(f"({'|'.join(patterns)})", line.strip())
    made = (next((to for of, to in patterns.items() if re.fullmatch(of, p)), "") for p in parts)
    return re.compile("".join(to or re.escape(part) for part, to in zip(parts, made, strict=True)))


def transcript(body: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a transcript, with the lines that are shown below it."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        yield command, [line for line in lines if line.strip() not in ("", "…")]


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment with the program `launcher` and this Python."""
    program = tmp_path / "bin/launcher"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m launcher "$@"\n')
    program.chmod(0o755)
    places = [program.parent, Path(sys.executable).parent, os.environ["PATH"]]
    return os.environ | {
        "PATH": os.pathsep.join(map(str, places)),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "LAUNCHER_RUNS": str(tmp_path / "runs"),
        "HOME": str(tmp_path),
    }


def call(command: str, folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """The exit code of a line of bash, and its output."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.long
@pytest.mark.megatron
@pytest.mark.skipif(bool(missing("torch", "megatron.core")), reason="no torch or megatron.core")
@pytest.mark.parametrize("path", CONSOLE, ids=lambda path: path.name)
def test_a_transcript_is_what_a_user_sees(
    path: Path, shell: dict[str, str], tmp_path: Path
) -> None:
    """A reader followed a page whose messages were those of an older version."""
    folder = tmp_path / "work"
    folder.mkdir()
    bodies = [body for language, body in FENCE.findall(text_of(path)) if language == "console"]
    for command, lines in (one for body in bodies for one in transcript(body)):
        code, output = call(command, folder, shell)
        assert code == 0 or lines[0].startswith("launcher: "), f"{command}\n{output}"
        for line in lines:  # ranks write at the same time, in no order
            found = (shown(line).match(one.strip()) for one in output.splitlines())
            assert any(found), f"{line}\n{output}"


@pytest.mark.long
def test_dry_runs_of_presets_and_plans_work_as_they_are_printed(
    shell: dict[str, str], tmp_path: Path
) -> None:
    """A page's first example ended with a usage error."""
    presets = {path.name for path in (ROOT / "launcher/presets").iterdir()}
    lines = {
        line
        for path in PAGES
        for line in commands(path)
        if {"--dry-run", "--plan"} & {*line.split()} and presets & {*line.split()}
        if "…" not in line and "num_attention_heads=3" not in line
    }
    assert len(lines) >= 3
    ended = {line: call(line, tmp_path, shell) for line in sorted(lines)}
    assert {line: done for line, done in ended.items() if done[0]} == {}


@pytest.mark.long
def test_the_site_builds_without_a_warning_and_asks_no_other_server(tmp_path: Path) -> None:
    """A broken link, a page in no list, or a font from elsewhere, which readers offline lack."""
    argv = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*argv, "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {path.stem: path.read_text("utf-8") for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in DOCS.glob("*.md")} - {"README"} <= {*pages}
    for name, page in pages.items():
        loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="([^"]+)"', page)
        assert not [one for one in loaded if re.match(r"(https?:)?//", one)], name
    assert "tokenize" in (tmp_path / "site/searchindex.js").read_text("utf-8")
