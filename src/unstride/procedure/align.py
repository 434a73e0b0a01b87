"""Maps of different states on one grid: the closed-form two-tap filter, with the true geometry.

Resizing a map to image resolution (nearest), moving it by Delta and averaging back is, per axis,
`(1 - a) f[n - k] + a f[n - k - 1]` with `Delta / T = k + a`: nothing is ever upsampled.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstride.geometry.grids import Grid


@dataclass(frozen=True)
class Offset:
    """Delta / T of a state per axis, split into whole cells (below 0: the map lies before) and the rest of a cell."""

    cells: tuple[int, ...]
    fraction: tuple[float, ...]

    @classmethod
    def of(cls, displacement: Sequence[float], spacing: Sequence[float]) -> "Offset":
        cells, fraction = [], []
        for d, t in zip(displacement, spacing, strict=True):
            ratio = d / t if t else 0.0
            k = math.floor(ratio + 1e-6)
            cells.append(k)
            fraction.append(max(0.0, ratio - k) if abs(ratio - k) > 1e-6 else 0.0)
        return cls(tuple(cells), tuple(fraction))

    @property
    def still(self) -> bool:
        return not any(self.cells) and not any(self.fraction)

    def taps(self) -> list[tuple[tuple[int, ...], float]]:
        """(cells per axis, weight) of the up to 2 per axis that a moved map is made of."""
        per_axis = [
            [(k, 1 - part), (k + 1, part)] if part else [(k, 1.0)]
            for k, part in zip(self.cells, self.fraction, strict=True)
        ]
        return [
            (tuple(k for k, _ in chosen), math.prod(w for _, w in chosen)) for chosen in itertools.product(*per_axis)
        ]


def overlap(size: Sequence[int], cells: Sequence[int]) -> tuple[Any, Any]:
    """Where maps (..., *size) lie on each other when one is moved by whole cells: indices of (place, source)."""
    place = [slice(max(k, 0), max(0, n + min(k, 0))) for k, n in zip(cells, size, strict=True)]
    source = [slice(max(-k, 0), max(0, n - max(k, 0))) for k, n in zip(cells, size, strict=True)]
    return (..., *place), (..., *source)


def add_aligned(total: Tensor, f: Tensor, offset: Offset) -> None:
    """total += Align(f) for maps (..., H, W), in place; what has no source adds nothing."""
    for cells, weight in offset.taps():
        place, source = overlap(f.shape[-len(cells) :], cells)
        total[place].add_(f[source], alpha=weight)


def align(f: Tensor, offset: Offset) -> Tensor:
    """Align maps (..., H, W) with zeros where it has no source: the paper's border rule."""
    if offset.still:
        return f
    out = torch.zeros_like(f)
    add_aligned(out, f, offset)
    return out


def coverage(size: Sequence[int], offset: Offset, like: Tensor) -> Tensor:
    """How much of each cell (1, H, W) of the aligned map comes from inside the state's own map, from 0 to 1."""
    make = _small_coverage if math.prod(size) <= 4096 else _coverage
    return make(tuple(size), offset, like.dtype, like.device)


def _coverage(size: tuple[int, ...], offset: Offset, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # what is kept must be usable in a fit, too
        out = torch.zeros((1, *size), dtype=dtype, device=device)
        add_aligned(out, torch.ones_like(out), offset)
    return out


_small_coverage = functools.lru_cache(maxsize=1024)(_coverage)  # few states and sizes come again and again


def align_covered(f: Tensor, offset: Offset) -> Tensor:
    """Align maps and divide by their coverage: at the border the nearest cell goes on."""
    if offset.still:
        return f
    part = coverage(f.shape[-len(offset.cells) :], offset, f)
    return align(f, offset).div_(part.clamp(min=1e-12))


def to_map(value: Tensor, grid: Grid) -> Tensor:
    """A value on a grid -> (B, C, H, W), whatever its own layout (channels last, tokens)."""
    axes = len(grid.size)
    if grid.tokens:
        value = value.narrow(grid.dim, grid.prefix, value.shape[grid.dim] - grid.prefix) if grid.prefix else value
        value = value.unflatten(grid.dim, grid.size)
    value = value.movedim(_dims(value.ndim, grid), tuple(range(-axes, 0)))
    if value.ndim == 1 + axes:  # one number in each cell
        return value.unsqueeze(1)
    return value.flatten(1, -axes - 1) if value.ndim != 2 + axes else value


def from_map(maps: Tensor, like: Tensor, grid: Grid) -> Tensor:
    """The inverse of `to_map`: (B, C, H, W) -> the layout of `like` (its batch may differ).

    Tokens that have no place on the grid are those of `like`, which must then hold values.
    """
    axes = len(grid.size)
    shape = list(like.shape)
    if grid.tokens:
        shape[grid.dim : grid.dim + 1] = grid.size
    dims = _dims(len(shape), grid)
    inner = [s for i, s in enumerate(shape) if i != 0 and i not in dims]
    value = maps.reshape(maps.shape[0], *inner, *(shape[d] for d in dims)).movedim(tuple(range(-axes, 0)), dims)
    if not grid.tokens:
        return value
    value = value.flatten(grid.dim, grid.dim + axes - 1)
    return torch.cat([like.narrow(grid.dim, 0, grid.prefix).to(value), value], grid.dim) if grid.prefix else value


def _dims(ndim: int, grid: Grid) -> tuple[int, ...]:
    """Where the axes of a value lie; a grid with an axis of a single cell is a map as torch has them."""
    axes = len(grid.size)
    if grid.tokens:
        return tuple(range(grid.dim, grid.dim + axes))
    there = tuple(d for d in grid.dims if d is not None)
    return there if len(there) == axes else tuple(range(ndim)[-axes:])
