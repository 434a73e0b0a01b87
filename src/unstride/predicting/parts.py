"""A part: a fixed run of 256 images that is computed together and saved whole, so that a killed run goes on from it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import UnstrideError, UnstrideWarning
from unstride.execution.prediction import Prediction
from unstride.execution.runner import StageResult
from unstride.models.weights import place
from unstride.pipeline import Pipeline
from unstride.predicting.reading import BYTES, Preparation, PreparedImage
from unstride.predicting.rows import Columns, Row, map_file, over_image
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN
from unstride.storage.artefacts import write_file
from unstride.storage.fingerprint import text_digest
from unstride.tasks.tasks import TASKS
from unstride.views.source import Canvas, PILImages, Source, to_device

PART = 256  # images; batches do not reach across parts, so rows do not depend on who made a part, or when
BATCH = 32
MAPS = 16  # images with maps that run together
_MAP_COPIES = 64  # bytes that the maps of an image take, for each byte of the image


@dataclass(frozen=True)
class PartResult:
    """The rows of a part.

    Attributes:
        read: a digest of what was read.
        passed: how many images passed each gate, of `images` that ran.
        base_macs: of one forward pass of the base model.
    """

    rows: list[Row]
    read: str
    images: int = 0
    passed: list[int] = field(default_factory=list)
    base_macs: int = 0


@dataclass(eq=False)
class PartRunner:
    """Turns prepared images into rows. Masks and other maps are written as they are made.

    A part runs stage by stage, so that images that pass a gate fill whole batches of the next network.
    """

    pipeline: Pipeline
    columns: Columns
    batch_size: int
    masks: Path | None = None

    @property
    def better(self) -> Enhanced:
        return self.pipeline.better

    @property
    def preparation(self) -> Preparation:
        return Preparation.of(self.better, self.pipeline.base.preprocess)

    def run(self, part: int, images: Iterable[PreparedImage]) -> PartResult:
        """Rows in the order of the images, whatever groups they ran in."""
        rows: dict[int, Row] = {}
        contents: dict[int, str] = {}
        ran, passed, macs = 0, [0] * gates(self.better.recipe), 0
        for group in self._groups(images):
            contents |= {image.index: image.content for image in group}
            for answered, result in self._results(group):
                for image, p, passes in self._answers(answered, result):
                    rows[image.index] = self._row(part, image, p, passes)
                if isinstance(result, str):
                    continue
                ran, macs = ran + len(answered), max(macs, result.record.base_macs)
                counts = [len(going) for going in result.record.passed_gates]
                passed = [a + b for a, b in zip(passed, counts + [0] * (len(passed) - len(counts)), strict=True)]
        read = text_digest([contents[index] for index in sorted(contents)])
        return PartResult([rows[index] for index in sorted(rows)], read, ran, passed, macs)

    def _groups(self, images: Iterable[PreparedImage]) -> Iterator[list[PreparedImage]]:
        """Images of one size that run together: a whole part, or as many as fit into memory."""
        most = PART if not self.columns.meaning.maps else max(self.batch_size, MAPS)
        most = self.batch_size if continues(self.better.recipe) else most
        weight = _MAP_COPIES if self.columns.meaning.maps else 1
        groups: dict[tuple[int, ...], list[PreparedImage]] = {}
        sizes: dict[tuple[int, ...], int] = {}
        for image in images:
            if image.error:
                yield [image]
                continue
            shape = tuple(image.views[PLAIN].shape)
            group = groups.setdefault(shape, [])
            group.append(image)
            sizes[shape] = sizes.get(shape, 0) + weight * image.bytes
            if len(group) >= most or sizes[shape] > BYTES:
                del sizes[shape]
                yield groups.pop(shape)
        yield from groups.values()

    def _results(self, group: list[PreparedImage]) -> Iterator[tuple[list[PreparedImage], StageResult | str]]:
        """A result for all of them; one that the model refuses has an error of its own."""
        if group[0].error:
            yield group, group[0].error
            return
        try:
            result: StageResult | str = self._run(group)
        except UnstrideError as error:
            if len(group) > 1:
                middle = len(group) // 2
                yield from self._results(group[:middle])
                yield from self._results(group[middle:])
                return
            result = str(error)
        yield group, result

    def _run(self, group: Sequence[PreparedImage]) -> StageResult:
        while True:
            try:
                source = self._source(group)
                return self.better.run(source, details=True, batch_size=self.batch_size)
            except torch.OutOfMemoryError:
                if self.batch_size == 1:
                    raise
                self.batch_size //= 2
                message = f"the device is out of memory; it goes on with {self.batch_size} images at once"
                warnings.warn(message, UnstrideWarning, stacklevel=2)

    def _source(self, group: Sequence[PreparedImage]) -> Source:
        device, dtype = place(self.better.model)
        like, preprocess = torch.empty(0, device=device, dtype=dtype), self.pipeline.base.preprocess
        views = {view: torch.stack([image.views[view] for image in group]) for view in group[0].views}
        images = [image.image for image in group if image.image is not None]
        if not images:
            return Canvas(to_device(views[PLAIN], like), preprocess=preprocess)
        return PILImages(images, preprocess, like, views)

    def predictions(self, images: Iterable[PreparedImage]) -> Iterator[tuple[PreparedImage, Prediction | str]]:
        """A Prediction of each image, or why there is none; in groups, not in order."""
        for group in self._groups(images):
            for answered, result in self._results(group):
                yield from ((image, p) for image, p, _ in self._answers(answered, result))

    def _answers(
        self, group: Sequence[PreparedImage], result: StageResult | str
    ) -> Iterator[tuple[PreparedImage, Prediction | str, int]]:
        """(image, its prediction or error, its number of passes)."""
        if isinstance(result, str):
            yield from ((image, result, 0) for image in group)
            return
        answers = zip(group, result.predictions(self.better.assumed), result.record.pass_counts, strict=True)
        yield from ((image, p.problem or p, passes) for image, p, passes in answers)

    def _row(self, part: int, image: PreparedImage, p: Prediction | str, passes: int) -> Row:
        if isinstance(p, str):
            return self.columns.error(image.name, p)
        file = None
        if self.masks is not None:
            p = over_image(p, image.size)
            name, content = map_file(part, image.index, image.name, p, self.pipeline.classes)
            write_file(self.masks / name, content)
            file = f"{self.masks.name}/{name}"
        return self.columns.row(image.name, p, passes, self.pipeline.classes, file)


def gates(recipe: Recipe) -> int:
    return sum(stage.gate is not None for stage in recipe.stages)


def continues(recipe: Recipe) -> bool:
    """True if a stage goes on with passes of an earlier one, which are then kept in memory."""
    for number, later in enumerate(recipe.stages):
        for stage in recipe.stages[:number]:
            if later.states is not None and later.network == stage.network and set(later.views) & set(stage.views):
                return True
    return False


def output_width(pipeline: Pipeline) -> int | None:
    """How many numbers the main output has for an image or a pixel; None if that cannot be found out."""
    from torch.utils._pytree import tree_leaves

    from unstride.tasks.tasks import meant_outputs

    network, task = pipeline.better.networks["base"], TASKS[pipeline.task]
    example = pipeline.base.example().to(*place(network.model))
    try:
        leaves = [leaf for leaf in tree_leaves(network.forward(example)) if isinstance(leaf, Tensor)]
        floats = [leaf for leaf in leaves if leaf.is_floating_point()]
        shape = floats[meant_outputs(task, [leaf.shape for leaf in floats], network.axes)[0]].shape
    except UnstrideError:  # a model that takes no noise of this size: an image will show what is wrong
        return len(pipeline.classes) or None
    width = 1 if len(shape) < 2 else int(shape[1])
    return max(2, width) if task.one_label and task.classes else width
