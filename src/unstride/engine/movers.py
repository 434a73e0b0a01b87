"""Moving an operand by a selection per row, and the ops that read it: what a state does inside a segment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.geometry.grids import border_index
from unstride.geometry.layers import Shift
from unstride.geometry.positions import (
    Window,
)
from unstride.geometry.states import State
from unstride.graph.ops import op_name

_FILL = {"max_pool": float("-inf")}


@dataclass(frozen=True)
class Batch:
    """Where the rows of a value lie: dimension `dim` counts rows x `factor` (windows and heads multiply the batch)."""

    dim: int
    factor: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows scattered over stored tensors, not yet gathered: (tensor, row) in order."""

    places: tuple[tuple[Tensor, int], ...]
    batch: Batch

    @property
    def together(self) -> int:
        """How many of the first rows lie one after the other in one tensor."""
        return neighbours(self.places, [0] * len(self.places))[0][2]

    def gather(self) -> Tensor:
        dim, m = self.batch.dim, self.batch.factor
        found = neighbours(self.places, [0] * len(self.places))
        pieces = [t.narrow(dim, start * m, count * m) for t, start, count in found]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def neighbours(places: Sequence[tuple[Tensor, int]], starts: Sequence[Any]) -> list[tuple[Tensor, int, int]]:
    """Neighbouring rows of one tensor that start at the same place: (tensor, first row, how many)."""
    found: list[tuple[Tensor, int, int]] = []
    for j, (t, r) in enumerate(places):
        if found and found[-1][0] is t and found[-1][1] + found[-1][2] == r and starts[j] == starts[j - 1]:
            found[-1] = (t, found[-1][1], found[-1][2] + 1)
        else:
            found.append((t, r, 1))
    return found


def selected(shift: Shift, state: State, a: int) -> int:
    """How many cells later a state reads an operand along an axis."""
    return sum(state.selections[layer - 1][a] * step for layer, step in shift.steps[a].items())


class Mover(nn.Module):
    """operand, states -> the operand as the op must read it: whole windows for strided ops, else cell by cell."""

    def __init__(
        self, shift: Shift, batch: Batch, ndim: int, out_size: tuple[int, int], stride: tuple[int, int]
    ) -> None:
        super().__init__()
        self.shift, self.batch, self.ndim = shift, batch, ndim
        site = shift.site
        self.fill = _FILL.get(site.kind, 0.0) if site is not None else 0.0
        self.mode = (
            "replicate"
            if site is not None and site.kind == "resize"
            else (site.mode if site is not None else "constant")
        )
        self.windows = site.windows if site is not None else None
        self.dims: tuple[int | None, int | None] = (2, 3) if self.windows is not None else shift.grid.dims
        self.reach: tuple[int, int] | None = None
        if self.windows is not None:
            self.reach = tuple(  # type: ignore[assignment]
                (out_size[a] - 1) * stride[a] + w.dilation * (w.size - 1) + 1 for a, w in enumerate(self.windows)
            )

    def start(self, state: State, a: int) -> int:
        return selected(self.shift, state, a) - (self.windows[a].start if self.windows is not None else 0)

    @torch.compiler.disable
    def forward(self, x: Tensor | Rows, states: Sequence[State]) -> Tensor:
        dim, m = self.batch.dim, self.batch.factor
        places = x.places if isinstance(x, Rows) else tuple((x, r) for r in range(len(states)))
        sample = places[0][0]
        if self.shift.grid.tokens and self.windows is None:
            parts = [self._tokens(t.narrow(dim, r * m, m), s) for (t, r), s in zip(places, states, strict=True)]
            return torch.cat(parts, dim)
        if self.mode != "constant":
            parts = [self._wrapped(t.narrow(dim, r * m, m), s) for (t, r), s in zip(places, states, strict=True)]
            return torch.cat(parts, dim)
        shape = list(sample.shape)
        shape[dim] = len(states) * m
        if self.reach is not None:
            shape[2], shape[3] = self.reach
        out = empty_like(shape, sample)
        starts = [(self.start(s, 0), self.start(s, 1)) for s in states]
        j = 0
        for t, r, count in neighbours(places, starts):
            self._copy(t.narrow(dim, r * m, count * m), out.narrow(dim, j * m, count * m), starts[j], self.dims)
            j += count
        return out

    def _copy(self, x: Tensor, out: Tensor, start: Sequence[int], dims: Sequence[int | None]) -> None:
        """out[n] = x[start + n] where that exists, the fill elsewhere; only the uncovered border is filled."""
        for a in (0, 1):
            d = dims[a]
            if d is None:
                continue
            length = out.shape[d]
            first = min(max(0, -start[a]), length)
            last = max(first, min(length, x.shape[d] - start[a]))
            if first:
                out.narrow(d, 0, first).fill_(self.fill)
            if last < length:
                out.narrow(d, last, length - last).fill_(self.fill)
            if last == first:
                return
            out = out.narrow(d, first, last - first)
            x = x.narrow(d, start[a] + first, last - first)
        out.copy_(x)

    def _wrapped(self, x: Tensor, state: State) -> Tensor:
        for a in (0, 1):
            d = self.dims[a]
            if d is not None:
                length = self.reach[a] if self.reach is not None else x.shape[d]
                x = x.index_select(d, border_index(self.start(state, a), length, x.shape[d], self.mode).to(x.device))
        return x

    def _tokens(self, x: Tensor, state: State) -> Tensor:
        d = self.dims[0]
        assert d is not None
        grid = self.shift.grid
        body = x.narrow(d, grid.prefix, x.shape[d] - grid.prefix).unflatten(d, grid.size)
        out = torch.empty_like(body)
        self._copy(body, out, (self.start(state, 0), self.start(state, 1)), (d, d + 1))
        out = out.flatten(d, d + 1)
        return torch.cat([x.narrow(d, 0, grid.prefix), out], d) if grid.prefix else out

    def extra_repr(self) -> str:
        return f"{self.shift.node.name} <- {self.shift.operand.name}"


