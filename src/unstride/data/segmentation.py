"""Segmentation data sets on disk: images, and masks whose values become classes 0..K-1, or 255: no label."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unstride.data.items import (
    Item,
    Listing,
    array_image,
    check_labels,
    choose,
    folder,
    is_image_name,
    number,
    paired,
    stamp,
)
from unstride.errors import DataError, OptionError
from unstride.views.images import Array, open_image, open_mask

IGNORE = 255
_UNKNOWN = -1
_BYTES = 1 << 20  # of a text file beside the images

CITYSCAPES = (
    *(
        "road",
        "sidewalk",
        "building",
        "wall",
        "fence",
        "pole",
        "traffic light",
        "traffic sign",
        "vegetation",
        "terrain",
    ),
    *("sky", "person", "rider", "car", "truck", "bus", "train", "motorcycle", "bicycle"),
)
# The label ids of those classes; the other ids up to 33 are not evaluated.
_CITYSCAPES_IDS = (7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33)
_ADE_CLASSES = 150


def _table(meaning: Mapping[int, int]) -> Array:
    """{value in the file: class} -> lookup table of values, 0..255."""
    table = np.full(256, _UNKNOWN, np.int64)
    for value, label in meaning.items():
        table[value] = label
    return table


def _read_mask(path: Path, table: Array) -> Tensor:
    values = open_mask(path)
    inside = (values >= 0) & (values < len(table))
    labels = np.where(inside, table[np.where(inside, values, 0)], _UNKNOWN)
    if (labels == _UNKNOWN).any():
        strange = np.unique(values[labels == _UNKNOWN])[:5].tolist()
        known = np.flatnonzero(table != _UNKNOWN)
        raise DataError(f"{path}: label values {strange}; known are {_ranges(known)}")
    return torch.from_numpy(labels)


def _ranges(values: Array) -> str:
    """[0, 1, 2, 255] -> '0-2, 255'"""
    runs = np.split(values, np.flatnonzero(np.diff(values) != 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _item(root: Path, tables: Mapping[str, Array], entry: tuple[str, str]) -> Item:
    """Entry (image, mask), both below root. The table is the one whose name the mask's file name ends with."""
    image, mask = root / entry[0], root / entry[1]
    table = next(table for ending, table in tables.items() if mask.name.endswith(ending))
    return Item(entry[0], partial(open_image, image), partial(_read_mask, mask, table), (image, mask))


def _cityscapes(path: Path, split: str | None, classes: int | None) -> Listing:
    split = choose(split, ("val", "train", "test"), "cityscapes")
    images = folder(path / "leftImg8bit" / split, "expected leftImg8bit/ and gtFine/, each with the splits")
    entries = []
    for image in sorted(images.glob("*/*_leftImg8bit.png")):
        stem = f"gtFine/{split}/{image.parent.name}/{image.name.removesuffix('_leftImg8bit.png')}_gtFine_"
        masks = [stem + kind for kind in ("labelTrainIds.png", "labelIds.png") if (path / (stem + kind)).is_file()]
        if not masks:
            raise DataError(f"{path / stem}labelIds.png: no such file, but there is its image {image.name}")
        entries.append((image.relative_to(path).as_posix(), masks[0]))
    own = {label: label for label in range(len(CITYSCAPES))}
    ids = dict.fromkeys(range(34), IGNORE) | {value: label for label, value in enumerate(_CITYSCAPES_IDS)}
    tables = {"labelTrainIds.png": _table({**own, 255: IGNORE}), "labelIds.png": _table({**ids, 255: IGNORE})}
    return Listing(entries, partial(_item, path, tables), CITYSCAPES)


