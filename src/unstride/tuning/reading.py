"""Labelled images in batches that one forward pass takes."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unstride.data import Dataset
from unstride.data.batches import FromBatches, reusable
from unstride.data.items import Item, Listing
from unstride.enhanced import Enhanced
from unstride.errors import DataError, LeftOut
from unstride.evaluation.labelled import Data
from unstride.models.weights import place
from unstride.tasks.tasks import TASKS
from unstride.views.images import Preprocess
from unstride.views.source import PILImages, Source, as_source

PIXELS = 32 * 224 * 224  # of a batch
MOST = 256  # images of a batch
Batch = tuple[list[int], Source, list[Any]]  # their numbers, the images, their targets


@dataclass(frozen=True, eq=False)
class LabelledReader:
    """Reads labelled images. Those that cannot be read are left out with a warning."""

    data: Data
    better: Enhanced
    size: int | None = None  # of a batch

    def batches(self, rows: Sequence[int]) -> Iterator[Batch]:
        """(rows, images, targets), of maps one image each."""
        chosen: list[int] = []
        images: list[Any] = []
        targets: list[Any] = []
        for row, image, target in self._read(rows):
            if images and (len(images) >= self._most(images[0]) or self._shape(image) != self._shape(images[0])):
                yield chosen, self._source(images), targets
                chosen, images, targets = [], [], []
            chosen, images, targets = [*chosen, row], [*images, image], [*targets, target]
        if images:
            yield chosen, self._source(images), targets

    def _read(self, rows: Sequence[int]) -> Iterator[tuple[int, Any, Any]]:
        for row in rows:
            if isinstance(self.data, FromBatches):
                yield row, *self.data.tensors(row)
                continue
            item = self.data[row]
            try:
                image, target = item.read()
            except (DataError, OSError) as error:
                warnings.warn(f"left out: {item.id}: {error}", LeftOut, stacklevel=2)
                continue
            yield row, image, target

    def _shape(self, image: Any) -> Any:
        if isinstance(image, Tensor):
            return image.shape
        return image.size if self.data.preprocess is None or self.data.preprocess.size is None else None

    def _most(self, image: Any) -> int:
        if TASKS[self.better.task].maps:
            return 1
        if self.size is not None:
            return self.size
        fixed = None if self.data.preprocess is None else self.data.preprocess.size
        area = image.shape[1:].numel() if isinstance(image, Tensor) else (fixed or image.size)
        return max(1, min(MOST, PIXELS // (area if isinstance(area, int) else area[0] * area[1])))

    def _source(self, images: list[Any]) -> Source:
        device, dtype = place(self.better.model)
        if isinstance(images[0], Tensor):
            return as_source(torch.stack(images).to(device, dtype), self.better.preprocess)
        assert self.data.preprocess is not None
        return PILImages(images, self.data.preprocess, torch.zeros(0, device=device, dtype=dtype))


def pil_pairs(data: Any) -> PILPairs | None:
    """Batches of (PIL images, labels); None for anything else."""
    if isinstance(data, str | Dataset | FromBatches | Tensor) or not isinstance(data, Iterable):
        return None
    reusable(data, "data")
    first = next(iter(data), None)
    images = first[0] if isinstance(first, list | tuple) and first else None
    if not isinstance(images, list | tuple) or not images or not isinstance(images[0], Image.Image):
        return None
    return PILPairs(tuple((i, t) for batch in data for i, t in zip(batch[0], batch[1], strict=True)))


@dataclass(frozen=True, eq=False)
class PILPairs:
    """PIL images with their labels, which become a data set once the preprocessing is known."""

    pairs: tuple[tuple[Image.Image, Any], ...]

    def dataset(self, preprocess: Preprocess) -> Dataset:
        """Items are named by their contents, so that the cache knows them again."""
        targets = [_plain_target(target) for _, target in self.pairs]
        task = "classification" if isinstance(targets[0], int) else "segmentation"
        entries = [
            (f"{k} {_digest(image)}", image, t)
            for k, ((image, _), t) in enumerate(zip(self.pairs, targets, strict=True))
        ]
        return Dataset("batches", task, preprocess, Listing(entries, _pil_item), range(len(entries)))


def _plain_target(target: Any) -> Any:
    tensor = torch.as_tensor(target)
    return int(tensor) if tensor.ndim == 0 else tensor


def _digest(image: Image.Image) -> str:
    return hashlib.sha256(repr((image.size, image.mode)).encode() + image.tobytes()).hexdigest()[:24]


def _pil_item(entry: tuple[str, Image.Image, Any]) -> Item:
    name, image, target = entry
    return Item(name, image.copy, target if isinstance(target, int) else target.clone)
