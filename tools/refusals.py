"""Writes where Megatron raises which message: `python3 -m tools.refusals CHECKOUT [TAG ...]`.

Of each tag, or of a checkout or unpacked sdist as it stands, every message that is raised or
asserted is read from the source: its fixed words as hashes, its module and function, and the
options that its condition names. launcher/runs/explain/refusals.json is written anew.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.runs.explain.refusals import INDEX, LONGEST_RUN, WORD, key

HOLE = "\0"
"""What stands for a value in a message."""

FILLED = re.compile(r"%[-+ #0-9.]*[sdifrgx]|\{[^{}]*\}")
OWNERS = ("args", "self", "config", "cfg", "model_config", "transformer_config")
MOST_OPTIONS = 4
FEWEST_WORDS = 5  # of a message; fewer stand in other programs' messages too


def runs(text: str, hole: str) -> list[list[str]]:
    """The words of a message between its values, [] for one with too few; `hole` is a value.

    A word that touches a value is a part of one, and no fixed word.
    """
    found = list[list[str]]()
    for index, part in enumerate(parts := text.split(hole)):
        cut = re.sub(r"^[\w-]+", "", part) if index else part
        cut = re.sub(r"[\w-]+$", "", cut) if index < len(parts) - 1 else cut
        if words := [word.lower() for word in WORD.findall(cut)]:
            found.append(words[:LONGEST_RUN])
    return found if sum(map(len, found)) >= FEWEST_WORDS else []


def message(node: ast.expr | None) -> str:
    """The text of a message, with HOLE where a value stands; "" for what isn't a text."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(message(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return message(node.left) + message(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return FILLED.sub(HOLE, message(node.left))
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr == "format":
        return FILLED.sub(HOLE, message(called.value))
    return HOLE if node is not None else ""


def options(nodes: list[ast.expr]) -> list[str]:
    """The options that expressions name, as attributes of what holds them."""
    found = [
        part.attr
        for node in nodes
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id in OWNERS
    ]
    return list(dict.fromkeys(found))[:MOST_OPTIONS]


def refusals(
    node: ast.AST, name: str, tests: tuple[ast.expr, ...] = ()
) -> Iterator[tuple[str, str, list[str]]]:
    """Function, message and options of what is raised under a node; `tests` lead to it."""
    for child in ast.iter_child_nodes(node):
        inner, led = name, tests
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = child.name
        elif isinstance(child, ast.If):
            led = (*tests, child.test)
        elif isinstance(child, ast.Assert) and child.msg is not None:
            yield name, message(child.msg), options([child.test, *tests[-1:]])
        elif isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call) and child.exc.args:
            yield name, message(child.exc.args[0]), options(list(tests[-2:]))
        yield from refusals(child, inner, led)


def sources(checkout: Path, tag: str) -> Iterator[tuple[str, str]]:
    """The path and text of each module of Megatron, of a tag or as the files are."""
    if not tag:
        for path in sorted(checkout.glob("megatron/**/*.py")):
            yield path.relative_to(checkout).as_posix(), path.read_text(encoding="utf-8")
        return
    command = ["git", "-C", str(checkout), "archive", tag, "megatron"]
    packed = subprocess.run(command, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)):
                yield member.name, file.read().decode()


def release(modules: dict[str, str]) -> str:
    """The release that a source says it is of."""
    text = modules["megatron/core/package_info.py"]
    return ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))


def index(releases: dict[str, dict[str, str]]) -> dict[str, Any]:
    """The messages of all releases, oldest release first, as refusals.json has them."""
    places, names = dict[str, int](), dict[str, int]()
    found: dict[str, list[Any]] = {}
    for number, modules in enumerate(releases.values()):
        for path, text in modules.items():
            for function, said, named in refusals(ast.parse(text), ""):
                if parts := runs(said, HOLE):
                    place = places.setdefault(f"{path} {function}", len(places))
                    of = [names.setdefault(name, len(names)) for name in named]
                    made = [number, number, place, of]
                    found.setdefault(".".join(map(key, parts)), made)[1] = number
    return {
        "releases": list(releases),
        "places": list(places),
        "options": list(names),
        "messages": found,
    }


def main() -> int:
    """Write the index; 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tags", nargs="*", metavar="TAG")
    given = parser.parse_args()
    read = [dict(sources(given.checkout, tag)) for tag in given.tags or [""]]
    made = index({release(modules): modules for modules in read})
    INDEX.write_text(json.dumps(made, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(made['messages'])} messages of {', '.join(made['releases'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
