"""Writes the tuned run file: the original's text with the changes and the measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import yaml

from launcher.base import files, yamlfile
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Override
from launcher.tools.tuning.candidates import SettingChanges


def write(
    target: Path,
    name: str,
    config: RunConfig,
    laid: Sequence[Override],
    changes: SettingChanges,
    lines: Sequence[str],
) -> None:
    """Write the run file `name` with what is laid over it and the changes, below `lines`.

    config: what it says with what is laid over it. Raises OSError where `target` is there.
    """
    keys = {key: value for one in laid for key, value in one.values.items()}
    keys = {**keys, **changes}
    label, path = origins.find(name)
    wanted = origins.overridden(config, [Override("tune", keys)])
    text = changed(yamlfile.read(path, label), keys, wanted)
    files.write_new(target, headed(text, [f"Tuned by `launcher tune {name}`:", *lines]))


def changed(text: str, changes: SettingChanges, wanted: RunConfig) -> str:
    """`text`, a run file, with the changes in it, every other line as it was.

    Where that doesn't give what is `wanted`, as with anchors, the whole is written anew.
    """
    made = text
    try:
        for key, value in changes.items():
            made = _with(made, key.split("."), value)
        root = yamlfile.tree(made, "the tuned file")
        assert root
        if origins.made(yamlfile.value(root, "the tuned file"), "the tuned file") == wanted:
            return made
    except Exception:  # noqa: S110 - whatever a text's shape is, the plain one is right
        pass
    values = wanted.model_dump(mode="json", exclude_unset=True)
    return yaml.safe_dump(values, sort_keys=False, width=96, allow_unicode=True)


def _with(text: str, keys: Sequence[str], value: object) -> str:
    """The text with a value under a key of a section, or at the top."""
    root, written = yamlfile.tree(text, "the run file"), json.dumps(value)
    assert isinstance(root, yaml.MappingNode)
    for at, key in enumerate(keys):
        found = next((pair for pair in root.value if pair[0].value == key), None)
        if found is None:
            return _added(text, root, keys[at:], written)
        name, inner = found
        if at + 1 < len(keys) and isinstance(inner, yaml.MappingNode) and inner.value:
            root = inner
            continue
        nested = "".join(f"{{{key}: " for key in keys[at + 1 :])
        new = nested + written + "}" * nested.count("{")
        empty = inner.start_mark.index == inner.end_mark.index
        start = name.end_mark.index if empty else inner.start_mark.index
        new = f": {new}" if empty else new
        end = name.end_mark.index + 1 if empty else inner.end_mark.index
        return text[:start] + new + text[end:]
    return text


def _added(text: str, root: yaml.MappingNode, keys: Sequence[str], written: str) -> str:
    """The text with a key that its section hasn't, before the section's first one."""
    new = ": ".join(keys[:1]) + ": " + "".join(f"{{{key}: " for key in keys[1:])
    new += written + "}" * (len(keys) - 1)
    first = root.value[0][0].start_mark
    if root.flow_style:
        return f"{text[: first.index]}{new}, {text[first.index :]}"
    return f"{text[: first.index]}{new}\n{' ' * first.column}{text[first.index :]}"


def headed(text: str, lines: Sequence[str]) -> str:
    """The text below lines of comments."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + text
