"""Fashion-MNIST as Debian or torchvision store it.

Fashion-MNIST is (c) 2017 Zalando SE, MIT licence.
"""

from __future__ import annotations

import gzip
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unstride.errors import DataError
from unstride.sample.data import Bytes, Labels

# Where Debian's package puts the files, then where torchvision's FashionMNIST does under a data folder of its own.
PLACES = ("/usr/share/datasets/fashion-mnist", "data/FashionMNIST/raw")
FIT_IMAGES = 5000


@dataclass(frozen=True)
class FashionMNIST:
    """The official splits; the last 5,000 training images are set aside as `fit`, which no network is trained on."""

    train_images: Bytes
    train_labels: Labels
    fit_images: Bytes
    fit_labels: Labels
    test_images: Bytes
    test_labels: Labels


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
