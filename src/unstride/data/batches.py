"""A loader's batches of (images, labels) as a data set, image by image."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unstride.errors import DataError, InputError
from unstride.storage.contents import FileDigests
from unstride.storage.fingerprint import digest, text_digest
from unstride.views.source import check_images

NUMBERS = {  # tasks whose labels are no classes: how many axes a batch of them has, and what they are
    "multilabel": (2, "0 or 1 for each label, (B, K)"),
    "regression": (2, "finite numbers (B, K), or (B,)"),
    "dense": (3, "a map (B, H, W) of finite numbers, NaN where nothing is known"),
}
_CACHED = 8  # batches: readers that run ahead of each other are never so far apart


def unpacked(batch: Any, what: str, task: str | None = None) -> tuple[Any, Tensor]:
    """Images and labels of a loader's batch: (images, labels, ...), or a dict with pixel_values and labels.

    `task`: one of `NUMBERS` has numbers for labels, float (B, K), or maps (B, H, W).
    """
    pair: list[Any]
    if isinstance(batch, Mapping):
        pair = [batch.get(name) for name in ("pixel_values", "labels")]
    else:
        pair = list(batch[:2]) if isinstance(batch, list | tuple) else []
    try:
        images, labels = pair[0], torch.as_tensor(pair[1])
        count = len(images)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        hint = "; for one batch give [(images, labels)]" if isinstance(batch, Tensor) else ""
        raise InputError(
            f"{what}: got a batch that is {_described(batch)}, expected (images, labels), labels as numbers, or a dict "
            f"with pixel_values and labels{hint}"
        ) from error
    pixels = getattr(images, "pixels", images)  # of a canvas
    if isinstance(pixels, Tensor) and not pixels.is_floating_point():
        check_images(pixels, what)
    if task in NUMBERS:
        return images, _numbers(labels, count, what, task)
    if labels.ndim == 0 or len(labels) != count or labels.is_floating_point():
        raise InputError(
            f"{what}: labels {tuple(labels.shape)} {labels.dtype} for {count} images; expected integers or masks"
        )
    return images, labels


def _described(value: Any) -> str:
    """What came, in words: a dict by its keys, a pair by its parts."""
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(map(str, value))}"
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)}"
    if isinstance(value, list | tuple) and value:
        inside = (
            [_described(v) for v in value[:2]] if isinstance(value[0], Tensor) else [type(value[0]).__name__, "..."]
        )
        return f"({', '.join(inside)})"
    return f"of type {type(value).__name__}"


def _numbers(labels: Tensor, count: int, what: str, task: str) -> Tensor:
    """As `Item.read` gives them, one below the other: (B, K), or maps (B, H, W); NaN only where a map is not known."""
    axes, wanted = NUMBERS[task]
    values = labels.float()[:, None] if task == "regression" and labels.ndim == 1 else labels.float()
    fits = values.ndim == axes and len(values) == count and not bool(values.isinf().any())
    fits = fits and (task == "dense" or not bool(values.isnan().any()))
    if not fits or (task == "multilabel" and not bool(((values == 0) | (values == 1)).all())):
        raise InputError(f"{what}: labels {tuple(labels.shape)} {labels.dtype} for {count} images; expected {wanted}")
    return values


def legend(task: str | None) -> str:
    """What labels of batches are taken for, in one line."""
    return f"targets: {task}" if task in NUMBERS else "labels are taken for the model's class numbers"


def reusable(loader: Any, what: str) -> None:
    """A loader is read more than once, so an iterator will not do."""
    if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | Tensor | Mapping):
        raise InputError(f"{what}: got {type(loader).__name__}, expected batches (images, labels), e.g. a DataLoader")
    if isinstance(loader, Iterator):
        raise InputError(f"{what}: an iterator can be read once only; pass a DataLoader or a list of batches")


class FromBatches:
    """`FromBatches(loader)`: batches of prepared, labelled images as a data set, image by image.

    The loader is gone through once to know what it holds and again to use it, in the same order each time; only its
    last few batches are kept. `task`: what the labels are for, where that is no class.
    """

    name, preprocess, classes = "batches", None, ()

    def __init__(self, loader: Iterable[Any], task: str | None = None) -> None:
        reusable(loader, "data")
        self.loader = loader
        self._fixed_task = task if task in NUMBERS else None
        self.legend = legend(task)
        self.ends: list[int] = []  # images up to and with each batch
        self._labels: list[int] = []  # where an image has one
        self.masks: list[Tensor] = []  # else the values that are in its mask
        self._keys: list[str] = []
        self.task = "classification"
        for images, labels in self._batches():
            self.ends.append(len(images) + (self.ends[-1] if self.ends else 0))
            self.task = self._fixed_task or ("segmentation" if labels.ndim == 3 else "classification")
            self._labels += labels.tolist() if labels.ndim == 1 and self._fixed_task is None else []
            self.masks += [mask.unique() for mask in labels] if self.task == "segmentation" else []
            self._keys += [digest({"x": x, "y": y})[:32] for x, y in zip(images, labels, strict=True)]
        if not self.ends or not self.ends[-1]:
            raise DataError("data: the batches hold no image")
        self._lock = threading.Lock()  # readers ahead of the network ask from several threads
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}
        self._remaining = enumerate(self._batches())

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader:
            images, labels = unpacked(batch, "data", self._fixed_task)
            several = self._fixed_task not in NUMBERS and labels.ndim == 2 and labels.shape[1] > 1
            if several and getattr(images, "ndim", 0) > 3:  # of signals (B, C, L) it is a mask
                raise InputError(
                    f"data: labels {tuple(labels.shape)} for {len(images)} images; expected integers or masks. "
                    "For several labels of each image, pass task='multilabel'"
                )
            yield check_images(images, "data"), labels

    def serving(self, task: str | None) -> FromBatches:
        """For another task that its labels say enough for: of one class, an embedding can be judged."""
        if (self.task, task) == ("classification", "embedding"):
            self.task = "embedding"
        return self

    def __len__(self) -> int:
        return self.ends[-1]

    def labelled(self) -> tuple[list[str], list[int]]:
        """Of each image a name and its class, where that is one number."""
        return [f"image {i}" for i in range(len(self._labels))], self._labels

    def tensors(self, index: int) -> tuple[Tensor, int | Tensor]:
        """(C, H, W), and a class, a mask or map (H, W), or labels or numbers (K,)."""
        number = bisect_right(self.ends, index)
        with self._lock:
            if number not in self._cached and min(self._cached, default=0) > number:
                self._cached, self._remaining = {}, enumerate(self._batches())  # it was left behind: begin again
            while number not in self._cached:
                at, batch = next(self._remaining)
                self._cached = {k: v for k, v in self._cached.items() if k > at - _CACHED} | {at: batch}
            images, labels = self._cached[number]
        row = index - (self.ends[number - 1] if number else 0)
        return images[row], int(labels[row]) if labels.ndim == 1 else labels[row]

    def keys(self, digests: FileDigests | None = None) -> list[str]:
        """What identifies each image with its label."""
        return [text_digest([f"image {index}", key])[:32] for index, key in enumerate(self._keys)]

    def files(self) -> Iterator[Path]:
        """None: the images came as tensors."""
        return iter(())

    def fingerprint(self, digests: FileDigests | None = None) -> str:
        """Of the images and labels in their order."""
        return text_digest([self.task, self._keys])[:16]
