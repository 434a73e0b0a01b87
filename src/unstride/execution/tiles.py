"""Gates in space: which tiles of an image go on, and the fewest windows that contain them with their context.

All windows of a view have one size. A window starts on a multiple of the network's stride and is as odd as the whole,
so that every cell lies where it lies in the whole image. It serves the tiles that are `context` pixels away from its
sides, except where a side is the image's own. What a network sees beyond that (a global pool) is the window alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unstride.errors import OptionError
from unstride.recipe.stage import Gate
from unstride.recipe.view import View
from unstride.views.source import flip_axes, place

PLACING = {"Crop", "ShiftX", "ShiftY", "FiveCrop", "Scale", "TranslateX", "TranslateY", "Cutout"}


def tile_of(size: int, out: int, tile: int) -> Tensor:
    """In which tile each row (or column) of a map lies: (out,) for an image of `size` pixels."""
    return (torch.arange(out) * size // out) // tile


def tile_means(confidence: Tensor, size: Sequence[int], tile: int) -> Tensor:
    """(B, h, w) -> (B, rows, columns): the mean over each tile of `tile` pixels of (H, W) = `size` images."""
    y, x = (tile_of(size[a], confidence.shape[1 + a], tile).to(confidence.device) for a in (0, 1))
    rows, columns = (torch.nn.functional.one_hot(k).to(confidence).T for k in (y, x))
    count = rows.sum(1)[:, None] * columns.sum(1)
    return rows @ confidence @ columns.T / count


def spread(where: Tensor, size: Sequence[int], out: Sequence[int], tile: int) -> Tensor:
    """Tiles (rows, columns) -> the map (h, w) that they stand for."""
    y, x = (tile_of(size[a], out[a], tile).to(where.device) for a in (0, 1))
    return where[y][:, x]


@dataclass(frozen=True)
class Axis:
    """Along one axis of a view: how long a window is, and (start, first tile, tile after the last) of each."""

    length: int
    starts: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, size: int, shown: int, filled: int, flip: bool, tile: int, reach: int, stride: int) -> Axis:
        """`shown` pixels of the view, which are `filled` up for the network."""
        count, scale = -(-size // tile), shown / size
        length = math.ceil(2 * tile * scale) + 2 * reach + stride - 1
        length += (filled - length) % stride
        if length >= filled:
            return cls(filled, ((0, 0, count),))
        boxes = [(min(k * tile, size), min((k + 1) * tile, size)) for k in range(count)]
        boxes = [(size - b, size - a) if flip else (a, b) for a, b in boxes]
        found: dict[tuple[int, int], int] = {}
        for start in range(0, filled - length + 1, stride):
            end = start + length
            fits = [
                k
                for k, (a, b) in enumerate(boxes)
                if (start == 0 or a * scale - reach >= start) and (end == filled or b * scale + reach <= end)
            ]
            if fits:
                found.setdefault((fits[0], fits[-1] + 1), start)
        most = [(a, b) for a, b in found if not any((c, d) != (a, b) and c <= a and b <= d for c, d in found)]
        return cls(length, tuple((found[span], *span) for span in sorted(most)))


@dataclass(frozen=True)
class Window:
    """Rows and columns of a view where a window begins, and the tiles (first and last row, first and last column)."""

    top: int
    left: int
    tiles: tuple[int, int, int, int]


@dataclass(frozen=True)
class Tiling:
    """`Tiling.of(view, gate, (180, 240), stride=8).cover(where)`: the windows of a view."""

    size: tuple[int, int]  # of the plain image
    shown: tuple[int, int]  # of the view
    flips: tuple[bool, bool]
    tile: int
    rim: int  # pixels beside a tile that bringing its map back to the plain image needs
    axes: tuple[Axis, Axis]
    filled: tuple[int, int]

    @classmethod
    def of(cls, view: View, gate: Gate, size: Sequence[int], stride: Sequence[int], fill: int = 1) -> Tiling:
        """`fill`: what the network's images are filled up to a multiple of."""
        strange = [op.name for op in view.ops if op.name in PLACING]
        if strange or len(size) != 2:
            raise OptionError(f"a gate with tiles takes flips and sizes of images (B, C, H, W), not {view}")
        assert gate.tile is not None
        plain = (int(size[0]), int(size[1]))
        shown, axes_flipped = place(view, plain).size, flip_axes(view)
        flipped = (-2 in axes_flipped, -1 in axes_flipped)
        scale = max(shown[0] / plain[0], shown[1] / plain[1], 1.0)
        rim = math.ceil(scale) + 2
        filled = (-(-shown[0] // fill) * fill, -(-shown[1] // fill) * fill)
        axes = tuple(
            Axis.of(
                plain[a], shown[a], filled[a], flipped[a], gate.tile, gate.context + rim, math.lcm(int(stride[a]), fill)
            )
            for a in (0, 1)
        )
        return cls(plain, shown, flipped, gate.tile, rim, (axes[0], axes[1]), filled)

    @property
    def window(self) -> tuple[int, int]:
        return self.axes[0].length, self.axes[1].length

    def cover(self, where: Tensor) -> list[Window] | None:
        """Windows that serve all open tiles (rows, columns), the fullest first; None: the whole is no more work."""
        left = where.cpu().clone()
        area, whole = math.prod(self.window), math.prod(self.filled)
        found: list[Window] = []
        while left.any():
            if (len(found) + 1) * area >= whole:
                return None
            total = torch.nn.functional.pad(left.long().cumsum(0).cumsum(1), (1, 0, 1, 0)).tolist()
            best, (top, a, b), (side, c, d) = max(
                (total[b][d] - total[a][d] - total[b][c] + total[a][c], (top, a, b), (side, c, d))
                for top, a, b in self.axes[0].starts
                for side, c, d in self.axes[1].starts
            )
            assert best > 0
            left[a:b, c:d] = False
            found.append(Window(top, side, (a, b, c, d)))
        return found

    def share(self, where: Tensor) -> float:
        """Of the view's area that is computed for these tiles, context included."""
        windows = self.cover(where)
        return 1.0 if windows is None else len(windows) * math.prod(self.window) / math.prod(self.filled)

    def cut(self, images: Tensor, windows: Sequence[Window]) -> Tensor:
        """One image (1, C, h, w) of the view -> (windows, C, ...)."""
        h, w = self.window
        return torch.cat([images[:, :, one.top : one.top + h, one.left : one.left + w] for one in windows])

    def paste(self, maps: Tensor, windows: Sequence[Window]) -> Tensor:
        """Maps of the windows (windows, K, ...) -> the map (1, K, ...) of the view; 0 where no window serves."""
        steps = [_step(n, m) for n, m in zip(self.window, maps.shape[2:], strict=True)]
        size = [
            m + round((n - k) / step)
            for m, n, k, step in zip(maps.shape[2:], self.shown, self.window, steps, strict=True)
        ]
        out = maps.new_zeros((1, maps.shape[1], *size))
        for one, own in zip(windows, maps, strict=True):
            spans = []
            for a, at in ((0, one.top), (1, one.left)):
                first, last = one.tiles[2 * a] * self.tile, min(one.tiles[2 * a + 1] * self.tile, self.size[a])
                if self.flips[a]:
                    first, last = self.size[a] - last, self.size[a] - first
                scale, step = self.shown[a] / self.size[a], steps[a]
                low = max(0, math.floor(first * scale / step) - self.rim, round(at / step))
                high = min(size[a], math.ceil(last * scale / step) + self.rim, round(at / step) + own.shape[1 + a])
                spans.append((slice(low, high), slice(low - round(at / step), high - round(at / step))))
            out[0][:, spans[0][0], spans[1][0]] = own[:, spans[0][1], spans[1][1]]
        return out


def _step(pixels: int, cells: int) -> float:
    """Pixels between two cells of a map; a window of 8 n + 1 pixels has n + 1."""
    return float(max(1, round(pixels / cells))) if cells <= pixels else 1 / round(cells / pixels)
