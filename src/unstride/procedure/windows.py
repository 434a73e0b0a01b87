"""Large images: the model on overlapping windows, blended by how far inside its window each pixel lies."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.errors import InputError, OptionError
from unstride.graph.capture import SHAPES, check_images
from unstride.procedure.prediction import at_size


class SlidingWindow(nn.Module):
    """`SlidingWindow(better, (512, 512))(images)`: what the model returns, for images larger than it was made for.

    Maps (B, K, h, w) among the outputs are blended, smaller ones after upsampling to the window; a weight falls
    linearly towards the border, and the sum is divided by the weights. An image that fits one window is the model's.
    A window has a length for each axis: three for volumes, one for signals.
    """

    def __init__(self, model: nn.Module, window: Sequence[int], overlap: float = 0.5) -> None:
        super().__init__()
        if not 1 <= len(window) <= 3 or min(window) < 1:
            raise OptionError(f"window: got {window!r}, wanted (height, width) in pixels")
        if not 0 <= overlap < 1:
            raise OptionError(f"overlap: got {overlap!r}, wanted a share from 0 up to, not including, 1")
        self.model, self.window, self.overlap = model, tuple(int(n) for n in window), overlap

    def forward(self, images: Tensor) -> Any:
        check_images(images, axes=len(self.window))
        size = images.shape[2:]
        if len(size) != len(self.window):
            wanted = SHAPES[len(self.window)]
            raise InputError(f"images: got shape {tuple(images.shape)}, wanted {wanted} for this window")
        window = tuple(map(min, size, self.window))
        if window == size:
            return self.model(images)
        weight = tent(window, images)
        sums: list[Any] = []
        total = images.new_zeros((1, 1, *size))
        for corner in itertools.product(*(starts(n, k, self.overlap) for n, k in zip(size, window, strict=True))):
            here: Any = (..., *(slice(at, at + n) for at, n in zip(corner, window, strict=True)))
            leaves, spec = pytree.tree_flatten(self.model(images[here]))
            maps = [isinstance(leaf, Tensor) and leaf.ndim == images.ndim for leaf in leaves]
            if not any(maps):
                wanted = SHAPES[len(size)].replace("C", "K")
                raise InputError(f"sliding windows need a model that returns a map {wanted}")
            if not sums:
                both = zip(leaves, maps, strict=True)
                sums = [leaf.new_zeros((*leaf.shape[:2], *size)) if is_map else leaf for leaf, is_map in both]
            for k, leaf in enumerate(leaves):
                if maps[k]:
                    sums[k][here] += at_size(leaf, window) * weight
            total[here] += weight
        out = [s / total.to(s) if is_map else s for s, is_map in zip(sums, maps, strict=True)]
        return pytree.tree_unflatten(out, spec)

    def extra_repr(self) -> str:
        return f"window={self.window}, overlap={self.overlap}"


def starts(extent: int, window: int, overlap: float) -> list[int]:
    """Where windows begin along an axis: evenly, overlapping at least as asked, the last one flush with the end."""
    if window >= extent:
        return [0]
    step = max(1, int(window * (1 - overlap)))
    count = -(-(extent - window) // step) + 1
    return [round(i * (extent - window) / (count - 1)) for i in range(count)]


def tent(size: Sequence[int], like: Tensor) -> Tensor:
    """Weights (1, 1, H, W) from the border (small, never 0) to the middle (1)."""
    out = torch.ones((1, 1), device=like.device)
    for n in size:
        i = torch.arange(n, dtype=torch.float32, device=like.device)
        out = out[..., None] * (torch.minimum(i + 1, n - i) / ((n + 1) // 2))
    return out.to(like.dtype)
