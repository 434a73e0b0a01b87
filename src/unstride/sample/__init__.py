"""Small trained networks and labelled test images in the package, so that unstride can be tried offline.

    model = load_classifier()
    images, labels = classification_sample(100)
    model(preprocess_classification(images)).argmax(1)

`benchmarks/train_sample.py` makes all of it from Fashion-MNIST.
"""

from __future__ import annotations

from importlib import resources
from typing import TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn
from torch.nn import functional as F

from unstride.errors import ArtefactError, InputError
from unstride.sample.data import CLASSES, SCENE_CLASSES, Bytes, classification_sample, segmentation_sample
from unstride.sample.nets import Classifier, LargeClassifier, SampleSegmenter

__all__ = [
    "CLASSES",
    "SCENE_CLASSES",
    "classification_sample",
    "load_classifier",
    "load_large_classifier",
    "load_segmenter",
    "preprocess_classification",
    "preprocess_segmentation",
    "segmentation_sample",
]

CLASSIFIER_FILE = "classifier.safetensors"
SEGMENTER_FILE = "segmenter.safetensors"
LARGE_CLASSIFIER_FILE = "classifier_large.safetensors"

_Net = TypeVar("_Net", bound=nn.Module)


def load_classifier() -> Classifier:
    """The embedded garment classifier, trained, in eval mode: (B, 1, 64, 64) -> (B, 10)."""
    return _loaded(Classifier(), CLASSIFIER_FILE)


def load_large_classifier() -> LargeClassifier:
    """A larger classifier of the same images, trained, in eval mode: more accurate, and several times the cost."""
    return _loaded(LargeClassifier(), LARGE_CLASSIFIER_FILE)


def load_segmenter() -> SampleSegmenter:
    """The embedded scene segmenter, trained, in eval mode: (B, 1, H, W) -> (B, 11, H, W)."""
    return _loaded(SampleSegmenter(), SEGMENTER_FILE)


def preprocess_classification(images: Bytes) -> Tensor:
    """uint8 (N, 28, 28) -> float (N, 1, 64, 64): twice the size, a margin of 4 black pixels, normalised."""
    large = F.interpolate(_unit(images), scale_factor=2.0, mode="bilinear", align_corners=False)
    return (F.pad(large, (4, 4, 4, 4)) - 0.219) / 0.323


def preprocess_segmentation(scenes: Bytes) -> Tensor:
    """uint8 (N, H, W) -> float (N, 1, H, W), normalised."""
    return (_unit(scenes) - 0.45) / 0.25


def _unit(images: Bytes) -> Tensor:
    if images.ndim != 3 or images.dtype != np.uint8:
        raise InputError(f"images: got {images.dtype} {images.shape}, expected gray images, uint8 (N, H, W).")
    return torch.tensor(images).float().unsqueeze(1) / 255


def _loaded(model: _Net, name: str) -> _Net:
    file = resources.files("unstride.sample").joinpath("files", name)
    try:
        model.load_state_dict(load(file.read_bytes()))  # stored in half precision where that is enough
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ArtefactError(
            f"the embedded network {name} is missing or damaged ({error}). Install unstride again."
        ) from error
    return model.eval()
