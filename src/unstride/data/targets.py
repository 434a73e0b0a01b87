"""Data sets whose targets are no single class: depth maps, several labels, numbers, pairs. What is not known is NaN."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstride.data.items import Item, Listing, folder, no_split, paired, stamp
from unstride.data.labels import Classes
from unstride.errors import DataError
from unstride.views.images import open_image, open_mask

_MOST = 1 << 28  # bytes of one map
_SCALE = "scale.txt"
_PAIRS = "query,match with two images that belong together in each row"


def _depth(path: Path, split: str | None, classes: int | None) -> Listing:
    """images/ and depth/, matched by name: 16-bit PNG (0: not measured) divided by the number in scale.txt, or npy."""
    root = path if split is None else path / split
    wanted = "expected images/ and depth/ (16-bit PNG, or .npy), or SPLIT/images and SPLIT/depth"
    images, maps = (folder(root / name, wanted) for name in ("images", "depth"))
    pairs = paired(images, maps, lambda p: p.suffix in (".png", ".npy"))
    entries = [(f"images/{image.name}", f"depth/{depth.name}") for image, depth in pairs]
    return Listing(entries, partial(_depth_item, root, _scale(path / _SCALE)))


def _scale(path: Path) -> float:
    if not path.is_file():
        return 1.0
    try:
        number = float(path.read_text(encoding="utf-8-sig"))
        if not 0 < number < float("inf"):
            raise ValueError(number)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {error}; expected one positive number, by which a map's values are divided"
        ) from error
    return number


def _depth_item(root: Path, scale: float, entry: tuple[str, str]) -> Item:
    image, depth = root / entry[0], root / entry[1]
    return Item(entry[0], partial(open_image, image), partial(_read_depth, depth, scale), (image, depth))


def _read_depth(path: Path, scale: float) -> Tensor:
    """(H, W), float32; NaN where nothing was measured."""
    try:
        if path.stat().st_size > _MOST:
            raise ValueError(f"{path.stat().st_size:,} bytes")
        if path.suffix == ".npy":
            values = np.load(path, allow_pickle=False).astype(np.float32)
        else:
            values = open_mask(path).astype(np.float32)
            values = np.where(values > 0, values, np.nan) / scale
    except DataError:
        raise
    except Exception as error:  # numpy raises nearly anything on a damaged file
        raise DataError(f"{path}: cannot be read as a map ({type(error).__name__}: {error})") from error
    values = values[..., 0] if values.ndim == 3 and values.shape[2] == 1 else values
    if values.ndim != 2:
        raise DataError(f"{path}: its shape is {values.shape}; expected one number for each pixel, (H, W)")
    return torch.from_numpy(np.ascontiguousarray(values, np.float32))


def _table(path: Path, split: str | None, kind: str, wanted: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Titles, and (path, cells) of each row of a CSV."""
    no_split(split, kind)
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a CSV of {wanted}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = [[cell.strip() for cell in row] for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error})") from error
    if not rows or len(rows[0]) < 2:
        raise DataError(f"{path}: expected a first row of titles, {wanted}")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(rows[0]):
            raise DataError(f"{path}, row {number}: {len(row)} cells; expected {len(rows[0])}, as the titles")
        if not (path.parent / row[0]).is_file():
            raise DataError(f"{path.parent / row[0]}: no such file, but {path.name} has it in row {number}")
    return rows[0][1:], [(row[0], row[1:]) for row in rows[1:]]


def _without_groups(
    titles: list[str], rows: list[tuple[str, list[str]]]
) -> tuple[list[str], list[tuple[str, list[str]]], dict[str, tuple[str, ...]]]:
    """Titles and rows without a column called group, and that column."""
    places = [k for k, title in enumerate(titles) if title.lower() == "group"]
    if not places:
        return titles, rows, {}
    group = tuple(cells[places[0]] for _, cells in rows)
    others = [k for k in range(len(titles)) if k not in places]
    return [titles[k] for k in others], [(file, [cells[k] for k in others]) for file, cells in rows], {"group": group}


def _vectors(path: Path, rows: Sequence[tuple[str, list[str]]], check: Callable[[float], bool], wanted: str) -> Listing:
    """Rows of numbers -> items with a vector each."""
    entries: list[tuple[str, tuple[float, ...]]] = []
    seen: dict[str, int] = {}
    for number, (file, cells) in enumerate(rows, 2):
        if (first := seen.setdefault(os.path.realpath(path.parent / file), number)) != number:
            raise DataError(f"{path}, row {number}: {file} is in row {first}, too; expected each image once")
        try:
            values = tuple(float(cell) for cell in cells)
        except ValueError:
            values = (float("nan"),)
        if not all(check(v) for v in values):
            raise DataError(f"{path}, row {number}: {', '.join(cells)[:60]!r}; expected {wanted}")
        entries.append((file, values))
    stamped = stamp(np.array([v for _, v in entries], np.float64))
    return Listing(entries, partial(_vector_item, path.parent), stamp=stamped)


