"""Ops that lay a map on other cells: interpolation, adaptive pooling, pixel shuffle, unpooling, sampling at places."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from unstride.geometry.positions import LOST, Site, contract, has_axis, resample
from unstride.geometry.rules.base import Result, argument, rule
from unstride.graph.ops import arguments, op_name

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk


def _stretched(t: Tensor, shape: torch.Size, corners: bool = False) -> Tensor:
    """Output cell o of m over n cells sits at (o + 1/2) n / m - 1/2, or from corner to corner."""
    for d in range(2, t.ndim):
        before, after = t.shape[d], shape[d]
        o = torch.arange(after, dtype=torch.float32)
        centre = o * (before - 1) / max(after - 1, 1) if corners else (o + 0.5) * before / after - 0.5
        t = resample(t, d, centre)
    return t


@rule(
    """upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_trilinear3d upsample_bicubic2d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
)
def _resize(w: "Walk", n: Node, value: Any, passed: str | None = None) -> Result:
    """Interpolation: a layer where a map becomes smaller by an integer factor. `passed`: why it is none in any case."""
    source = arguments(n)[0]
    p = w.pos(source)
    if p is None or p.ndim < 3:
        return (LOST if p is not None else None), [source]
    smooth = "linear" in op_name(n) or "bicubic" in op_name(n)
    corners = smooth and bool(argument(n, 2, "align_corners", False))
    out = p.map(lambda t: _stretched(t, value.shape, corners))
    rate = [1] * w.axes
    for d in range(2, p.ndim):
        before, after = p.shape[d], value.shape[d]
        for a in p.along(d) if after < before else ():
            if not has_axis(out, a):
                continue
            if passed is None and before % after == 0 and not corners:
                rate[a] = before // after
            else:
                w.trace.passed[n] = passed or f"resizes {before} cells to {after}: not by an integer factor"
    if max(rate) > 1 and passed is None:
        w.trace.sites.append(Site(n, source, "resize", tuple(rate)))
    return out, [source]


@rule(
    """adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    adaptive_max_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"""
)
def _adaptive(w: "Walk", n: Node, value: Any) -> Result:
    if isinstance(value, tuple):
        pos, carriers = _resize(w, n, value[0], "adaptive pooling")
        return [pos, pos], carriers
    return _resize(w, n, value, "adaptive pooling")


@rule("max_unpool2d max_unpool3d")
def unpool(w: "Walk", n: Node, value: Any) -> Result:
    """max_unpool2d(values, indices): the finer map again; both operands must have moved alike."""
    source, indices = arguments(n)[0], arguments(n)[1]
    p = w.pos(source)
    if p is None or p.ndim < 3:
        return (LOST if p is not None else None), [source, indices]
    return p.map(lambda t: _stretched(t, value.shape)), [source, indices]


@rule("pixel_shuffle")
def _shuffle_up(w: "Walk", n: Node, value: Any) -> Result:
    source, r = arguments(n)[0], int(w.fill(arguments(n)[1]))
    p = w.pos(source)

    def spread(t: Tensor) -> Tensor:
        t, _ = contract(t, [1])
        for d in (2, 3):
            t = resample(t, d, (torch.arange(value.shape[d], dtype=torch.float32) + 0.5) / r - 0.5)
        return t.expand(value.shape)

    return (p.map(spread) if p else None), [source]


@rule("grid_sampler grid_sampler_2d grid_sampler_3d")
def _sample(w: "Walk", n: Node, value: Any) -> Result:
    """grid_sample(map, places): what is read for a cell lies where that cell does, as attention follows its queries.

    Deformable attention and warps by a flow do so. The map must have moved as the cells have, since places are counted
    from its corner. Places that are the same for every image are read as they are; of others nothing is known.
    """
    source, places = arguments(n)[:2]
    p, asks = w.pos(source), w.pos(places)
    if asks is not None:
        w.trace.places.add(places)
        return asks.map(lambda t: contract(t, [-1], False)[0].unsqueeze(1).expand(value.shape)), [places, source]
    if p is None:
        return None, []
    if places not in w.indices:
        w.trace.unknown[n] = "reads where the image says, so positions are not known"
        return LOST, [source]
    at, corners = w.indices[places].float(), bool(argument(n, 4, "align_corners", False))

    def read(t: Tensor) -> Tensor:
        t = contract(t, [1])[0].contiguous()
        return F.grid_sample(t, at, padding_mode="border", align_corners=corners).expand(value.shape)

    return p.map(read), [source]
