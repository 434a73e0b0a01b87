"""Stitch (ours, not the paper's): states sample between the cells of the base map, so place them on a finer grid."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.graph.ops import op_name
from unstride.method.aggregate import ALL, entropy_weight
from unstride.method.align import Offset
from unstride.method.split import Target
from unstride.tasks.tasks import in_pieces


@dataclass(eq=False)
class Stitched:
    """Collects maps (R, K, h, w) at the resolution of the output (R, K, H, W).

    Each state is interpolated between its own cells; at a pixel, the state with the nearest cell has the largest
    weight. With one state the result is the base map. Memory is that of the output, for any number of states.
    """

    target: Target
    size: tuple[int, ...]
    count: int = 1
    total: Tensor | None = None
    weight: Tensor | None = None
    places: tuple[Tensor, ...] = field(init=False, repr=False)  # rows and columns of the output, in cells

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if self.total is None or self.weight is None:
            self.total = f.new_zeros((self.count, f.shape[1], *self.size))
            self.weight = f.new_zeros((self.count, 1, *self.size))
            self.places = upsampling_places(self.target, f.shape[2:], self.size, f.device)
        at = list(self.places)
        if offset is not None:
            at = [p - c - part for p, c, part in zip(at, offset.cells, offset.fraction, strict=True)]
        near = math.prod(torch.meshgrid(*(nearness(p, n) for p, n in zip(at, f.shape[2:], strict=True)), indexing="ij"))
        weight = weight if weight.ndim > 1 else weight.view(-1, *[1] * len(at)).expand(-1, *f.shape[2:])
        near = near * sample(weight[:, None].to(f), at)
        self.total[images].add_(sample(f, at) * near)
        self.weight[images].add_(near)

    def add_by_entropy(self, images: slice, f: Tensor, offset: Offset | None) -> Tensor:
        """Add logit maps, each pixel weighted by its entropy; returns these weights (R, h, w)."""
        weight = in_pieces(entropy_weight, f)
        self.add(images, f, weight, offset)
        return weight

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        assert self.total is not None and self.weight is not None
        return self.total[images] / self.weight[images].clamp(min=1e-12)


def upsampling_places(
    target: Target, before: Sequence[int], after: Sequence[int], device: torch.device
) -> tuple[Tensor, ...]:
    """Where the network's own upsampling samples the rows and columns of the output, counted in cells of the map."""
    n = target.leaf
    smooth = "linear" in op_name(n) or "bicubic" in op_name(n)
    corners = target.head is not None and smooth and len(n.args) > 2 and bool(n.args[2])
    out = []
    for cells, pixels in zip(before, after, strict=True):
        o = torch.arange(pixels, dtype=torch.float32, device=device)
        at = o * (cells - 1) / max(pixels - 1, 1) if corners else (o + 0.5) * (cells / pixels) - 0.5
        out.append(at.clamp(0, cells - 1))
    return tuple(out)


def nearness(at: Tensor, cells: int) -> Tensor:
    """1 on a cell, 1/4 between two, falling to 0 one cell beyond the map's ends."""
    inside = at.clamp(0, cells - 1)
    part = inside - inside.floor()
    beyond = (1 - (at - inside).abs()).clamp(min=0)
    return ((1 - part) ** 2 + part**2) ** 2 * beyond**4


def sample(f: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Linear interpolation of maps (R, C, H, W) at fractional rows and columns -> (R, C, len(rows), len(columns)).

    Beyond the ends the last cell is repeated.
    """
    if len(places) == 1:  # torch samples images and volumes
        return sample(f.unsqueeze(2), [places[0].new_zeros(1), *places]).squeeze(2)
    ends = zip(places, f.shape[2:], strict=True)
    at = torch.meshgrid(*(p.float() * 2 / max(n - 1, 1) - 1 for p, n in ends), indexing="ij")
    grid = torch.stack(at[::-1], -1).to(f).expand(len(f), *[-1] * (len(at) + 1))
    return F.grid_sample(f, grid, mode="bilinear", padding_mode="border", align_corners=True)
