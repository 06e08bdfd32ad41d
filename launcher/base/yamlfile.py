"""Reads a YAML file into a strict pydantic model; errors give file, line, key and reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import yaml

from launcher.base import screen
from launcher.base.errors import UsageError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)
    Secret = Callable[[str, object], bool]


class PortableDumper(yaml.SafeDumper):
    """Writes for readers of YAML 1.2: no anchors, and what looks like a number to them quoted.

    To them 1e-05 is one, and 29107e04, which an id may be; PyYAML reads and writes 1.1.
    """

    def ignore_aliases(self, data: Any) -> bool:
        """No anchor, however often something stands."""
        return True

    def a_text(self, text: str) -> yaml.Node:
        """A text, with what no reader should see as it is escaped."""
        quoted = "'" if re.fullmatch(r"[-+.]?\d[\da-fA-FxXoO_.,:+-]*", text) else None
        if re.search(r"[\x00-\x1f\x7f-\xa0\u2028\u2029\ufeff]", text):
            quoted = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=quoted)


PortableDumper.add_representer(str, PortableDumper.a_text)


def dump(value: object, **how: Any) -> str:
    """`value` as YAML that any reader takes alike, keys in their order; `how`: yaml.dump's own."""
    how = {"sort_keys": False, "allow_unicode": True} | how
    return str(yaml.dump(value, Dumper=PortableDumper, **how))


def inline(value: object) -> str:
    """`value` as YAML that may stand anywhere in a line of a file, within brackets too."""
    return dump([value], default_flow_style=True, width=float("inf"))[1:-2]


Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEEPEST = 50
"""Levels of nesting, far more than any file of ours has; libyaml crashes at about 50,000."""
MOST_VALUES = 20_000
"""Values once aliases are followed; a few lines of aliases can stand for billions."""
MOST_BYTES = 16 << 20
"""Of a file that people write; a device has no end."""
MOST_FAULTS = 20
LONGEST = 100
SURPRISES = (
    ("bool", "(?i:yes|no|on|off)$", "yes, no, on or off for true or false", "Write true or false"),
    ("timestamp", "", "this for a date", "Write a number"),
    ("int float", ".*_", "a number without its _", "Write its digits alone"),
    ("int", "[-+]?0b", "a number that begins with 0b for a binary one", "Write it in decimals"),
    ("int", "[-+]?0[0-7]", "a number that begins with 0 for an octal one", "Drop that 0"),
    ("int", r"[-+]?\w{19}", "this for a number of 19 digits or more", "Write a smaller one"),
)
"""What YAML 1.1 makes of plain words and 1.2 doesn't: types, how they begin, what, the cure."""
TEXT = "tag:yaml.org,2002:str"
UNREADABLE = (ValueError, LookupError, AttributeError, ArithmeticError, TypeError)
"""What PyYAML's constructor raises, next to its own errors, for `!!bool x` and the like."""


class SurpriseError(UsageError):
    """A plain word that YAML takes for something else than it says: for `what`."""

    def __init__(self, place: str, what: str, remedy: str) -> None:
        super().__init__(f"{place}: {what}", remedy)
        self.what = what


class KeyFault(ValueError):
    """What a validator of a whole model raises to name the key below it that is wrong."""

    def __init__(self, where: tuple[str | int, ...], reason: str) -> None:
        super().__init__(reason)
        self.where = where


def load(path: Path, model: type[Model]) -> Model:
    """The file at `path` as `model`. Raises UsageError where it can't be read or doesn't fit."""
    return parse(read(path, str(path)), model, name=str(path))