def _ade20k(path: Path, split: str | None, classes: int | None) -> Listing:
    split = choose("validation" if split == "val" else split, ("validation", "training"), "ade20k")
    root = path / "ADEChallengeData2016" if (path / "ADEChallengeData2016").is_dir() else path
    images = folder(root / "images" / split, "expected ADEChallengeData2016/ with images/ and annotations/")
    entries = []
    for image in sorted(images.glob("*.jpg")):
        mask = f"annotations/{split}/{image.stem}.png"
        if not (root / mask).is_file():
            raise DataError(f"{root / mask}: no such file, but there is its image {image.name}")
        entries.append((image.relative_to(root).as_posix(), mask))
    table = _table({0: IGNORE} | {value: value - 1 for value in range(1, _ADE_CLASSES + 1)})
    return Listing(entries, partial(_item, root, {"": table}), _ade_names(root / "objectInfo150.txt"))


def _ade_names(path: Path) -> tuple[str, ...]:
    """The last column of the table that comes with the data, first of its synonyms; () where it does not."""
    if not path.is_file():
        return ()
    lines = _text(path).splitlines()[1:]
    names = tuple(line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip())
    if len(names) != _ADE_CLASSES:
        raise DataError(f"{path}: {len(names)} classes; expected a line of titles and {_ADE_CLASSES} of classes")
    return names


def _masks(path: Path, split: str | None, classes: int | None, ignore: int | None = None) -> Listing:
    root = path if split is None else path / split
    if split is None and not (path / "images").is_dir():
        splits = sorted(p.parent.name for p in path.glob("*/images")) if path.is_dir() else []
        hint = f"choose a split: {', '.join(splits)}" if splits else "expected images/ and masks/"
        raise DataError(f"{path / 'images'}: no such folder; {hint}")
    images, masks = (
        folder(root / "images", "expected images/ and masks/"),
        folder(root / "masks", "expected it beside images/"),
    )
    pairs = paired(images, masks, is_image_name)
    names = _lines(path / "classes.txt")
    void = ignore if ignore is not None else _number(path / "ignore.txt")
    if void is not None and not 0 <= void <= 255:
        raise OptionError(f"ignore is {void}; expected a value of a mask's pixels, 0 to 255")
    if len(names) > IGNORE:
        raise DataError(f"{path / 'classes.txt'}: {len(names)} names; masks have at most {IGNORE} classes")
    count = len(names) or min(classes or IGNORE, IGNORE)
    meaning = {value: value for value in range(count)} | {255: IGNORE} | ({void: IGNORE} if void is not None else {})
    entries = [(f"images/{image.name}", f"masks/{mask.name}") for image, mask in pairs]
    return Listing(entries, partial(_item, root, {"": _table(meaning)}), names)


def _lines(path: Path) -> tuple[str, ...]:
    """Without the empty ones at the end; one in between would shift all that follow."""
    if not path.is_file():
        return ()
    lines = tuple(line.strip() for line in _text(path).rstrip().splitlines())
    if "" in lines:
        raise DataError(f"{path}, line {lines.index('') + 1}: it is empty; expected a name in each line")
    return lines


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _BYTES:
            raise DataError(f"{path}: {path.stat().st_size:,} bytes; expected a short text file")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as text ({error})") from error


def _number(path: Path) -> int | None:
    lines = _lines(path)
    if lines and not (len(lines) == 1 and lines[0].isdecimal() and len(lines[0]) < 5):
        raise DataError(f"{path}: {' '.join(lines)[:60]!r}; expected one number, the value of pixels without a label")
    return int(lines[0]) if lines else None


def _sample(path: Path, split: str | None, classes: int | None) -> Listing:
    from unstride import sample

    choose(split, ("test",), "sample-segmentation")
    images, masks = sample.segmentation_sample()
    check_labels(["sample-segmentation"], [int(masks.max())], classes)
    return Listing(range(len(images)), partial(_array_item, images, masks), sample.SCENE_CLASSES, stamp(images, masks))


def _array_item(images: Array, masks: Array, index: int) -> Item:
    return Item(number(index, len(images)), partial(array_image, images, index), partial(_array_mask, masks, index))


def _array_mask(masks: Array, index: int) -> Tensor:
    return torch.from_numpy(masks[index].astype(np.int64))


KINDS: dict[str, Callable[..., Listing]] = {
    "cityscapes": _cityscapes,
    "ade20k": _ade20k,
    "masks": _masks,
    "sample-segmentation": _sample,
}
