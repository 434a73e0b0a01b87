"""Views of prepared tensors, and the way back for maps, as gathers and products with constant matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unstride.errors import OptionError
from unstride.exporting.builder import Array, OnnxBuilder
from unstride.recipe.view import PLAIN, View
from unstride.views.source import FLIPS, PLACING, Block, Canvas, back, flip_axes, other_ops

_ROWS = 32  # basis images at once


@dataclass(frozen=True, eq=False)
class FixedView:
    """What a view does to tensors of one size: along each axis a gather (indices) or a product (out, in); then flips.

    Flips and placing views are separable and linear, so what they do to single rows and columns says everything.
    """

    moves: tuple[tuple[int, Array], ...] = ()
    flips: tuple[int, ...] = ()  # axes, counted from the last

    def on_tensor(self, x: Tensor) -> Tensor:
        for axis, move in self.moves:
            if move.ndim == 1:
                x = x.index_select(x.ndim + axis, torch.from_numpy(move))
            else:
                matrix = torch.from_numpy(move).to(x)
                x = matrix @ x if axis == -2 else x @ matrix.T
        return x.flip(self.flips) if self.flips else x

    def on_graph(self, b: OnnxBuilder, x: str) -> str:
        for axis, move in self.moves:
            if move.ndim == 1:
                x = b.op("Gather", x, b.constant(move), axis=axis)
            elif axis == -2:
                x = b.op("MatMul", b.constant(move), x)
            else:
                x = b.op("MatMul", x, b.op("Transpose", b.constant(move), perm=[1, 0]))
        for axis in self.flips:
            x = b.reversed(x, axis)
        return x


def check_view(view: View) -> None:
    if other_ops(view) is not None or any(op.name == "FlipFB" for op in view.ops):
        raise OptionError(
            f"export: view {view} changes more than which part of the image the network gets, and the file has no op "
            "for it. Flips, sizes, crops, shifts and corners can be exported."
        )


def fixed_view(view: View, size: Sequence[int]) -> FixedView:
    """`as_source(images).render(view)` for images, volumes or signals of one size."""
    check_view(view)
    flips = tuple(flip_axes(view))
    placing = tuple(op for op in view.ops if op.name in PLACING)
    if len(size) != 2:
        Block(torch.empty(1, 1, *size)).render(view)  # an error for views that only images have
        return FixedView((), flips)
    if not placing:
        return FixedView((), flips)
    h, w = size

    def placed(x: Tensor) -> Tensor:
        return Canvas(x).render(View(placing))

    return FixedView(_moves(placed, (h, w)), flips)


def fixed_back(view: View, size: Sequence[int], shown: Sequence[int], wanted: Sequence[int]) -> FixedView:
    """How a map of size `shown` of a view becomes a map of size `wanted` over the plain view of `size`."""
    if {op.name for op in view.ops} - {"Identity", "Size", *FLIPS}:
        raise OptionError(f"export: view {view} of a map cannot be brought back in a file. Use flips and sizes.")
    flips = tuple(flip_axes(view))
    if tuple(shown) == tuple(wanted):
        return FixedView((), flips)
    h, w = shown

    def resized(x: Tensor) -> Tensor:
        return back(PLAIN, x, tuple(size), tuple(wanted))

    return FixedView(_moves(resized, (h, w)), flips)


def _moves(run: Callable[[Tensor], Tensor], size: tuple[int, int]) -> tuple[tuple[int, Array], ...]:
    """Of both axes, those that are not left as they are."""
    found = []
    for axis in (-2, -1):
        matrix = _matrix(run, size, axis)
        index = matrix.argmax(1)
        if not (np.abs(matrix[np.arange(len(index)), index] - 1) < 1e-6).all():
            found.append((axis, matrix))
        elif not np.array_equal(index, np.arange(matrix.shape[1])):
            found.append((axis, index))
    return tuple(found)


def _matrix(run: Callable[[Tensor], Tensor], size: tuple[int, int], axis: int) -> Array:
    """(out, in): what becomes of images with a single bright row or column."""
    extent, shown = size[axis], []
    for start in range(0, extent, _ROWS):
        basis = torch.eye(extent)[start : start + _ROWS]
        images = basis[:, None, :, None] if axis == -2 else basis[:, None, None, :]
        out = run(images.expand(-1, 1, *size).contiguous())[:, 0]
        shown.append(out[:, :, 0] if axis == -2 else out[:, 0, :])
    return np.ascontiguousarray(torch.cat(shown).T.numpy())
