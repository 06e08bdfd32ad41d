"""Reads a git checkout's releases for the option names that arguments.json holds (a dev command).

`python3 -m launcher.run.extract GITDIR core_v0.9.0 core_v0.10.0 …` rewrites arguments.json; without
arguments, only the part on our own program, after its parser has changed.

Nothing of Megatron is imported: the names are read from the syntax tree, and where a release makes
options out of a dataclass (ArgumentGroupFactory, from 0.16 on) the fields of the class and of its
bases are followed through the imports. Options that depend on an installed package count as there.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from launcher.run.arguments import DATA, series
from launcher.train.arguments import parser

ARGUMENTS = "megatron.training.arguments"
EXTRA = ("megatron.post_training.arguments", "add_modelopt_args")


class Checkout:
    """The modules of one commit of a git directory."""

    def __init__(self, git_dir: Path, commit: str) -> None:
        self.git_dir = git_dir
        self.commit = commit
        self.module = cache(self._module)

    def text(self, path: str) -> str | None:
        """The file at `path`, or None where the commit has none."""
        command = ["git", "-C", str(self.git_dir), "show", f"{self.commit}:{path}"]
        shown = subprocess.run(command, capture_output=True, text=True)
        return shown.stdout if shown.returncode == 0 else None

    def _module(self, name: str) -> tuple[ast.Module, str]:
        """The syntax tree of the module `name`, and the package that its imports start from."""
        stem = name.replace(".", "/")
        for path, package in (
            (f"{stem}.py", name.rpartition(".")[0]),
            (f"{stem}/__init__.py", name),
        ):
            text = self.text(path)
            if text is not None:
                return ast.parse(text), package
        raise LookupError(f"{self.commit} has no module {name}")

    def find_class(self, module: str, name: str) -> tuple[ast.ClassDef, str]:
        """The class that `name` means in `module`, and the module it is written in."""
        tree, package = self.module(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return node, module
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self.find_class(_absolute(node, package), alias.name)
        raise LookupError(f"{self.commit}: {module} has no class {name}")


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The full name of the module that an import statement in `package` names."""
    if not node.level:
        return node.module or ""
    parent = PurePosixPath(*package.split("."))
    for _ in range(node.level - 1):
        parent = parent.parent
    return ".".join([*parent.parts, *([node.module] if node.module else [])])


def options_of(checkout: Checkout) -> set[str]:
    """Every option string that pretrain_gpt.py of this release may take."""
    tree, _ = checkout.module(ARGUMENTS)
    found = set(literal_options(tree))
    for call in _calls(tree, "ArgumentGroupFactory"):
        found |= set(_factory_options(checkout, tree, call))
    module, function = EXTRA
    if function in (checkout.text("pretrain_gpt.py") or ""):
        found |= set(literal_options(checkout.module(module)[0]))
    return found


def literal_options(tree: ast.AST) -> Iterator[str]:
    """The option strings written out in calls of add_argument."""
    for call in _calls(tree, "add_argument"):
        for argument in call.args:
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                yield str(argument.value)
                if any("BooleanOptionalAction" in ast.unparse(k.value) for k in call.keywords):
                    yield f"--no-{str(argument.value)[2:]}"


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if name in (called, getattr(node.func, "id", None)):
                yield node


def _factory_options(checkout: Checkout, tree: ast.AST, call: ast.Call) -> Iterator[str]:
    """The options that ArgumentGroupFactory(Class, exclude=…) makes."""
    excluded: set[str] = set()
    for keyword in call.keywords:
        if keyword.arg == "exclude":
            excluded = set(ast.literal_eval(_value_of(tree, keyword.value)))
    name = ast.unparse(call.args[0])
    for field, node in _fields(checkout, ARGUMENTS, name).items():
        if field not in excluded:
            yield from _field_options(field, node)


def _value_of(tree: ast.AST, node: ast.expr) -> ast.expr:
    """The expression itself, or what is assigned to the name that it is."""
    if isinstance(node, ast.Name):
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                return statement.value
    return node


def _fields(checkout: Checkout, module: str, name: str) -> dict[str, ast.AnnAssign]:
    """The dataclass fields of a class and of its bases, a class before its bases."""
    found, home = checkout.find_class(module, name)
    fields = {
        node.target.id: node
        for node in found.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    for base in found.bases:
        if ast.unparse(base) not in ("object", "ABC"):
            fields = _fields(checkout, home, ast.unparse(base)) | fields
    return fields


def _field_options(name: str, node: ast.AnnAssign) -> list[str]:
    """The option strings of one field, by the rules of ArgumentGroupFactory."""
    keywords = _field_keywords(node)
    init = keywords.get("init")
    if isinstance(init, ast.Constant) and init.value is False:
        return []
    names = _named_in_metadata(keywords.get("metadata"))
    if names:
        return names
    option = name.replace("_", "-")
    default = keywords.get("default")
    off = isinstance(default, ast.Constant) and default.value is False
    annotation = ast.unparse(node.annotation)
    if annotation in ("bool", "Optional[bool]", "bool | None") and not off:
        return [f"--no-{option}", f"--disable-{option}"]
    return [f"--{option}"]


def _field_keywords(node: ast.AnnAssign) -> dict[str, ast.expr]:
    """What field(…) is given, or the plain default."""
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("field"):
        return {str(k.arg): k.value for k in node.value.keywords}
    return {"default": node.value} if node.value is not None else {}


def _named_in_metadata(node: ast.expr | None) -> list[str]:
    """The arg_names of a field's argparse_meta."""
    for entry in ast.walk(node) if node is not None else ():
        if isinstance(entry, ast.Dict):
            for key, value in zip(entry.keys, entry.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "arg_names":
                    return [str(name) for name in ast.literal_eval(value)]
    return []


def upstreams(releases: dict[str, set[str]]) -> dict[str, object]:
    """Megatron's part of arguments.json: each option with the spans of releases that have it."""
    order = list(releases)
    options = {
        option: _spans([option in releases[name] for name in order], order)
        for option in sorted(set().union(*releases.values()))
    }
    return {"releases": order, "megatron": options}


def ours() -> dict[str, object]:
    """Our own program's part: its options, and which of them must be given."""
    actions = [action for action in parser()._actions if action.dest != "help"]
    required = [action.option_strings[-1] for action in actions if action.required]
    options = [action.option_strings[-1] for action in actions]
    return {"gpt": sorted(options), "gpt_required": sorted(required)}


def _spans(present: list[bool], order: list[str]) -> str:
    """'0.11-' for an option that came with 0.11 and stayed, '0.9-0.12' for one that went."""
    spans, start = [], None
    for index, there in enumerate([*present, False]):
        if there and start is None:
            start = index
        elif not there and start is not None:
            until = "" if index == len(order) else order[index - 1]
            spans.append(f"{order[start]}-{until}")
            start = None
    return ",".join(spans)


def main(argv: list[str]) -> int:
    """Rewrite arguments.json: our part, and Megatron's from the tags given, oldest first."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    if argv:
        git_dir, *tags = argv
        checkouts = {series(t.removeprefix("core_v")): Checkout(Path(git_dir), t) for t in tags}
        data = upstreams({name: options_of(checkout) for name, checkout in checkouts.items()})
    text = json.dumps(data | ours(), indent=0, sort_keys=True)
    DATA.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