def empty_like(shape: list[int], like: Tensor) -> Tensor:
    last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last) and not like.is_contiguous()
    layout = torch.channels_last if last else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


class MovedAvgPool(nn.Module):
    """Average pooling over an extracted window: sums, divided by what the op's own rule counts there."""

    def __init__(
        self,
        shift: Shift,
        size: tuple[int, int],
        stride: tuple[int, int],
        out_size: tuple[int, int],
        extent: tuple[int, int],
        count_pad: bool,
        divisor: int | None,
        ceil: bool,
    ) -> None:
        super().__init__()
        assert shift.site is not None and shift.site.windows is not None
        self.shift, self.size, self.stride = shift, size, stride
        self.counts: tuple[dict[int, Tensor], ...] | None = None  # per axis and selection
        self.scale = 1.0 / (divisor or size[0] * size[1])
        if divisor is None and (ceil or not count_pad):
            rates = shift.site.rate
            self.counts = tuple(
                {
                    s: _counts(shift.site.windows[a], s, size[a], stride[a], out_size[a], extent[a], count_pad)
                    for s in range(1 - rates[a], rates[a])
                }
                for a in (0, 1)
            )

    def counted(self, a: int, state: State) -> Tensor:
        """How many elements each window counts along an axis."""
        assert self.counts is not None
        return self.counts[a][selected(self.shift, state, a)]

    def forward(self, x: Tensor, states: Sequence[State]) -> Tensor:
        total = F.avg_pool2d(x, self.size, self.stride, divisor_override=1)
        if self.counts is None:
            return total * self.scale
        rows, columns = (torch.stack([self.counted(a, s) for s in states]).to(x) for a in (0, 1))
        m = x.shape[0] // len(states)
        divide = (rows[:, None, :, None] * columns[:, None, None, :]).repeat_interleave(m, 0)
        return total / divide


def _counts(w: Window, s: int, size: int, stride: int, out: int, extent: int, count_pad: bool) -> Tensor:
    """How many elements each window counts: the padded extent goes on with the state, so s = 0 is torch's own rule."""
    start = torch.arange(out) * stride - w.start + s
    end = torch.minimum(start + size, torch.tensor(extent + w.start + max(s, 0)))
    if not count_pad:
        start, end = start.clamp(min=0), end.clamp(max=extent)
    return (end - start).clamp(min=1).float()


def stride_of(node: torch.fx.Node) -> tuple[int, int]:
    """Stride of a conv or pool node as (y, x)."""
    name = op_name(node)
    i = 2 if "pool" in name else 3
    stride: Any = node.args[i] if len(node.args) > i else node.kwargs.get("stride")
    if not stride:
        stride = node.args[1] if "pool" in name else [1, 1]
    values = [int(v) for v in stride] if isinstance(stride, list | tuple) else [int(stride)]
    return values[0], values[-1]
