"""How cost grows: a Bench as an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unstride.evaluation.benching import Bench, BenchRow
from unstride.show.style import COLOURS, FAINT, INK, PLAIN, SOFT, library

OURS, TTA = COLOURS[0], COLOURS[1]


def plot_bench(result: Bench, title: str = "") -> Any:
    """A matplotlib Figure: `plot_bench(bench(model, example)).savefig("cost.png")`."""
    panels: list[tuple[str, str, Sequence[BenchRow]]] = []
    for batch in dict.fromkeys(row.batch for row in result.rows):
        panels.append((f"batch {batch}", "budget", [row for row in result.rows if row.batch == batch]))
    names = {"budget": "states, all layers", "batch": "images in a batch", "image": "image side, pixels"}
    panels += [(names[kind], kind, rows) for kind, rows in result.growth.items() if rows]
    figure = library().Figure(figsize=(4.2 * len(panels), 3.6), dpi=150, layout="constrained")
    if title:
        figure.suptitle(title, color=INK)
    for axes, (name, kind, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        x = [{"budget": row.budget, "batch": row.batch, "image": row.image[0]}[kind] for row in rows]
        absolute = kind == "image"  # the plain forward grows, too, so ratios would hide it
        scale = [row.plain_ms if absolute else 1.0 for row in rows]
        work = [row.macs * k for row, k in zip(rows, scale, strict=True)]
        axes.plot(x, work, "--", color=PLAIN, label="work (MACs)")
        axes.plot(x, [row.time * k for row, k in zip(rows, scale, strict=True)], "o-", color=OURS, label="time")
        views = [(at, row.tta * k) for at, row, k in zip(x, rows, scale, strict=True) if row.tta is not None]
        if views:
            axes.plot(*zip(*views, strict=True), "s-", color=TTA, label="time of TTA, as many views")
        if kind == "budget" and max(x) > 32:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
        axes.set_xlabel("states" if kind == "budget" else name, color=SOFT)
        axes.set_ylabel("ms" if absolute else "times a plain forward", color=SOFT)
        axes.set_title(name if kind == "budget" else f"{rows[0].budget} states", size=10, color=INK)
        axes.set_ylim(bottom=None if axes.get_yscale() == "log" else 0)
        axes.grid(color=FAINT, linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
    return figure
