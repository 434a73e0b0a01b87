"""How a value lies on the image: which dimensions are rows and columns, how far apart its cells are."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from unstride.geometry.positions import Pos, Trace, core


@dataclass(frozen=True)
class Grid:
    """A regular grid of cells in a value: dims (rows, columns), size (H, W) and spacing in image pixels.

    Maps have two spatial dims; tokens (B, N, C) have one, in row-major order behind `prefix` tokens without a place.
    A dim of None is an axis with a single cell.
    """

    dims: tuple[int | None, int | None]
    size: tuple[int, int]
    spacing: tuple[float, float]
    prefix: int = 0

    @property
    def tokens(self) -> bool:
        return self.dims[0] is not None and self.dims[0] == self.dims[1]

    def like(self, other: "Grid") -> bool:
        """The same cells, but for where the first one lies."""
        near = all(abs(a - b) <= 0.01 * max(a, b) for a, b in zip(self.spacing, other.spacing, strict=True))
        return near and (self.dims, self.size, self.prefix) == (other.dims, other.size, other.prefix)

    def __str__(self) -> str:
        return f"{self.size[0]}x{self.size[1]}" + (" tokens" if self.tokens else "")


def grid_of(pos: Pos) -> Grid | None:
    """The grid that a value's coordinates form, or None if they form none (windows, mixed channels, uneven spacing)."""
    y, x = core(pos.y), core(pos.x)
    dy, dx = _varying(y), _varying(x)
    if len(dy) > 1 or len(dx) > 1 or not (dy or dx):
        return None
    if dy and dx and dy == dx:
        return _tokens(y, x, dy[0], pos.y.ndim)
    sizes, spacings = [1, 1], [0.0, 0.0]
    for a, (t, dims) in enumerate(((y, dy), (x, dx))):
        if dims:
            line = _line(t, dims[0])
            step = _step(line)
            if step is None:
                return None
            sizes[a], spacings[a] = len(line), step
    return Grid((dy[0] if dy else None, dx[0] if dx else None), (sizes[0], sizes[1]), (spacings[0], spacings[1]))


def grid_at(trace: Trace, node: Node) -> Grid | None:
    """The grid of a node's value; None where it has no position, or lies on none."""
    pos = trace.pos.get(node)
    return grid_of(pos) if isinstance(pos, Pos) else None


def _varying(t: Tensor) -> list[int]:
    return [d for d in range(t.ndim) if t.shape[d] > 1 and bool((t.diff(dim=d).nan_to_num().abs() > 1e-3).any())]


def _line(t: Tensor, dim: int) -> Tensor:
    return t.movedim(dim, 0).reshape(t.shape[dim], -1)[:, 0]


def _step(line: Tensor) -> float | None:
    steps = line.diff()
    if bool(line.isnan().any()) or len(steps) == 0:
        return None
    mean = float(steps.mean())
    if mean <= 0 or bool(((steps - mean).abs() > 0.02 * mean + 1e-3).any()):
        return None
    return mean


def _tokens(y: Tensor, x: Tensor, dim: int, ndim: int) -> Grid | None:
    rows, columns = _line(y, dim), _line(x, dim)
    prefix = int((rows.isnan() | columns.isnan()).long().cumprod(0).sum())
    rows, columns = rows[prefix:], columns[prefix:]
    width = int((rows == rows[0]).sum())
    if bool(rows.isnan().any() | columns.isnan().any()) or width == 0 or len(rows) % width:
        return None
    height = len(rows) // width
    tall, wide = rows.view(height, width), columns.view(height, width)
    sy, sx = _step(tall[:, 0]), _step(wide[0])
    if sy is None or sx is None or bool((tall != tall[:, :1]).any()) or bool((wide != wide[:1]).any()):
        return None
    return Grid((dim, dim), (height, width), (sy, sx), prefix)


def extract(
    source: Tensor,
    row: int,
    start: tuple[int, int],
    out: Tensor,
    dims: tuple[int | None, int | None],
) -> None:
    """out[n, m] = source[row][start_y + n, start_x + m] wherever that lies inside; the rest of `out` keeps its fill.

    `out` is one row without its leading dimension; dims count in the row.
    """
    x = source[row]
    for a in (0, 1):
        d = dims[a]
        if d is None:
            continue
        low, length = start[a], out.shape[d]
        first, last = max(0, -low), min(length, x.shape[d] - low)
        if last <= first:
            return
        out = out.narrow(d, first, last - first)
        x = x.narrow(d, low + first, last - first)
    out.copy_(x)


def border_index(start: int, length: int, extent: int, mode: str) -> Tensor:
    """Indices start .. start + length - 1 brought inside 0 .. extent - 1 by a padding mode."""
    i = torch.arange(start, start + length)
    if mode == "circular":
        return i % extent
    if mode == "reflect" and extent > 1:
        i = i.abs()
        i = torch.where(i >= extent, 2 * (extent - 1) - i, i)
    return i.clamp(0, extent - 1)
