"""Renders the Dockerfile of every row, and what it is built from: matrix and lock in, text out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import jinja2
import yaml

from launcher.base import files, owned
from launcher.base.errors import UsageError
from launcher.images.matrix.extras import extras_of
from launcher.images.matrix.locked import Lock
from launcher.images.matrix.matrix_file import patch_files
from launcher.images.matrix.recipe import Recipe, recipe
from launcher.images.matrix.schema import Matrix

HEADER = b"# Generated from "
LISTED = "# Generated from matrix.yaml, matrix.lock and patches/ by `make render`; do not edit.\n"
BEGIN = "<!-- images: written by `make render` -->"
END = "<!-- /images -->"


def dockerfile(matrix: Matrix, tag: str, template: str, extras: Sequence[str] = ()) -> str:
    """The Dockerfile of the row `tag` with these extras, from the text of Dockerfile.template."""
    row = matrix.rows[tag]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - a Dockerfile, not HTML
    )
    text = environment.from_string(template)
    added = extras_of(matrix, row, extras)
    return text.render(tag=tag, row=row, builder=matrix.builders[row.abi], extras=added)


def inputs(recipes: Sequence[Recipe], patches: Mapping[str, str]) -> str:
    """What a row is built from by default, as YAML: what its Dockerfile takes for granted.

    recipes: one for each of the row's platforms; patches: sha256 by name
    """
    first = recipes[0]
    named, locked = first.named.git, first.locked
    if first.kind == "sdist" and locked.sdist:
        source = {"sdist": f"megatron-core=={first.release}", "sha256": locked.sdist.sha256}
    else:
        assert locked.git is not None
        source = {"git": named.url, "commit": locked.git.commit, "tree": locked.git.tree}
    images = {name: image for one in recipes for name, image in one.images.items()}
    said = {
        "images": {name: one.digest if one else "not locked" for name, one in images.items()},
        "megatron": {"release": first.release, **source, "patches": dict(patches)},
        "interpreter": first.interpreter and first.interpreter.model_dump(),
        "extensions": {
            name: {path or ".": git.commit for path, git in {"": one.git, **one.submodules}.items()}
            for name, (_, one) in first.extensions.items()
        },
        "extras": [*first.extras.names],  # their lock is a file of its own
        "wheels": {
            one.platform: {group: [*pins] for group, pins in one.pins.items()} for one in recipes
        },
    }
    text = {part: value for part, value in said.items() if value}
    return LISTED + yaml.dump(text, Dumper=_PlainDumper, sort_keys=False, width=200)


class _PlainDumper(yaml.SafeDumper):
    """Writes a list in full where it stands again, not as a reference to the first."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def render_all(
    matrix: Matrix, lock: Lock, root: Path, beside: Path | None = None
) -> dict[Path, str]:
    """Every file `make render` writes below `root`, by its path.

    beside: the folder of the template and the patches, where it is another one. Raises UsageError
    where the lock lacks what a row needs.
    """
    beside = beside or root
    template = (beside / "Dockerfile.template").read_text(encoding="utf-8")
    files = {}
    for tag, row in matrix.rows.items():
        recipes = [recipe(matrix, lock, tag, platform=platform) for platform in row.platforms]
        patches = {
            f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest()
            for path in patch_files(beside, recipes[0].named)
        }
        files[root / "images" / tag / "Dockerfile"] = dockerfile(matrix, tag, template)
        files[root / "images" / tag / "inputs.yaml"] = inputs(recipes, patches)
    readme = root / "README.md"
    if readme.exists():
        files[readme] = between_markers(readme, table(matrix))
    return files


def between_markers(page: Path, content: str, begin: str = BEGIN, end: str = END) -> str:
    """The text of `page` with `content` between the two markers. Raises UsageError without them."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise UsageError(f"{page.name}: the lines {begin} and {end} must stand in it")
    return f"{before}{begin}\n\n{content}\n{end}{after}"


def write(rendered: dict[Path, str], root: Path) -> None:
    """Write the rendered files; in images/ what was rendered for a row that went is removed."""
    for path in drift(rendered, root):
        if path in rendered:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, rendered[path])
        elif path.read_bytes().startswith(HEADER):
            owned.remove_file(path.absolute(), root.absolute())
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
        "| tag | base | Python | torch | CUDA | Megatron | expected |",
        "|---|---|---|---|---|---|---|",
    ]
    for tag, row in matrix.rows.items():
        cells = [tag, f"`{row.base}`", row.python, row.torch, row.cuda or ""]
        status = "untried" if row.untried else row.expected or ""
        lines.append("| " + " | ".join([*cells, row.megatron, status]) + " |")
    return "\n".join(lines) + "\n"