def read(path: Path, name: str) -> str:
    """The text of the file at `path`, which messages call `name`. Raises UsageError."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{name}: can't be read: {reason}") from error
    if len(raw) > MOST_BYTES:
        raise UsageError(f"{name}: has over {MOST_BYTES >> 20} MB, which nobody wrote by hand")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{name}:{line}: can't be read: not UTF-8 text (byte 0x{raw[error.start]:02x})"
        ) from error


def parse(text: str, model: type[Model], name: str) -> Model:
    """Validate `text` as `model`; `name` stands for the file in messages."""
    return validate(tree(text, name), model, name)


def validate(
    root: yaml.Node | None, model: type[Model], name: str, secret: Secret = lambda key, value: False
) -> Model:
    """The model of the tree of a file. Raises UsageError with a line for each fault.

    A value that is `secret`, by its dotted key or itself, isn't shown.
    """
    from pydantic import ValidationError

    if root is None:
        raise UsageError(f"{name}:1: the file is empty")
    data = value(root, name)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UsageError(describe(error, root, name, model, secret)) from error


def tree(text: str, name: str) -> yaml.Node | None:
    """The nodes of `text`, None for an empty one.

    Raises UsageError for what isn't YAML, more than one document, a repeated key, a key that is
    no word, nesting below DEEPEST, and aliases that lead into themselves or past MOST_VALUES.
    """
    try:
        _refuse_shape(text, name)
        root = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        _refuse(error, text, name)
    except yaml.reader.ReaderError as error:
        # The position counts bytes where libyaml reads, which is where it matters.
        line = text.encode(errors="replace").count(b"\n", 0, error.position) + 1
        raise UsageError(f"{name}:{line}: not YAML: {error.reason}") from error
    except UnicodeEncodeError as error:
        line = text.count("\n", 0, error.start) + 1
        raise UsageError(f"{name}:{line}: not YAML: half a character") from error
    if root is not None:
        _measure(root, name, {})
        _refuse_repeated_keys(root, name)
    return root


def value(root: yaml.Node, name: str) -> Any:
    """The value that a tree stands for.

    Raises UsageError at a number that is none or is too large, SurpriseError at what YAML takes for
    another value than it looks like; neither says the value, which may be a secret.
    """
    for node in _scalars(root):
        if _is_time(node):
            node.tag = TEXT
        _refuse_surprise(node, name)
    try:
        return _built(root)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{name}:{line}: {error.problem}") from error
    except UNREADABLE as error:
        line = next((_line(node) for node in _scalars(root) if not _readable(node)), _line(root))
        reason = "it looks like a date or a number, and is none"
        raise UsageError(f"{name}:{line}: a value can't be read: {reason}") from error


def lines(root: yaml.Node | None) -> dict[str, int]:
    """The line of every key of a tree, by its dotted name (1-based)."""
    found: dict[str, int] = {}

    def walk(node: yaml.Node | None, prefix: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, inner in node.value:
                dotted = f"{prefix}{key.value}"
                found[dotted] = _line(key)
                walk(inner, f"{dotted}.")

    walk(root, "")
    return found


def describe(
    error: Any,
    root: yaml.Node | None,
    name: str,
    model: type[BaseModel] | None = None,
    secret: Secret = lambda key, value: False,
) -> str:
    """One line per fault of a pydantic ValidationError: file, line, key and reason.

    `root` is the tree of the file, for the lines; None where the values come from elsewhere.
    """
    faults = error.errors(include_url=False)
    told = []
    for fault in faults[:MOST_FAULTS]:
        where = _where(fault)
        dotted = ".".join(str(part) for part in where)
        place = f"{name}:{_line_of(root, where)}" if root is not None else name
        reason = _reason(fault, where, model)
        given = "" if secret(dotted, fault["input"]) else _shown(fault)
        key = ".".join("(hidden)" if secret("", str(part)) else str(part) for part in where)
        told.append(f"{place}: {printable(key) or '(the file)'}: {reason}{given}")
    if len(faults) > MOST_FAULTS:
        told.append(f"{name}: {len(faults) - MOST_FAULTS} more like these")
    return "\n".join(told)


def printable(text: str) -> str:
    """`text` on one line of a terminal, a long one cut."""
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return screen.printable(text)


def _where(fault: Any) -> tuple[Any, ...]:
    """The keys and indices that lead to a fault."""
    parts, last = fault["loc"], len(fault["loc"]) - 1
    own = fault["type"] == "extra_forbidden"  # the last part is the user's, whatever it looks like
    where = tuple(p for n, p in enumerate(parts) if (own and n == last) or not _is_branch(p))
    cause = fault.get("ctx", {}).get("error")
    return where + cause.where if isinstance(cause, KeyFault) else where


def _reason(fault: Any, where: tuple[Any, ...], model: type[BaseModel] | None) -> str:
    """What is wrong with one value, and what would be right."""
    kind = fault["type"]
    if kind == "extra_forbidden":
        return _unknown(where, model)
    if kind == "missing":
        return "must be given"
    if kind in ("model_type", "dict_type"):
        empty = fault["input"] is None
        return "empty. Give it keys, or leave it out" if empty else "takes keys and their values"
    if kind == "literal_error":
        return f"takes {fault['ctx']['expected']}"
    return str(fault["msg"]).removeprefix("Value error, ")


def _shown(fault: Any) -> str:
    """The wrong value, where it is a word."""
    if fault["type"] in ("extra_forbidden", "missing", "model_type", "dict_type"):
        return ""
    given = fault["input"]
    return f" (it is {printable(repr(given))})" if isinstance(given, str | int | float) else ""


def _unknown(where: tuple[Any, ...], model: type[BaseModel] | None) -> str:
    """What to say of an unknown key: where it belongs, or the nearest of those there are."""
    word, known = str(where[-1]), _known_keys(model, where[:-1])
    if not known:
        return "unknown key"
    elsewhere = [place for place in _places(model) if place.rpartition(".")[2] == word]
    if elsewhere:
        return f"unknown key here. There is {' and '.join(elsewhere)}"
    return f"unknown key. {nearest(word, known)}"


def _is_branch(part: object) -> bool:
    """True for what pydantic adds to a location: union branches and '[key]' marks."""
    return isinstance(part, str) and (part == "[key]" or "[" in part or part.endswith("()"))


def _line(part: yaml.Node | yaml.Event) -> int:
    return part.start_mark.line + 1 if part.start_mark else 1


def _line_of(node: yaml.Node, where: tuple[Any, ...]) -> int:
    """The line of the deepest part of `where` that stands in the file (1-based)."""
    line = _line(node)
    for part in where:
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if found is None:
                break
            line, node = _line(found[0]), found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = _line(node)
        else:
            break
    return line


def _refuse(error: yaml.MarkedYAMLError, text: str, name: str) -> NoReturn:
    """Raise the UsageError for what isn't YAML, with what was being read where that is known."""
    mark, began = error.problem_mark, error.context_mark
    line = mark.line + 1 if mark else 1
    rows = text.splitlines()
    if mark and mark.line < len(rows) and rows[mark.line][mark.column : mark.column + 1] == "\t":
        raise UsageError(f"{name}:{line}: not YAML: a tab; indent by spaces") from error
    context = f" {error.context}, begun on line {began.line + 1}" if error.context and began else ""
    raise UsageError(f"{name}:{line}: not YAML: {error.problem}{context}") from error


