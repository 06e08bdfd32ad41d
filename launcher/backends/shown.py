"""What the commands that are shown have in common: secrets stay out of them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from launcher.errors import UsageError
from launcher.plan.plan import Plan
from launcher.plan.secrets import is_secret


def lines(commands: list[list[str]]) -> str:
    """The commands as a shell's lines."""
    return "".join(f"{shlex.join(command)}\n" for command in commands)


def folders(plan: Plan) -> str:
    """The `mkdir` of the folders that the plan writes to; "" where there are none."""
    written = [mount.source for mount in plan.mounts if not mount.read_only]
    return lines([["mkdir", "-p", "--", *written]] if written else [])


def wanted(env: tuple[tuple[str, str | None], ...]) -> str:
    """A line for each secret among the variables, with which a shell asks for it where it has none.

    The commands take its value from there.
    """
    named = [name for name, value in env if value is not None and is_secret(name, value)]
    return "".join(f': "${{{name}:?export it first: its value is not shown}}"\n' for name in named)


def literal(text: str) -> str:
    """A text in which compose fills nothing in, and a pod no $(NAME): both read $$ as one $."""
    return text.replace("$", "$$")


def filled(told: Mapping[str, Any]) -> dict[str, Any]:
    """What isn't None or empty: of the rest an engine or a cluster has its own."""
    return {key: value for key, value in told.items() if value not in (None, "", [], {})}


def going_on(plan: Plan, key: str, restart: str) -> str:
    """What a shell adds to the command, so that a run that `key` starts again loads what it saved.

    `restart` is the variable with the number of starts before; "" for a run that saves nothing,
    or loads it anyway. Raises UsageError.
    """
    save = plan.options.get("save")
    if not save or plan.options.get("load") == save:
        return ""
    if plan.options.get("finetune"):
        raise UsageError(
            f"{key}: finetuning begins at iteration 0 each time",
            f"Leave {key} out, or checkpoint.finetune.",
        )
    return f""" $([ "${restart}" -eq 0 ] || echo --load {shlex.quote(str(save))})"""
