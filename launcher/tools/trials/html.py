"""Renders results as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.base.screen import duration
from launcher.images.matrix.dockerfile import between_markers
from launcher.tools.pages import page
from launcher.tools.trials.result import ORDER, STAGES, Cell, CellResult, warned
from launcher.tools.trials.trial_report import BEGIN, END, PAGE, TABLE, load_committed, plain, table

PARTS = Path(__file__).with_name("page")
"""The template of the page, its style and its script."""

KINDS = dict(zip(ORDER, ("fails", "part", "part", "warns", "runs"), strict=True))
"""How a verdict looks: its class in the style."""

SIGNS = {"fails": "✕", "part": "◐", "warns": "!", "runs": "✓", "skipped": "–"}
"""The sign of each class, so that no colour needs to be recognised."""

STEPS = tuple(STAGES)[:7]
"""The stages that follow one another; the others are limits that end any of them."""

REACHED = {"builds": "compile", "imports": "import"}
"""The last step of a verdict that isn't the end."""

NAMES = {
    "os": "OS",
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA",
    "driver": "driver",
    "cudnn": "cuDNN",
    "nccl": "NCCL",
    "transformer_engine": "Transformer Engine",
    "apex": "Apex",
    "flash_attention": "flash-attn",
    "megatron_core": "megatron_core",
    "extension": "extension",
    "training": "megatron.training",
    "gpus": "GPUs",
    "transformer_engine_layer": "TE layer",
    "apex_layer": "Apex layer",
}
"""The facts as people call them, in the order in which they are shown."""


@dataclass(frozen=True)
class CellCard:
    """A cell as the page shows it: `id` is what comes after # in a link to it."""

    id: str
    result: CellResult

    @property
    def kind(self) -> str:
        return KINDS[self.result.verdict]

    @property
    def steps(self) -> list[tuple[str, str]]:
        """Each of STEPS, and whether it is done, failed, or wasn't come to ("left")."""
        one = self.result
        if one.verdict != "fails":
            done = STEPS.index(REACHED.get(one.verdict, STEPS[-1])) + 1
            return [(step, "done" if i < done else "left") for i, step in enumerate(STEPS)]
        failed = one.ended_at in STEPS
        at = STEPS.index(one.ended_at) if failed else 0
        states = ["done"] * at + ["failed" if failed else "left"] + ["left"] * len(STEPS)
        return list(zip(STEPS, states, strict=False))

    @property
    def times(self) -> list[tuple[str, float]]:
        """Seconds of each stage, in the order of stages, which a sorted file has lost."""
        return sorted(self.result.seconds.items(), key=lambda one: [*STAGES].index(one[0]))

    @property
    def asides(self) -> list[str]:
        """What the image's packages warned of as it was asked for facts: no verdict counts it."""
        facts = self.result.facts.values()
        return list(dict.fromkeys(text for fact in facts for text in fact["warnings"]))

    @property
    def again(self) -> str:
        """The command that tries it again."""
        one = self.result
        on = "" if one.trained_on in ("", "CPU") else " --gpus all"
        return f"launcher matrix compat {one.tag} --megatron {one.megatron}{on} --again"


def as_html(results: Sequence[CellResult], title: str = "Compatibility") -> str:
    """The page; a text of an image or a log is never anything but text in it."""
    cards = list(_cards(results))
    by_result = {id(card.result): card for card in cards}
    return page.render(
        PARTS,
        title,
        {"plain": plain, "took": duration},
        cards=cards,
        kinds=KINDS,
        signs=SIGNS,
        stages=STAGES,
        names=_present(results),
        tags=list(dict.fromkeys(one.tag for one in results)),
        releases=list(dict.fromkeys(one.megatron for one in results)),
        warned=[(one, [by_result[id(each)] for each in one.results]) for one in warned(results)],
    )


def rendered(root: Path, rows: Iterable[Cell] = ()) -> dict[Path, str]:
    """docs/compat.md with the table of the committed results, and their page.

    rows: the matrix's own cells; the table names those without a result

    Raises UsageError where the markers of the table are missing.
    """
    results, shown = load_committed(root), root / TABLE
    if not results or not shown.exists():
        return {}
    tried = {one.tag for one in results}
    without = [one for one in rows if one.tag not in tried]
    text = between_markers(shown, table(results, without), BEGIN, END)
    return {shown: text, root / PAGE: as_html(results, "What was tried")}


def _cards(results: Iterable[CellResult]) -> Iterable[CellCard]:
    """A card for each result; the id of a second one of the same cell has its number."""
    had: dict[str, int] = {}
    for one in results:
        name = f"{one.tag}-{one.megatron}"
        had[name] = had.get(name, 0) + 1
        yield CellCard(name if had[name] == 1 else f"{name}-{had[name]}", one)


def _present(results: Iterable[CellResult]) -> dict[str, str]:
    """The facts that any image has, by their names."""
    found = {
        name
        for one in results
        for name, fact in one.facts.items()
        if fact["value"] is not None or fact["error"]
    }
    return {key: name for key, name in NAMES.items() if key in found}
