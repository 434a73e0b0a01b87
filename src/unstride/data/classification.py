"""Image classification data sets on disk. A reader is (path, split, classes of the model or None) -> Listing."""

from __future__ import annotations

import csv
import importlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from unstride.compat import import_torchvision
from unstride.data.items import (
    Item,
    Listing,
    check_labels,
    choose,
    file_item,
    folder,
    no_split,
    number,
    of_arrays,
)
from unstride.errors import DataError
from unstride.storage.files import check_inflation
from unstride.views.images import images_below, open_image

_HEADERS = ("path", "file", "filename", "image")
_INFLATES = 200  # times its size: images of one colour, not a bomb
_LABELS = ("label", "class", "target")


def _images_below(root: Path) -> list[str]:
    """Paths of images relative to root, sorted; symbolic links followed, as torchvision does."""
    return [path.relative_to(root).as_posix() for path in images_below(root)]


def _folders(root: Path) -> list[str]:
    """Those in it, but not a link back to where it lies."""
    here = Path(os.path.realpath(root))
    folders = [entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(e.name for e in folders if not (e.is_symlink() and here.is_relative_to(os.path.realpath(e))))


def _folder(path: Path, split: str | None, classes: int | None) -> Listing:
    root = folder(path if split is None else path / split, "expected a folder that holds a folder per class")
    names = _folders(root)
    if not names:
        raise DataError(f"{root}: there is no folder in it; expected one per class")
    entries: list[tuple[str, int]] = []
    where: dict[str, str] = {}
    for label, name in enumerate(names):
        for image in images_below(root / name):
            entry = image.relative_to(root).as_posix()
            first = where.setdefault(os.path.realpath(image), entry)
            if first != entry:
                raise DataError(f"{image}: the same file as {root / first}, so it would be of two classes; remove one")
            entries.append((entry, label))
    written = {name: str(root / name) for name in names}
    return Listing(entries, partial(file_item, root), tuple(names), written=written, folders=True)


def _imagenet(path: Path, split: str | None, classes: int | None) -> Listing:
    import_torchvision()
    from timm.data import ImageNetInfo

    from unstride.models.libraries import imagenet_names

    split = choose(split, ("val", "train"), "imagenet")
    index = {wnid: i for i, wnid in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    root = path / split if (path / split).is_dir() else folder(path, f"expected a folder that holds {split}/")
    wnids = [name for name in _folders(root) if re.fullmatch(r"n\d{8}", name)]
    unknown = [wnid for wnid in wnids if wnid not in index]
    if unknown:
        raise DataError(
            f"{root / unknown[0]}: not one of the 1000 classes of ImageNet; use folder:PATH for other classes"
        )
    if wnids:
        # By wnid and not by position: a part of ImageNet keeps the labels of the whole.
        entries = [(f"{wnid}/{image}", index[wnid]) for wnid in wnids for image in _images_below(root / wnid)]
    elif split == "val" and (path / "meta.bin").is_file():
        entries = _flat_imagenet(root, path / "meta.bin", index)
    else:
        raise DataError(
            f"{root}: no folder n01440764, n01443537, ... in it, and no meta.bin beside it; let "
            "torchvision.datasets.ImageNet(root, 'val') sort the archives once"
        )
    return Listing(entries, partial(file_item, root), imagenet_names())


def _flat_imagenet(root: Path, meta: Path, index: dict[str, int]) -> list[tuple[str, int]]:
    """ILSVRC2012_val_00000001.JPEG, ... with the classes that torchvision keeps in meta.bin, in that order."""
    try:
        wnids = torch.load(meta, weights_only=True)[1]
        labels = [index[wnid] for wnid in wnids]
    except Exception as error:
        raise DataError(f"{meta}: not the file that torchvision.datasets.ImageNet writes ({error!r})") from error
    entries = []
    for name in _images_below(root):
        match = re.fullmatch(r"ILSVRC2012_val_(\d{8})", Path(name).stem)
        if not match or not 1 <= int(match[1]) <= len(labels):
            raise DataError(
                f"{root / name}: not an image of the validation set; expected ILSVRC2012_val_00000001.JPEG, ..."
            )
        entries.append((name, labels[int(match[1]) - 1]))
    return entries


def _flowers102(path: Path, split: str | None, classes: int | None) -> Listing:
    import_torchvision()
    from torchvision.datasets import Flowers102

    split = choose(split, ("test", "train", "val"), "flowers102")
    root = path / "flowers-102" if (path / "flowers-102").is_dir() else path
    folder(root / "jpg", "expected torchvision's flowers-102/ with jpg/, imagelabels.mat and setid.mat")
    labels = _matlab(root / "imagelabels.mat", "labels")
    ids = _matlab(root / "setid.mat", {"train": "trnid", "val": "valid", "test": "tstid"}[split])
    entries = []
    for image in ids:
        name = f"jpg/image_{image:05d}.jpg"
        if not 1 <= image <= len(labels):
            raise DataError(f"{root / 'setid.mat'}: image {image}, but imagelabels.mat has {len(labels)} labels")
        if not (root / name).is_file():
            raise DataError(f"{root / name}: no such file, but setid.mat has it in {split}")
        entries.append((name, labels[image - 1] - 1))
    check_labels([entry[0] for entry in entries], [entry[1] for entry in entries], 102)
    return Listing(entries, partial(file_item, root), tuple(Flowers102.classes))


def _matlab(path: Path, key: str) -> list[int]:
    try:
        loadmat = importlib.import_module("scipy.io").loadmat
    except ImportError as error:
        raise DataError(f"{path}: reading it needs scipy: pip install scipy") from error
    if not path.is_file():
        raise DataError(f"{path}: no such file; it is one of the three parts of Flowers102")
    try:
        return [int(value) for value in np.atleast_1d(loadmat(str(path), squeeze_me=True)[key])]
    except Exception as error:  # scipy raises nearly anything on a damaged file
        raise DataError(f"{path}: not Flowers102's own file, or damaged ({type(error).__name__}: {error})") from error


def _cifar(kind: str, path: Path, split: str | None, classes: int | None) -> Listing:
    import_torchvision()
    from torchvision import datasets

    split = choose(split, ("test", "train"), kind)
    made = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[kind]
    root = path.parent if path.name == made.base_folder else path
    folder(root / made.base_folder, f"expected torchvision's {made.base_folder}/")
    try:
        # These are pickles. torchvision compares the MD5 of each with the official one before it opens any.
        data = made(str(root), train=split == "train")
    except RuntimeError as error:
        raise DataError(
            f"{root / made.base_folder}: not the official files, by their MD5 ({error}); fetch them again"
        ) from error
    return of_arrays(data.data, data.targets, tuple(data.classes))


def _csv(path: Path, split: str | None, classes: int | None) -> Listing:
    no_split(split, "csv")
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected a CSV of path,label")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream)
            rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: not a CSV file in UTF-8 ({error})") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    titles = [title.lower() for title in rows[0][1]] if rows else []
    column, rows = _label_column(path, rows)
    named: list[tuple[str, str]] = []
    written: dict[str, str] = {}
    seen: dict[str, int] = {}
    for line, row in rows:
        if len(row) <= column or not row[0] or not row[column]:
            raise DataError(f"{path}, row {line}: {','.join(row)!r}; expected path,label")
        file, label = row[0], row[column]
        if not (path.parent / file).is_file():
            raise DataError(f"{path.parent / file}: no such file, but {path.name} has it in row {line}")
        if (first := seen.setdefault(os.path.realpath(path.parent / file), line)) != line:
            raise DataError(f"{path}, row {line}: {file} is in row {first}, too; expected each image once")
        named.append((file, label))
        written.setdefault(label, f"{path}, row {line}, {file}")
    words = sorted(written)
    place = {word: k for k, word in enumerate(words)}
    entries = [(file, place[label]) for file, label in named]
    columns = _other_columns(path, titles, column, rows) if len(titles) > 2 else {}
    return Listing(entries, partial(file_item, path.parent), tuple(words), written=written, columns=columns)


def _other_columns(
    path: Path, titles: list[str], label: int, rows: list[tuple[int, list[str]]]
) -> dict[str, tuple[str, ...]]:
    """The columns beside path and label, by title."""
    for line, row in rows:
        if len(row) != len(titles):
            raise DataError(f"{path}, row {line}: {len(row)} cells; expected {len(titles)}, as the titles")
    others = [k for k in range(1, len(titles)) if k != label]
    columns = {titles[k]: tuple(row[k] for _, row in rows) for k in others}
    if len(columns) < len(others):
        raise DataError(f"{path}: a title is there twice: {', '.join(titles)}")
    for line, row in rows:
        if "group" in columns and not row[titles.index("group")]:
            raise DataError(f"{path}, row {line}: no group; expected one for each image, or no column called group")
    return columns


def _label_column(path: Path, rows: list[tuple[int, list[str]]]) -> tuple[int, list[tuple[int, list[str]]]]:
    """Which column has the labels, and the rows without the titles."""
    if not rows:
        return 1, rows
    line, first = rows[0]
    titled = first[0].lower() in _HEADERS
    if len(first) > 2 and not titled:
        raise DataError(
            f"{path}, row {line}: {len(first)} columns; expected path,label, or a first row that names them"
        )
    if len(first) > 2:
        columns = [k for k, title in enumerate(first) if title.lower() in _LABELS]
        if len(columns) != 1:
            raise DataError(f"{path}: columns {', '.join(first)}; expected one that is called {' or '.join(_LABELS)}")
        return columns[0], rows[1:]
    return 1, rows[1:] if titled else rows


def _npz(path: Path, split: str | None, classes: int | None) -> Listing:
    no_split(split, "npz")
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected arrays x and y in a .npz")
    try:
        check_inflation(path, _INFLATES, 1 << 28)
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
    except Exception as error:  # numpy raises nearly anything on a damaged file
        raise DataError(f"{path}: expected plain arrays x and y ({type(error).__name__}: {error})") from error
    if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)) or not all(x.shape[1:]):
        raise DataError(f"{path}: x is {x.dtype} {x.shape}; expected uint8 (N, H, W, 3) or (N, H, W)")
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise DataError(f"{path}: y is {y.dtype} {y.shape}; expected {len(x)} integers")
    check_labels([f"{path}, image {i}" for i in range(len(y))], y.tolist(), classes)
    return of_arrays(x, y.tolist())


