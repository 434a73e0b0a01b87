"""One labelled image, and a list of them that is cheap to keep: entries are names, items are made on demand."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from unstride.errors import DataError, OptionError
from unstride.storage.contents import FileDigests, image_key
from unstride.views.images import Array, is_image_name, open_image


@dataclass(frozen=True)
class Item:
    """An image and its target, both still to be decoded. `id` is stable: the path within the data set, or a number."""

    id: str
    image: Callable[[], Image.Image]
    target: int | Callable[[], Tensor]
    files: tuple[Path, ...] = ()

    def read(self) -> tuple[Image.Image, int | Tensor]:
        """RGB image and its class, its mask or map (H, W), or its labels or numbers (K,)."""
        image = self.image()
        if isinstance(self.target, int):
            return image, self.target
        mask = self.target()
        size = (image.height, image.width)
        if mask.ndim > 1 and tuple(mask.shape) != size:
            masked, seen = (" x ".join(map(str, shape)) for shape in (mask.shape, size))
            raise DataError(
                f"{self.files[-1] if self.files else self.id}: the mask has {masked} pixels, its image {seen}; "
                "they must be equal"
            )
        return image, mask


@dataclass(frozen=True)
class Listing:
    """What a kind of data set says: names and labels, and how to make an Item of one entry.

    written   where each class is written, if by a user and not by the data set's makers; then its number means
              nothing but the order of the text, and `labels.match` finds the model's
    meaning   class of the model by label, once it is matched
    columns   what a table says of each entry beside its label, by title, such as a patient
    """

    entries: Sequence[Any]
    make: Callable[[Any], Item]
    classes: tuple[str, ...] = ()
    stamp: str = ""  # stands for the contents where they are in no file of their own
    written: Mapping[str, str] = field(default_factory=dict)
    folders: bool = False  # written as the names of folders
    meaning: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def item(self, index: int) -> Item:
        return self.make(self.entries[index])


def item_key(item: Item, stamp: str, digests: FileDigests) -> str:
    """What identifies an image with its target: its id, the contents of its files, and how its label is read.

    `stamp` stands for the contents of data that are in no files of their own.
    """
    files = [path for path in item.files if path.is_file()]
    return image_key(item.files, digests, item.id, _described(item.target), "" if files else stamp)


def _described(target: Any) -> Any:
    """How a target is read, in plain values. What lies in files, or in the arrays of a whole data set, is not in it."""
    if isinstance(target, partial):
        return [_described(value) for value in target.args]
    if isinstance(target, Tensor | np.ndarray):
        return target.tolist() if target.ndim == 1 else list(target.shape)
    if isinstance(target, list | tuple):
        return [_described(value) for value in target]
    return target if isinstance(target, int | float | str) else type(target).__name__


def file_item(root: Path, entry: tuple[str, int]) -> Item:
    """Entry (path below root, label)."""
    path = root / entry[0]
    return Item(entry[0], partial(open_image, path), entry[1], (path,))


def of_arrays(images: Array, labels: Sequence[int], classes: tuple[str, ...] = ()) -> Listing:
    """uint8 (N, H, W) or (N, H, W, 3) and N labels."""
    entries = list(zip(range(len(images)), map(int, labels), strict=True))
    return Listing(entries, partial(_array_item, images), classes, stamp(images, np.asarray(labels)))


def _array_item(images: Array, entry: tuple[int, int]) -> Item:
    index, label = entry
    return Item(number(index, len(images)), partial(array_image, images, index), label)


def array_image(images: Array, index: int) -> Image.Image:
    return Image.fromarray(images[index]).convert("RGB")


def number(index: int, total: int) -> str:
    """An id that sorts as its number does."""
    return str(index).zfill(len(str(total - 1)))


def stamp(*arrays: Array) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr((array.shape, str(array.dtype))).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def paired(images: Path, targets: Path, wanted: Callable[[Path], bool]) -> list[tuple[Path, Path]]:
    """Each image of a folder with its file of another, matched by name; `wanted`: what is a target there."""
    image_files, target_files = _by_stem(images, is_image_name), _by_stem(targets, wanted)
    for stem in sorted(image_files.keys() ^ target_files.keys()):
        missing, there = (targets, image_files[stem]) if stem in image_files else (images, target_files[stem])
        raise DataError(f"{missing / stem}.*: no such file, but there is {there}")
    return [(image_files[stem], target_files[stem]) for stem in sorted(image_files)]


def _by_stem(root: Path, wanted: Callable[[Path], bool]) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(filter(wanted, root.iterdir())):
        if path.stem in files:
            raise DataError(
                f"{path}: there is {files[path.stem].name}, too; images and their targets are matched by name"
            )
        files[path.stem] = path
    return files


def check_labels(names: Sequence[str], labels: Sequence[int], classes: int | None) -> None:
    """Each label against the number of the model's classes, where that is known."""
    for name, label in zip(names, labels, strict=True):
        if label < 0 or (classes is not None and label >= classes):
            top = "" if classes is None else f" to {classes - 1}, the model's classes"
            raise DataError(f"{name}: its label is {label}; expected 0{top or ' or more'}")


def check_classes(name: str | Path, count: int, classes: int | None) -> None:
    """Data whose labels are positions in a list: a model with another list would be scored on the wrong names."""
    if classes is not None and classes != count:
        raise DataError(f"{name}: {count} classes, but the model has {classes}; they must be the same")


def choose(split: str | None, known: Sequence[str], kind: str) -> str:
    """The split that was named, or the first."""
    if split is not None and split not in known:
        raise OptionError(f"{kind} has no split {split!r}; choose from {', '.join(known)}")
    return known[0] if split is None else split


def no_split(split: str | None, kind: str) -> None:
    if split is not None:
        raise OptionError(f"{kind} has no splits, but got {split!r}; leave it out")


def folder(path: Path, hint: str) -> Path:
    if not path.is_dir():
        raise DataError(f"{path}: no such folder; {hint}")
    return path
