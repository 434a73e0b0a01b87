"""A file against the recipe that it came from: outputs, and which images go on, before the file is moved into place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import ArtefactError
from unstride.execution.runner import StageResult
from unstride.exporting.builder import Array
from unstride.exporting.loop import ALWAYS, NEVER, forced
from unstride.exporting.networks import session
from unstride.recipe.recipe import Recipe
from unstride.tasks.tasks import TASKS, confidence, top_class

CLOSE = 1e-4  # of the largest output; and of a confidence to its gate, below which an image may go on or not
SAME_CLASS = 0.995  # of the images, from pixels or with int8
UNCERTAIN = 0.02  # a margin, or a distance to a gate, below which the rounding of a pixel may change the class
CHUNK = 16  # images at a time


@dataclass(frozen=True)
class Agreement:
    """How far a file agrees with its recipe.

    Attributes:
        difference: the largest of an output, relative to the largest output.
        same_class: the share of all images (or pixels, or labels) with the same class.
    """

    images: int
    difference: float
    same_class: float

    def __str__(self) -> str:
        same = f", same class for {self.same_class:.1%}" if self.same_class < 1 else ""
        plural = "" if self.images == 1 else "s"
        return f"checked on {self.images:,} image{plural}: largest difference {self.difference:.1e}{same}"


def check(model: Any, better: Enhanced, images: Sequence[Any], names: Sequence[str], exact: bool) -> Agreement:
    """Run the file on images, also with its gates forced both ways; an ArtefactError where it is not the recipe.

    Args:
        images: prepared tensors (C, H, W), or PIL images.
        names: of the outputs that are compared.
        exact: outputs, passes and cost must agree; otherwise classes.
    """
    found = _compared(session(model), better, images, names, exact)
    if any(stage.gate is not None for stage in better.recipe.stages):
        for threshold in (NEVER, ALWAYS):
            other = better.replace(with_threshold(better.recipe, 0.0 if threshold == NEVER else 1.000001))
            _compared(session(forced(model, threshold)), other, images, names, exact)
    return found


def with_threshold(recipe: Recipe, below: float) -> Recipe:
    """The recipe with the same threshold at every gate."""
    stages = [s if s.gate is None else replace(s, gate=replace(s.gate, below=below)) for s in recipe.stages]
    return recipe.changed(stages=tuple(stages))


def _compared(opened: Any, better: Enhanced, images: Sequence[Any], names: Sequence[str], exact: bool) -> Agreement:
    largest, same, certain = 0.0, list[Tensor](), list[Tensor]()
    for batch in _batches(images):
        source, feed = _inputs(batch)
        result = better.run(source)
        got = dict(zip([o.name for o in opened.get_outputs()], opened.run(None, {"images": feed}), strict=True))
        wanted = [result.output, *(part.value() for part in result.combined.parts[1:])]
        excused = torch.zeros(len(batch), dtype=torch.bool)
        if not _same_passes(got, result):
            excused = _near_a_gate(better, source, CLOSE if exact else UNCERTAIN)
            if exact and not _same_passes(got, result, ~excused):
                raise ArtefactError(
                    "export: the file was not written, because other images go on in it than in the recipe. Please "
                    "report the network and the recipe."
                )
        for name, value in zip(names, wanted, strict=True):
            largest = max(largest, _difference(got[name], value, excused, by_sigmoid(better, value)))
        agree = same_class(got[names[0]], wanted[0], better)
        same.append(agree.flatten())
        certain.append(agree[~excused][_margin(wanted[0], better)[~excused] >= UNCERTAIN])
    found = Agreement(len(images), largest, float(torch.cat(same).mean()))
    if exact:
        check_difference(largest)
    known = torch.cat(certain)
    if not exact and len(known) and not float(known.mean()) >= SAME_CLASS:
        raise ArtefactError(
            f"export: the file was not written, because it gives the same class for {known.mean():.1%} of what the "
            f"recipe is certain of, expected at least {SAME_CLASS:.1%}. Check it on images of your own: images=FOLDER."
        )
    return found


def check_difference(largest: float) -> None:
    """An ArtefactError where outputs differ by more than rounding. `largest`: relative to the largest output."""
    if not largest <= CLOSE:
        raise ArtefactError(
            f"export: the file was not written, because its outputs differ by {largest:.1e} of the largest output, "
            f"expected at most {CLOSE:.0e}. Please report the network and the recipe."
        )


def _batches(images: Sequence[Any]) -> Iterator[list[Any]]:
    """Neighbouring images of one size, a few at a time."""
    batch: list[Any] = []
    for image in images:
        size = image.shape if isinstance(image, Tensor) else image.size
        if batch and (len(batch) == CHUNK or size != (batch[0].shape if isinstance(image, Tensor) else batch[0].size)):
            yield batch
            batch = []
        batch.append(image)
    if batch:
        yield batch


def _inputs(batch: list[Any]) -> tuple[Any, Array]:
    """As the recipe takes them, and as the file does."""
    if isinstance(batch[0], Tensor):
        stacked = torch.stack(batch)
        return stacked, stacked.cpu().numpy()
    return batch, np.stack([np.asarray(image.convert("RGB")) for image in batch])


def _same_passes(got: dict[str, Array], result: StageResult, rows: Tensor | None = None) -> bool:
    chosen = np.ones(result.record.count, bool) if rows is None else rows.numpy()
    counts, costs = np.array(result.record.pass_counts), np.array(result.costs)
    same_cost = np.isclose(got["cost"], costs, rtol=0.02, atol=0.02) | result.record.timed
    return bool(((got["pass_count"] == counts) & same_cost)[chosen].all())


def _near_a_gate(better: Enhanced, source: Any, distance: float) -> Tensor:
    """Images whose confidence is so near to a gate's threshold that rounding decides."""
    record = better.run(source, open_gates=True).record
    gates = [stage.gate for stage in better.recipe.stages if stage.gate is not None]
    near = torch.zeros(record.count, dtype=torch.bool)
    for gate, values in zip(gates, record.confidences, strict=True):
        near |= (values - float(gate.below or 0.0)).abs() < distance
    return near


