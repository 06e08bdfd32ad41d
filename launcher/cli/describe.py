"""Describes a plan in words: what `--dry-run` prints above the backend's command."""

from __future__ import annotations

import shlex

from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.secrets import redact, redacted


def describe(plan: Plan) -> str:
    """The plan, one fact a line; what the engine's own default decides is left out."""
    facts = {
        "run": f"{plan.name} ({plan.run})",
        "image": plan.image,
        "gpus": str(plan.gpus) if plan.gpus.count else "none (CPU)",
        "processes": f"{plan.processes_per_node} on each of {plan.nodes} nodes"
        if plan.nodes > 1
        else str(plan.processes_per_node),
        "user": plan.user,
        "groups": " ".join(map(str, plan.groups)),
        "workdir": plan.workdir,
        "network": plan.network,
        "ipc": plan.ipc,
        "shm_size": plan.shm_size,
        "ulimits": " ".join(f"{name}={limit}" for name, limit in plan.ulimits),
        "stop": f"{plan.stop_grace} s after the signal",
    }
    env, mounts = list[str](), list[str]()
    lines = [f"{key + ':':<11}{value}" for key, value in facts.items() if value]
    for name, value in redact(dict(plan.env)).items():
        env.append(f"{name} (the launcher's own)" if value is None else f"{name}={value}")
    for mount in plan.mounts:
        mode = "read-only" if mount.read_only else "read-write"
        mounts.append(f"{mount.target} <- {mount.source} ({mode})")
    lines += _listed("env", env) + _listed("mounts", mounts)
    lines += _listed("command", _wrapped(redacted(plan.argv)))
    return "\n".join(lines) + "\n"


def _listed(title: str, items: list[str]) -> list[str]:
    return [f"{title}:", *(f"  {item}" for item in items)] if items else []


def _wrapped(argv: tuple[str, ...]) -> list[str]:
    """The command with each option on a line of its own."""
    lines: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--") and lines[-1]:
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]
