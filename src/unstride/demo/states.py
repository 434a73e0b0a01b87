"""The paper's procedure (ECCV 2024) on the embedded classifier: states of its strided layers, three aggregations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from unstride import models
from unstride.data import load as load_data
from unstride.demo.parts import DemoSize, NamedRow, Say, rows_table
from unstride.demo.tuning import COST, SMALL
from unstride.evaluation.evaluate import evaluate
from unstride.learning.fitting import fit
from unstride.recipe.presets import get
from unstride.show.charts import Chart, Point, Series
from unstride.show.html import Block, Text

BUDGETS = (4, 10)
SCHEDULE, EPOCHS = "fast", 15  # so few images need more steps than the schedule has


def states(out: Path, size: DemoSize, say: Say) -> tuple[Any, list[Block]]:
    """Budgets 1 (the base model), 4 and 10, with the mean, entropy weights, and the learned aggregation."""
    loaded = models.load(SMALL)
    whole = load_data(SMALL, loaded.preprocess)
    images = replace(whole, chosen=whole.chosen[: size.states])
    others = replace(whole, chosen=whole.chosen[len(whole) - size.fitting :])
    say(f"training the learned aggregation on {size.fitting} other images")
    learned = out / "learned.toml"
    report = fit(loaded, others, schedule=SCHEDULE, epochs=EPOCHS, out=learned).report
    recipes: dict[str, Any] = {
        "mean": get("paper").changed(aggregate="mean"),
        "entropy": get("paper"),
        "learned": learned,
    }
    say(f"searching up to {max(BUDGETS)} states of {size.states} images")
    found = evaluate(loaded, images, recipe=list(recipes.values()), budgets=list(BUDGETS))
    base, rest = found[0], iter(found[1:])
    rows = [NamedRow("B = 1, the base model", base)]
    rows += [NamedRow(f"B = {budget}, {name}", next(rest)) for name in recipes for budget in BUDGETS]
    points = {name: [(1, base), *zip(BUDGETS, _of(rows, name), strict=True)] for name in recipes}
    series = tuple(Series(name, tuple(Point(b, row.metrics["NLL"]) for b, row in own)) for name, own in points.items())
    blocks: list[Block] = [
        Text(
            f"The paper's search on {len(images)} of these images: B states of each image, aligned and aggregated. "
            f"The learned aggregation was trained on {size.fitting} other images with our {SCHEDULE} schedule (epoch "
            f"{report.kept} of {len(report.epochs) - 1}); the paper's takes 20,000."
        ),
        rows_table(rows, f"{COST} {SMALL}. Gains are over the base model on the same images."),
        Chart("Likelihood over the budget", "states, B", "NLL (lower is better)", series, base.metrics["NLL"], False),
    ]
    return {"images": len(images), "kept": report.kept, "rows": [_json(row) for row in rows]}, blocks


def _of(rows: list[NamedRow], name: str) -> list[Any]:
    return [named.row for named in rows if named.name.endswith(f", {name}")]


def _json(named: NamedRow) -> dict[str, Any]:
    return {**named.to_json(), "nll": named.row.metrics["NLL"]}
