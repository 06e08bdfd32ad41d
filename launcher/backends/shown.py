"""What the commands that are shown have in common: secrets stay out of them."""

from __future__ import annotations

import shlex

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
