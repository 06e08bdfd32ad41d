"""Results that are committed: what README.md shows of them, and their page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.files import write as write_file
from launcher.matrix.render import between_markers
from launcher.trials import html, report
from launcher.trials.result import Result

RESULTS = "docs/compat.json"
PAGE = "docs/compat.html"
"""Where they are, and where their page is, below the folder of the matrix."""

BEGIN = "<!-- compat: written by `make render` -->"
END = "<!-- /compat -->"


def load(root: Path) -> list[Result]:
    """The results, none where there is no file of them."""
    path = root / RESULTS
    return report.from_json(path.read_text(encoding="utf-8"), RESULTS) if path.exists() else []


def merged(old: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """The old results with the new in place of those of the same cell on the same GPUs.

    An old one that was never asked what GPUs it had, as it failed before, makes way for any.
    """
    news = [*new]
    tried = {one.cell for one in news}
    stay = [one for one in old if one.on or one.cell not in tried]
    found = {(one.tag, one.megatron, one.on): one for one in [*stay, *news]}
    return sorted(found.values(), key=lambda one: (one.tag, _numbers(one.megatron), one.on))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def write(results: Iterable[Result], root: Path) -> Path:
    """Put results among those that are committed; the file."""
    path = root / RESULTS
    path.parent.mkdir(exist_ok=True)
    write_file(path, report.as_json(merged(load(root), results)))
    return path


def files(rendered: Mapping[Path, str], root: Path) -> dict[Path, str]:
    """README.md, as it is rendered so far, with the table of the results, and their page."""
    results, readme = load(root), root / "README.md"
    if not results or readme not in rendered:
        return {}
    shown = between_markers(rendered[readme], report.table(results), BEGIN, END)
    return {readme: shown, root / PAGE: html.as_html(results, "What was tried")}
