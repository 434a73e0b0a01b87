"""Transposed convolutions with packed weights; those of few channels as a convolution whose channels become cells."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.engine.bounds import wild_now
from unstride.engine.movers import for_each
from unstride.engine.packing import Packing

_LANES = 16  # channels that a vector register holds: fewer take as long


class FusedTransposed(nn.Module):
    """conv_transpose(x), of two or three axes.

    For each cell of x there are `stride` cells along an axis of the result. Where the result has few channels, these
    cells are computed as channels of one convolution of stride 1 and then laid out: its taps are the same, and zeros
    between. Values that are not finite take the long way, for a zero tap is no 0 of them.
    """

    def __init__(self, weight: Packing, bias: Tensor | None, args: tuple[Any, ...], tame: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.tame = weight, bias, tame
        stride, padding, output_padding, groups, dilation = args
        each = [for_each(v, weight.dense.ndim - 2) for v in (padding, output_padding, stride, dilation)]
        self.where: tuple[Any, ...] = (*each, int(groups))
        self.cells = Cells.of(weight.dense, bias, *self.where)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):  # the packed ops know nothing of it
            return self._separate(x)
        if self.cells is not None:
            y = self.cells(x)
            if (self.tame and not wild_now()) or y.sum().isfinite():
                return y
        packed = self.weight(x.shape, *self.where)
        return torch.ops.mkldnn._convolution_transpose_pointwise.default(
            x, packed, self.bias, *self.where, "none", [], ""
        )

    def _separate(self, x: Tensor) -> Tensor:
        padding, output_padding, stride, dilation, groups = self.where
        op = F.conv_transpose2d if x.ndim == 4 else F.conv_transpose3d
        return op(x, self.weight.dense, self.bias, stride, padding, output_padding, groups, dilation)


class Cells(nn.Module):
    """A transposed convolution as one of stride 1: output cell `s q + r` is channel r of cell q.

    Along an axis, cell `s q + r` reads input cell `q + e` by tap `r + padding - s e`: so the channels of cell q read
    the cells from `q + first` to `q + last`, each by its own taps.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, padding: list[int], more: list[int], stride: list[int]
    ) -> None:
        super().__init__()
        taps, axes = weight.shape[2:], range(weight.ndim - 2)
        self.stride, self.padding, self.more, self.taps = stride, padding, more, tuple(taps)
        self.first = [-(-(p - k + 1) // s) for k, s, p in zip(taps, stride, padding, strict=True)]
        self.last = [(s - 1 + p) // s for s, p in zip(stride, padding, strict=True)]
        wide = F.pad(weight, (0, 1) * len(taps))  # a zero tap at the end of each axis
        for a in reversed(axes):
            index = [
                t if 0 <= (t := r + padding[a] - stride[a] * e) < taps[a] else taps[a]
                for r in range(stride[a])
                for e in range(self.first[a], self.last[a] + 1)
            ]
            wide = wide.index_select(2 + a, torch.tensor(index, device=weight.device)).unflatten(2 + a, (stride[a], -1))
        # (C, K, s, n, s, n, ...) -> (s, s, ..., K, C, n, n, ...)
        order = [*(2 + 2 * a for a in axes), 1, 0, *(3 + 2 * a for a in axes)]
        self.weight = Packing(wide.permute(order).flatten(0, len(taps)).contiguous())
        self.bias = None if bias is None else bias.repeat(math.prod(stride))

    @classmethod
    def of(
        cls,
        weight: Tensor,
        bias: Tensor | None,
        padding: list[int],
        more: list[int],
        stride: list[int],
        dilation: list[int],
        groups: int,
    ) -> "Cells | None":
        """None where its zero taps cost more than the lanes of a register that few channels leave empty."""
        if groups != 1 or set(dilation) != {1} or any(k < s for k, s in zip(weight.shape[2:], stride, strict=True)):
            return None
        made = cls(weight, bias, padding, more, stride)
        own = math.prod(weight.shape[2:]) * -(-weight.shape[1] // _LANES)
        dense = made.weight.dense
        return made if math.prod(dense.shape[2:]) * -(-dense.shape[0] // _LANES) < own else None

    def forward(self, x: Tensor) -> Tensor:
        size = self._size(x.shape[2:])
        cells = [-(-n // s) for n, s in zip(size, self.stride, strict=True)]
        ends = zip(self.first, self.last, cells, x.shape[2:], strict=True)
        padding = [max(0, -first, count + last - n) for first, last, count, n in ends]
        ones = [1] * len(cells)
        packed = self.weight(x.shape, padding, ones, ones, 1)
        y = torch.ops.mkldnn._convolution_pointwise.default(
            x, packed, self.bias, padding, ones, ones, 1, "none", [], ""
        )
        for a, (first, pad, count) in enumerate(zip(self.first, padding, cells, strict=True)):
            y = y.narrow(2 + a, first + pad, count)
        y = y.unflatten(1, (*self.stride, -1))  # (B, s, s, ..., K, *cells)
        axes = len(cells)
        order = [0, 1 + axes, *(d for a in range(axes) for d in (2 + axes + a, 1 + a))]
        y = y.permute(order).reshape(len(x), -1, *(c * s for c, s in zip(cells, self.stride, strict=True)))
        return y[(..., *(slice(n) for n in size))]

    def _size(self, size: Sequence[int]) -> list[int]:
        given = zip(size, self.stride, self.padding, self.taps, self.more, strict=True)
        return [(n - 1) * s - 2 * p + k + more for n, s, p, k, more in given]
