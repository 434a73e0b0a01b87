"""Labelled test images that come with the package.

    images, labels = classification_sample()  # uint8 (5000, 28, 28), int64 (5000,)
    scenes, masks = segmentation_sample()     # uint8 (240, 96, 96), uint8 (240, 96, 96)

Fashion-MNIST is (c) 2017 Zalando SE, MIT licence. The scenes are composed from its test images by
`benchmarks/scenes.py`: they are not photographs.
"""

from __future__ import annotations

from importlib import resources

import numpy as np
from numpy.typing import NDArray

from unstride.errors import DataError, OptionError

CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
SCENE_CLASSES = ("background", *CLASSES)

CLASSIFICATION_FILE = "classification_test.npz"
SEGMENTATION_FILE = "segmentation_test.npz"

Bytes = NDArray[np.uint8]
Labels = NDArray[np.int64]


def classification_sample(limit: int | None = None) -> tuple[Bytes, Labels]:
    """The first `limit` of the first 5,000 images (N, 28, 28) of the Fashion-MNIST test set, and their labels (N,)."""
    images, labels = _embedded(CLASSIFICATION_FILE, limit)
    return images, labels.astype(np.int64)


def segmentation_sample(limit: int | None = None) -> tuple[Bytes, Bytes]:
    """The first `limit` of 240 composed test scenes (N, 96, 96) and their masks (N, 96, 96) of SCENE_CLASSES."""
    return _embedded(SEGMENTATION_FILE, limit)


def _embedded(name: str, limit: int | None) -> tuple[Bytes, Bytes]:
    if limit is not None and limit < 1:
        raise OptionError(f"limit: got {limit}, expected a positive number of images, or None for all of them.")
    file = resources.files("unstride.sample").joinpath("files", name)
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the embedded file {name} is missing or damaged ({error}). Install unstride again.") from error
    return images[:limit], labels[:limit]
