"""Without labels: gates set for a mean cost from images alone. Nothing is proved, and it says so."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL import Image

from unstride.data import check_limit
from unstride.enhanced import Enhanced, enhance
from unstride.errors import DataError, LeftOut, OptionError
from unstride.evaluation.loop import asked_task
from unstride.models import LoadedModel
from unstride.procedure.calibrate import Calibration
from unstride.procedure.gates import tile_gate
from unstride.tasks.tasks import TASKS
from unstride.recipe import Recipe, write
from unstride.recipe.view import PLAIN
from unstride.storage.progress import progress as show_progress
from unstride.views.images import Preprocess, find_images, open_image
from unstride.views.source import PILImages

MOST, MAPS, DOUBTED = 1000, 100, 64  # images: enough for a quantile, also of tiles; enough to doubt a look by
TOGETHER, FEW = 8, 30  # images
UNPROVED = "not proved: the gates were set without labels, so nobody knows whether answers change for the better"


@dataclass(frozen=True, eq=False)
class Settled:
    """`print` says what it will cost and how many answers change; `recipe` runs everywhere."""

    recipe: Recipe
    calibration: Calibration
    changed: float
    better: Enhanced
    doubt: str | None = None

    def __str__(self) -> str:
        task = TASKS[self.recipe.task]
        answers = "pixels" if task.maps else "answers" if task.one_label else "labels"
        told = [
            str(self.calibration),
            f"{self.changed:.1%} of the {answers} change. Nothing was proved: without labels nobody knows whether they "
            "change for the better.",
            str(self.recipe),
        ]
        if self.calibration.images < FEW:
            told.append(f"{FEW} images and more are better: what few of them cost says little of others.")
        return "\n".join(told if self.doubt is None else [*told, self.doubt])

    def to_json(self) -> dict[str, Any]:
        """What is printed, as numbers."""
        told = {"recipe": str(self.recipe), "images": self.calibration.images, "cost": self.calibration.cost}
        return {**told, "changed": self.changed, "proved": False, "doubt": self.doubt}

    def save(self, path: str | Path) -> Path:
        told = {"images": self.calibration.images, "cost": round(self.calibration.cost, 4)}
        figures = {**told, "proved": False, "verdict": UNPROVED}
        return write(path, self.recipe, self.better.model, self.better.preprocess, figures)


@dataclass(frozen=True, eq=False)
class Album:
    """Images in files, a few of one size at a time, as often as somebody asks; what cannot be read is told once."""

    paths: Sequence[Path]
    preprocess: Preprocess
    broken: set[Path] = field(default_factory=set)
    advance: Callable[[int, str], None] = lambda step, note: None

    def __iter__(self) -> Iterator[PILImages]:
        images: list[Image.Image] = []
        for path in self.paths:
            image = self._open(path)
            self.advance(1, "")
            if image is None:
                continue
            if images and (len(images) == TOGETHER or not self._alike(images[0], image)):
                yield PILImages(images, self.preprocess)
                images = []
            images.append(image)
        if images:
            yield PILImages(images, self.preprocess)

    def some(self, most: int) -> Album:
        """So many of them at most, spread evenly."""
        count = min(most, len(self.paths))
        return replace(self, paths=[self.paths[i * len(self.paths) // count] for i in range(count)])

    def _open(self, path: Path) -> Image.Image | None:
        if path in self.broken:
            return None
        try:
            return open_image(path)
        except DataError as error:
            self.broken.add(path)
            warnings.warn(f"left out: {error}", LeftOut, stacklevel=2)
            return None

    def _alike(self, one: Image.Image, other: Image.Image) -> bool:
        return self.preprocess.size is not None or one.size == other.size


def settle(
    loaded: LoadedModel,
    folders: Sequence[str | Path],
    cost: float,
    recipe: str = "default",
    task: str | None = None,
    limit: int | None = None,
    progress: bool = False,
) -> Settled:
    """`settle(unstride.models.load("timm:resnet50"), ["photos/"], cost=1.5)`.

    Of classes, whole images look again; of maps of classes, tiles of them. Other tasks have no gates to set. `limit`:
    so many images, spread evenly; by default 1,000, of maps 100.
    """
    check_limit(limit)
    album = Album(find_images(list(folders)), loaded.preprocess)
    first = next(iter(album), None)
    if first is None:
        raise DataError("no image could be read")
    told = asked_task(loaded, task) or "auto"
    example = first.rows([0]).render(PLAIN)
    better = enhance(loaded.model, example, recipe=recipe, task=told, preprocess=loaded.preprocess)
    better = better.with_options(recipe=gated(better.recipe, first.size))
    album = album.some(limit or (MAPS if TASKS[better.task].maps else MOST))
    with show_progress("images, twice", 2 * len(album.paths), progress) as advance:
        shown = replace(album, advance=advance)
        found = better.calibrate(shown, cost)
        better = better.with_options(recipe=better.recipe.changed(name=f"set for {cost:g} without labels"))
        changed, count = 0, 0
        for images in shown:
            both = better.looks(images)[0], better.plain(images.render(PLAIN))
            answers, plain = map(TASKS[better.task].own, both)
            changed, count = changed + int((answers != plain).sum()), count + plain.numel()
    doubt = better.doubts(album.some(DOUBTED)) if better.task == "classification" else None
    return Settled(better.recipe, found, changed / count, better, doubt)


def gated(recipe: Recipe, size: Sequence[int]) -> Recipe:
    """The recipe, with its last looks behind a gate where it has none: tiles, of maps of classes."""
    if any(s.gate is not None for s in recipe.stages):
        return recipe
    task = TASKS[recipe.task]
    if not (task.maps and "margin" in task.gates):
        raise OptionError(
            f"task {recipe.task} has no gates, so without labels there is nothing to set: every image takes the same "
            "looks. Give labels (--data), which say which looks help, or take a recipe as it is: unstride predict "
            "--recipe flip"
        )
    first, *again = recipe.stages
    return recipe.changed(stages=(first, *(replace(s, gate=tile_gate(size)) for s in again)))
