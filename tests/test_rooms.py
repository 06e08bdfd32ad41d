"""The house as docs/ tell it: every module has a room, and imports go one way."""

from __future__ import annotations

import ast
import builtins
import pickle
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "launcher"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("\n## Files\n")[0]
LISTED = PAGE.partition("\n## Folders\n")[2]
ROWS = re.findall(r"^\| (`[a-z/]+`(?:, `[a-z/]+`)*) \| (.*) \|$", LISTED, re.MULTILINE)
ROOMS = [
    f"{room}{part}".strip("/").replace("/", ".")
    for names, contents in ROWS
    for room in re.findall(r"[a-z/]+", names)
    for part in (re.findall(r"`([a-z]+/)`", contents) if room == "images/" else [""])
]
ARGUMENTS = "trainer.gpt.arguments"
"""What of the trainer the rooms below it may import."""

LARGEST = {"modules": 16, "lines": 450}


def room_of(name: str) -> str:
    """The room that a module, or a name in one, stands in: "runs.plan"; "" for none."""
    return max((room for room in ROOMS if f"{name}.".startswith(f"{room}.")), key=len, default="")


@cache
def syntax(path: Path) -> ast.Module:
    """A module, parsed once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(path: Path) -> Iterator[str]:
    """What of launcher a module imports, wherever in it: "plan.job"."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("launcher"):
            within = (node.module or "").split(".")[1:]
            yield from (".".join([*within, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name[9:] for a in node.names if a.name.startswith("launcher."))


def modules() -> Iterator[tuple[str, Path]]:
    """Each module of a room, by its name: "runs.plan.job"."""
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        if path.parent != PACKAGE and path.name != "__init__.py":
            yield name, path


def test_every_module_is_in_a_room() -> None:
    assert not [name for name, _ in modules() if not room_of(name)]
    assert not [room for room in ROOMS if not any(room_of(name) == room for name, _ in modules())]


def test_imports_go_one_way() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, path in modules()
        for other in imported(path)
        if (room := room_of(other)) and ROOMS.index(room) > ROOMS.index(room_of(name))
    ]
    assert not wrong, wrong


def test_the_core_takes_its_list_of_arguments_from_the_trainer_and_nothing_else() -> None:
    """What starts runs would need torch, or each format that a tool reads."""
    core = ("base.", "agent.", "images.", "runs.")
    wrong = [
        f"{name} imports {other}"
        for name, path in modules()
        if name.startswith(core)
        for other in imported(path)
        if other.startswith(("trainer.", "tools.")) and not other.startswith(ARGUMENTS)
    ]
    assert not wrong, wrong


def test_what_travels_with_a_run_imports_what_travels_too() -> None:
    found = {
        ".".join(other.split(".")[: 2 if other.startswith("base") else 1])
        for name, path in modules()
        if name.startswith(("agent.", "trainer."))
        for other in imported(path)
    }
    assert found == {"agent", "trainer", "base.files", "base.owned"}


BUILDING = {f"launcher.images.{name}" for name in ("sources", "carry", "builder.context")}


@pytest.mark.parametrize(
    ("start", "heavy"),
    [
        # What reads metrics and traces was 44 of 517 ms of CPU for `stop`.
        ("launcher.api, launcher.runs.follow.supervise", {"launcher.runs.records.metrics"}),
        ("launcher.api, launcher.runs.records.recorded_runs", {"sqlite3"}),
        ("launcher.agent.runner", {"sqlite3"}),
        # The documents beside an image took all that builds one: a tenth of a launch.
        ("launcher.runs.follow.launch, launcher.images.builder.beside", BUILDING),
    ],
)
def test_a_run_stop_logs_and_a_node_start_without_what_they_do_not_use(
    start: str, heavy: set[str]
) -> None:
    code = f"import sys, {start}; print(*{heavy!r} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_no_circles_of_modules() -> None:
    """A circle makes two files one: neither can be read, tested or moved alone."""
    known = dict(modules())
    graph = {
        name: {
            next((other for other in (found, found.rpartition(".")[0]) if other in known), "")
            for found in imported(path)
        }
        - {"", name}
        for name, path in known.items()
    }
    with_parents = TopologicalSorter(graph)
    with_parents.prepare()  # raises CycleError


def test_rooms_stay_small() -> None:
    folders = [path.parent for _, path in modules()]
    assert {folder for folder in folders if folders.count(folder) > LARGEST["modules"]} == set()
    long = {n for n, path in modules() if path.read_text("utf-8").count("\n") > LARGEST["lines"]}
    assert long == {"images.builder.megatron_core_training_example"}  # it needs no other file


def types_of(path: Path) -> Iterator[str]:
    """The classes of a module, and what it calls a union, a tuple, a function's type or the like.

    A field's annotated type, as Annotated or Literal, is named as the field, and a TypeVar by none.
    """
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in syntax(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript | ast.BinOp):
            name, kind = ast.unparse(node.targets[0]), ast.unparse(node.value).split("[")[0]
            if re.fullmatch(r"[A-Z]+[a-z]\w*", name) and kind not in ("Annotated", "Literal"):
                yield name


def test_the_name_of_a_type_stands_once() -> None:
    """49 classes stood twice or more: seven were named Request; an alias was named as a class.

    The example script needs no other file.
    """
    example = ".megatron_core_training_example"
    names = [
        one for name, path in modules() if not name.endswith(example) for one in types_of(path)
    ]
    assert {name for name in names if names.count(name) > 1} == set()


ALSO_NAMED = {"__main__": "python3 -m starts the launcher, and the trainer"}
"""Module names that stand twice on purpose, and why."""


def test_a_module_name_stands_once() -> None:
    """38 stood twice or more: a reader of report.py, of four, opened the wrong one."""
    names = [path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    assert {name for name in names if names.count(name) > 1} == {*ALSO_NAMED}


def test_each_path_on_the_pages_for_developers_is_there() -> None:
    """Pages went on naming modules that had other names by then."""
    page = (ROOT / "docs/contributing.md").read_text(encoding="utf-8")
    named = re.findall(r"`launcher/([a-z_/.]+[a-z/])`", page)
    named += re.findall(r"`((?:agent|base|cli|images|runs|tools|trainer)/[a-z_/]+\.py)`", PAGE)
    assert [each for each in named if not (PACKAGE / each).exists()] == []
    assert len(named) > 60


def defined(path: Path) -> Iterator[str]:
    """The names that a module has, methods as Class.method; those of a folder's modules."""
    for module in path.rglob("*.py") if path.is_dir() else [path]:
        yield module.stem
        for node in syntax(module).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node]
            for one in targets:
                one = one.target if isinstance(one, ast.AnnAssign) else one
                yield str(getattr(one, "id", getattr(one, "name", "")))
            if isinstance(node, ast.ImportFrom):
                yield from (each.name for each in node.names)
            if isinstance(node, ast.ClassDef):
                methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
                yield from (f"{node.name}.{each.name}" for each in methods)


def named_on_the_pages() -> Iterator[tuple[str, list[Path]]]:
    """Each name on the developers' pages that stands beside paths, and these paths."""
    path = r"`(?:launcher/)?((?:agent|base|cli|images|runs|tools|trainer)/[a-z_/]*(?:\.py)?)`"
    name = r"`@?((?!NAME_|rows`)[A-Za-z_]\w*(?:\.(?!py`|json`|yaml`)[a-z]\w*)?)(?:\(\))?`"
    text = (ROOT / "docs/contributing.md").read_text("utf-8")
    text += (ROOT / "docs/architecture.md").read_text("utf-8")
    for line in re.findall(r"^\| [^|]* \| ([^|]*) \| [^|]* \|$", text, re.MULTILINE):
        paths = [PACKAGE / each for each in re.findall(path, line)]
        beside = [each.parent for each in paths if "there" in line or "beside" in line]
        for found in re.findall(name, line) if paths else ():
            yield found, [*paths, *beside]
    for found, where in re.findall(rf"{name} in\s+{path}", text):
        yield found, [PACKAGE / where]
    for found, where in re.findall(rf"^- \*\*(\w+)\*\* \({path}\)", text, re.MULTILINE):
        yield found, [PACKAGE / where]


def test_each_name_on_the_pages_for_developers_is_in_its_module() -> None:
    """A table of functions goes wrong when one is renamed or moved, and no other test reads it."""
    found = [*named_on_the_pages()]
    known = {path: {*defined(path)} for _, paths in found for path in paths}
    assert [one for one, paths in found if not any(one in known[path] for path in paths)] == []
    assert len(found) > 60


def test_programs_in_strings_import_what_is_there() -> None:
    """Tests that need torch handed old names to another Python, and the short run had no torch."""
    found = list[tuple[str, str]]()
    for folder in ("tests", "bench", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text("utf-8")
            for module, names in re.findall(r"^from (launcher[\w.]*) import (.+)", text, re.M):
                found += [(module, name) for name in re.findall(r"(?:^|, )(\w+)", names)]
    known = {module: _members(module) for module, _ in found}
    assert [(module, name) for module, name in found if name not in known[module]] == []
    assert len(found) > 1000


def _members(module: str) -> set[str]:
    """The words of a module or a package, whatever they name, and the latter's modules."""
    place = ROOT / module.replace(".", "/")
    file = place.with_suffix(".py") if place.with_suffix(".py").exists() else place / "__init__.py"
    beside = {each.stem for each in place.iterdir()} if place.is_dir() else set()
    return {*re.findall(r"\w+", file.read_text("utf-8"))} | beside


def test_what_a_docstring_raises_is_a_class() -> None:
    """Docstrings went on naming classes that had other names by then."""
    classes = {*dir(builtins), *dir(pickle), *dir(subprocess), *dir(tarfile)}
    named = list[tuple[str, str]]()
    for name, path in modules():
        for node in ast.walk(syntax(path)):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                classes |= {each.asname or each.name for each in node.names}
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                text = ast.get_docstring(node) or ""
                for found in re.findall(r"[Rr]aises? ((?:`?[A-Z]\w+`?(?:, | and | or )?)+)", text):
                    named += [(name, each) for each in re.findall(r"[A-Z]\w+", found)]
    assert not [(name, each) for name, each in named if each not in classes]
    assert len(named) > 300
