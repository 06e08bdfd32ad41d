"""Reads a git checkout's releases for the options that arguments.json holds (a dev command).

`python3 -m tools.extract GITDIR core_v0.9.0 core_v0.10.0 …` rewrites arguments.json.
`python3 -m tools.extract --programs GITDIR core_v0.9.0 …` rewrites programs.json: which
series have which of upstream's programs, the scripts that run what they hold.

Nothing of Megatron is imported: names and choices are read from the syntax tree, and where a
release makes options of a dataclass (ArgumentGroupFactory, from 0.16 on) the fields of the class
and of its bases are followed through the imports. Options that depend on an installed package count
as there. Choices are what is written out: literals, Literal types, ranges, and the members of an
enumeration; an option whose choices are made in any other way takes all values here. A kind is what
an option takes: "flag" nothing, "int", "float" or "str" one value, "int 3", "str *", "str +" or
"int ?" as many as argparse's nargs says; a type that is made in any other way is "str".
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from launcher.agent.series import series_of
from launcher.runs.plan.program import PROGRAMS
from launcher.runs.plan.program_options import DATA

ARGUMENTS = "megatron.training.arguments"
EXTRA = ("megatron.post_training.arguments", "add_modelopt_args")


@dataclass(frozen=True)
class Field:
    """A dataclass field that becomes an option, and the module it is written in."""

    name: str
    node: ast.AnnAssign
    module: str


class Checkout:
    """The modules of one commit of a git directory."""

    def __init__(self, git_dir: Path, commit: str) -> None:
        self.git_dir = git_dir
        self.commit = commit
        self.module = cache(self._module)

    def text(self, path: str) -> str | None:
        """The file at `path`, or None where the commit has none."""
        command = ["git", "-C", str(self.git_dir), "show"]
        command += ["--end-of-options", f"{self.commit}:{path}"]
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
    found = set[str]()
    for module in _modules(checkout):
        tree, _ = checkout.module(module)
        found |= set(literal_options(tree))
        for field in _factory_fields(checkout, tree):
            found |= set(_field_options(field))
    return found


def choices_of(checkout: Checkout) -> dict[str, tuple[str, ...]]:
    """The values of every option that takes only some, as they are given on the command line."""
    found: dict[str, list[tuple[str, ...] | None]] = {}
    for module in _modules(checkout):
        tree, _ = checkout.module(module)
        for call in _calls(tree, "add_argument"):
            keywords = {str(k.arg): k.value for k in call.keywords}
            allowed = _literal_choices(checkout, module, keywords)
            for option in _names(call):
                found.setdefault(option, []).append(allowed)
        for field in _factory_fields(checkout, tree):
            for option in _field_options(field):
                found.setdefault(option, []).append(_field_choices(checkout, field))
    return {
        option: tuple(dict.fromkeys(value for allowed in several for value in allowed or ()))
        for option, several in found.items()
        if all(several)
    }


def kinds_of(checkout: Checkout) -> dict[str, str]:
    """What every option takes; an option that is added twice, with different kinds, is left out."""
    found: dict[str, set[str]] = {}
    for module in _modules(checkout):
        tree, _ = checkout.module(module)
        for call in _calls(tree, "add_argument"):
            keywords = {str(k.arg): k.value for k in call.keywords}
            for option in literal_options(call):
                found.setdefault(option, set()).add(_kind(keywords))
        for field in _factory_fields(checkout, tree):
            for option in _field_options(field):
                found.setdefault(option, set()).add(_field_kind(field))
    return {option: kinds.pop() for option, kinds in found.items() if len(kinds) == 1}


def _kind(keywords: dict[str, ast.expr]) -> str:
    """What an option takes that is added with these keywords."""
    action = ast.unparse(keywords["action"]) if "action" in keywords else ""
    if "store_" in action or "BooleanOptionalAction" in action:
        return "flag"
    kind = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    kind = kind if kind in ("int", "float") else "str"
    many = ast.literal_eval(keywords["nargs"]) if "nargs" in keywords else None
    return kind if many is None else f"{kind} {many}"


def _field_kind(field: Field) -> str:
    """What the options of a field take, by the rules of ArgumentGroupFactory."""
    keywords = _of_annotation(field.node.annotation) | _metadata(_field_keywords(field.node))
    return _kind(keywords)


def _of_annotation(annotation: ast.expr) -> dict[str, ast.expr]:
    """The keywords of add_argument that a field's type stands for."""
    if isinstance(annotation, ast.BinOp):  # X | None
        return _of_annotation(annotation.left)
    if isinstance(annotation, ast.Subscript):
        outer, inner = ast.unparse(annotation.value).rpartition(".")[2], annotation.slice
        first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
        if outer in ("Optional", "Union"):
            return _of_annotation(first)
        if outer in ("list", "List"):
            return _of_annotation(first) | {"nargs": ast.Constant("+")}
        if outer == "Literal":
            return {"type": ast.Name(type(ast.literal_eval(first)).__name__)}
    if ast.unparse(annotation) == "bool":
        return {"action": ast.Constant("store_true")}
    return {"type": annotation}


