"""Moving an operand by a selection per row, and the ops that read it: what a state does inside a segment."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.geometry.grids import border_index, pinned_pieces
from unstride.geometry.layers import Shift
from unstride.geometry.positions import OpWindow, Site
from unstride.geometry.states import State
from unstride.graph.ops import op_name

_FILL = {"max_pool": float("-inf")}
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions of a value
AVG_POOL: dict[int, Callable[..., Tensor]] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


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
        self, shift: Shift, batch: Batch, extent: Sequence[int], out_size: Sequence[int], stride: Sequence[int]
    ) -> None:
        super().__init__()
        self.shift, self.batch, self.pinned = shift, batch, shift.pinned
        site = shift.site
        self.fill = _FILL.get(site.kind, 0.0) if site is not None else 0.0
        self.mode = site.mode if site is not None else "constant"
        if site is not None and (site.kind == "resize" or _may_miss_the_map(site, extent, out_size, stride)):
            self.mode = "replicate"
        self.windows = site.windows if site is not None else None
        # what is moved: dimensions of the operand, and the axis along each
        self.dims: tuple[int | None, ...] = shift.grid.dims
        self.axes: tuple[int | None, ...] = tuple(range(len(shift.grid.dims)))
        self.reach: tuple[int, ...] | None = None
        if self.windows is not None and site is not None:
            self.dims = tuple(range(2, 2 + len(self.windows)))
            self.axes = tuple(site.axis(d) for d in range(len(self.windows)))
            self.reach = tuple(
                (out_size[d] - 1) * stride[d] + w.dilation * (w.size - 1) + 1 for d, w in enumerate(self.windows)
            )

    def start(self, state: State) -> tuple[int, ...]:
        """Where a state begins to read along each moved dimension."""
        cells = tuple(0 if a is None else selected(self.shift, state, a) for a in self.axes)
        return cells if self.windows is None else tuple(c - w.start for c, w in zip(cells, self.windows, strict=True))

    @torch._disable_dynamo  # as torch.compiler.disable, which would import the whole compiler here
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
            shape[2:] = self.reach
        out = empty_like(shape, sample)
        starts = [self.start(s) for s in states]
        j = 0
        for t, r, count in neighbours(places, starts):
            self._copy(t.narrow(dim, r * m, count * m), out.narrow(dim, j * m, count * m), starts[j], self.dims)
            j += count
        return out

    def _copy(self, x: Tensor, out: Tensor, start: Sequence[int], dims: Sequence[int | None]) -> None:
        """out[n] = x[start + n] where that exists, the fill elsewhere; only the uncovered border is filled."""
        if self.pinned is not None:
            self._copy_pinned(x, out, start, dims)
            return
        for a, d in enumerate(dims):
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

    def _copy_pinned(self, x: Tensor, out: Tensor, by: Sequence[int], dims: Sequence[int | None]) -> None:
        assert self.pinned is not None
        along = [
            [(d, piece) for piece in pinned_pieces(by[a], x.shape[d], self.pinned[a])]
            for a, d in enumerate(dims)
            if d is not None
        ]
        for pieces in itertools.product(*along):
            source, target = x, out
            for d, (to, count, start, read) in pieces:
                source, target = source.narrow(d, start, read), target.narrow(d, to, count)
            target.copy_(source)

    def _wrapped(self, x: Tensor, state: State) -> Tensor:
        for a, (d, start) in enumerate(zip(self.dims, self.start(state), strict=True)):
            if d is not None:
                length = self.reach[a] if self.reach is not None else x.shape[d]
                x = x.index_select(d, border_index(start, length, x.shape[d], self.mode).to(x.device))
        return x

    def _tokens(self, x: Tensor, state: State) -> Tensor:
        grid = self.shift.grid
        d, last = grid.dim, grid.dim + len(grid.size) - 1
        body = x.narrow(d, grid.prefix, x.shape[d] - grid.prefix).unflatten(d, grid.size)
        out = torch.empty_like(body)
        self._copy(body, out, self.start(state), range(d, last + 1))
        out = out.flatten(d, last)
        return torch.cat([x.narrow(d, 0, grid.prefix), out], d) if grid.prefix else out

    def extra_repr(self) -> str:
        return f"{self.shift.node.name} <- {self.shift.operand.name}"


def _may_miss_the_map(site: Site, extent: Sequence[int], out_size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a moved window of a max pool may see nothing of the map: its -inf would soon be NaN.

    A map that goes on beyond its edge has the same maxima in all other windows, which hold the cell at the edge.
    """
    if site.kind != "max_pool" or site.windows is None or any(w.dilation > 1 for w in site.windows):
        return False
    for d, w in enumerate(site.windows):
        axis = site.axis(d)
        most = 0 if axis is None else site.rate[axis] - 1
        if (out_size[d] - 1) * stride[d] - w.start + most >= extent[d] or w.size - w.start - most <= 0:
            return True
    return False


