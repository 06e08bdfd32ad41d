"""The JSON Schema of a run file, made of its models, for editors to complete and check by.

It takes all that the models take, and refuses what a schema can tell to be wrong; the launcher
refuses more. Where programs take only some values of an option, it has those of every release.
"""

from __future__ import annotations

from inspect import getclosurevars
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from launcher import names
from launcher.plan import arguments, config
from launcher.plan.config import RunConfig

if TYPE_CHECKING:
    from pydantic_core import core_schema

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NUMBER = r"^\s*[+-]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][+-]?\d[\d_]*)?\s*$"
"""Numbers as text: YAML 1.1, which the launcher reads, takes 1e-4 for text."""
GPUS = r"^\s*(all|\d{1,6}|device=[\w:.-]+(,[\w:.-]+)*)\s*$"
SCALAR = {"type": ["string", "boolean", "number"]}
TAG = r"^[A-Za-z0-9][\w.-]{0,99}$"

READ_AS: dict[Any, JsonSchemaValue] = {
    config._number: {"anyOf": [{"type": "number"}, {"type": "string", "pattern": NUMBER}]},
    config._gpus: {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": 999999},
            {"type": "string", "pattern": GPUS},
        ]
    },
    config._batch: {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]},
    config._scalar: SCALAR,
    config._scalars: {"anyOf": [SCALAR, {"type": "array", "items": SCALAR}]},
    config._prefixes: {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {
                "type": "array",
                "items": {"type": ["string", "number"]},
                "contains": {"type": "string"},
            },
        ]
    },
    config._size: {
        "anyOf": [
            {"type": "integer", "minimum": 0},
            {"type": "string", "pattern": "^[0-9]+[bkmgBKMG]?$"},
        ]
    },
    config._tag: {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": TAG}]},
}
"""What stands in a file for the values that a validator turns into something else first."""

TOLD = {
    "name": "Begins the container's name.",
    "image": 'A row of the matrix ("24.10"), an image by its full name, or {tag:, megatron:}.',
    "program": "gpt, pretrain_gpt.py and its like in the image, or ./mine.py of this machine.",
    "source": "A Megatron-LM checkout of this machine, in place of the image's Megatron.",
    "megatron_args": "Further options by Megatron's names: a value, a list, or true for a flag.",
    "gpus": "A number, all, 0 (the CPU), or device=0,1.",
    "processes": "On the CPU only; on GPUs there are as many as GPUs.",
    "env": "Variables; null passes on the launcher's own value.",
    "secrets": "Variables, each with the file that holds its value.",
    "mounts": "Folders and files of the host that the program sees.",
    "max_restarts": "How often a run that failed is started again from its newest checkpoint.",
    "watchdog": "What is done about a run that writes nothing for so many seconds.",
    "nodes": "Several machines: start the same file on each, with its own rank.",
}


class _Generator(GenerateJsonSchema):
    """Puts what a file may hold in the place of what the models hold."""

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        read_as = READ_AS.get(schema["function"]["function"])
        return dict(read_as) if read_as else super().function_before_schema(schema)

    def function_after_schema(
        self, schema: core_schema.AfterValidatorFunctionSchema
    ) -> JsonSchemaValue:
        inner = super().function_after_schema(schema)
        function: Any = schema["function"]["function"]
        if getattr(function, "__qualname__", "").startswith("matching."):
            pattern = getclosurevars(function).nonlocals["pattern"]
            return inner if "anyOf" in inner else inner | {"pattern": f"^({pattern})$"}
        bounds = getattr(function, "keywords", {})
        limits = {"ge": "minimum", "le": "maximum"}
        return inner | {limits[name]: value for name, value in bounds.items() if name in limits}


def schema() -> JsonSchemaValue:
    """The schema of a run file, a JSON value (2020-12)."""
    made = RunConfig.model_json_schema(schema_generator=_Generator)
    parts = made["$defs"]
    for part in (made, *parts.values()):
        _simplify(part)
    for section, model in arguments.SECTIONS.items():
        for key, value in parts[model.__name__]["properties"].items():
            _describe(f"{section}.{key}", value)
    for key, value in made["properties"].items():
        if key in TOLD:
            value["description"] = TOLD[key]
    _short_forms(parts)
    return {"$schema": DIALECT, "title": "A run file of launcher run", **made}


def _simplify(part: JsonSchemaValue) -> None:
    """Drop titles and defaults that only repeat the key or say nothing."""
    part.pop("title", None)
    if "description" in part:
        part["description"] = part["description"].partition("\n\n")[0].replace("\n", " ")
    for value in part.get("properties", {}).values():
        value.pop("title", None)
        if "patternProperties" in value:
            value["additionalProperties"] = False
        if value.get("default", 0) in (None, {}, []):
            del value["default"]


def _describe(key: str, value: JsonSchemaValue) -> None:
    """Say which option a key is and who takes it, and which values where those are few."""
    option, table = arguments.option_name(key), arguments.table()
    spans = table.megatron.get(option)
    if option not in arguments.own_keys() or (spans is None and option not in table.gpt):
        return  # the launcher's own
    told = [option]
    if spans is None:
        told.append("for the program gpt alone")
    elif spans.pairs != ((table.releases[0], ""),):
        told.append(f"Megatron has it {spans}")
    if option not in table.gpt:
        told.append("not for the program gpt")
    value["description"] = "; ".join(told)
    choices = table.any_choices(option)
    if choices:
        value.pop("anyOf", None)
        value["enum"] = [*choices, None]


def _short_forms(parts: dict[str, JsonSchemaValue]) -> None:
    """`image: "24.10"`, `nodes: 2`, and what sections ask of several keys together."""
    image = parts["Image"]
    image["anyOf"] = [{"required": ["tag"]}, {"required": ["name"]}]
    named = {"type": "string", "pattern": f"^(?=.*[/:@])({names.IMAGE})$"}
    parts["Image"] = {"anyOf": [*READ_AS[config._tag]["anyOf"], named, image]}
    parts["Nodes"] = {"anyOf": [{"type": "integer", "minimum": 1}, parts["Nodes"]]}
    resources = parts["Resources"]
    resources |= _where("shm_size", {"not": {"type": "null"}}, needs="ipc")
    resources["then"]["properties"] = {"ipc": {"not": {"enum": ["host", None]}}}


def _where(key: str, value: JsonSchemaValue, *, needs: str) -> JsonSchemaValue:
    """The other key must be there where this one has such a value."""
    return {
        "if": {"properties": {key: value}, "required": [key]},
        "then": {"required": [needs]},
    }
