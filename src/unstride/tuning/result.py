"""What `tune` returns: a recipe, the decision about it, and the table of what people do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unstride.errors import OptionError
from unstride.evaluation.decisions import Decision
from unstride.evaluation.findings import IMAGE_KEYS
from unstride.evaluation.intervals import ConfidenceInterval
from unstride.evaluation.labelled import Data
from unstride.evaluation.rows import Row, table
from unstride.evaluation.scoring import Scoring
from unstride.evaluation.timing import TimeRatio
from unstride.execution.prediction import Prediction
from unstride.pipeline import Pipeline
from unstride.recipe.files import to_data, write
from unstride.recipe.recipe import Recipe
from unstride.storage.provenance import provenance


@dataclass(frozen=True, eq=False)
class Tuned:
    """A tuned recipe. `print` shows the decision and the table.

    Attributes:
        recipe: the best one under the ceiling. It may be a network alone.
        decision: whether to use it. Its figures are cross-validated.
        rows: what people do at their cost, then the tuned recipe.
        frontier: the recipe of each ceiling that was asked for.
        pipeline: the networks with the recipe, ready to run: `tuned.pipeline.better(images)`.
        cost: the expected mean cost on new images, with its interval.
        time: the measured time, where it was bounded.
        stats: of the images, by the rows' names.
        indices: of each image in the stats, its index in the data.
        image_keys: a sample of the images by their contents, so that `evaluate` knows them again.
    """

    recipe: Recipe
    decision: Decision
    rows: tuple[Row, ...]
    frontier: Mapping[float, Recipe]
    pipeline: Pipeline
    cost: ConfidenceInterval
    ceiling: float
    notes: tuple[str, ...]
    time: TimeRatio | None
    stats: Mapping[str, Any] = field(repr=False)
    data: Data = field(repr=False)
    scoring: Scoring = field(repr=False)
    indices: NDArray[np.int64] = field(repr=False)
    image_keys: tuple[str, ...] = ()

    @property
    def row(self) -> Row:
        """Of the tuned recipe."""
        return next(row for row in self.rows if row.name == f"tuned for {self.ceiling:g}")

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """The decision, the recipe and the table, in lines of at most `width` where the names allow it."""
        cost = f"{self.cost.estimate:.2f}"
        if self.cost.width:
            cost += f" (95 % CI {self.cost.low:.2f} to {self.cost.high:.2f})"
        lines = [
            str(self.decision),
            str(self.recipe),
            f"expected cost {cost}, ceiling {self.ceiling:g}, in {self.row.cost_unit}",
            "",
            table(self.rows, width),
            "",
            "Figures of tuned recipes are cross-validated. Passes and thresholds are those of the final recipe.",
            *self.notes,
        ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Tuned({self.decision})"

    def figures(self) -> dict[str, Any]:
        """What a recipe file says about how its recipe was chosen."""
        gain = self.decision.gain
        return {
            "verdict": str(self.decision),
            "decision": self.decision.verdict,
            "baseline": self.decision.baseline,
            "metric": self.row.metric,
            "gain": gain.estimate,
            "gain_low": gain.low,
            "gain_high": gain.high,
            "cost": self.cost.estimate,
            "cost_low": self.cost.low,
            "cost_high": self.cost.high,
            "ceiling": self.ceiling,
            "images": self.row.images,
            IMAGE_KEYS: list(self.image_keys),
            "shares": [s.gate.share for s in self.recipe.stages if s.gate is not None and s.gate.share is not None],
        }

    def save(self, path: str | Path, anyway: bool = False) -> Path:
        """Write the recipe with its networks and figures. "Keep" writes nothing without `anyway`."""
        if self.decision.verdict == "keep" and not anyway:
            raise OptionError(f"{path}: not written. {self.decision} Pass anyway=True (--anyway) to write it.")
        networks = self.pipeline.stored_networks()
        return write(path, self.recipe, networks, self.figures(), next(iter(networks)))

    def report(self, path: str | Path) -> Path:
        """Write the evidence as one page (.html)."""
        from unstride.tuning.report import write_page

        return write_page(self, path)

    def plot(self) -> Any:
        """Gain against cost, every alternative named: an SVG image that shows itself in a notebook."""
        from unstride.tuning.report import plot

        return plot(self)

    def predictions(self, images: Any) -> list[Prediction]:
        """What the recipe says of images, with every pass."""
        return self.pipeline.better.explain(images)

    def to_json(self) -> dict[str, Any]:
        """Plain values: the decision, the recipe, the rows."""
        return {
            **self.figures(),
            "recipe": to_data(self.recipe),
            "networks": {name: loaded.spec for name, loaded in self.pipeline.networks.items()},
            "rows": [row.to_json() for row in self.rows],
            "frontier": {f"{ceiling:g}": to_data(recipe) for ceiling, recipe in self.frontier.items()},
            "notes": list(self.notes),
            "provenance": provenance(),
        }