def _modules(checkout: Checkout) -> list[str]:
    """The modules that pretrain_gpt.py's parser is made by."""
    module, function = EXTRA
    extra = function in (checkout.text("pretrain_gpt.py") or "")
    return [ARGUMENTS, *([module] if extra else [])]


def literal_options(tree: ast.AST) -> Iterator[str]:
    """The option strings written out in calls of add_argument."""
    for call in _calls(tree, "add_argument"):
        for option in _names(call):
            yield option
            if any("BooleanOptionalAction" in ast.unparse(k.value) for k in call.keywords):
                yield f"--no-{option[2:]}"


def _names(call: ast.Call) -> list[str]:
    """The option strings of one call of add_argument."""
    words = [str(word.value) for word in call.args if isinstance(word, ast.Constant)]
    return [word for word in words if word.startswith("--")]


def _literal_choices(
    checkout: Checkout, module: str, keywords: dict[str, ast.expr]
) -> tuple[str, ...] | None:
    """The choices that add_argument is given, or None for any value."""
    made_of = keywords.get("choices")
    kind = ast.unparse(keywords["type"]) if "type" in keywords else "str"
    if made_of is None:
        return None
    if isinstance(made_of, ast.Call) and ast.unparse(made_of.func) == "list":
        name = ast.unparse(made_of.args[0])
        by_name = kind.startswith("lambda") and kind.partition(": ")[2].startswith(f"{name}[")
        return tuple(_members(checkout, module, name)) if by_name else None
    if isinstance(made_of, ast.ListComp) and kind == "str":
        name = ast.unparse(made_of.generators[0].iter)
        plain = ast.unparse(made_of.elt) == f"{ast.unparse(made_of.generators[0].target)}.value"
        return _texts(_members(checkout, module, name).values(), kind) if plain else None
    if isinstance(made_of, ast.Call) and ast.unparse(made_of.func) == "range":
        return _texts(range(*map(ast.literal_eval, made_of.args)), kind)
    return _texts(ast.literal_eval(made_of), kind)


def _texts(values: Iterable[object], kind: str) -> tuple[str, ...] | None:
    """The values as they are typed; None where the parser turns what is typed into another type."""
    known = {"str": str, "int": int}.get(kind)
    given = [value for value in values if value is not None]
    if known is None or not all(type(value) is known for value in given):
        return None
    return tuple(str(value) for value in given)


def _members(checkout: Checkout, module: str, name: str) -> dict[str, object]:
    """The members of an enumeration, name to value; {} for a class that is none."""
    found, _ = checkout.find_class(module, name)
    if not any("Enum" in ast.unparse(base) for base in found.bases):
        return {}
    return {
        ast.unparse(node.targets[0]): getattr(node.value, "value", None)
        for node in found.body
        if isinstance(node, ast.Assign)
    }


