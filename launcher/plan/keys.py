"""The keys of a run file that are options of the training program, and the options' names."""

from __future__ import annotations

from functools import cache

from pydantic import BaseModel

from launcher.plan.config import Checkpoint, Data, Logging, Model, Parallel, Training

SECTIONS: dict[str, type[BaseModel]] = {
    "model": Model,
    "training": Training,
    "parallel": Parallel,
    "data": Data,
    "checkpoint": Checkpoint,
    "logging": Logging,
}
THE_RUNNERS = {"checkpoint.keep", "checkpoint.save_overwrite"}
"""Keys of the sections that the runner takes, and the program doesn't."""

RENAMED = {
    "data.path": "--data-path",
    "data.mock": "--mock-data",
    "data.cache": "--data-cache-path",
}


def option_name(key: str) -> str:
    """The option of a section's key: '--num-layers' of model.num_layers."""
    return RENAMED.get(key, "--" + key.partition(".")[2].replace("_", "-"))


@cache
def own_keys() -> dict[str, str]:
    """The key of every option that has one in a section."""
    keys = [
        f"{section}.{field}" for section, model in SECTIONS.items() for field in model.model_fields
    ]
    return {option_name(key): key for key in keys if key not in THE_RUNNERS}


def key(option: str) -> str:
    """The key of an option, in its section or under megatron_args."""
    return own_keys().get(option, f"megatron_args.{option[2:].replace('-', '_')}")