def is_channels_last(x: Tensor) -> bool:
    """Whether the channels of a cell lie together, and not the cells of a channel."""
    return x.ndim in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.ndim]) and not x.is_contiguous()


def empty_like(shape: list[int], like: Tensor) -> Tensor:
    layout = CHANNELS_LAST[like.ndim] if is_channels_last(like) else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=layout)


class MovedAvgPool(nn.Module):
    """Average pooling over an extracted window: sums, divided by what the op's own rule counts there."""

    def __init__(
        self,
        shift: Shift,
        size: Sequence[int],
        stride: Sequence[int],
        out_size: Sequence[int],
        extent: Sequence[int],
        count_pad: bool,
        divisor: int | None,
        ceil: bool,
    ) -> None:
        super().__init__()
        assert shift.site is not None and shift.site.windows is not None
        self.shift, self.size, self.stride = shift, tuple(size), tuple(stride)
        self.axes = tuple(shift.site.axis(d) for d in range(len(size)))
        self.counts: tuple[dict[int, Tensor], ...] | None = None  # per dimension of the window, and selection
        self.scale = math.prod(size) / (divisor or math.prod(size))
        if divisor is None and (ceil or not count_pad):
            rates = [1 if a is None else shift.site.rate[a] for a in self.axes]
            self.counts = tuple(
                {
                    s: _counts(w, s, size[d], stride[d], out_size[d], extent[d], count_pad)
                    for s in range(1 - rates[d], rates[d])
                }
                for d, w in enumerate(shift.site.windows)
            )

    def counted(self, state: State) -> Tensor:
        """How many elements each window counts: (*map)."""
        assert self.counts is not None
        out = torch.ones(())
        for counts, a in zip(self.counts, self.axes, strict=True):
            out = out[..., None] * counts[0 if a is None else selected(self.shift, state, a)]
        return out

    def forward(self, x: Tensor, states: Sequence[State]) -> Tensor:
        mean = AVG_POOL[len(self.size)](x, self.size, self.stride)
        if self.counts is None:
            return mean * self.scale
        share = torch.stack([self.counted(s) for s in states]).to(x) / math.prod(self.size)
        return mean / share.unsqueeze(1).repeat_interleave(x.shape[0] // len(states), 0)


def _counts(w: OpWindow, s: int, size: int, stride: int, out: int, extent: int, count_pad: bool) -> Tensor:
    """How many elements each window counts: the padded extent goes on with the state, so s = 0 is torch's own rule."""
    start = torch.arange(out) * stride - w.start + s
    end = torch.minimum(start + size, torch.tensor(extent + w.start + max(s, 0)))
    if not count_pad:
        start, end = start.clamp(min=0), end.clamp(max=extent)
    return (end - start).clamp(min=1).float()


def stride_of(node: torch.fx.Node) -> list[int]:
    """Stride of a conv or pool node, along each dimension that it slides over."""
    name = op_name(node)
    i = 2 if "pool" in name else 3
    stride: Any = node.args[i] if len(node.args) > i else node.kwargs.get("stride")
    if not stride:
        stride = node.args[1] if "pool" in name else 1
    value = node.meta["val"]
    return for_each(stride, (value[0] if isinstance(value, tuple | list) else value).ndim - 2)


def for_each(v: Any, count: int) -> list[int]:
    """An argument that is one number for all dimensions, or one for each."""
    values = [int(i) for i in v] if isinstance(v, list | tuple) else [int(v)]
    return values if len(values) == count else values[:1] * count
