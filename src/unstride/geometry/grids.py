"""How a value lies on the image: which dimensions are rows and columns, how far apart its cells are."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.fx import Node

from unstride.geometry.positions import Pos, Trace, changes, unexpanded


@dataclass(frozen=True)
class Grid:
    """A regular grid of cells in a value: dims (rows, columns), size (H, W) and spacing in image pixels; so many axes.

    Maps have a dim per axis; tokens (B, N, C) have one, in row-major order behind `prefix` tokens without a place.
    A dim of None is an axis with a single cell.
    """

    dims: tuple[int | None, ...]
    size: tuple[int, ...]
    spacing: tuple[float, ...]
    prefix: int = 0

    @cached_property
    def tokens(self) -> bool:
        there = [d for d in self.dims if d is not None]
        return len(there) > 1 and len(set(there)) == 1

    @property
    def dim(self) -> int:
        """Of tokens, the dimension that they lie along."""
        return next(d for d in self.dims if d is not None)

    def like(self, other: "Grid") -> bool:
        """The same cells, but for where the first one lies."""
        near = all(abs(a - b) <= 0.01 * max(a, b) for a, b in zip(self.spacing, other.spacing, strict=True))
        return near and (self.dims, self.size, self.prefix) == (other.dims, other.size, other.prefix)

    def __str__(self) -> str:
        return by(self.size) + (" tokens" if self.tokens else "")


def by(numbers: Iterable[int]) -> str:
    """(7, 7) -> 7x7."""
    return "x".join(map(str, numbers))


def grid_of(pos: Pos) -> Grid | None:
    """The grid that a value's coordinates form, or None if they form none (windows, mixed channels, uneven spacing)."""
    coords = [unexpanded(t) for t in pos.axes]
    dims = [_varying(t) for t in coords]
    if any(len(d) > 1 for d in dims) or not any(dims):
        return None
    there = [d[0] for d in dims if d]
    if len(there) > 1 and len(set(there)) == 1:
        return _tokens(coords, dims, there[0])
    if len(set(there)) < len(there):
        return None  # some axes share a dimension, others do not
    sizes, spacings = [1] * len(dims), [0.0] * len(dims)
    for a, (t, along) in enumerate(zip(coords, dims, strict=True)):
        if along:
            line = _line(t, along[0])
            step = _step(line)
            if step is None:
                return None
            sizes[a], spacings[a] = len(line), step
    return Grid(tuple(d[0] if d else None for d in dims), tuple(sizes), tuple(spacings))


def grid_at(trace: Trace, node: Node) -> Grid | None:
    """The grid of a node's value; None where it has no position, or lies on none."""
    pos = trace.pos.get(node)
    return grid_of(pos) if isinstance(pos, Pos) else None


def _varying(t: Tensor) -> list[int]:
    return [d for d in range(t.ndim) if changes(t, d)]


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


def _tokens(coords: Sequence[Tensor], dims: Sequence[list[int]], dim: int) -> Grid | None:
    """Axes that share a dimension: cells in row-major order, after tokens without a place."""
    lines = [_line(t, dim) for t, along in zip(coords, dims, strict=True) if along]
    prefix = int(torch.stack(lines).isnan().any(0).long().cumprod(0).sum())
    lines = [line[prefix:] for line in lines]
    if any(bool(line.isnan().any()) for line in lines):
        return None
    size = _row_major(lines)
    if size is None:
        return None
    places = [line.view(size) for line in lines]
    steps = []
    for a, place in enumerate(places):
        line = _line(place, a)
        step = _step(line)
        shape = [-1 if i == a else 1 for i in range(len(size))]
        if step is None or bool((place != line.view(shape)).any()):
            return None
        steps.append(step)
    there = iter(zip(size, steps, strict=True))
    cells = [next(there) if along else (1, 0.0) for along in dims]
    return Grid(
        tuple(dim if along else None for along in dims), tuple(n for n, _ in cells), tuple(t for _, t in cells), prefix
    )


def _row_major(lines: Sequence[Tensor]) -> tuple[int, ...] | None:
    """How many cells each axis has, if the tokens are in row-major order: the first axes stay longest."""
    rest, size = len(lines[0]), []
    for line in lines:
        run = int((line[:rest] == line[0]).long().cumprod(0).sum())
        if run == 0 or rest % run:
            return None
        size.append(rest // run)
        rest = run
    return tuple(size) if rest == 1 else None


def border_index(start: int, length: int, extent: int, mode: str) -> Tensor:
    """Indices start .. start + length - 1 brought inside 0 .. extent - 1 by a padding mode."""
    i = torch.arange(start, start + length)
    if mode == "circular":
        return i % extent
    if mode == "reflect" and extent > 1:
        i = i.abs()
        i = torch.where(i >= extent, 2 * (extent - 1) - i, i)
    return i.clamp(0, extent - 1)


def pinned_pieces(by: int, extent: int, pinned: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """x[n + by] between the first and last `pinned` cells, which stay; where it ends before them its last cell goes on.

    Pieces (to, how many, from, how many): a single cell that is read stands for all that are written.
    """
    low, high = pinned[0], extent - pinned[1]
    by = max(low - high, min(by, high - low))
    if high <= low or by == 0:
        return [(0, extent, 0, extent)]
    first, last = (low, high - by) if by > 0 else (low - by, high)  # where there is something to move there
    found = [(0, low, 0, low), (low, first - low, low, 1), (first, last - first, first + by, last - first)]
    found += [(last, high - last, high - 1, 1), (high, extent - high, high, extent - high)]
    return [piece for piece in found if piece[1]]
