"""Reads a YAML file into a strict pydantic model; a wrong one gives file, line, key and reason."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from launcher.errors import UsageError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

    Model = TypeVar("Model", bound=BaseModel)

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Fault(ValueError):
    """What a validator of a whole model raises to name the key below it that is wrong."""

    def __init__(self, where: tuple[str | int, ...], reason: str) -> None:
        super().__init__(reason)
        self.where = where


def load(path: Path, model: type[Model]) -> Model:
    """Validate the file at `path` as `model`.

    Raises UsageError for a file that can't be read, isn't YAML, repeats a key or doesn't fit.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: can't be read: {reason}") from error
    return parse(text, model, name=str(path))


def parse(text: str, model: type[Model], name: str) -> Model:
    """Validate `text` as `model`; `name` stands for the file in messages."""
    from pydantic import ValidationError

    try:
        root = yaml.compose(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{name}:{line}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{name}: not YAML: {error}") from error
    if root is None:
        raise UsageError(f"{name}:1: the file is empty")
    try:
        _refuse_repeated_keys(root, name)
        data = yaml.load(text, Loader=Loader)  # noqa: S506 - a safe loader
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{name}:{line}: {error.problem}") from error
    except ValueError as error:  # a date or a number that is none
        raise UsageError(f"{name}: a value can't be read: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{name}: an alias stands within what it names") from error
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UsageError(describe(error, root, name, model)) from error


def describe(
    error: Any, root: yaml.Node | None, name: str, model: type[BaseModel] | None = None
) -> str:
    """One line per fault of a pydantic ValidationError: file, line, key and reason."""
    lines = []
    for fault in error.errors():
        where = tuple(part for part in fault["loc"] if not _is_branch(part))
        cause = fault.get("ctx", {}).get("error")
        if isinstance(cause, Fault):
            where += cause.where
        line = _line_of(root, where) if root is not None else None
        key = ".".join(str(part) for part in where) or "(the file)"
        reason = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            known = _known_keys(model, where[:-1])
            reason = "unknown key"
            if known:
                reason += f". {nearest(str(where[-1]), known)}"
        elif fault["type"] != "missing" and isinstance(fault["input"], str | int | float | bool):
            reason += f" (it is {fault['input']!r})"
        lines.append(f"{name}:{line}: {key}: {reason}" if line else f"{name}: {key}: {reason}")
    return "\n".join(lines)


def _is_branch(part: object) -> bool:
    """True for what pydantic adds to a location: union branches and '[key]' marks."""
    return isinstance(part, str) and (part == "[key]" or "[" in part or part.endswith("()"))


def _line_of(node: yaml.Node, where: tuple[Any, ...]) -> int:
    """The line of the deepest part of `where` that stands in the file (1-based)."""
    line = node.start_mark.line + 1
    for part in where:
        if isinstance(node, yaml.MappingNode):
            found = next((pair for pair in node.value if pair[0].value == str(part)), None)
            if found is None:
                break
            line, node = found[0].start_mark.line + 1, found[1]
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int):
            node = node.value[part]
            line = node.start_mark.line + 1
        else:
            break
    return line


def _refuse_repeated_keys(node: yaml.Node, name: str) -> None:
    """Raise UsageError at the first key that stands twice in one mapping (YAML keeps the last)."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise UsageError(f"{name}:{line}: a key must be a word, not a list or a mapping")
            if key.value in seen:
                raise UsageError(
                    f"{name}:{line}: {key.value}: repeated key, first on line {seen[key.value]}"
                )
            seen[key.value] = line
            _refuse_repeated_keys(value, name)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_repeated_keys(item, name)


def _known_keys(model: type[BaseModel] | None, where: tuple[Any, ...]) -> list[str]:
    """The keys that the model at `where` below `model` takes, or [] where that can't be told."""
    from typing import get_args

    from pydantic import BaseModel

    for part in where:
        field = model.model_fields.get(str(part)) if model else None
        if field is None:
            continue  # a key of a dict or an index of a list: the model is the container's
        inner = [field.annotation, *get_args(field.annotation)]
        model = next((t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)), None)
    return sorted(f.alias or n for n, f in model.model_fields.items()) if model else []
