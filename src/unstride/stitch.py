"""Shift and stitch: states are samples between the cells of the plain map, so lay them on a finer grid."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.align import Offset, add_aligned
from unstride.positions import op_name
from unstride.tasks import Target


@dataclass(eq=False)
class Stitched:
    """Collects maps (K, H, W) by their place inside the cell: `value()` is a map finer by whole factors.

    A fine cell that a state fell on is the weighted mean of the states there; the others are interpolated between the
    aligned averages, so that with one state the answer is the plain map.
    """

    spacing: tuple[float, float]
    total: Tensor | None = None
    weight: Tensor | None = None
    phases: dict[tuple[float, float], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, f: Tensor, weight: float | Tensor, offset: Offset | None) -> None:
        f = f.float()
        own = weight[None].to(f) if isinstance(weight, Tensor) else f.new_full((1, *f.shape[1:]), weight)
        if self.total is None or self.weight is None:
            self.total, self.weight = torch.zeros_like(f), torch.zeros_like(own)
        offset = offset or Offset((0, 0), (0.0, 0.0))
        add_aligned(self.total, f * own, offset)
        add_aligned(self.weight, own, offset)
        whole = Offset(offset.cells, (0.0, 0.0))
        if offset.fraction not in self.phases:
            self.phases[offset.fraction] = (torch.zeros_like(f), torch.zeros_like(own))
        total, weights = self.phases[offset.fraction]
        add_aligned(total, f * own, whole)
        add_aligned(weights, own, whole)

    def factor(self) -> tuple[int, int]:
        """How many fine cells fit into a cell: the least that puts every state on the fine grid."""
        out = []
        for a in (0, 1):
            u = 1
            for phase in self.phases:
                part = round(phase[a] * 64)
                u = math.lcm(u, 64 // math.gcd(part, 64))
            out.append(u)
        return out[0], out[1]

    def value(self) -> Tensor:
        assert self.total is not None and self.weight is not None
        uy, ux = self.factor()
        mean = self.total / self.weight.clamp(min=1e-12)
        h, w = mean.shape[-2:]
        rows = (torch.arange(h * uy, device=mean.device) / uy).clamp(max=h - 1)
        columns = (torch.arange(w * ux, device=mean.device) / ux).clamp(max=w - 1)
        fine = sample(mean, rows, columns)
        for (fy, fx), (total, weight) in self.phases.items():
            y, x = round(fy * uy), round(fx * ux)
            here = fine[:, y::uy, x::ux]
            fine[:, y::uy, x::ux] = torch.where(weight > 0, total / weight.clamp(min=1e-12), here)
        return fine

    def resize(self, fine: Tensor, size: tuple[int, int], target: Target) -> Tensor:
        """The fine map at the resolution of the output, where the network's own upsampling would have put its cells."""
        assert self.total is not None
        h, w = self.total.shape[-2:]
        uy, ux = self.factor()
        if target.head is None:
            return sample(fine, torch.arange(h, device=fine.device) * uy, torch.arange(w, device=fine.device) * ux)
        n = target.leaf
        corners = ("bilinear" in op_name(n) or "bicubic" in op_name(n)) and len(n.args) > 2 and bool(n.args[2])
        rows = _centres(h, size[0], corners, fine.device) * uy
        columns = _centres(w, size[1], corners, fine.device) * ux
        return sample(fine, rows.clamp(0, fine.shape[1] - 1), columns.clamp(0, fine.shape[2] - 1))


def _centres(before: int, after: int, corners: bool, device: torch.device) -> Tensor:
    o = torch.arange(after, dtype=torch.float32, device=device)
    centres = o * (before - 1) / max(after - 1, 1) if corners else (o + 0.5) * before / after - 0.5
    return centres.clamp(0, before - 1)


def sample(f: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Bilinear values of a map (C, H, W) at fractional rows and columns inside it -> (C, len(rows), len(columns))."""
    h, w = f.shape[-2:]
    y = rows.float() * 2 / max(h - 1, 1) - 1
    x = columns.float() * 2 / max(w - 1, 1) - 1
    grid = torch.stack(torch.broadcast_tensors(x[None, :], y[:, None]), -1)[None].to(f)
    return F.grid_sample(f[None], grid, mode="bilinear", padding_mode="border", align_corners=True)[0]
