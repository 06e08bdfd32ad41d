"""The JSON Schema of a run file, for editors.

It takes all that the models take, and refuses what a schema can see to be wrong; the launcher
refuses more. Where programs take only some values of an option, it has those of every release.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping

from pydantic.json_schema import JsonSchemaValue

from launcher.base import names
from launcher.runs.plan import program_options
from launcher.runs.runfile import clusters, config, origins, values
from launcher.runs.runfile.config import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DESCRIPTIONS = {
    "name": "The run's name. The container's name begins with it.",
    "image": 'A tag ("24.10"), an image\'s name, or a section: tag, megatron, extras, python.',
    "program": "gpt (our trainer), a program of upstream (pretrain_gpt.py), or yours (./mine.py).",
    "source": "A Megatron-LM checkout on this machine, used in place of the image's Megatron.",
    "megatron": 'If the image has an unknown Megatron, use rules of this release: {as: "0.19"}.',
    "megatron_args": "Further options by Megatron's names, with a value, a list, or true (a flag).",
    "gpus": "The GPUs to use: a number, all, 0 (use the CPU), or device=0,1.",
    "processes": "The number of processes on the CPU. With GPUs, each GPU has one process.",
    "env": "Variables of the program. null means the value that the launcher has.",
    "secrets": "Variables of the program, each with the path of a file that contains its value.",
    "mounts": "Folders and files of this machine that the program sees.",
    "max_restarts": "How often a failed run is restarted from its newest checkpoint.",
    "watchdog": "What happens to a run that writes nothing for some time.",
    "guard": "What happens at NaN, at a sudden rise, or if the loss doesn't change.",
    "profile": "Trace these steps, and report what took their time: {steps: 10-12}.",
    "nodes": "The number of nodes (machines), or a section: count, master_addr and others.",
}


def schema() -> JsonSchemaValue:
    """The schema of a run file, a JSON value (2020-12)."""
    made = RunConfig.model_json_schema()
    parts = made["$defs"]
    for part in (made, *parts.values()):
        _simplify(part)
    for section, model in program_options.SECTIONS.items():
        for key, value in parts[model.__name__]["properties"].items():
            _describe(f"{section}.{key}", value)
    for name, texts in key_texts().items():
        for key, text in texts.items():
            value = parts[name]["properties"][key]
            value["description"] = "; ".join(filter(None, [text, value.get("description")]))
    for key, value in made["properties"].items():
        if key in DESCRIPTIONS:
            value["description"] = DESCRIPTIONS[key]
    made["properties"][origins.EXTENDS] = {
        "type": "string",
        "description": "A run file, or a preset, that this one is laid over.",
    }
    made["anyOf"] = [{"required": made.pop("required")}, {"required": [origins.EXTENDS]}]
    _short_forms(parts)
    return {"$schema": DIALECT, "title": "A run file of launcher run", **made}


def key_texts() -> Mapping[str, Mapping[str, str]]:
    """What each key means, by model and key: the docstrings below the fields, from the source."""
    found = dict[str, dict[str, str]]()
    for module in (config, clusters):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                texts = found.setdefault(node.name, {})
                for field, text in zip(node.body, node.body[1:], strict=False):
                    match field, text:
                        case (
                            ast.AnnAssign(target=ast.Name(id=key)),
                            ast.Expr(value=ast.Constant(value=str(said))),
                        ):
                            texts[key] = said
    return found


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
    option, table = program_options.option_name(key), program_options.table()
    spans = table.megatron.get(option)
    if option not in program_options.own_keys() or (spans is None and option not in table.gpt):
        return  # the launcher's own
    told = [option]
    if spans is None:
        told.append("only for the program gpt")
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
    image = parts["ImageRequest"]
    image["anyOf"] = [{"required": ["tag"]}, {"required": ["name"]}]
    named = {"type": "string", "pattern": f"^(?=.*[/:@])({names.IMAGE})$"}
    parts["ImageRequest"] = {"anyOf": [*values.TAGS, named, image]}
    parts["Nodes"] = {"anyOf": [{"type": "integer", "minimum": 1}, parts["Nodes"]]}
    size = {"properties": {"shm_size": {"not": {"type": "null"}}}, "required": ["shm_size"]}
    ipc = {"properties": {"ipc": {"not": {"enum": ["host", None]}}}, "required": ["ipc"]}
    parts["Resources"] |= {"if": size, "then": ipc}
