"""Large images: the model on overlapping windows, blended by how far inside its window each pixel lies."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from unstride.errors import InputError, OptionError
from unstride.graph.capture import check_images


class SlidingWindow(nn.Module):
    """`SlidingWindow(better, (512, 512))(images)`: what the model returns, for images larger than it was made for.

    Maps (B, K, h, w) among the outputs are blended, smaller ones after upsampling to the window; a weight falls
    linearly towards the border, and the sum is divided by the weights. An image that fits one window is the model's.
    """

    def __init__(self, model: nn.Module, window: tuple[int, int], overlap: float = 0.5) -> None:
        super().__init__()
        if len(window) != 2 or min(window) < 1:
            raise OptionError(f"window: got {window!r}, wanted (height, width) in pixels")
        if not 0 <= overlap < 1:
            raise OptionError(f"overlap: got {overlap!r}, wanted a share from 0 up to, not including, 1")
        self.model, self.window, self.overlap = model, (int(window[0]), int(window[1])), overlap

    def forward(self, images: Tensor) -> Any:
        check_images(images)
        h, w = images.shape[2:]
        wh, ww = min(h, self.window[0]), min(w, self.window[1])
        if (wh, ww) == (h, w):
            return self.model(images)
        weight = tent(wh, ww, images)
        sums: list[Any] = []
        total = images.new_zeros((1, 1, h, w))
        for y in starts(h, wh, self.overlap):
            for x in starts(w, ww, self.overlap):
                leaves, spec = pytree.tree_flatten(self.model(images[:, :, y : y + wh, x : x + ww]))
                maps = [isinstance(leaf, Tensor) and leaf.ndim == 4 for leaf in leaves]
                if not any(maps):
                    raise InputError("sliding windows need a model that returns a map (B, K, H, W)")
                if not sums:
                    sums = [
                        leaf.new_zeros((*leaf.shape[:2], h, w)) if is_map else leaf
                        for leaf, is_map in zip(leaves, maps, strict=True)
                    ]
                for k, leaf in enumerate(leaves):
                    if maps[k]:
                        full = leaf if leaf.shape[2:] == (wh, ww) else F.interpolate(leaf, (wh, ww), mode="bilinear")
                        sums[k][:, :, y : y + wh, x : x + ww] += full * weight
                total[:, :, y : y + wh, x : x + ww] += weight
        out = [s / total.to(s) if isinstance(s, Tensor) and s.ndim == 4 else s for s in sums]
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


def tent(height: int, width: int, like: Tensor) -> Tensor:
    """Weights (1, 1, H, W) from the border (small, never 0) to the middle (1)."""

    def side(n: int) -> Tensor:
        i = torch.arange(n, dtype=torch.float32, device=like.device)
        return torch.minimum(i + 1, n - i) / ((n + 1) // 2)

    return (side(height)[:, None] * side(width)[None, :])[None, None].to(like.dtype)
