"""Drafts a run file of somebody's own: of a preset, a model of Hugging Face's, or a script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.base import yamlfile
from launcher.base.errors import UsageError
from launcher.base.install import install
from launcher.base.settings import PACKAGE
from launcher.runs.checks import fit
from launcher.runs.checks.fit import Changes
from launcher.runs.checks.machine import Gpu
from launcher.runs.plan import layout, program_options
from launcher.runs.records import resume
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import EXTENDS, Override, overridden
from launcher.tools.tuning import tuned

SCHEMA = PACKAGE / "presets/run.schema.json"
HEADER = "# yaml-language-server: $schema="
"""How the line begins by which editors know what may be in the file."""

SECTIONS = ("training", "parallel", "model", "megatron_args")
"""Of a run file what a fit may change."""


@dataclass(frozen=True)
class Draft:
    """A run file's text, and lines on what it is; `config` is what it says."""

    text: str
    config: RunConfig
    lines: tuple[str, ...] = ()

    def written(self, name: str) -> str:
        """The text of the file of that name, below the lines and the one of the schema."""
        text = re.sub(rf"^{re.escape(HEADER)}.*\n", "", self.text)
        use = f"`launcher run {name} --dry-run` shows what would run; without --dry-run it starts."
        return f"{HEADER}{SCHEMA}\n" + tuned.headed(text, [use, *self.lines])


def of_preset(name: str) -> Draft:
    """A preset, or a run file, whole: with what it takes of the files that it extends."""
    config, _ = origins.load(name, [])
    return Draft(_flattened(name), config)


def _flattened(name: str, folder: Path | None = None) -> str:
    """The text of a run file over that of the file that it extends."""
    label, path = origins.find(name, folder)
    text = yamlfile.read(path, label)
    root = yamlfile.tree(text, label)
    data = yamlfile.value(root, label) if root else None
    if not isinstance(data, dict) or EXTENDS not in data:
        return text
    below = _comments(_flattened(str(data.pop(EXTENDS)), path.parent))[1]
    config, _ = origins.load(str(path) if path.is_file() else name, [])
    return _comments(text)[0] + tuned.changed(below, dict(_dotted(data)), config)


def _comments(text: str) -> tuple[str, str]:
    """The comments that a text begins with, and the rest."""
    found = re.match(r"(#.*\n|\s*\n)*", text)
    at = found.end() if found else 0
    return text[:at], text[at:]


def _dotted(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, dict) and value:
            yield from _dotted(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def of_model(folder: Path) -> Draft:
    """The model of a folder of Hugging Face's. Raises UsageError for what Megatron hasn't."""
    install()
    from launcher.tools.weights import architecture, convert, hf_config, safetensors

    convert.require_model(folder)
    shape = hf_config.of_config(safetensors.read_json(folder / hf_config.CONFIG), 1)
    base = of_preset("gpt2" if shape.of.gpt2 else "llama3-8b")
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name).strip("-._")[:60] or "model"
    told = architecture.arguments(shape)
    known = {program_options.key_of(key): value for key, value in told.items() if _is_ours(key)}
    known = {key: value for key, value in known.items() if key.startswith(("model", "megatron"))}
    changes: Changes = {f"model.{key}": None for key in base.config.model.model_fields_set}
    kept = ("init_method_std", "hidden_dropout", "attention_dropout", "seq_length")
    changes = {key: value for key, value in changes.items() if key[6:] not in kept}
    changes |= {key: value for key, value in known.items() if value not in (None, False)}
    changes |= {"parallel.tensor_model_parallel_size": 1, "parallel.sequence_parallel": None}
    changes |= {"model.seq_length": min(shape.positions, base.config.model.seq_length or 2048)}
    folders = f"checkpoints/{name}"
    changes |= {"name": name, "data.vocab_size": shape.vocabulary}
    changes |= {"checkpoint.save": folders, "checkpoint.load": folders}
    if (folder / "tokenizer.json").is_file():
        tokenizer = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
        changes |= {f"data.{key}": value for key, value in tokenizer.items()}
    changes = {k: v for k, v in changes.items() if v is not None or _is_set(base.config, k)}
    weights = (
        "This trains the shape from nothing. To begin from its weights:",
        f"  launcher checkpoint import {folder} --output {folders}-weights",
        f"  and below: checkpoint.load: {folders}-weights, checkpoint.finetune: true",
    )
    return _changed(Draft(_comments(base.text)[1], base.config, weights), changes)


def _is_ours(name: str) -> bool:
    """Whether our own program takes an option, and it isn't one that follows from others."""
    follows = "vocab" in name or name == "group_query_attention"
    return f"--{name.replace('_', '-')}" in program_options.table().gpt and not follows


def _is_set(config: RunConfig, key: str) -> bool:
    section, _, name = key.partition(".")
    found = getattr(config, section)
    return getattr(found, name, None) is not None if name else found is not None


def _changed(draft: Draft, changes: Changes) -> Draft:
    wished = overridden(draft.config, [Override("init", changes)])
    return Draft(tuned.changed(draft.text, changes, wished), wished, draft.lines)


def fitted(draft: Draft, count: int, cards: Sequence[Gpu]) -> Draft:
    """The draft for so many GPUs, 0 for the CPU; the layout follows, by `cards` where they are.

    Raises UsageError where no layout fits so many.
    """
    config = draft.config
    before = config.processes if config.gpus == "0" else _count(config.gpus)
    changes: Changes = {"gpus": count}
    if count == 0:
        where = layout.layout(config, max(before, 1))
        count = where.tensor * where.pipeline * where.context
        changes |= {"processes": count} if count > 1 else {}
        if config.program == "gpt" and config.image.tag and "cpu" not in config.image.tag:
            changes |= {"image": "cpu"}
    found = resume.on_processes(config, before, count) if count != before else None
    changes |= _differences(config, found.config) if found else {}
    lines = [note for note in (found.notes if found else ()) if note.startswith("layout: ")]
    smallest = min((card for card in cards if card.total), key=lambda one: one.total, default=None)
    wished = overridden(config, [Override("init", changes)])
    if smallest and changes["gpus"]:
        needed = fit.smallest(wished, count, smallest)
        changes |= needed or {}
        if needed is None:
            lines.append(f"it doesn't fit on {count} × {smallest.name}, by an estimate")
    made = _changed(draft, changes)
    return Draft(made.text, made.config, (*lines, *draft.lines))


def _count(gpus: str) -> int:
    """How many GPUs a run file asks for; of all, as many as one."""
    return int(gpus) if gpus.isdecimal() else max(len(gpus.split(",")), 1)


def _differences(before: RunConfig, after: RunConfig) -> Changes:
    """What has another value, by dotted keys."""
    then, now = (one.model_dump(exclude_unset=True) for one in (before, after))
    return {
        f"{section}.{key}": now.get(section, {}).get(key)
        for section in SECTIONS
        for key in {**then.get(section, {}), **now.get(section, {})}
        if then.get(section, {}).get(key) != now.get(section, {}).get(key)
    }


def of_text(text: str, name: str) -> Draft:
    """What a text of a run file says, as the import of a script writes it. Raises UsageError."""
    try:
        return Draft(text, yamlfile.parse(text, RunConfig, name))
    except UsageError as error:
        raise UsageError(f"{name}: not yet a run file that is whole: {error.problem}") from None
