"""Writes the fields of a pod, by which `kubernetes.pod` is checked: python -m tools.podmodel.

They are of the models that Kubeflow's trainer publishes, which are Kubernetes' own:
{type: {field: its kind}}, where a kind is a type, boolean, integer, string or any, [kind] of a list
and {"*": kind} of a mapping.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "launcher/runs/backends/kubernetes/kubernetes_pod.json"
ROOTS = {"jobset": "IoK8sApiCoreV1PodTemplateSpec", "trainjob": "TrainerV1alpha1PodTemplatePatch"}
SHORT = (
    "IoK8sApiCoreV1",
    "IoK8sApimachineryPkgApisMetaV1",
    "IoK8sApimachineryPkg",
    "TrainerV1alpha1",
)
EITHERS = ("ApiResourceQuantity", "UtilIntstrIntOrString")
"""A number or text: 16, "500m", "25%"."""

PLAIN = ("boolean", "integer", "string")


def text() -> str:
    """The table as it is committed, a line for each type."""
    lines = [f"{json.dumps(name)}: {json.dumps(told)}" for name, told in sorted(table().items())]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def table() -> dict[str, Any]:
    """The types that a pod's template is made of, by their names; "roots" says whose is which."""
    from kubeflow_trainer_api import models

    found: dict[str, Any] = {"roots": {kind: _name(root) for kind, root in ROOTS.items()}}
    for root in ROOTS.values():
        schema = getattr(models, root).model_json_schema()
        for name, one in {**schema.pop("$defs"), root: schema}.items():
            if "properties" in one and _name(name) not in EITHERS:
                fields = one["properties"].items()
                found[_name(name)] = {field: _kind(kind) for field, kind in fields}
    return found


def _name(model: str) -> str:
    for prefix in SHORT:
        model = model.removeprefix(prefix)
    return model


def _kind(schema: dict[str, Any]) -> Any:
    """What a field takes, by its JSON schema; "any" where that says several things."""
    several = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    (one,) = several if len(several) == 1 else [{}]
    if "$ref" in one:
        name = _name(one["$ref"].rpartition("/")[2])
        return "any" if name in EITHERS else name
    if one.get("type") == "array":
        return [_kind(one["items"])]
    if one.get("type") == "object":
        inner = one.get("additionalProperties")
        return {"*": _kind(inner) if isinstance(inner, dict) else "any"}
    return one["type"] if one.get("type") in PLAIN else "any"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
