"""Shift and stitch: states are samples between the cells of the plain map, so lay them on a finer grid."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.graph.ops import op_name
from unstride.procedure.aggregate import ALL, in_pieces, sure_weight
from unstride.procedure.align import Offset
from unstride.procedure.tasks import Target


@dataclass(eq=False)
class Stitched:
    """Collects maps (R, K, h, w) at the resolution of the output (R, K, H, W): each state's cells have their own place.

    A state is interpolated between its own cells, once, and counts the more at a pixel, the nearer one of them is. So
    with one state the answer is the plain map, and what every state sees sharply stays sharp. Memory is that of the
    output, for any number of states.
    """

    target: Target
    size: tuple[int, ...]
    count: int = 1
    total: Tensor | None = None
    weight: Tensor | None = None
    at: tuple[Tensor, ...] | None = None  # places asked for; by default, where the network's own upsampling looks
    places: tuple[Tensor, ...] = field(init=False, repr=False)  # rows and columns of the output, in cells

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if self.total is None or self.weight is None:
            self.total = f.new_zeros((self.count, f.shape[1], *self.size))
            self.weight = f.new_zeros((self.count, 1, *self.size))
            self.places = self.at or places(self.target, f.shape[2:], self.size, f.device)
        at = list(self.places)
        if offset is not None:
            at = [p - c - part for p, c, part in zip(at, offset.cells, offset.fraction, strict=True)]
        own = math.prod(torch.meshgrid(*(nearness(p, n) for p, n in zip(at, f.shape[2:], strict=True)), indexing="ij"))
        sure = weight if weight.ndim > 1 else weight.view(-1, *[1] * len(at)).expand(-1, *f.shape[2:])
        own = own * sample(sure[:, None].to(f), at)
        self.total[images].add_(sample(f, at) * own)
        self.weight[images].add_(own)

    def add_by_entropy(self, images: slice, f: Tensor, offset: Offset | None) -> Tensor:
        """Add logit maps, pixel by pixel by how sure they are; returns these weights (R, h, w)."""
        weight = in_pieces(sure_weight, f)
        self.add(images, f, weight, offset)
        return weight

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        assert self.total is not None and self.weight is not None
        return self.total[images] / self.weight[images].clamp(min=1e-12)


def places(target: Target, before: Sequence[int], after: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Where the network's own upsampling sees the rows and columns of the output, counted in cells of the map."""
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
    """1 on a cell, 1/4 between two, falling to 0 a cell beyond the map's ends."""
    inside = at.clamp(0, cells - 1)
    part = inside - inside.floor()
    beyond = (1 - (at - inside).abs()).clamp(min=0)
    return ((1 - part) ** 2 + part**2) ** 2 * beyond**4


def sample(f: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Linear values of maps (R, C, H, W) at fractional places, rows and columns -> (R, C, len(rows), len(columns)).

    Beyond its ends the last cell goes on.
    """
    if len(places) == 1:  # torch samples images and volumes
        return sample(f.unsqueeze(2), [places[0].new_zeros(1), *places]).squeeze(2)
    ends = zip(places, f.shape[2:], strict=True)
    at = torch.meshgrid(*(p.float() * 2 / max(n - 1, 1) - 1 for p, n in ends), indexing="ij")
    grid = torch.stack(at[::-1], -1).to(f).expand(len(f), *[-1] * (len(at) + 1))
    return F.grid_sample(f, grid, mode="bilinear", padding_mode="border", align_corners=True)
