"""Without labels: gates are set for a mean cost from images alone. Nothing is claimed about accuracy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unstride.data import Dataset, check_limit
from unstride.data.batches import FromBatches
from unstride.errors import DataError, OptionError
from unstride.execution.calibrate import Calibration
from unstride.models.weights import place
from unstride.pipeline import Pipeline, open_pipeline
from unstride.recipe.files import write
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import tile_gate
from unstride.storage.progress import progress as show_progress
from unstride.tasks.tasks import TASKS
from unstride.views.images import Preprocess, find_images, open_image
from unstride.views.source import Canvas, PILImages, as_source

MOST, MOST_MAPS = 1000, 100  # images: enough for a quantile, also of tiles
TOGETHER, FEWEST = 8, 30  # images
UNTESTED = "The gates were set without labels: whether predictions improve was not measured."


@dataclass(frozen=True, eq=False)
class GatesOnly:
    """A recipe whose gates were set without labels. `print` shows its cost and how many predictions change."""

    recipe: Recipe
    calibration: Calibration
    changed: float  # share of the predictions
    pipeline: Pipeline

    def __str__(self) -> str:
        task = TASKS[self.recipe.task]
        what = "pixels" if task.maps else "predictions" if task.one_label else "labels"
        lines = [str(self.calibration), f"{self.changed:.1%} of the {what} change. {UNTESTED}", str(self.recipe)]
        if self.calibration.images < FEWEST:
            lines.append(f"Pass {FEWEST} images or more: the cost of so few says little of others.")
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        """What a recipe file says about how its recipe was made."""
        numbers = {"images": self.calibration.images, "cost": self.calibration.cost, "changed": self.changed}
        shares = [s.gate.share for s in self.recipe.stages if s.gate is not None and s.gate.share is not None]
        return {**numbers, "shares": shares, "decision": "inconclusive", "verdict": UNTESTED}

    def save(self, path: str | Path, anyway: bool = False) -> Path:
        """Write the recipe, marked as not tested."""
        networks = self.pipeline.stored_networks()
        return write(path, self.recipe, networks, self.figures(), next(iter(networks)))

    def to_json(self) -> dict[str, Any]:
        """What is printed, as plain values."""
        return {**self.figures(), "recipe": str(self.recipe)}


def without_labels(data: Any) -> bool:
    """True for a `Path` of images, PIL images and tensors, and lists of these. A text is named data with labels."""
    if isinstance(data, Path | Tensor | Image.Image | Canvas):
        return True
    if isinstance(data, Dataset | FromBatches) or not isinstance(data, Iterable):
        return False
    return isinstance(data, list | tuple) and bool(data) and isinstance(data[0], Path | Tensor | Image.Image | Canvas)


def set_gates(
    models: Any,
    images: Any,
    cost: float,
    *,
    task: str | None = None,
    weights: str | Path | None = "default",
    device: str | None = None,
    limit: int | None = None,
    progress: bool = False,
) -> GatesOnly:
    """Set the gates of the default recipe for a mean cost.

    Of classes, whole images pass a gate; of maps of classes, tiles of them. Other tasks have no gates.
    """
    check_limit(limit)
    pipeline = open_pipeline(models, weights=weights, task=task, device=device)
    most = limit or (MOST_MAPS if TASKS[pipeline.task].maps else MOST)
    batches = list(_batches(images, pipeline, most))
    if not batches:
        raise DataError("data: got no image that can be read.")
    better = pipeline.better.replace(gated(pipeline.better.recipe, as_source(batches[0], None).size))
    count = sum(len(batch) for batch in batches)
    with show_progress("images, twice", 2 * count, progress) as advance:
        found = better.calibrate(_counted(batches, advance), cost)
        better.recipe = better.recipe.changed(name=f"set for {cost:g} without labels")
        changed = total = 0
        meaning, plain = TASKS[better.task], better.replace(Recipe(task=better.task))
        for batch in _counted(batches, advance):
            answers, base = (meaning.answer(e.run(batch).output) for e in (better, plain))
            changed, total = changed + int((answers != base).sum()), total + base.numel()
    return GatesOnly(better.recipe, found, changed / total, replace(pipeline, better=better))


def gated(recipe: Recipe, size: Sequence[int]) -> Recipe:
    """The recipe with its last passes behind a gate where it has none: tiles, of maps of classes."""
    if any(s.gate is not None for s in recipe.stages):
        return recipe
    task = TASKS[recipe.task]
    if not (task.maps and "margin" in task.gates):
        raise OptionError(
            f"data: got images without labels, and task {recipe.task!r} has no gates to set. Pass labelled images, or "
            "use a recipe as it is: `unstride predict --recipe flip`."
        )
    first, *rest = recipe.stages
    return recipe.changed(stages=(first, *(replace(s, gate=tile_gate(tuple(size))) for s in rest)))


def _batches(images: Any, pipeline: Pipeline, most: int) -> Iterator[Any]:
    """Batches as `better.run` takes them."""
    better = pipeline.better
    device, dtype = place(better.model)
    files = _files(images)
    if files is not None:
        files = [files[i * len(files) // min(most, len(files))] for i in range(min(most, len(files)))]
        preprocess = better.preprocess or pipeline.base.preprocess
        for part in _alike((open_image(path) for path in files), preprocess):
            yield PILImages(part, preprocess, torch.zeros(0, device=device, dtype=dtype))
    elif isinstance(images, Tensor | Canvas | Image.Image):
        yield images if isinstance(images, Canvas) else as_source(images, better.preprocess)
    elif isinstance(images[0], Image.Image):
        for part in _alike(images[:most], better.preprocess or pipeline.base.preprocess):
            yield as_source(part, better.preprocess or pipeline.base.preprocess)
    else:
        for batch in images:
            yield as_source(batch, better.preprocess)


def _files(images: Any) -> list[Path] | None:
    several = list(images) if isinstance(images, list | tuple) else [images]
    return find_images(several) if all(isinstance(i, str | Path) for i in several) else None


def _alike(images: Iterable[Image.Image], preprocess: Preprocess) -> Iterator[list[Image.Image]]:
    """A few images at a time, of one size where the preprocessing keeps sizes."""
    part: list[Image.Image] = []
    for image in images:
        if part and (len(part) == TOGETHER or (preprocess.size is None and image.size != part[0].size)):
            yield part
            part = []
        part.append(image)
    if part:
        yield part


def _counted(batches: Sequence[Any], advance: Any) -> Iterator[Any]:
    for batch in batches:
        yield batch
        advance(len(batch), "")