def _calls(tree: ast.AST, name: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if name in (called, getattr(node.func, "id", None)):
                yield node


def _factory_fields(checkout: Checkout, tree: ast.AST) -> Iterator[Field]:
    """The fields that calls of ArgumentGroupFactory(Class, exclude=…) make options of."""
    for call in _calls(tree, "ArgumentGroupFactory"):
        excluded: set[str] = set()
        for keyword in call.keywords:
            if keyword.arg == "exclude":
                excluded = set(ast.literal_eval(_value_of(tree, keyword.value)))
        fields = _fields(checkout, ARGUMENTS, ast.unparse(call.args[0]))
        yield from (field for name, field in fields.items() if name not in excluded)


def _value_of(tree: ast.AST, node: ast.expr) -> ast.expr:
    """The expression itself, or what is assigned to the name that it is."""
    if isinstance(node, ast.Name):
        for statement in ast.walk(tree):
            if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.id:
                return statement.value
    return node


def _fields(checkout: Checkout, module: str, name: str) -> dict[str, Field]:
    """The dataclass fields of a class and of its bases, a class before its bases."""
    found, home = checkout.find_class(module, name)
    fields = {
        node.target.id: Field(node.target.id, node, home)
        for node in found.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    for base in found.bases:
        if ast.unparse(base) not in ("object", "ABC"):
            fields = _fields(checkout, home, ast.unparse(base)) | fields
    return fields


def _field_options(field: Field) -> list[str]:
    """The option strings of one field, by the rules of ArgumentGroupFactory."""
    keywords = _field_keywords(field.node)
    init = keywords.get("init")
    if isinstance(init, ast.Constant) and init.value is False:
        return []
    named = _metadata(keywords).get("arg_names")
    if named is not None:
        return [str(name) for name in ast.literal_eval(named)]
    option = field.name.replace("_", "-")
    default = keywords.get("default")
    off = isinstance(default, ast.Constant) and default.value is False
    annotation = ast.unparse(field.node.annotation)
    if annotation in ("bool", "Optional[bool]", "bool | None") and not off:
        return [f"--no-{option}", f"--disable-{option}"]
    return [f"--{option}"]


def _field_choices(checkout: Checkout, field: Field) -> tuple[str, ...] | None:
    """The values that a field's type leaves; None for any, or where metadata has its own say."""
    if {"choices", "type", "action"} & _metadata(_field_keywords(field.node)).keys():
        return None
    for node in ast.walk(field.node.annotation):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            values = ast.literal_eval(node.slice)
            values = values if isinstance(values, tuple) else (values,)
            return _texts(values, type(values[0]).__name__)
    if isinstance(field.node.annotation, ast.Name):
        try:
            return tuple(_members(checkout, field.module, field.node.annotation.id)) or None
        except LookupError:  # a type of Python's or torch's
            return None
    return None


def _field_keywords(node: ast.AnnAssign) -> dict[str, ast.expr]:
    """What field(…) is given, or the plain default."""
    if isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith("field"):
        return {str(k.arg): k.value for k in node.value.keywords}
    return {"default": node.value} if node.value is not None else {}


def _metadata(keywords: dict[str, ast.expr]) -> dict[str, ast.expr]:
    """What a field's argparse_meta says."""
    metadata = keywords.get("metadata")
    for entry in ast.walk(metadata) if metadata is not None else ():
        if isinstance(entry, ast.Dict):
            named = _entries(entry)
            if "argparse_meta" in named and isinstance(named["argparse_meta"], ast.Dict):
                return _entries(named["argparse_meta"])
    return {}


def _entries(node: ast.Dict) -> dict[str, ast.expr]:
    pairs = zip(node.keys, node.values, strict=True)
    return {str(key.value): value for key, value in pairs if isinstance(key, ast.Constant)}


def upstreams(releases: dict[str, set[str]]) -> dict[str, object]:
    """Megatron's part of arguments.json: each option with the spans of releases that have it."""
    order = list(releases)
    options = {
        option: _spans([option in releases[name] for name in order], order)
        for option in sorted(set().union(*releases.values()))
    }
    return {"releases": order, "megatron": options}


def restricted(releases: dict[str, dict[str, tuple[str, ...]]]) -> dict[str, dict[str, str]]:
    """The choices of each option, 'a b c', with the spans of releases that have just these."""
    return spanned(
        {
            name: {option: " ".join(allowed) for option, allowed in choices.items()}
            for name, choices in releases.items()
        }
    )


def spanned(releases: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """What is said of each option, with the spans of releases of which just this is said."""
    order = list(releases)
    found: dict[str, dict[str, str]] = {}
    for option in set().union(*releases.values()):
        by_release = [releases[name].get(option) for name in order]
        found[option] = {
            said: _spans([one == said for one in by_release], order) for said in by_release if said
        }
    return found


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


def programs(git_dir: Path, tags: list[str]) -> dict[str, str]:
    """Upstream's programs by their paths, with the series that have each, oldest first."""
    folders = ["pretrain_*.py", "train_*.py", "examples/*.py", "tools/*.py"]
    found: dict[str, list[str]] = {}
    for tag in tags:
        command = ["git", "-C", str(git_dir), "grep", "-l", "__main__", tag, "--", *folders]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in listed.splitlines():
            found.setdefault(line.partition(":")[2], []).append(
                series_of(tag.removeprefix("core_v"))
            )
    return {path: " ".join(there) for path, there in found.items()}


def main(argv: list[str]) -> int:
    """Rewrite arguments.json from the tags given, oldest first.

    With --programs, rewrite programs.json.
    """
    if argv[:1] == ["--programs"]:
        text = json.dumps(programs(Path(argv[1]), argv[2:]), indent=0, sort_keys=True)
        PROGRAMS.write_text(f"{text}\n", encoding="utf-8")
        return 0
    git_dir, *tags = argv
    checkouts = {series_of(t.removeprefix("core_v")): Checkout(Path(git_dir), t) for t in tags}
    data = upstreams({name: options_of(checkout) for name, checkout in checkouts.items()})
    data["choices"] = restricted({name: choices_of(one) for name, one in checkouts.items()})
    data["kinds"] = spanned({name: kinds_of(one) for name, one in checkouts.items()})
    text = json.dumps(data, indent=0, sort_keys=True)
    DATA.write_text(f"{text}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
