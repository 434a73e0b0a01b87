"""Garment images: the embedded test sample, and the Fashion-MNIST files that it and the networks come from.

    images, labels = classification_sample()  # uint8 (2500, 28, 28), int64 (2500,)
    scenes, masks = segmentation_sample()     # uint8 (240, 96, 96), uint8 (240, 96, 96)

Fashion-MNIST is (c) 2017 Zalando SE, MIT licence. The scenes are composed from its test images
(`scenes.compose_scenes`): they are not photographs.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unstride.errors import DataError, OptionError

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SCENE_CLASSES = ("background", *CLASSES)

CLASSIFICATION_FILE = "classification_test.npz"
SEGMENTATION_FILE = "segmentation_test.npz"

# Where Debian's package puts the files, then where torchvision's FashionMNIST does under a data folder of its own.
PLACES = ("/usr/share/datasets/fashion-mnist", "data/FashionMNIST/raw")
FIT_IMAGES = 5000

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class FashionMNIST:
    """The official splits; the last 5,000 training images are set aside as `fit`, which no network is trained on."""

    train_images: Bytes
    train_labels: Labels
    fit_images: Bytes
    fit_labels: Labels
    test_images: Bytes
    test_labels: Labels


def classification_sample(limit: int | None = None) -> tuple[Bytes, Labels]:
    """The first `limit` of the first 2,500 images (N, 28, 28) of the Fashion-MNIST test set, and their labels (N,)."""
    images, labels = _embedded(CLASSIFICATION_FILE, limit)
    return images, labels.astype(np.int64)


def segmentation_sample(limit: int | None = None) -> tuple[Bytes, Bytes]:
    """The first `limit` of 240 composed test scenes (N, 96, 96) and their masks (N, 96, 96) of SCENE_CLASSES."""
    return _embedded(SEGMENTATION_FILE, limit)


def _embedded(name: str, limit: int | None) -> tuple[Bytes, Bytes]:
    if limit is not None and limit < 1:
        raise OptionError(f"limit is {limit}; it must be a positive number of images, or None for all of them")
    file = resources.files("unstride.sample").joinpath("files", name)
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the embedded sample {name} is missing or damaged ({error}); reinstall unstride") from error
    return images[:limit], labels[:limit]


def find_fashion_mnist(folder: str | Path | None = None) -> Path:
    """The folder that holds the four official files: `folder`, or the first known place that has them."""
    places = [Path(folder)] if folder is not None else [Path(place) for place in PLACES]
    for place in places:
        if (place / "train-images-idx3-ubyte.gz").is_file():
            return place
    raise DataError(
        f"no Fashion-MNIST in {', '.join(map(str, places))}; install it with `apt-get install dataset-fashion-mnist` "
        "(Debian, Ubuntu), or give the folder that holds train-images-idx3-ubyte.gz with --data"
    )


def load_fashion_mnist(folder: str | Path | None = None) -> FashionMNIST:
    place = find_fashion_mnist(folder)
    images, labels = (_read_idx(place / f"train-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1"))
    test_images, test_labels = (_read_idx(place / f"t10k-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1"))
    if images.shape != (60000, 28, 28) or test_images.shape != (10000, 28, 28):
        raise DataError(f"{place} holds arrays {images.shape} and {test_images.shape}, not the official Fashion-MNIST")
    if labels.shape != (60000,) or test_labels.shape != (10000,):
        raise DataError(f"{place} holds labels {labels.shape} and {test_labels.shape}, not the official Fashion-MNIST")
    cut = len(images) - FIT_IMAGES
    known, test_known = labels.astype(np.int64), test_labels.astype(np.int64)
    return FashionMNIST(images[:cut], known[:cut], images[cut:], known[cut:], test_images, test_known)


def _read_idx(path: Path) -> NDArray[np.uint8]:
    """IDX: two zero bytes, the type (8 = uint8), the number of axes, each axis as a big-endian int32, the bytes."""
    try:
        with gzip.open(path, "rb") as stream:
            content = stream.read()
    except (OSError, EOFError) as error:
        raise DataError(f"cannot read {path} ({error}); install dataset-fashion-mnist again") from error
    if len(content) < 8 or content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 3:
        raise DataError(f"{os.fspath(path)} is not an IDX file of bytes; install dataset-fashion-mnist again")
    start = 4 + 4 * content[3]
    shape = tuple(int(n) for n in np.frombuffer(content, ">i4", content[3], 4))
    if min(shape) < 1 or len(content) - start != int(np.prod(shape)):
        raise DataError(f"{path} says shape {shape} but holds {len(content) - start} bytes; it is damaged")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
