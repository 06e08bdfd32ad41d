"""Writes the tables of docs/ that stand in the code: `python3 -m tools.options`.

In a page, `<!-- table: KIND NAMES -->` begins a table and `<!-- /table -->` ends it; KIND is one of
TABLES. A test holds the pages to the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from launcher import cli
from launcher.base.settings import Settings
from launcher.runs.plan import program_options
from launcher.runs.runfile import clusters, config
from launcher.tools import json_schema
from launcher.trainer.gpt.arguments import parser as gpt_parser

DOCS = Path(__file__).parents[1] / "docs"
MARK = re.compile(r"(<!-- table: (\w+) ?([\w ]*) -->\n).*?(<!-- /table -->)", re.DOTALL)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in (head, *rows)]
    lines.insert(1, " | ".join("---" for _ in head))
    return "".join(f"| {line} |\n" for line in lines)


def command_table(*names: str) -> str:
    """The options of a command, and what its actions do."""
    parser = cli.parser([*names])
    for name in names:
        parser = _below(parser).choices[name]
    rows = list[tuple[str, str]]()
    for one in parser._actions:
        if isinstance(one, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in one._choices_actions}
            rows += [(f"`{' '.join([*names, action])}`", helps[action]) for action in one.choices]
        elif one.dest != "help":
            value = "" if one.nargs == 0 else str(one.metavar or one.dest.upper())
            words = [f"`{word} {value}`".replace(" `", "`") for word in one.option_strings]
            meaning = (one.help or "") % {**vars(one), "prog": "launcher"}
            if one.choices and not all(str(each) in meaning for each in one.choices):
                meaning += f": {', '.join(map(str, one.choices))}"
            rows.append((", ".join(words) or f"`{value}`", meaning))
    return table(("option", "meaning"), rows)


def _below(parser: argparse.ArgumentParser) -> argparse._SubParsersAction[argparse.ArgumentParser]:
    """The action that holds a parser's commands."""
    return next(one for one in parser._actions if isinstance(one, argparse._SubParsersAction))


PLAIN = {
    "Slurm": "The option of sbatch with this name.",
    "Kubernetes": "A pod's serviceAccountName, nodeSelector, tolerations, priorityClassName.",
}
"""What the keys of a section mean that have no text of their own."""


def key_table(*names: str) -> str:
    """The keys of models of a run file; those without a text of their own share the last row."""
    rows, plain = list[tuple[str, str, str]](), list[str]()
    for name in names:
        model: type[BaseModel] = getattr(config, name, None) or getattr(clusters, name)
        texts = {
            **json_schema.key_texts()[name],
            **(json_schema.DESCRIPTIONS if name == "RunConfig" else {}),
        }
        for key, field in model.model_fields.items():
            shown = f"`{name.lower()}.{key}`" if len(names) > 1 else f"`{key}`"
            text = texts.get(key) or _section(field)
            if text:
                default = "" if "If not given" in text else _default(field)
                rows.append((shown, default, text))
            else:
                plain.append(shown)
    if plain:
        text = PLAIN.get(names[0], "Megatron's option with this name.")
        rows.append((", ".join(plain), "", text))
    return table(("key", "default", "meaning"), rows)


def _section(field: FieldInfo) -> str:
    """What a section is for, by its docstring; "" for what is no section."""
    one = field.annotation
    if not (inspect.isclass(one) and issubclass(one, BaseModel)):
        return ""
    return (inspect.getdoc(one) or "").partition("\n")[0]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
    if value is None or value in ([], {}) or isinstance(value, BaseModel):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def section_table() -> str:
    """The keys that are options of the program, by who takes them."""
    known = program_options.table()
    rows = []
    for section, model in program_options.SECTIONS.items():
        kinds: tuple[list[str], list[str]] = ([], [])
        for key in model.model_fields:
            option = program_options.option_name(f"{section}.{key}")
            kinds[option in known.megatron and option not in known.gpt].append(f"`{key}`")
        rows.append((f"`{section}`", *map(", ".join, kinds)))
    return table(("section", "for any program", "not for `gpt`"), rows)


def setting_table() -> str:
    """A site's settings, by the docstring of their class."""
    text = inspect.getdoc(Settings) or ""
    found = re.findall(r"^(\w+): (.*(?:\n    .*)*)", text, re.MULTILINE)
    return table(("key", "meaning"), [(f"`{k}`", re.sub(r"\s+", " ", v)) for k, v in found])


def program_table() -> str:
    """The options of our program, by the groups of its parser."""
    rows = []
    for group in gpt_parser()._action_groups:
        options = [_described(one) for one in group._group_actions if one.dest != "help"]
        if options:
            rows.append((str(group.title), "; ".join(options)))
    return table(("group", "options (default)"), rows)


def _described(option: argparse.Action) -> str:
    """`--lr-decay-style` constant, linear or cosine (linear): its help."""
    text = f"`{option.option_strings[0]}`"
    if option.choices:
        text += f" {', '.join(map(str, option.choices))}"
    if option.required:
        text += " (required)"
    elif option.default is not None and option.default is not False and option.default != []:
        default = option.default
        given = default if isinstance(default, list) else [default]
        text += f" ({' '.join(f'{one:g}' if type(one) is float else str(one) for one in given)})"
    return f"{text}: {option.help}" if option.help else text


TABLES: dict[str, Callable[..., str]] = {
    "command": command_table,
    "keys": key_table,
    "sections": section_table,
    "settings": setting_table,
    "program": program_table,
}


def page(text: str) -> str:
    """A page with its tables as they are now."""
    return MARK.sub(lambda found: found[1] + TABLES[found[2]](*found[3].split()) + found[4], text)


def main() -> int:
    """Write all pages; the exit code."""
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        path.write_text(page(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
