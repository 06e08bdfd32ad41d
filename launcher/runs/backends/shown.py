"""Renders commands for people, without secrets."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.base.errors import UsageError
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.secrets import HIDDEN, is_secret, redacted


class Variable(str):
    """A word of a command with a shell's variable in it: it stands there without quotes."""


def by_name(argv: tuple[str, ...]) -> list[str]:
    """`argv` with a variable of the shell in place of each secret, so that the line still runs."""
    found = secret_words(argv)
    return [
        Variable(f'{shlex.quote(found[at][0]) if found[at][0] else ""}"${{SECRET_{at}}}"')
        if at in found
        else word
        for at, word in enumerate(argv)
    ]


def secret_words(argv: tuple[str, ...]) -> dict[int, tuple[str, str]]:
    """What is shown and what is secret of each word that has a secret, by its place."""
    pairs = enumerate(zip(argv, redacted(argv), strict=True))
    return {
        at: (safe.removesuffix(HIDDEN), word.removeprefix(safe.removesuffix(HIDDEN)))
        for at, (word, safe) in pairs
        if safe != word
    }


def secrets(plan: Plan) -> dict[str, str]:
    """The values of the plan that aren't shown, by the names of the variables that have them."""
    found = {
        name: value for name, value in plan.env if value is not None and is_secret(name, value)
    }
    return found | {f"SECRET_{at}": value for at, (_, value) in secret_words(plan.argv).items()}


def joined(command: list[str]) -> str:
    """The command as a shell has it."""
    return " ".join(word if isinstance(word, Variable) else shlex.quote(word) for word in command)


def lines(commands: list[list[str]]) -> str:
    """The commands as a shell's lines."""
    return "".join(f"{joined(command)}\n" for command in commands)


def folders(plan: Plan) -> str:
    """The `mkdir` of the folders that the plan writes to; "" where there are none."""
    written = [mount.source for mount in plan.mounts if not mount.read_only]
    return lines([["mkdir", "-p", "--", *written]] if written else [])


def wanted(named: Iterable[str]) -> str:
    """A shell's line for each variable that it lacks, from which commands take secrets."""
    return "".join(f': "${{{name}:?export it first: its value is not shown}}"\n' for name in named)


def literal(text: str) -> str:
    """A text in which compose fills nothing in, and a pod no $(NAME): both read $$ as one $."""
    return text.replace("$", "$$")


def filled(told: Mapping[str, Any]) -> dict[str, Any]:
    """Drops unset keys, so that the engine's or the cluster's defaults apply."""
    return {key: value for key, value in told.items() if value not in (None, "", [], {})}


def goes_on_from(plan: Plan, key: str) -> str:
    """The folder that a run which `key` starts again is to load, or "". Raises UsageError."""
    save = plan.options.get("save")
    if not save or plan.options.get("load") == save:
        return ""
    if plan.options.get("finetune"):
        raise UsageError(
            f"{key}: finetuning begins at iteration 0 each time",
            f"Leave {key} out, or checkpoint.finetune.",
        )
    return str(save)
