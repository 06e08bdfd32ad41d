"""Draws losses.json, losses beside upstream's on the same text: `python3 -m bench.gpu.losses`.

Each run's losses from step 1; upstream's log has the mean of the first two as its second.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import mean

HERE = Path(__file__).parent
REFERENCE, LAST = "upstream", 50


def distances(one: list[float | None], other: list[float | None]) -> list[float]:
    """How far they are apart at each step from the third on, a mean of 10 steps."""
    apart = [abs(a - b) for a, b in zip(one[2:], other[2:], strict=False) if a and b]
    return [mean(apart[max(0, step - 9) : step + 1]) for step in range(len(apart))]


def main() -> None:
    """Write losses.png, and print each run's mean of its last steps."""
    from matplotlib.figure import Figure

    told = json.loads((HERE / "losses.json").read_text(encoding="utf-8"))
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    for axes, (model, runs) in zip(figure.subplots(1, len(told)), told.items(), strict=True):
        for number, (name, losses) in enumerate(runs.items()):
            print(f"{model}, {name}: {len(losses)} steps, {mean(losses[-LAST:]):.4f}")
            if name != REFERENCE:
                apart = distances(losses, runs[REFERENCE])
                axes.plot(range(3, 3 + len(apart)), apart, label=name, color=f"C{number - 1}")
        axes.set_yscale("log")
        axes.set_ylim(bottom=1e-5)
        axes.set_title(model)
        axes.set_xlabel("step")
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("distance from upstream's loss")
    figure.savefig(HERE / "losses.png", dpi=72)


if __name__ == "__main__":
    main()
