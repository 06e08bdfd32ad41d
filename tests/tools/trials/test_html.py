"""The page as text: one file that names no other, and steps, times and links told rightly."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.tools.pages import page
from launcher.tools.trials import html
from launcher.tools.trials.result import ORDER, STAGES, WHILE, CellResult
from tests.tools.trials.samples import RESULTS, SECONDS, result

VOID = {"meta", "link", "input", "br"}


class Read(HTMLParser):
    """What a page is made of: each element's name and attributes, its ids, and where they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, name: str) -> list[str]:
        """Every value of an attribute."""
        return [one[name] or "" for _, one in self.elements if name in one]


def style() -> str:
    """The style of the page."""
    files = page.SHARED / "style.css", html.PARTS / "page.css"
    return "".join(file.read_text(encoding="utf-8") for file in files)


def test_it_is_well_nested_and_names_nothing_outside() -> None:
    assert "Nothing was tried." in html.as_html([])
    shown = html.as_html(RESULTS)
    assert shown == html.as_html(RESULTS)
    read = Read(shown)
    assert read.open == []
    assert not {"img", "iframe", "object", "form", "base"} & {tag for tag, _ in read.elements}
    assert read.all("src") == []
    assert {one for one in read.all("href") if not one.startswith("#")} == {"data:,"}
    assert not [name for _, one in read.elements for name in one if name.startswith("on")]
    assert read.all("style") == []
    assert not re.search(r"@import|url\(", style())


def test_every_link_leads_somewhere_and_no_id_is_there_twice() -> None:
    read = Read(html.as_html([*RESULTS, RESULTS[0]]))
    ids = read.all("id")
    assert len(ids) == len(set(ids))
    assert {"24.02-0.9.0", "24.02-0.9.0-2"} <= set(ids)
    assert {one[1:] for one in read.all("href") if one.startswith("#")} <= set(ids)
    assert set(read.all("data-cell")) <= set(ids)
    assert set(read.all("aria-labelledby")) <= set(ids)


def test_the_policy_lets_in_the_pages_own_script_and_style_alone() -> None:
    page = html.as_html(RESULTS)
    policy = Read(page).all("content")[0]
    assert policy.startswith("default-src 'none';")
    for kind, name in (("style", "style"), ("script", "script")):
        (text,) = re.findall(f"<{name}>(.*?)</{name}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy


@given(st.text(), st.text(), st.text(), st.lists(st.text(), max_size=3))
def test_no_text_changes_what_the_page_is_made_of(
    reason: str, warning: str, fact: str, tail: list[str]
) -> None:
    read = Read(told(reason or "r", warning, fact or "f", "t", *tail))
    assert [tag for tag, _ in read.elements] == SHAPE
    assert read.open == []


def told(reason: str, warning: str, fact: str, *tail: str) -> str:
    """The page of a cell that failed and told that."""
    facts = {"torch": {"value": fact, "error": "", "warnings": (warning,)}}
    more = {"reason": reason, "warnings": (warning,), "facts": facts, "tail": tail}
    return html.as_html([CellResult("24.10", "0.9.0", "k", "fails", "runs", "train", **more)])


SHAPE = [tag for tag, _ in Read(told("r", "w", "f", "t")).elements]


def test_what_packages_warned_of_is_told_once_and_apart() -> None:
    fact = {"value": "1", "error": "", "warnings": ["UserWarning: x", "UserWarning: y"]}
    one = result("24.10", "runs", facts={"torch": fact, "training": fact})
    assert html.CellCard("x", one).asides == ["UserWarning: x", "UserWarning: y"]
    page = html.as_html([one])
    assert page.count("UserWarning: x\nUserWarning: y") == 1
    assert "<h3>Warnings</h3>" not in page


@pytest.mark.parametrize(
    ("verdict", "stage", "reason", "states"),
    [
        ("runs", "", "", "ddddddd"),
        ("runs with warnings", "", "", "ddddddd"),
        ("imports", "", "", "dddddll"),
        ("builds", "", "", "ddddlll"),
        ("fails", "pull", "no such host", "fllllll"),
        ("fails", "compile", "no g++", "dddflll"),
        ("fails", "checkpoint", "entrypoint: exit code 1", "ddddddf"),
        ("fails", "time limit", f"90 s{WHILE}train", "dddddfl"),
        ("fails", "disk budget", f"its images take too much{WHILE}pull", "fllllll"),
        ("fails", "disk budget", "its images take too much", "lllllll"),
    ],
)
def test_the_steps_say_how_far_it_came(verdict: str, stage: str, reason: str, states: str) -> None:
    """Whatever it took time for: a source is fetched before a base is pulled."""
    card = html.CellCard("x", result("24.10", verdict, stage=stage, reason=reason))
    assert [step for step, _ in card.steps] == list(html.STEPS)
    assert "".join(state[0] for _, state in card.steps) == states
    shuffled = dict(sorted(SECONDS.items()))
    timed = html.CellCard("x", result("24.10", "runs", seconds=shuffled))
    assert timed.times == [*SECONDS.items()] != [*shuffled.items()]


def test_every_verdict_and_stage_has_its_look_and_its_meaning() -> None:
    assert set(html.KINDS) == set(ORDER)
    page = html.as_html(RESULTS)
    assert all(f"<dt>fails: {stage}</dt>" in page for stage in STAGES)
    assert all(f".{kind} {{ --ink" in style() for kind in {*html.SIGNS})
    for name in re.findall(r"var\((--[a-z-]+)", style()):
        assert f"{name}:" in style(), name
