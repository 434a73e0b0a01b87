"""Ops that slide a window over a map: convolutions, transposed ones, pools."""

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.geometry.positions import (
    FIXED,
    LOST,
    OpWindow,
    Pos,
    Site,
    contract,
    has_axis,
    position_of,
    resample,
)
from unstride.geometry.rules.base import Result, argument, each, rule, summed
from unstride.graph.ops import arguments, op_name

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk


@dataclass(frozen=True)
class _Sliding:
    """A window that slides over the last dimensions of a map, a number for each; `kind` is what a layer is called."""

    kind: str
    stride: list[int]
    padding: list[int]
    size: list[int]
    dilation: list[int]

    def centres(self, d: int, count: int) -> Tensor:
        """Where the first `count` windows along a dimension are centred, in cells of the input."""
        first = self.dilation[d] * (self.size[d] - 1) / 2
        return torch.arange(count, dtype=torch.float32) * self.stride[d] - self.padding[d] + first

    def along(self, d: int, before: int, after: int) -> OpWindow:
        """The window along a dimension of `before` cells that become `after`; its end padding is what is left."""
        reach = (after - 1) * self.stride[d] + self.dilation[d] * (self.size[d] - 1) + 1
        end = reach - self.padding[d] - before
        return OpWindow(self.size[d], self.dilation[d], self.padding[d], end, max(end, self.padding[d]))


_LONG = {1: ("long",), 2: ("high", "wide"), 3: ("deep", "high", "wide")}


def _slide(w: "Walk", n: Node, over: _Sliding, out: Tensor) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    if p is None:
        return None, []
    dims = range(len(over.size))
    axes = [p.along(2 + d) for d in dims] if p.ndim == 2 + len(dims) else []
    if not axes or any(len(a) > 1 for a in axes):
        what = f"a value of {p.ndim} dimensions" if not axes else "several axes in one dimension"
        w.trace.unknown[n] = f"{over.kind} over {what}"
        return LOST, [source]
    result = _centred(w, n, p, over, out)
    rate = [1] * w.axes
    for d, a in [(d, a[0]) for d, a in zip(dims, axes, strict=True) if a and over.stride[d] > 1]:
        if has_axis(result, a):
            rate[a] = over.stride[d]
        else:
            w.trace.passed[n] = f"its output is one cell {_LONG[w.axes][a]}: a global pool"
    if max(rate) > 1:
        windows = tuple(over.along(d, w.trace.shapes[source][2 + d], out.shape[2 + d]) for d in dims)
        carried = tuple(a[0] if a else None for a in axes)
        w.trace.sites.append(Site(n, source, over.kind, tuple(rate), windows, over=carried))
    return result, [source]


def _centred(w: "Walk", n: Node, p: Pos, over: _Sliding, out: Tensor) -> Pos | None:
    """The middle of every window; a convolution sums over channels besides."""
    mixed = [False] * w.axes
    coords = []
    for a, t in enumerate(p.axes):
        if over.kind == "conv":
            t, mixed[a] = contract(t, [1])
        for d in range(len(over.size)):
            t = resample(t, 2 + d, over.centres(d, out.shape[2 + d]))
        coords.append(t.expand(out.shape))
    w.mixing(n, mixed)
    return position_of(*coords)


@rule("conv2d conv1d conv3d _convolution")
def _conv(w: "Walk", n: Node, value: Any) -> Result:
    kernel = w.trace.shapes[arguments(n)[1]]
    count, p = len(kernel) - 2, w.pos(arguments(n)[0])
    if count == 1 and p is not None and len(p.along(2)) != 1:
        return _sequence_conv(w, n, value)
    stride, dilation = each(argument(n, 3, "stride", 1), count, 1), each(argument(n, 5, "dilation", 1), count, 1)
    padding = argument(n, 4, "padding", 0)
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, kernel[2:], strict=True)]
        padding = [0] * count if padding == "valid" else [t // 2 for t in total]
    return _slide(w, n, _Sliding("conv", stride, each(padding, count), list(kernel[2:]), dilation), value)


def _sequence_conv(w: "Walk", n: Node, value: Any) -> Result:
    """A convolution along tokens of several axes, or along something that is no place."""
    source = arguments(n)[0]
    p = w.pos(source)
    if p is None:
        return None, [source]
    if w.trace.shapes[arguments(n)[1]][2] == 1 and each(argument(n, 3, "stride", 1), 1, 1)[0] == 1:  # over channels
        return summed(w, n, p, [1], value.shape), [source]
    if not p.along(2):
        return p.map(lambda t: t[:, :1, :1].expand(value.shape)), [source]
    if value.shape[2] == p.shape[2]:  # neighbours along a sequence of tokens: each output stays where it was
        return p.map(lambda t: t.nanmean(1, keepdim=True).expand(value.shape)), [source]
    w.trace.unknown[n] = "1-d convolution along positions"
    return LOST, [source]


@rule("convolution")
def _convolution(w: "Walk", n: Node, value: Any) -> Result:
    return _transposed(w, n, value) if arguments(n)[6] else _conv(w, n, value)


@rule("conv_transpose1d conv_transpose2d conv_transpose3d")
def _transposed(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    kernel = w.trace.shapes[arguments(n)[1]]
    count = len(kernel) - 2
    if p is None or p.ndim != 2 + count:
        return (LOST if p is not None else None), [source]
    stride, padding = each(argument(n, 3, "stride", 1), count, 1), each(argument(n, 4, "padding", 0), count)
    dilation = each(argument(n, 5 if op_name(n) == "convolution" else 7, "dilation", 1), count, 1)

    def spread(t: Tensor) -> Tensor:
        t, _ = contract(t, [1])
        for d in range(count):
            o = torch.arange(value.shape[2 + d], dtype=torch.float32)
            t = resample(t, 2 + d, (o + padding[d] - dilation[d] * (kernel[2 + d] - 1) / 2) / stride[d])
        return t.expand(value.shape)

    return p.map(spread), [source]


@rule(
    """max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    avg_pool1d avg_pool2d avg_pool3d"""
)
def _pool(w: "Walk", n: Node, value: Any) -> Result:
    kind = "max_pool" if "max" in op_name(n) else "avg_pool"
    count = (value[0] if isinstance(value, tuple) else value).ndim - 2
    size = each(arguments(n)[1], count)
    stride = each(argument(n, 2, "stride", None) or size, count, 1)
    dilation = each(argument(n, 4, "dilation", 1), count, 1) if kind == "max_pool" else [1] * count
    over = _Sliding(kind, stride, each(argument(n, 3, "padding", 0), count), size, dilation)
    if not isinstance(value, tuple):
        return _slide(w, n, over, value)
    pos, carriers = _slide(w, n, over, value[0])
    if not any(u.target is operator.getitem and u.args[1] == 1 and u.users for u in n.users):
        return [pos, None], carriers
    # Indices say where each maximum was: they cannot be moved, and an unpooling puts values back there.
    w.trace.sites = [s for s in w.trace.sites if s.node is not n]
    w.trace.passed[n] = "its indices are used (unpooling), so its windows must stay where they are"
    return [pos, FIXED if pos is not None else None], carriers
