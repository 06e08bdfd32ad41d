"""The result of a matrix cell, compared with what was expected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from launcher.tools.trials.trials import NUMBER

ORDER = ("fails", "builds", "imports", "runs with warnings", "runs")
"""The verdicts, from the worst to the best."""

STAGES = {
    "pull": "base and builder",
    "fetch": "Megatron's source and the Python packages",
    "patch": "the patches of the release",
    "compile": "the wheel and the image",
    "import": "the compiled extension, megatron.training, layers of Transformer Engine and Apex",
    "train": "the trials of image probe",
    "checkpoint": "saving, and loading in another layout",
    "time limit": "a cell may take no longer",
    "disk budget": "images may take no more",
}
"""Where a cell can fail, in order."""
OUTSIDE = ("pull", "fetch")
"""Those of them that ask others, who may have another answer the next time."""
LIMITS = ("time limit", "disk budget")
"""Those of them that are no fault of the cell."""
WHILE = ", while at "
"""What is before the stage, in the reason of one that went over a limit."""

# Warnings that are understood, by what they say: read in torch 2.2.2 to 2.5.1, and in Megatron.
CAUSES = (
    (r"torch\.cuda\.amp\.custom_(fwd|bwd)", "Megatron before 0.10.0 names two decorators as torch "
     "before 2.4 did"),
    (r"torch\.cuda\.amp\.autocast\(", "a package names autocast as torch before 2.4 did"),
    (r"_all_gather_base|_reduce_scatter_base", "Megatron before 0.10.0 calls collectives by names "
     "that are torch's own"),
    (r"_sharded_tensor`? will be deprecated", "Megatron before 0.10.0 imports ShardedTensor from "
     "its old place in torch"),
    (r"deprecating ShardedTensor", "Megatron's checkpoints are made of torch's ShardedTensor"),
    (r"\b(load|save)_state_dict\W{1,2}is deprecated", "Megatron calls torch's distributed "
     "checkpoints by an old name"),
    (r"`torch\.load` with `weights_only=False`", "Megatron leaves weights_only of torch.load "
     "unset; torch 2.4 and 2.5 ask for it"),
    (r"`torch\.library\.impl_abstract` was renamed", "a package names it as torch before 2.4 did"),
    (r"Transformer Engine and Apex are not installed", "the image has neither Transformer Engine "
     "nor Apex"),
    (r"Apex is not installed", "the image has no Apex"),
    (r"Transformer Engine is not installed", "the image has no Transformer Engine"),
    (r"`?async_grad_allreduce`? is deprecated", "Megatron's own older name"),
    (r"full scope is deprecated", "Megatron's own default for cuda_graph_scope"),
    (r"_jit_set_nvfuser_enabled", "Megatron switches on a fuser that torch has no more"),
    (r"invalid escape sequence", "a text in Megatron's sources; Python 3.12 says so"),
    (r"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "set by the launcher, or torch 2.6 and later don't load "
     "what Megatron saved"),
    (r"Overriding default arguments for", "another tokenizer than the program's own default"),
    (r"invoking optimized fused softmax", "a short sequence or no fused kernel: Megatron takes "
     "torch's"),
    (r"The fp8 argument in .* has been deprecated", "Megatron's own older argument"),
    (r"_get_layer_offset is deprecated|on a deprecation track", "Megatron's own older function"),
    (r"destroy_process_group\(\) was not called|process group has NOT been destroyed", "upstream's "
     "programs before 0.17.0 end without it; torch says so from 2.4 on"),
    (r"using the device under current context", "upstream names no device to init_process_group"),
)  # fmt: skip


def cause(warning: str) -> str:
    """Why a warning comes, "" where that isn't known."""
    return next((why for says, why in CAUSES if re.search(says, warning)), "")


@dataclass(frozen=True)
class Cell:
    """A row with a release."""

    tag: str
    megatron: str

    def __str__(self) -> str:
        return f"{self.tag} × {self.megatron}"


@dataclass(frozen=True)
class CellResult:
    """What was found: a verdict of ORDER; of one that failed the stage, the reason, the last lines.

    key: names all that the cell was tried with; seconds: of each stage
    """

    tag: str
    megatron: str
    key: str
    verdict: str
    expected: str | None = None
    stage: str = ""
    reason: str = ""
    tail: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    trials: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """JSON has lists for tuples."""
        for name in ("tail", "warnings"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def cell(self) -> Cell:
        return Cell(self.tag, self.megatron)

    @property
    def worse(self) -> bool:
        """Whether it is worse than expected; nothing is where nothing was."""
        return self.expected is not None and ORDER.index(self.verdict) < ORDER.index(self.expected)

    @property
    def better(self) -> bool:
        """Whether it is better than expected."""
        return not self.worse and self.expected not in (None, self.verdict)

    @property
    def failure(self) -> bool:
        """Whether it fails the series: it fails unexpectedly, or is worse than expected."""
        return self.worse or (self.verdict == "fails" and self.expected is None)

    @property
    def trained_on(self) -> str:
        """What was trained on: GPUs by their name, "CPU", or "" where nothing was asked."""
        gpus = self.facts.get("gpus") or {}
        return str(gpus.get("value") or "CPU") if self.facts else ""

    @property
    def ended_at(self) -> str:
        """The stage that it was at when it failed, of one that went over a limit, too; or ""."""
        return self.reason.partition(WHILE)[2] if self.stage in LIMITS else self.stage

    @property
    def told(self) -> str:
        """The verdict with the stage that failed."""
        return f"{self.verdict}: {self.stage}" if self.stage else self.verdict


@dataclass(frozen=True)
class WarningNote:
    """A warning as first printed, why it comes ("" where unknown), and the cells it is of."""

    text: str
    cause: str
    results: tuple[CellResult, ...]


def warned(results: Iterable[CellResult]) -> list[WarningNote]:
    """The warnings of all cells, each once whatever numbers stand in it, the most frequent first.

    They are distinguished as in a trial: 0x7f3c and 12 are the same in two texts.
    """
    found: dict[str, tuple[str, list[CellResult]]] = {}
    for one in results:
        for text in one.warnings:
            _, those = found.setdefault(NUMBER.sub("#", text), (text, []))
            if not those or those[-1] is not one:
                those.append(one)
    told = [WarningNote(text, cause(text), tuple(those)) for text, those in found.values()]
    return sorted(told, key=lambda one: -len(one.results))


def verdict(facts: Mapping[str, Any], trials: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict on an image that was built, from `image probe`'s facts and trials."""
    for name in ("extension", "training", "transformer_engine_layer", "apex_layer"):
        if name in facts and facts[name]["error"]:
            reason = f"{name}: {facts[name]['error']}"
            return {"verdict": "fails", "stage": "import", "reason": reason}
    warnings = tuple(dict.fromkeys(line for trial in trials.values() for line in trial["warnings"]))
    for trial in trials.values():
        if trial["state"] == "fails":
            told = {key: trial[key] for key in ("stage", "reason", "tail")}
            return {"verdict": "fails", **told, "warnings": warnings}
    states = {trial["state"] for trial in trials.values()} - {"skipped"}
    reached = min(states, key=ORDER.index) if states else "imports" if facts else "builds"
    return {"verdict": reached, "warnings": warnings}
