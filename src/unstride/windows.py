"""Large images: the model on overlapping windows, blended by how far inside its window each pixel lies.

SlidingWindow(better, (512, 512))(images)    # what the model returns, for images larger than it was made for
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.errors import InputError, OptionError
from unstride.execution.prediction import at_size
from unstride.graph.capture import SHAPES
from unstride.views.source import check_images


class SlidingWindow(nn.Module):
    """A model that is called on windows of its images.

    Maps (B, K, h, w) among the outputs are blended, smaller ones after upsampling to the window. A window's weight
    falls linearly towards its border. An image that fits one window goes to the model as it is.

    Args:
        window: pixels along each axis: two for images, three for volumes, one for signals; a number is for images.
        overlap: the share of a window that its neighbour covers, too.
    """

    def __init__(self, model: nn.Module, window: int | Sequence[int], overlap: float = 0.5) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise InputError(f"model: got {type(model).__name__}, expected a torch.nn.Module.")
        self.model, self.window = model, _checked_window(window)
        number = isinstance(overlap, int | float) and not isinstance(overlap, bool)
        if not number or not 0 <= overlap < 1:
            raise OptionError(f"overlap: got {overlap!r}, expected a share from 0 up to, not including, 1.")
        self.overlap = float(overlap)

    def forward(self, images: Tensor) -> Any:
        images = check_images(images, axes=len(self.window))
        if images.ndim != 2 + len(self.window):
            wanted = SHAPES[len(self.window)]
            raise InputError(f"images: got shape {tuple(images.shape)}, expected {wanted} for this window.")
        size = tuple(images.shape[2:])
        window = tuple(map(min, size, self.window))
        return self.model(images) if window == size else self._blended(images, size, window)

    def _blended(self, images: Tensor, size: tuple[int, ...], window: tuple[int, ...]) -> Any:
        weight = tent_weights(window, images)
        total = images.new_zeros((1, 1, *size))
        sums: list[Any] = []
        corners = [window_starts(n, k, self.overlap) for n, k in zip(size, window, strict=True)]
        for corner in itertools.product(*corners):
            here: Any = (..., *(slice(at, at + n) for at, n in zip(corner, window, strict=True)))
            leaves, spec = pytree.tree_flatten(self.model(images[here]))
            maps = [isinstance(leaf, Tensor) and leaf.ndim == images.ndim for leaf in leaves]
            if not any(maps):
                wanted = SHAPES[len(size)].replace("C", "K")
                raise InputError(f"the model returns no map {wanted}, and sliding windows blend maps.")
            if not sums:
                both = zip(leaves, maps, strict=True)
                sums = [leaf.new_zeros((*leaf.shape[:2], *size)) if is_map else leaf for leaf, is_map in both]
            for k, leaf in enumerate(leaves):
                if maps[k]:
                    sums[k][here] += at_size(leaf, window) * weight
            total[here] += weight
        blended = [s / total.to(s) if is_map else s for s, is_map in zip(sums, maps, strict=True)]
        return pytree.tree_unflatten(blended, spec)

    def extra_repr(self) -> str:
        return f"window={self.window}, overlap={self.overlap}"


def _checked_window(window: Any) -> tuple[int, ...]:
    sides = (window, window) if isinstance(window, int) else tuple(window) if isinstance(window, list | tuple) else ()
    if not 1 <= len(sides) <= 3 or not all(type(n) is int and n >= 1 for n in sides):
        raise OptionError(f"window: got {window!r}, expected pixels along each axis, such as (512, 512).")
    return sides


def window_starts(extent: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along an axis: evenly, at least this overlap, the last one at the end."""
    if window >= extent:
        return [0]
    step = max(1, int(window * (1 - overlap)))
    count = -(-(extent - window) // step) + 1
    return [round(i * (extent - window) / (count - 1)) for i in range(count)]


def tent_weights(size: Sequence[int], like: Tensor) -> Tensor:
    """Weights (1, 1, H, W): 1 in the middle, small but never 0 at the border."""
    out = torch.ones((1, 1), device=like.device)
    for n in size:
        i = torch.arange(n, dtype=torch.float32, device=like.device)
        out = out[..., None] * (torch.minimum(i + 1, n - i) / ((n + 1) // 2))
    return out.to(like.dtype)
