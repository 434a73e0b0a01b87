"""Shift and stitch: states are samples between the cells of the plain map, so lay them on a finer grid."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.graph.ops import op_name
from unstride.procedure.aggregate import ALL, sure_weight
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
    size: tuple[int, int]
    count: int = 1
    total: Tensor | None = None
    weight: Tensor | None = None
    places: tuple[Tensor, Tensor] = field(init=False, repr=False)  # rows and columns of the output, in cells

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if self.total is None or self.weight is None:
            self.total = f.new_zeros((self.count, f.shape[1], *self.size))
            self.weight = f.new_zeros((self.count, 1, *self.size))
            self.places = places(self.target, (f.shape[2], f.shape[3]), self.size, f.device)
        offset = offset or Offset((0, 0), (0.0, 0.0))
        rows, columns = (p - c - part for p, c, part in zip(self.places, offset.cells, offset.fraction, strict=True))
        own = nearness(rows, f.shape[2])[:, None] * nearness(columns, f.shape[3])[None, :]
        sure = weight if weight.ndim > 1 else weight[:, None, None].expand(-1, *f.shape[2:])
        own = own * sample(sure[:, None].to(f), rows, columns)
        self.total[images].add_(sample(f, rows, columns) * own)
        self.weight[images].add_(own)

    def add_by_entropy(self, images: slice, f: Tensor, offset: Offset | None) -> Tensor:
        """Add logit maps, pixel by pixel by how sure they are; returns these weights (R, h, w)."""
        weight = sure_weight(f)
        self.add(images, f, weight, offset)
        return weight

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        assert self.total is not None and self.weight is not None
        return self.total[images] / self.weight[images].clamp(min=1e-12)


def places(
    target: Target, before: tuple[int, int], after: tuple[int, int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Where the network's own upsampling sees the rows and columns of the output, counted in cells of the map."""
    n = target.leaf
    smooth = "bilinear" in op_name(n) or "bicubic" in op_name(n)
    corners = target.head is not None and smooth and len(n.args) > 2 and bool(n.args[2])
    out = []
    for a in (0, 1):
        o = torch.arange(after[a], dtype=torch.float32, device=device)
        grown = before[a] / after[a]
        at = o * (before[a] - 1) / max(after[a] - 1, 1) if corners else (o + 0.5) * grown - 0.5
        out.append(at.clamp(0, before[a] - 1))
    return out[0], out[1]


def nearness(at: Tensor, cells: int) -> Tensor:
    """1 on a cell, 1/4 between two, falling to 0 a cell beyond the map's ends."""
    inside = at.clamp(0, cells - 1)
    part = inside - inside.floor()
    beyond = (1 - (at - inside).abs()).clamp(min=0)
    return ((1 - part) ** 2 + part**2) ** 2 * beyond**4


def sample(f: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Bilinear values of maps (R, C, H, W) at fractional rows and columns -> (R, C, len(rows), len(columns)).

    Beyond its ends the last cell goes on.
    """
    h, w = f.shape[-2:]
    y = rows.float() * 2 / max(h - 1, 1) - 1
    x = columns.float() * 2 / max(w - 1, 1) - 1
    grid = torch.stack(torch.broadcast_tensors(x[None, :], y[:, None]), -1).to(f).expand(len(f), -1, -1, -1)
    return F.grid_sample(f, grid, mode="bilinear", padding_mode="border", align_corners=True)
