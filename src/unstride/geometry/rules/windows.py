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
    Pos,
    Site,
    Window,
    contract,
    has_axis,
    resample,
    settle,
    varies,
)
from unstride.geometry.rules.base import Result, argument, pair, rule, summed
from unstride.graph.ops import arguments, op_name

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk


@dataclass(frozen=True)
class _Sliding:
    """A window that slides over both axes of a map, each list (along y, along x); `kind` is what a layer is called."""

    kind: str
    stride: list[int]
    padding: list[int]
    size: list[int]
    dilation: list[int]

    def centres(self, d: int, count: int) -> Tensor:
        """Where the first `count` windows along an axis are centred, in cells of the input."""
        first = self.dilation[d] * (self.size[d] - 1) / 2
        return torch.arange(count, dtype=torch.float32) * self.stride[d] - self.padding[d] + first

    def along(self, d: int, before: int, after: int) -> Window:
        """The window along an axis of `before` cells that become `after`; its end padding is what is left to reach."""
        reach = (after - 1) * self.stride[d] + self.dilation[d] * (self.size[d] - 1) + 1
        end = reach - self.padding[d] - before
        return Window(self.size[d], self.dilation[d], self.padding[d], end, max(end, self.padding[d]))


def _slide(w: "Walk", n: Node, over: _Sliding, out: Tensor) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    if p is None:
        return None, []
    if p.y.ndim != 4:
        w.trace.unknown[n] = f"{over.kind} over a value of {p.y.ndim} dimensions"
        return LOST, [source]
    result = _centred(w, n, p, over, out)
    rate = [1, 1]
    for a in (0, 1):
        if over.stride[a] > 1 and has_axis(p, a):
            if has_axis(result, a):
                rate[a] = over.stride[a]
            else:
                w.trace.passed[n] = f"its output is one cell {'high' if a == 0 else 'wide'}: a global pool"
    if max(rate) > 1:
        y, x = (over.along(d, w.trace.shapes[source][2 + d], out.shape[2 + d]) for d in (0, 1))
        w.trace.sites.append(Site(n, source, over.kind, (rate[0], rate[1]), (y, x)))
    return result, [source]


def _centred(w: "Walk", n: Node, p: Pos, over: _Sliding, out: Tensor) -> Pos | None:
    """The middle of every window; a convolution sums over channels besides."""
    mixed = [False, False]
    coords = []
    for a in (0, 1):
        t = p.axis(a)
        if over.kind == "conv":
            t, mixed[a] = contract(t, [1])
        for d in (0, 1):
            t = resample(t, 2 + d, over.centres(d, out.shape[2 + d]))
        coords.append(t.expand(out.shape))
    w.mixing(n, (mixed[0], mixed[1]))
    return settle(coords[0], coords[1])


@rule("conv2d conv1d conv3d _convolution")
def _conv(w: "Walk", n: Node, value: Any) -> Result:
    kernel = w.trace.shapes[arguments(n)[1]]
    if len(kernel) != 4:
        return _sequence_conv(w, n, value)
    stride, dilation = pair(argument(n, 3, "stride", 1), 1), pair(argument(n, 5, "dilation", 1), 1)
    padding = argument(n, 4, "padding", 0)
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, kernel[2:], strict=True)]
        padding = [0, 0] if padding == "valid" else [t // 2 for t in total]
    return _slide(w, n, _Sliding("conv", stride, pair(padding), list(kernel[2:]), dilation), value)


def _sequence_conv(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    kernel = w.trace.shapes[arguments(n)[1]]
    if p is None or len(kernel) != 3:
        w.trace.unknown[n] = f"{len(kernel) - 2}-d convolution"
        return LOST, [source]
    if kernel[2] == 1 and pair(argument(n, 3, "stride", 1), 1)[0] == 1:  # a linear layer over channels
        return summed(w, n, p, [1], value.shape), [source]
    if not any(varies(t.nan_to_num().diff(dim=2)) or bool(t.diff(dim=2).nan_to_num().any()) for t in (p.y, p.x)):
        return p.map(lambda t: t[:, :1, :1].expand(value.shape)), [source]
    if value.shape[2] == p.y.shape[2]:  # neighbours along a sequence of tokens: each output stays where it was
        return p.map(lambda t: t.nanmean(1, keepdim=True).expand(value.shape)), [source]
    w.trace.unknown[n] = "1-d convolution along positions"
    return LOST, [source]


@rule("convolution")
def _convolution(w: "Walk", n: Node, value: Any) -> Result:
    return _transposed(w, n, value) if arguments(n)[6] else _conv(w, n, value)


@rule("conv_transpose2d")
def _transposed(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    kernel = w.trace.shapes[arguments(n)[1]]
    if p is None or len(kernel) != 4:
        return (LOST if p is not None else None), [source]
    stride, padding = pair(argument(n, 3, "stride", 1), 1), pair(argument(n, 4, "padding", 0))
    dilation = pair(argument(n, 7 if op_name(n) == "conv_transpose2d" else 5, "dilation", 1), 1)

    def spread(t: Tensor) -> Tensor:
        t, _ = contract(t, [1])
        for d in (0, 1):
            o = torch.arange(value.shape[2 + d], dtype=torch.float32)
            t = resample(t, 2 + d, (o + padding[d] - dilation[d] * (kernel[2 + d] - 1) / 2) / stride[d])
        return t.expand(value.shape)

    return p.map(spread), [source]


@rule("max_pool2d max_pool2d_with_indices avg_pool2d")
def _pool(w: "Walk", n: Node, value: Any) -> Result:
    kind = "max_pool" if "max" in op_name(n) else "avg_pool"
    size = pair(arguments(n)[1])
    stride = pair(argument(n, 2, "stride", None) or size, 1)
    dilation = pair(argument(n, 4, "dilation", 1), 1) if kind == "max_pool" else [1, 1]
    over = _Sliding(kind, stride, pair(argument(n, 3, "padding", 0)), size, dilation)
    if not isinstance(value, tuple):
        return _slide(w, n, over, value)
    pos, carriers = _slide(w, n, over, value[0])
    if not any(u.target is operator.getitem and u.args[1] == 1 and u.users for u in n.users):
        return [pos, None], carriers
    # Indices say where each maximum was: they cannot be moved, and an unpooling puts values back there.
    w.trace.sites = [s for s in w.trace.sites if s.node is not n]
    w.trace.passed[n] = "its indices are used (unpooling), so its windows must stay where they are"
    return [pos, FIXED if pos is not None else None], carriers