def _refuse_shape(text: str, name: str) -> None:
    """Raise UsageError at nesting that would crash the composer, and at a second document."""
    depth = documents = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.DocumentStartEvent):
            documents += 1
        if depth > DEEPEST:
            raise UsageError(f"{name}:{_line(event)}: nested deeper than {DEEPEST} levels")
        if documents > 1:
            raise UsageError(f"{name}:{_line(event)}: a second document begins here; one is taken")


def _measure(
    node: yaml.Node, name: str, known: dict[int, tuple[int, int] | None]
) -> tuple[int, int]:
    """The values and the levels below a node, aliases followed; None marks a node being looked at.

    Raises UsageError where there are too many, or where an alias stands within what it names.
    """
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise UsageError(f"{name}:{_line(node)}: an alias stands within what it names")
        return found
    known[id(node)] = None
    values, levels = 1, 0
    for child in _children(node):
        below, deep = _measure(child, name, known)
        values, levels = values + below, max(levels, deep + 1)
    if values > MOST_VALUES:
        raise UsageError(f"{name}:{_line(node)}: more than {MOST_VALUES} values, aliases followed")
    if levels > DEEPEST:
        raise UsageError(f"{name}:{_line(node)}: nested deeper than {DEEPEST} levels")
    known[id(node)] = values, levels
    return values, levels


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _scalars(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.ScalarNode):
        yield node
    for child in _children(node):
        yield from _scalars(child)


def _built(node: yaml.Node) -> Any:
    return yaml.constructor.SafeConstructor().construct_document(node)


def _readable(node: yaml.Node) -> bool:
    try:
        _built(node)
    except UNREADABLE:
        return False
    return True


def _is_time(node: yaml.Node) -> bool:
    """Whether it is 24:00:00, which is text to YAML 1.2; 1.1 takes it for a number to base 60."""
    return node.tag.endswith((":int", ":float")) and ":" in node.value


def _refuse_surprise(node: yaml.Node, name: str) -> None:
    """Raise SurpriseError where YAML takes a word for something else than it looks like."""
    kind = node.tag.rpartition(":")[2]
    for kinds, begins, what, remedy in SURPRISES:
        if kind in kinds.split() and re.match(begins, node.value):
            remedy = f"{remedy}, or put it in quotes where it is text."
            raise SurpriseError(f"{name}:{_line(node)}", f"YAML takes {what}", remedy)


def _refuse_repeated_keys(node: yaml.Node, name: str) -> None:
    """Raise UsageError at a key that stands twice in one mapping (YAML keeps the last)."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, _ in node.value:
            line = _line(key)
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"{name}:{line}: a key must be a word, not a list or a mapping")
            if key.value in seen:
                raise UsageError(
                    f"{name}:{line}: {printable(key.value)}: repeated key, "
                    f"first on line {seen[key.value]}"
                )
            seen[key.value] = line
    for child in _children(node):
        _refuse_repeated_keys(child, name)


def _known_keys(model: type[BaseModel] | None, where: tuple[Any, ...]) -> list[str]:
    """The keys that the model at `where` below `model` takes, or [] where that isn't known."""
    for part in where:
        field = model.model_fields.get(str(part)) if model else None
        if field is None:
            continue  # a key of a dict or an index of a list: the model is the container's
        model = _inner(field.annotation)
    return sorted(f.alias or n for n, f in model.model_fields.items()) if model else []


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The model that a field holds, alone or in a list, a dict or with None."""
    from typing import get_args

    from pydantic import BaseModel

    inner = [annotation, *get_args(annotation)]
    return next((t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)), None)


def _places(model: type[BaseModel] | None, prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys of a model and of the models in it."""
    for key, field in model.model_fields.items() if model else ():
        yield f"{prefix}{key}"
        yield from _places(_inner(field.annotation), f"{prefix}{key}.")
