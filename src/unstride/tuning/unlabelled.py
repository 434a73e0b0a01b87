"""Without labels: gates set for a mean cost from pictures alone. Nothing is proved, and it says so."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unstride.enhanced import Enhanced, enhance
from unstride.errors import DataError, LeftOut
from unstride.models import Loaded
from unstride.procedure.calibrate import Calibration
from unstride.proof.loop import asked_task
from unstride.recipe import Recipe, write
from unstride.views.canvas import Pictures
from unstride.views.images import find_images, open_image
from unstride.views.policies import IDENTITY

MOST = 1000  # pictures: enough for a quantile


@dataclass(frozen=True, eq=False)
class Settled:
    """`print` says what it will cost and how many answers change; `recipe` runs everywhere."""

    recipe: Recipe
    calibration: Calibration
    changed: float
    better: Enhanced
    doubt: str | None = None

    def __str__(self) -> str:
        told = (
            f"{self.calibration}\n{self.changed:.1%} of the answers change. Nothing was proved: without labels nobody "
            f"knows whether they change for the better.\n{self.recipe}"
        )
        return told if self.doubt is None else f"{told}\n{self.doubt}"

    def to_json(self) -> dict[str, Any]:
        """What is printed, as numbers."""
        told = {"recipe": str(self.recipe), "pictures": self.calibration.pictures, "cost": self.calibration.cost}
        return {**told, "changed": self.changed, "proved": False, "doubt": self.doubt}

    def save(self, path: str | Path) -> Path:
        figures = {"pictures": self.calibration.pictures, "cost": round(self.calibration.cost, 4), "proved": False}
        return write(path, self.recipe, self.better.model, self.better.preprocess, figures)


def settle(
    loaded: Loaded, folders: Sequence[str | Path], cost: float, recipe: str = "default", task: str | None = None
) -> Settled:
    """`settle(unstride.models.load("timm:resnet50"), ["photos/"], cost=1.5)`."""
    paths = find_images(list(folders))
    step = max(1, len(paths) // MOST)
    images = []
    for path in paths[::step][:MOST]:
        try:
            images.append(open_image(path))
        except DataError as error:
            warnings.warn(f"left out: {error}", LeftOut, stacklevel=2)
    if not images:
        raise DataError("no picture could be read")
    told = asked_task(loaded, task) or "auto"
    pictures = Pictures(images, loaded.preprocess)
    example = pictures.rows([0]).see(IDENTITY)
    better = enhance(loaded.model, example, recipe=recipe, task=told, preprocess=loaded.preprocess)
    found = better.calibrate(pictures, cost)
    chosen = better.recipe.changed(name=f"set for {cost:g} without labels")
    better = better.with_options(recipe=chosen)
    with torch.no_grad():
        logits, _ = better.looks(pictures)
        plain = better.plain(pictures.see(IDENTITY))
    changed = float((logits.argmax(1) != plain.argmax(1)).float().mean())
    doubt = better.doubts(pictures) if better.task == "classification" else None
    return Settled(chosen, found, changed, better, doubt)
