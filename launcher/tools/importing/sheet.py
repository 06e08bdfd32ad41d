"""Builds the text of an imported run file, with each value as it was spelled."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from launcher.base import yamlfile
from launcher.base.errors import UsageError
from launcher.runs.plan import program_options
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.mounts import Host
from launcher.runs.plan.plan import Stamp, make_plan
from launcher.runs.plan.program import fewest
from launcher.runs.plan.resolved import resolve
from launcher.runs.runfile.clusters import Slurm
from launcher.runs.runfile.config import Resources, RunConfig
from launcher.runs.runfile.origins import Origin
from launcher.runs.runfile.values import parse_gpus
from launcher.tools.importing.commands import Report, Word

NUMBER = re.compile(r"(?=.{1,18}$)[+-]?(?!0\d)(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
OWN_SECTIONS: Mapping[str, type[BaseModel]] = {"slurm": Slurm, "resources": Resources}
ORDER = ("name", "image", "program", "gpus", "nodes", "max_restarts")


@dataclass
class Sheet(Report):
    """The run file as it is filled: YAML texts by dotted key, and what keys wait for."""

    keys: dict[str, str] = field(default_factory=dict)
    mounts: list[str] = field(default_factory=list)
    missing: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def put(self, key: str, name: str, texts: list[str], line: int) -> None:
        """Put an option's values under its key in the first form that the key takes."""
        section, _, last = key.partition(".")
        free = section == "megatron_args"
        for form in _forms(texts):
            value = yaml.load(form, Loader=yamlfile.Loader)  # noqa: S506 - a safe loader
            if _same(value, texts, exact=free) and (free or fits(section, {last: value})):
                self.keys[key] = form
                return
        self.tell(line, f"{name} {' '.join(texts)}: {key} doesn't take it")

    def lack(self, word: Word, key: str) -> None:
        """Note that a key waits for what a word depends on."""
        self.missing.setdefault(word.unknown, (word.line, []))[1].append(key)

    def section(self, name: str) -> dict[str, str]:
        """The keys of a section, in the script's order."""
        parts = ((*key.partition("."), text) for key, text in self.keys.items())
        return {last: text for section, dot, last, text in parts if dot and section == name}

    def written(self, name: str) -> str:
        """The run file: sections in the models' order, keys in the script's."""
        blocks = [[f"# From {yamlfile.printable(name.rpartition('/')[2])}, by `launcher import`."]]
        blocks[0] += [f"{key}: {self.keys[key]}" for key in ORDER if key in self.keys]
        for title in (*program_options.SECTIONS, "slurm", "megatron_args", "env", "resources"):
            if values := self.section(title):
                lines = [f"  {yaml_text(key)}: {value}" for key, value in values.items()]
                blocks.append([f"{title}:", *lines])
        if self.mounts:
            blocks.append(["mounts:", *(f"  {mount}" for mount in self.mounts)])
        return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _forms(texts: list[str]) -> Iterator[str]:
    """YAML for an option's values: true, a number as it stands, text, a list."""
    if not texts:
        yield "true"
    elif len(texts) == 1:
        if NUMBER.fullmatch(texts[0]):
            yield texts[0]
        yield yaml_text(texts[0])
    if texts:
        numbers = [NUMBER.fullmatch(text) for text in texts]
        parts = [t if n else yaml_text(t, flow=True) for t, n in zip(texts, numbers, strict=True)]
        yield f"[{', '.join(parts)}]"
        yield f"[{', '.join(yaml_text(text, flow=True) for text in texts)}]"


def _same(value: Any, texts: list[str], *, exact: bool) -> bool:
    """True where the value is rendered as it was given; as the same number, where not `exact`."""
    if not texts:
        return value is True
    values = value if isinstance(value, list) else [value]
    if len(values) != len(texts) or any(isinstance(one, bool | None) for one in values):
        return False
    for one, text in zip(values, texts, strict=True):
        same_number = not isinstance(one, str) and not exact and float(one) == float(text)
        if str(one) != text and not same_number:
            return False
    return True


def fits(section: str, values: Mapping[str, object]) -> bool:
    """Whether a section takes the values."""
    models: Mapping[str, type[BaseModel]] = {**program_options.SECTIONS, **OWN_SECTIONS}
    try:
        models[section].model_validate(values)
    except ValidationError:
        return False
    return True


def yaml_text(text: str, *, flow: bool = False) -> str:
    """The text as a YAML scalar that is read as text, quoted where it must be."""
    plain = f"[{text}]" if flow else f"a: {text}"
    wanted: object = [text] if flow else {"a": text}
    try:
        if "\n" not in text and yaml.load(plain, Loader=yamlfile.Loader) == wanted:  # noqa: S506
            return text
    except (yaml.YAMLError, ValueError):
        pass
    return json.dumps(text, ensure_ascii=False)


def wrong(text: str, images: Mapping[str, tuple[str, ...]], bare: Collection[str]) -> str:
    """What the launcher would say to the run file, "" where it would start it."""
    name = "the run file"
    root = yamlfile.tree(text, name)
    config = yamlfile.validate(root, RunConfig, name)
    if config.nodes.count > 1 and not config.nodes.master_addr:  # Slurm, or the command line
        nodes = config.nodes.model_copy(update={"master_addr": "first-node"})
        config = config.model_copy(update={"nodes": nodes})
    release = config.image.megatron or images[config.image.tag or ""][0]
    origin = Origin(name, yamlfile.lines(root), {})
    gpus = parse_gpus(config.gpus)
    gpus = replace(gpus, count=fewest(config)) if gpus.count is None else gpus
    host = Host(uid=1, gid=1, home="/", cwd="/", cache="/")
    try:
        facts = ImageFacts(release, config.image.tag not in bare)
        make_plan(resolve(config, origin, facts, host, gpus=gpus), host, Stamp("", ""))
    except UsageError as error:
        return str(error)
    return ""
