"""Rows in words, the same on the command line and in the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unstride.evaluation.measures import measure_of
from unstride.evaluation.rows import Row


def verdict(row: Row) -> str:
    """`budget 4: helps: +0.50 points ...`: one line on one row."""
    g, by = row.gain, row.measure
    scale, digits = (100, ".2f") if by.percent else (1, ".4g")
    changed = f" {g['corrected']:,} {by.counted} corrected, {g['corrupted']:,} corrupted;" if by.counted else ""
    return (
        f"{stated(row)}: {row.verdict}: {by.change(g['gain'])}, 95 % interval {g['low'] * scale:+{digits}} to "
        f"{g['high'] * scale:+{digits}};{changed} {row.macs:.1f}x the MACs"
        + (f", {row.latency:.1f}x the time" if row.latency is not None else "")
    )


def advice(rows: Sequence[Row]) -> str:
    """Which setting to use, and why."""
    chosen = next(row for row in rows if row.recommended)
    best = max(rows, key=lambda row: -row.quality if row.measure.lower else row.quality)
    if untrained(chosen):
        return f"recommended: nothing; with {untrained(chosen)} no accuracy means anything, so load trained ones"
    if chosen.plain:
        return (
            f"recommended: leave it off; nothing is measurably better than the plain network on these "
            f"{chosen.images:,} images"
        )
    same = "the best" if chosen is best else f"the cheapest that is not measurably below the best ({setting(best)})"
    return f"recommended: {setting(chosen)}, {same}, at {chosen.macs:.1f}x the MACs of a plain forward"


def untrained(row: Row) -> str:
    """`random weights`, said in every line with an accuracy of them; nothing where the weights were trained."""
    return _random(row.weights)


def _random(weights: str) -> str:
    if weights in ("random", "none"):  # "none": rows of version 0.1
        return "random weights"
    return weights if weights.startswith("random") else ""


def stated(row: Row) -> str:
    """`setting`, and what must be said beside its accuracy."""
    return setting(row) + (f" ({untrained(row)})" if untrained(row) else "")


def doubts(rows: Sequence[Row]) -> list[str]:
    """What makes the plain accuracy itself doubtful, and what is usually wrong then."""
    return doubts_of(rows[0].task, rows[0].metrics, rows[0].images, rows[0].weights)


def doubts_of(task: str, metrics: Mapping[str, Any], images: int, weights: str) -> list[str]:
    """The same from the plain network's metrics, with the `chance` of guessing among them."""
    by, chance = measure_of(task, metrics), metrics.get("chance")
    if _random(weights):
        return [f"{by.name} with {_random(weights)} is the accuracy of guessing; give trained weights"]
    if chance is None or by.enough is None or images < by.enough:
        return []
    wide = 0.0 if task == "segmentation" else 2 * math.sqrt(chance * (1 - chance) / images)
    found = float(metrics[by.key])
    if found > chance + wide:
        return []
    give = f", give or take {100 * wide:.2f}" if wide else ""
    return [
        f"plain {by.name} is {100 * found:.2f} %, no better than guessing ({100 * chance:.2f} %{give}). "
        "Usually wrong then: labels in another order than the model's classes; images prepared in another way than in "
        "training (size, mean and std, BGR for RGB); weights that are random, or were trained for something else"
    ]


def setting(row: Row) -> str:
    """`plain`, `recipe flip`, `budget 4`, `budget 4 in 15 views`."""
    if row.plain:
        return "plain"
    if row.recipe is not None:
        return f"recipe {row.recipe}"
    return f"budget {row.budget}" + (f" in {row.views} views" if row.views > 1 else "")


def measure(row: Row) -> str:
    """The name of `row.quality`."""
    return row.measure.name
