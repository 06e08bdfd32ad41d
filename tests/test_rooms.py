"""The house as docs/ tell it: every module has a room, imports go one way, pages are found."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "launcher"
ROOMS = [
    room
    for line in (ROOT / "docs/architecture.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
    for room in [re.findall(r"`([a-z_]+)(?:\.py|/)`", line.split("|")[1])]
    if room
]
ORDER = {name: place for place, room in enumerate(ROOMS) for name in room}


def imported(path: Path) -> Iterator[str]:
    """What of launcher a module imports, wherever in it: "plan.job"."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("launcher"):
            within = (node.module or "").split(".")[1:]
            yield from (".".join([*within, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name[9:] for a in node.names if a.name.startswith("launcher."))


def test_every_module_is_in_a_room() -> None:
    found = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    assert {name.removesuffix(".py") for name in found} - {"__init__", "__main__"} == set(ORDER)


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in PACKAGE.rglob("*.py")
        if (room := path.relative_to(PACKAGE).parts[0].removesuffix(".py")) in ORDER
        for name in imported(path)
        if ORDER.get(name.split(".")[0], 0) > ORDER[room]
    ]
    assert not wrong, wrong


def test_what_runs_inside_the_image_imports_what_goes_into_it() -> None:
    """Nothing of the launcher but its folder and `files.py` is there."""
    found = {
        name.split(".")[0] for path in (PACKAGE / "train").rglob("*.py") for name in imported(path)
    }
    assert found == {"train", "files"}


def test_every_page_is_in_the_index_and_every_link_leads_to_a_file() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    leads = {
        page: [
            (page.parent / link).resolve()
            for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8"))
        ]
        for page in pages
    }
    assert not [(page.name, str(to)) for page in pages for to in leads[page] if not to.exists()]
    assert {*pages[2:]} <= {*leads[ROOT / "docs/README.md"], ROOT / "docs/README.md"}


def test_the_tests_of_every_room_are_collected(request: pytest.FixtureRequest) -> None:
    """By itself pytest passes over a folder called build."""
    skipped = request.config.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert not [name for name in folders for pattern in skipped if fnmatch(name, pattern)]
