"""Tuning the embedded networks: two classifiers as a cascade, and the segmenter against a flip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unstride.demo.parts import DemoSize, NamedRow, Say, row_named, rows_table
from unstride.recipe.presets import get
from unstride.show.html import Block, Figure, Text
from unstride.tuning.result import Tuned
from unstride.tuning.tune import tune

SMALL, LARGE, SEGMENTER = "sample", "sample-large", "sample-segmentation"
CASCADE_COST, SEGMENTER_COST = 2.0, 2.0
COST = "Cost 1.00x is one forward pass of"
CROSS = "Figures of the tuned recipe are cross-validated: each image by a recipe that was chosen without it."


def classifiers(out: Path, size: DemoSize, say: Say) -> tuple[Tuned, Any, list[Block]]:
    """The small network, the large one, both on every image, and the large one only where the small is uncertain."""
    say(f"tuning {SMALL} and {LARGE} on {size.classifiers:,} images")
    tuned = _tuned([SMALL, LARGE], SMALL, CASCADE_COST, size.classifiers)
    names = {"small": SMALL, "large": LARGE, "both, averaged": "ensemble of all", "tuned": tuned.row.name}
    rows = [NamedRow(name, row_named(tuned.rows, known)) for name, known in names.items()]
    blocks: list[Block] = [
        Text(
            f"Two classifiers of Fashion-MNIST, {rows[0].row.images:,} labelled test images. `unstride tune {SMALL} "
            f"{LARGE} --data {SMALL} --cost {CASCADE_COST:g}` finds the best recipe at that mean cost."
        ),
        rows_table(rows, f"{COST} the small network. {CROSS}", strong=3),
        Text(str(tuned.decision)),
        Text(f"The recipe: {_one_line(tuned)}"),
        _plot(tuned),
    ]
    return tuned, _figures(tuned, rows), blocks


def segmenter(out: Path, size: DemoSize, say: Say) -> tuple[Any, list[Block]]:
    """The network alone, a flip, multi-scale, and the recipe that tune finds at the cost of a flip."""
    say(f"tuning {SEGMENTER} on {size.scenes} scenes")
    tuned = _tuned(SEGMENTER, SEGMENTER, SEGMENTER_COST, size.scenes, against="flip")
    known = {row.name: row for row in tuned.rows}
    chosen = {
        "base model": known[SEGMENTER],
        "flip": next(row for name, row in known.items() if row.gain is None),
        "multi-scale": next((row for name, row in known.items() if "multi" in name), None),
        "tuned": tuned.row,
    }
    if is_a_flip(tuned):
        del chosen["tuned"]  # it is the row of the flip
    rows = [NamedRow(name, row) for name, row in chosen.items() if row is not None]
    blocks: list[Block] = [
        Text(
            f"A segmenter on {rows[0].row.images} scenes of Fashion-MNIST test images. Gains are over a flip, "
            "the usual test-time augmentation of segmentation. The tuned recipe may cost as much as a flip: "
            f"{SEGMENTER_COST:g}."
        ),
        rows_table(rows, f"{COST} the segmenter. {CROSS}", strong=1 if is_a_flip(tuned) else len(rows) - 1),
        Text(against_a_flip(tuned)),
        *([] if is_a_flip(tuned) else [Text(f"The recipe: {_one_line(tuned)}")]),
        _plot(tuned),
    ]
    return _figures(tuned, rows), blocks


def against_a_flip(tuned: Tuned) -> str:
    """The decision over a flip, and where nothing beats it, why."""
    if tuned.decision.verdict == "use" and tuned.decision.gain.low > 0:
        return str(tuned.decision)
    result = "`tune` chooses the flip itself" if is_a_flip(tuned) else f"{tuned.decision}"
    return (
        f"No recipe at this cost is shown to beat a flip: {result.removesuffix('.')}. This network was trained with "
        "flips and on whole scenes at one size, so a flip is a view that it knows, and other sizes are not."
    )


def is_a_flip(tuned: Tuned) -> bool:
    """Whether the tuned recipe is the flip that it was compared with."""
    return tuned.recipe.digest() == get("flip", tuned.recipe.task).digest()


def _tuned(models: Any, data: str, cost: float, limit: int, **options: Any) -> Tuned:
    found = tune(models, data, cost=cost, limit=limit, **options)
    assert isinstance(found, Tuned)  # the data has labels
    return found


def _one_line(tuned: Tuned) -> str:
    return "; ".join(line.strip() for line in str(tuned.recipe).splitlines()[1:]) or str(tuned.recipe)


def _plot(tuned: Tuned) -> Block:
    return Figure(tuned.plot().svg, "Gain against cost, each alternative by its name.", "Gain against cost.")


def _figures(tuned: Tuned, rows: list[NamedRow]) -> dict[str, Any]:
    decision = {"decision": str(tuned.decision), "verdict": tuned.decision.verdict}
    return {**decision, "recipe": str(tuned.recipe), "rows": [row.to_json() for row in rows]}
