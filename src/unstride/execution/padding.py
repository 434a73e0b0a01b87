"""Images of a size that a model does not take: padded to a multiple of 32, and the maps cropped again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from unstride.errors import InputError, ModelRaised
from unstride.geometry.grids import by
from unstride.graph.capture import SHAPES, wanted_axes

MULTIPLE = 32  # what an image is padded to where the model takes only such sizes
Crop = tuple[float, ...] | None  # the share of each axis of a padded image that is the image's own
T = TypeVar("T")


def sized(model: nn.Module, images: Tensor, pads: bool, call: Callable[[Tensor], T]) -> tuple[T, Tensor, Crop]:
    """`call(images)`; where the output is a map and the model raises, on images padded to a multiple of 32."""
    try:
        return call(images), images, None
    except ModelRaised as error:
        return on_padded(model, images, pads, call, error)


def on_padded(
    model: nn.Module, images: Tensor, pads: bool, call: Callable[[Tensor], T], error: ModelRaised
) -> tuple[T, Tensor, Crop]:
    """`call` on padded images, after it raised `error` on the images themselves."""
    axes = wanted_axes(model)
    if images.ndim != 2 + axes:
        raise InputError(
            f"images: got shape {tuple(images.shape)}, expected {SHAPES[axes]} by the model's first convolution "
            f"({error})"
        ) from error
    more, crop = padded(images) if pads else (images, None)
    if crop is None:
        raise error
    try:
        return call(more), more, crop
    except ModelRaised:
        raise InputError(
            f"the model does not take images of {by(images.shape[2:])} ({error}); padding to "
            f"{by(more.shape[2:])} did not help. Resize or pad them to a size that the model accepts."
        ) from error


def padded(images: Tensor) -> tuple[Tensor, Crop]:
    """Images padded to a multiple of 32, and the share of each axis that is the image's own; None if that is all."""
    size = images.shape[2:]
    more = [-n % MULTIPLE for n in size]
    if not any(more):
        return images, None
    sides = [side for k in reversed(more) for side in (0, k)]
    filled = F.pad(images, sides, mode="replicate" if min(size) > 1 else "constant")
    return filled, tuple(n / (n + k) for n, k in zip(size, more, strict=True))


def cropped(leaf: Any, crop: Crop) -> Any:
    """The part of a map (..., H, W) that belongs to the image, without its padding."""
    if crop is None or not isinstance(leaf, Tensor) or leaf.ndim < len(crop):
        return leaf
    size = leaf.shape[-len(crop) :]
    kept: Any = (..., *(slice(round(n * share)) for n, share in zip(size, crop, strict=True)))
    return leaf[kept]


def cropped_output(leaf: Any, crop: Crop) -> Any:
    """The same for an output of a batch: maps (B, H, W), (B, K, H, W); scores (B, K) have no place on the image."""
    return cropped(leaf, crop) if isinstance(leaf, Tensor) and leaf.ndim > 2 else leaf
