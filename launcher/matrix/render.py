"""Renders the Dockerfile of every row: matrix and template in, text out."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import jinja2

from launcher import files
from launcher.errors import UsageError
from launcher.matrix.schema import Matrix

HEADER = b"# Generated from Dockerfile.template"
BEGIN = "<!-- images: written by `make render` -->"
END = "<!-- /images -->"


def dockerfile(matrix: Matrix, tag: str, template: str) -> str:
    """The Dockerfile of the row `tag`, from the text of Dockerfile.template."""
    row = matrix.rows[tag]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - a Dockerfile, not HTML
    )
    text = environment.from_string(template)
    return text.render(tag=tag, row=row, builder=matrix.builders[row.abi])


def render_all(matrix: Matrix, root: Path) -> dict[Path, str]:
    """Every file `make render` writes below `root`, by its path."""
    template = (root / "Dockerfile.template").read_text(encoding="utf-8")
    files = {
        root / "images" / tag / "Dockerfile": dockerfile(matrix, tag, template)
        for tag in matrix.rows
    }
    readme = root / "README.md"
    if readme.exists():
        files[readme] = between_markers(readme.read_text(encoding="utf-8"), table(matrix))
    return files


def between_markers(text: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what stands between its two markers replaced by `content`."""
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UsageError(f"README.md: the lines {begin} and {end} must stand in it")
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def write(rendered: dict[Path, str], root: Path) -> None:
    """Write the rendered files; in images/ what was rendered for a row that went is removed."""
    for path in drift(rendered, root):
        if path in rendered:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, rendered[path])
        elif path.read_bytes().startswith(HEADER):
            files.remove_file(path.absolute(), root.absolute())
            with suppress(OSError):  # something else is in there
                path.parent.rmdir()


def drift(rendered: dict[Path, str], root: Path) -> list[Path]:
    """The paths whose text differs from what would be rendered, and the orphans in images/."""
    orphans = {path for path in (root / "images").rglob("*") if path.is_file()} - rendered.keys()
    changed = {
        path
        for path, text in rendered.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    return sorted(changed | orphans)


def table(matrix: Matrix) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| tag | base | OS | Python | torch | CUDA | Megatron | expected |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for tag, row in matrix.rows.items():
        cells = [tag, f"`{row.base}`", row.os, row.python, row.torch, row.cuda or ""]
        status = "untried" if row.untried else row.expected or ""
        lines.append("| " + " | ".join([*cells, row.megatron, status]) + " |")
    return "\n".join(lines) + "\n"