def _hf(path: Path, split: str | None, classes: int | None) -> Listing:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError("hf data needs the datasets library: pip install 'unstride[hf]'") from error
    folder(path, "expected a folder written by save_to_disk")
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path}: not a folder written by save_to_disk ({error})") from error
    if isinstance(data, datasets.DatasetDict):
        usual = [name for name in ("test", "validation", "val") if name in data]
        data = data[choose(split, usual + [name for name in data if name not in usual], f"hf:{path}")]
    else:
        no_split(split, f"hf:{path}")
    images = [name for name, feature in data.features.items() if isinstance(feature, datasets.Image)]
    named = [name for name, feature in data.features.items() if isinstance(feature, datasets.ClassLabel)]
    columns = named or [name for name in ("label", "labels", "fine_label") if name in data.features]
    if len(images) != 1 or not columns:
        raise DataError(
            f"{path}: columns {dict(data.features)}; expected one Image and a ClassLabel or a number `label`"
        )
    labels = [int(label) for label in data[columns[0]]]
    check_labels([f"{path}, image {i}" for i in range(len(labels))], labels, classes)
    raw = data.cast_column(images[0], datasets.Image(decode=False))  # decoded by open_image, with its checks
    words = tuple(data.features[columns[0]].names) if named else ()
    entries = list(enumerate(labels))
    return Listing(entries, partial(_hf_item, raw, images[0]), words, str(data._fingerprint))


def _hf_item(data: Any, column: str, entry: tuple[int, int]) -> Item:
    index, label = entry
    return Item(number(index, len(data)), partial(_hf_image, data, column, index), label)


def _hf_image(data: Any, column: str, index: int) -> Image.Image:
    stored = data[index][column]
    try:
        return open_image(stored["bytes"] or stored["path"])
    except DataError as error:
        raise DataError(f"image {index}: {error}") from error


def _sample(path: Path, split: str | None, classes: int | None) -> Listing:
    from unstride import sample

    choose(split, ("test",), "sample")
    images, labels = sample.classification_sample()
    check_labels(["sample"] * len(labels), labels.tolist(), classes)
    return of_arrays(images, labels.tolist(), sample.CLASSES)


KINDS: dict[str, Callable[..., Listing]] = {
    "imagenet": _imagenet,
    "flowers102": _flowers102,
    "cifar10": partial(_cifar, "cifar10"),
    "cifar100": partial(_cifar, "cifar100"),
    "folder": _folder,
    "csv": _csv,
    "npz": _npz,
    "hf": _hf,
    "sample": _sample,
}