def _vector_item(root: Path, entry: tuple[str, tuple[float, ...] | tuple[int, ...]]) -> Item:
    path = root / entry[0]
    return Item(entry[0], partial(open_image, path), partial(torch.tensor, entry[1]), (path,))


def _labels(path: Path, split: str | None, classes: int | None) -> Listing:
    """A CSV whose first row is path and the labels' names; then 1 where an image has a label, 0 where not."""
    titles, all_rows = _table(path, split, "labels", "path,NAME,NAME,... with 0 or 1 below each name")
    names, rows, columns = _without_groups(titles, all_rows)
    if len(set(names)) < len(names):
        raise DataError(f"{path}: a label is named twice: {', '.join(names)}")
    listing = _vectors(path, rows, lambda v: v in (0.0, 1.0), "0 or 1 for each label")
    return replace(listing, classes=tuple(names), columns=columns)


def _values(path: Path, split: str | None, classes: int | None) -> Listing:
    """A CSV whose first row is path and a title for each number of the model's output."""
    _, rows, columns = _without_groups(*_table(path, split, "values", "path,TITLE,... with a number below each title"))
    return replace(_vectors(path, rows, np.isfinite, "finite numbers"), columns=columns)


def _pairs(path: Path, split: str | None, classes: int | None) -> Listing:
    """A CSV of query,match: two images that belong together in each row, of a query as many rows as it has matches.

    A target is (its number, 1 where it is in the second column, the numbers of its matches, -1 for none): a query is
    searched for among the images of the second column.
    """
    titles, rows = _table(path, split, "pairs", _PAIRS)
    if [title.lower() for title in titles] != ["match"]:
        raise DataError(f"{path}: the titles are {', '.join(['...', *titles])}; expected {_PAIRS}")
    numbers: dict[str, int] = {}
    matches: dict[str, list[int]] = {}
    for row, (query, (match,)) in enumerate(rows, 2):
        if not (path.parent / match).is_file():
            raise DataError(f"{path.parent / match}: no such file, but {path.name} has it in row {row}")
        if query == match:
            raise DataError(f"{path}, row {row}: {query} is its own match; expected another image")
        for name in (query, match):
            numbers.setdefault(name, len(numbers))
        matches.setdefault(query, []).append(numbers[match])
    most = max(map(len, matches.values()), default=0)
    known = {match for _, (match,) in rows}
    entries = []
    for name, number in numbers.items():
        own = matches.get(name, [])
        entries.append((name, (number, int(name in known), *own, *[-1] * (most - len(own)))))
    stamped = stamp(np.array([v for _, v in entries], np.int64))
    return Listing(entries, partial(_vector_item, path.parent), stamp=stamped)


def match_labels(name: str, listing: Listing, classes: Classes) -> Listing:
    """The labels in the model's order, where both have names; otherwise as many as the model has."""
    own = listing.classes
    if classes.count is not None and classes.count != len(own) and not (classes.count == 2 and len(own) == 1):
        raise DataError(f"{name}: {len(own)} labels ({', '.join(own[:4])}, ...), but the model has {classes.count}")
    if not classes.names or len(classes.names) != len(own):
        return listing
    places = {word: k for k, word in enumerate(own)}
    missing = [word for word in classes.names if word not in places]
    if missing:
        raise DataError(f"{name}: no column {missing[0]!r}, which is a label of the model; there are {', '.join(own)}")
    order = torch.tensor([places[word] for word in classes.names])
    return replace(listing, make=partial(_ordered, listing.make, order), classes=classes.names)


def _ordered(make: Callable[[Any], Item], order: Tensor, entry: Any) -> Item:
    item = make(entry)
    assert callable(item.target)
    return replace(item, target=partial(_picked, item.target, order))


def _picked(target: Callable[[], Tensor], order: Tensor) -> Tensor:
    return target()[order]


KINDS: dict[str, Callable[..., Listing]] = {"depth": _depth, "labels": _labels, "values": _values, "pairs": _pairs}
TASKS = {"depth": "dense", "labels": "multilabel", "values": "regression", "pairs": "embedding"}
