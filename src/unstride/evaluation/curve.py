"""Accuracy over budget and over cost: the rows of an evaluation as an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unstride.show.style import COLOURS, FAINT, INK, PLAIN, SOFT, library

if TYPE_CHECKING:
    from unstride.evaluation import Row

LINES = (("o-", COLOURS[0]), ("s--", COLOURS[1]))  # told apart without colour, too


def plot_rows(rows: Sequence[Row], title: str = "") -> Any:
    """A matplotlib Figure: `plot_rows(unstride.evaluate("sample", "sample")).savefig("curve.png")`."""
    from unstride.evaluation.page import measured
    from unstride.evaluation.words import measure, untrained

    figure = library().Figure(figsize=(9.2, 3.9), dpi=150, layout="constrained")
    told = f"{rows[0].spec} on {rows[0].data}: {rows[0].images:,} images"
    figure.suptitle(", ".join(filter(None, [title or told, untrained(rows[0])])), color=INK)
    names = ("budget (states per image)", "cost (MACs, plain forward = 1)")
    for axes, name, over_cost in zip(figure.subplots(1, 2, sharey=True), names, (False, True), strict=True):
        axes.axhline(100 * rows[0].quality, color=PLAIN, linestyle=":", label="plain")
        for (label, points), (line, colour) in zip(measured(rows).items(), LINES, strict=False):
            x = [m.cost if over_cost else m.budget for m in points]
            low, high = ([100 * v for v in side] for side in zip(*((m.low, m.high) for m in points), strict=True))
            axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
            axes.vlines(x, low, high, color=colour, linewidth=1)
            axes.plot(x, [100 * m.value for m in points], line, color=colour, label=label)
        axes.set_xlim(left=0)
        axes.set_xlabel(name, color=SOFT)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel(f"{measure(rows[0])}, %; bars: 95 % interval of the gain", color=SOFT, fontsize=8)
    return figure
