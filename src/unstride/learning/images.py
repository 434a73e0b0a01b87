"""Labelled images to learn from: opened, checked, and split into training and validation by a seed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unstride import data as datasets
from unstride.data import Dataset
from unstride.data.batches import FromBatches
from unstride.data.items import check_labels
from unstride.errors import DataError, LeftOut, OptionError
from unstride.models.weights import place
from unstride.pipeline import Pipeline
from unstride.storage.contents import FileDigests
from unstride.storage.progress import progress as show_progress
from unstride.views.source import Canvas, PILImages, Source

VALIDATION = 0.2  # of the images, as the paper's 5,000 of 25,000
LEAST = 2


@dataclass(frozen=True, eq=False)
class LearningImages:
    """Some images of a data set, each with its class and a key that identifies both.

    Args:
        part: what they are for, "training" or "validation"; messages name it.
        chosen: which of the data set's images.
    """

    part: str
    data: Dataset | FromBatches
    chosen: tuple[int, ...]
    pipeline: Pipeline
    digests: FileDigests

    def __len__(self) -> int:
        return len(self.chosen)

    @cached_property
    def labels(self) -> tuple[int, ...]:
        own = self.data.labelled()[1]
        return tuple(own[i] for i in self.chosen)

    @cached_property
    def names(self) -> tuple[str, ...]:
        own = self.data.labelled()[0]
        return tuple(own[i] for i in self.chosen)

    @cached_property
    def keys(self) -> tuple[str, ...]:
        own = self.data.keys(self.digests)
        return tuple(own[i] for i in self.chosen)

    def source(self, rows: Sequence[int]) -> Source:
        """These images (places in `chosen`), ready to be rendered in any view."""
        preprocess = self.pipeline.better.preprocess
        device, dtype = place(self.pipeline.better.model)
        if isinstance(self.data, Dataset):
            opened = [self.data[self.chosen[row]].read()[0] for row in rows]
            return PILImages(opened, self.data.preprocess, torch.empty(0, device=device, dtype=dtype))
        tensors = torch.stack([self.data.tensors(self.chosen[row])[0] for row in rows])
        return Canvas(tensors.to(device), preprocess=preprocess)

    def checked(self, classes: int | None, show: bool) -> LearningImages:
        """Without the images that cannot be read, which a warning names. A label or a pixel that is wrong is an error.

        Args:
            classes: how many the model has, where that is known.
        """
        check_labels([f"{self.part} images, {name}" for name in self.names], self.labels, classes)
        kept = []
        with show_progress(f"reading {self.part} images", len(self), show) as advance:
            for row, index in enumerate(self.chosen):
                try:
                    image = self.data.tensors(index)[0]
                except (DataError, OSError) as error:
                    warnings.warn(LeftOut(f"{error} (left out of the {self.part} images)"), stacklevel=2)
                else:
                    _check_finite(image, f"{self.part} images, {self.names[row]}")
                    kept.append(index)
                advance(1, "")
        if len(kept) == len(self):
            return self
        if not kept:
            raise DataError(f"{self.part} images: none of {len(self)} can be read")
        return replace(self, chosen=tuple(kept))


def _check_finite(image: Tensor, name: str) -> None:
    if not bool(image.isfinite().all()):
        raise DataError(f"{name}: the image has NaN or infinite pixels. Repair it, or leave it out.")


def learning_images(
    pipeline: Pipeline,
    data: Any,
    validation: Any = None,
    *,
    seed: int = 0,
    split: str | None = None,
    limit: int | None = None,
    digests: FileDigests | None = None,
    show: bool = False,
) -> tuple[LearningImages, LearningImages]:
    """Training and validation images. Without `validation`, one fifth of `data`, drawn by the seed.

    Args:
        data, validation: KIND:PATH, a `Dataset`, or batches (images, labels) as a DataLoader gives them.
        limit: use so many images of `data`, drawn at random by the seed (the paper: 25,000 of ImageNet's training
            images, resampled for each seed).
    """
    digests = digests or FileDigests()
    opened = _opened(pipeline, data, "data", split)
    datasets.check_limit(limit)
    if validation is None:
        train, held = random_split(len(opened), seed, limit)
        other = opened
    else:
        other = _opened(pipeline, validation, "validation", None)
        train, held = drawn(len(opened), seed, limit), list(range(len(other)))
    both = (
        LearningImages("training", opened, tuple(train), pipeline, digests),
        LearningImages("validation", other, tuple(held), pipeline, digests),
    )
    classes = class_count(pipeline)
    return both[0].checked(classes, show), both[1].checked(classes, show)


def drawn(count: int, seed: int, limit: int | None = None) -> list[int]:
    """`limit` of `count` images, drawn at random by the seed, in the order of the data set."""
    return sorted(random.Random(f"{seed} images").sample(range(count), min(limit or count, count)))


def random_split(
    count: int, seed: int, limit: int | None = None, share: float = VALIDATION
) -> tuple[list[int], list[int]]:
    """(training, validation): `limit` of `count` images drawn at random, and a share of them for validation.

    Another seed draws other images, as for the paper's five runs (section 5.1).
    """
    order = random.Random(f"{seed} images").sample(range(count), min(limit or count, count))
    if len(order) < LEAST:
        raise DataError(
            f"{len(order)} image is not enough to train and to validate on. Give more, or validation images."
        )
    held = min(len(order) - 1, max(1, round(share * len(order))))
    return sorted(order[held:]), sorted(order[:held])


def class_count(pipeline: Pipeline) -> int | None:
    """How many classes the base model has, where that is known; one score stands for two classes."""
    labels = pipeline.base.for_task("classification").labels
    count = len(labels) if isinstance(labels, tuple) else labels
    return None if count is None else max(2, count)


def batches_of(count: int, size: int) -> Iterator[range]:
    """0 to `count` in pieces."""
    for start in range(0, count, size):
        yield range(start, min(start + size, count))


def _opened(pipeline: Pipeline, data: Any, name: str, split: str | None) -> Dataset | FromBatches:
    if isinstance(data, str):
        if pipeline.better.preprocess is None:
            raise OptionError(
                f"{name}: got {data!r} with a module whose preprocessing is not known. Pass enhance(module, "
                "preprocess=...), a model by SPEC, or unstride.data.load(name, preprocess)."
            )
        labels = pipeline.base.for_task("classification").labels
        data = datasets.load(data, pipeline.better.preprocess, split, classes=labels)
    elif split is not None:
        raise OptionError(f"split: got {split!r}, but {name} is already open. Leave split out.")
    if not isinstance(data, Dataset | FromBatches):
        data = FromBatches(data)
    if data.task != "classification":
        raise OptionError(f"{name}: got labels for {data.task}, expected one class for each image.")
    return data
