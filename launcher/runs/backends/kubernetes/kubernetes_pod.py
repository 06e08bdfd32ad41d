"""What a run file lays over a pod, `kubernetes.pod`: checked by the published model, and merged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.base.errors import nearest
from launcher.runs.runfile.secrets import is_secret

TABLE = Path(__file__).with_name("kubernetes_pod.json")
"""The fields of a pod, which `python -m tools.podmodel` writes and describes."""

TYPES = {"boolean": bool, "integer": int, "string": str}
OURS = ("image", "args", "command")
"""Fields of the nodes' container that follow from the rest of a run file."""
CONTAINERS = ("containers", "initContainers", "ephemeralContainers")


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text("utf-8")))


def faults(overlay: Mapping[str, Any], kind: str, node: str) -> Iterator[tuple[str, str]]:
    """What is wrong with an overlay for a `kind` of object, and the cure, a pair for each."""
    found = [*_faults(overlay, _table()["roots"][kind], "kubernetes.pod")]
    yield from found
    spec = {} if found else overlay.get("spec", {})
    for container in spec.get("containers", ()):
        for name in OURS if (container.get("name") or node) == node else ():
            if name in container:
                problem = (
                    f"kubernetes.pod: the container's {name} follows from the rest of the file"
                )
                yield problem, "Leave it out. For a further container, give a name."
    for container in (one for key in CONTAINERS for one in spec.get(key, ())):
        for variable in container.get("env", ()):
            value = variable.get("value")
            if value is not None and is_secret(str(variable.get("name")), value):
                problem = f"kubernetes.pod: env {variable['name']}: a secret's value isn't written"
                yield (
                    f"{problem} into the cluster's objects",
                    "Use valueFrom, or kubernetes.secrets.",
                )


def _faults(value: Any, kind: Any, key: str) -> Iterator[tuple[str, str]]:
    """What the model has otherwise: a field that it doesn't know, a value of another type."""
    if kind == "any":
        return
    if isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{key}: takes a list", ""
            return
        for at, one in enumerate(value):
            yield from _faults(one, kind[0], f"{key}.{at}")
    elif isinstance(kind, dict) or kind not in TYPES:
        if not isinstance(value, dict):
            yield f"{key}: takes keys and their values", ""
            return
        fields = kind if isinstance(kind, dict) else _table()[kind]
        for name, inner in value.items():
            if (found := fields.get("*", fields.get(name))) is None:
                known = nearest(str(name), sorted(fields))
                yield f"{key}.{name}: a pod has no such field here", known
            else:
                yield from _faults(inner, found, f"{key}.{name}")
    elif value is not None and type(value) is not TYPES[kind]:
        yield f"{key}: {value!r} is no {kind}", "Put text in quotes, and numbers in none."


def merged(pod: Any, overlay: Any, node: str) -> Any:
    """A pod's template with an overlay: mappings are joined, and of lists what has the same name.

    The container `node` needs no name. What else is in a list comes behind ours, and any other
    value takes the place of ours.
    """
    if isinstance(overlay, dict):
        mine = pod if isinstance(pod, dict) else {}
        return mine | {
            key: merged(mine.get(key), _named(value, node) if key == "containers" else value, node)
            for key, value in overlay.items()
        }
    if not isinstance(overlay, list):
        return overlay
    found = [*pod] if isinstance(pod, list) else []
    known = {_key(one): at for at, one in enumerate(found) if _key(one)}
    for one in overlay:
        if (at := known.get(_key(one))) is None:
            found.append(one)
        else:
            found[at] = merged(found[at], one, node)
    return found


def _named(containers: Any, node: str) -> Any:
    return [one | {"name": one.get("name") or node} for one in containers]


def _key(one: Any) -> Any:
    """By what two entries of a list are the same; None for those that never are."""
    return (one.get("mountPath") or one.get("name")) if isinstance(one, dict) else None