def by_sigmoid(better: Enhanced, output: Tensor) -> bool:
    """True if probabilities of a yes were averaged: near 1 their logits amplify rounding without bound."""
    task = TASKS[better.task]
    return better.recipe.combine == "probabilities" and (output.shape[1] == 1 or not task.one_label)


def _difference(got: Array, wanted: Tensor, excused: Tensor, sigmoid: bool) -> float:
    value = torch.from_numpy(got).reshape(wanted.shape)[~excused]
    expected = wanted.cpu().float()[~excused]
    if not len(expected):
        return 0.0
    if sigmoid:
        value, expected = value.sigmoid(), expected.sigmoid()
    finite = expected.isfinite()
    if not torch.equal(value.isfinite(), finite):
        return float("nan")
    scale = max(1.0, float(expected[finite].abs().max())) if bool(finite.any()) else 1.0
    return float((value - expected)[finite].abs().max()) / scale if bool(finite.any()) else 0.0


def same_class(got: Array, wanted: Tensor, better: Enhanced) -> Tensor:
    """1 for each image (or pixel, or label) with the same class, 0 for others; without classes, for close values."""
    task, wanted = TASKS[better.task], wanted.cpu().float()
    value = torch.from_numpy(got).reshape(wanted.shape)
    if not task.classes:
        close = 0.05 * float(wanted.abs().max())
        return ((value - wanted).abs() <= close).flatten(1).all(1).float()
    same = top_class(value) == top_class(wanted) if task.one_label else (value > 0) == (wanted > 0)
    return same.float()


def _margin(wanted: Tensor, better: Enhanced) -> Tensor:
    """How far each image (or pixel, or label) is from another class."""
    task, wanted = TASKS[better.task], wanted.cpu().float()
    if not task.classes:
        return torch.ones(len(wanted))
    return confidence(wanted, "margin") if task.one_label else (2 * wanted.sigmoid() - 1).abs()


# ------------------------------------------------------------------------------------------------ generated images


def noise_images(shape: Sequence[int], count: int) -> list[Tensor]:
    """Images (C, H, W) of every contrast, smooth and rough, the same each time."""
    images = []
    for k in range(count):
        seeded = torch.Generator().manual_seed(k)
        x = torch.randn(1, *shape, generator=seeded)
        if len(shape) == 3:
            coarse = torch.randn(1, shape[0], 2 + k % 6, 2 + k % 5, generator=seeded)
            x = 0.2 * x + F.interpolate(coarse, tuple(shape[1:]), mode="bilinear")
        images.append((0.1 + 2.0 * ((k * 7) % 16) / 15) * x[0])
    return images


def noise_photos(size: tuple[int, int], count: int) -> list[Image.Image]:
    """RGB images of two sizes, smooth and rough, the same each time."""
    sizes = [(round(size[0] * 1.3), round(size[1] * 1.7)), (round(size[0] * 1.5), round(size[1] * 1.2))]
    each = -(-count // 2)
    photos = [x for h, w in sizes for x in noise_images((3, h, w), each)][:count]
    return [Image.fromarray((x.permute(1, 2, 0) * 50 + 128).clamp(0, 255).to(torch.uint8).numpy()) for x in photos]
