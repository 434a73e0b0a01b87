"""Align (section 4.1, Eq. 9 and Figure 3): the maps of different states on one grid.

The paper upsamples a map to image resolution (nearest), shifts it by Delta pixels and resizes it back. With the average
on the way down that is, per axis, `(1 - a) f[n - k] + a f[n - k - 1]` with `Delta / T = k + a`: no map is upsampled.
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
    """Delta (Eq. 10) / T of a state per axis: whole cells (negative: towards the start) and the rest of a cell."""

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
    def is_zero(self) -> bool:
        return not any(self.cells) and not any(self.fraction)

    def nearest(self) -> "Offset":
        """The same with nearest instead of the average on the way down: a started cell counts as a whole one."""
        cells = tuple(k + (part > 0) for k, part in zip(self.cells, self.fraction, strict=True))
        return Offset(cells, (0.0,) * len(cells))

    def taps(self) -> list[tuple[tuple[int, ...], float]]:
        """(cells per axis, weight) of the at most 2 taps per axis that make the aligned map."""
        per_axis = [
            [(k, 1 - part), (k + 1, part)] if part else [(k, 1.0)]
            for k, part in zip(self.cells, self.fraction, strict=True)
        ]
        return [
            (tuple(k for k, _ in chosen), math.prod(w for _, w in chosen)) for chosen in itertools.product(*per_axis)
        ]


def add_aligned(total: Tensor, f: Tensor, offset: Offset) -> None:
    """total += Align(f) for maps (..., H, W), in place; cells without a source add nothing."""
    for cells, weight in offset.taps():
        place, source = overlap(f.shape[-len(cells) :], cells)
        total[place].add_(f[source], alpha=weight)


def overlap(size: Sequence[int], cells: Sequence[int]) -> tuple[Any, Any]:
    """Where maps (..., *size) cover each other when one is moved by whole cells: indices of (place, source)."""
    place = [slice(max(k, 0), max(0, n + min(k, 0))) for k, n in zip(cells, size, strict=True)]
    source = [slice(max(-k, 0), max(0, n - max(k, 0))) for k, n in zip(cells, size, strict=True)]
    return (..., *place), (..., *source)


def align(f: Tensor, offset: Offset) -> Tensor:
    """Align maps (..., H, W) with zeros where a cell has no source: the paper's border."""
    if offset.is_zero:
        return f
    out = torch.zeros_like(f)
    add_aligned(out, f, offset)
    return out


def coverage(size: Sequence[int], offset: Offset, like: Tensor) -> Tensor:
    """The share of each cell (1, H, W) of the aligned map that comes from inside the state's own map."""
    make = _small_coverage if math.prod(size) <= 4096 else _coverage
    return make(tuple(size), offset, like.dtype, like.device)


def _coverage(size: tuple[int, ...], offset: Offset, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # cached values are used in training, too
        out = torch.zeros((1, *size), dtype=dtype, device=device)
        add_aligned(out, torch.ones_like(out), offset)
    return out


_small_coverage = functools.lru_cache(maxsize=1024)(_coverage)  # few states and sizes recur


def align_covered(f: Tensor, offset: Offset) -> Tensor:
    """Align maps and divide by their coverage: at the border the nearest cell is repeated."""
    if offset.is_zero:
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
