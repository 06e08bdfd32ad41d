"""Writes a run's numbers to TensorBoard and Weights & Biases, under upstream's names."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from launcher.agent.ranks.exit_codes import OptionError, RunError

FLUSH_SECONDS = 10
"""How long TensorBoard's writer keeps a number at most."""


def check_packages(arguments: argparse.Namespace) -> None:
    """Raises `OptionError` where the package isn't there that would write."""
    for option, value, package in (
        ("--tensorboard-dir", arguments.tensorboard_dir, "tensorboard"),
        ("--wandb-project", arguments.wandb_project, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise OptionError(
                f"{option} needs the Python package {package}, which isn't here: leave the option "
                "out, or put the package on PYTHONPATH"
            )


class Writers:
    """Writes to TensorBoard, to Weights & Biases, to both or to neither; for one rank."""

    def __init__(self, arguments: argparse.Namespace, iteration: int) -> None:
        """For a run that begins after `iteration`. Raises `RunError` where a writer can't start."""
        folder, project = arguments.tensorboard_dir, arguments.wandb_project
        self.tensorboard: Any = _tensorboard(folder, iteration) if folder else None
        self.wandb: Any = _wandb(arguments) if project else None

    def write(
        self, values: Mapping[str, float | None], iteration: int, samples: int | None = None
    ) -> None:
        """Write numbers by tag, but for None; with `samples`, to TensorBoard by those too."""
        known = {tag: value for tag, value in values.items() if value is not None}
        for tag, value in known.items() if self.tensorboard else ():
            self.tensorboard.add_scalar(tag, value, iteration)
            if samples is not None:
                self.tensorboard.add_scalar(f"{tag} vs samples", value, samples)
        if self.wandb:
            over = {} if samples is None else {"samples vs steps": samples}
            self.wandb.log({**over, **known}, iteration)

    def close(self) -> None:
        """Write what is left."""
        if self.tensorboard:
            self.tensorboard.close()
        if self.wandb:
            self.wandb.finish()


def _tensorboard(folder: str, iteration: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    # What an interrupted run wrote after its last checkpoint gives way to what comes now.
    purge = iteration + 1 if iteration else None
    try:
        return SummaryWriter(folder, purge_step=purge, flush_secs=FLUSH_SECONDS)
    except OSError as error:
        raise RunError(f"can't write to {folder}: {error.strerror}") from error


def _wandb(arguments: argparse.Namespace) -> Any:
    folder = arguments.wandb_save_dir
    if not folder and arguments.save:
        folder = os.path.join(arguments.save, "wandb")
    try:
        wandb: Any = importlib.import_module("wandb")
        if folder:
            os.makedirs(folder, exist_ok=True)
        wandb.init(
            dir=folder,
            project=arguments.wandb_project,
            name=arguments.wandb_exp_name,
            config=vars(arguments),
        )
    except Exception as error:  # it has errors of many kinds, most of them the user's
        reason = str(error).strip().partition("\n")[0]
        raise RunError(f"W&B doesn't start: {reason}") from error
    return wandb
