"""Ops that only move elements about: views, permutations, slices, gathering, joining, padding."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.geometry.grids import grid_of
from unstride.geometry.positions import EPS, LOST, Pos, Site, changes, position_of, resample, unexpanded, varies
from unstride.geometry.rules.base import Result, argument, rule
from unstride.graph.ops import arguments, op_name

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk

_INDEXED = ("index", "index_select", "repeat_interleave", "tensor_split")  # other tensors they take are no places

_MERGING = ("view", "_unsafe_view", "reshape", "flatten")


@rule(
    """view reshape _unsafe_view permute transpose t flatten unflatten squeeze unsqueeze expand expand_as
    repeat select narrow split split_with_sizes chunk unbind stack hstack roll flip movedim moveaxis
    swapaxes pixel_unshuffle channel_shuffle native_channel_shuffle slice_scatter select_scatter unsafe_split tile
    unsafe_split_with_sizes unfold repeat_interleave numpy_T view_as reshape_as unsafe_chunk tensor_split"""
)
def _layout(w: "Walk", n: Node, value: Any) -> Result:
    """Views, permutations, slices, concatenations: executed on the coordinates themselves."""
    carriers = [i for i in n.all_input_nodes if w.pos(i) is not None]

    def run(a: int) -> Any:
        def swap(i: Node) -> Any:
            if i in w.values:
                return w.values[i]
            if i in w.indices and i is not arguments(n)[0] and op_name(n) in _INDEXED:
                return w.indices[i]
            if isinstance(w.trace.shapes.get(i), tuple):
                return w.coords(i, a)
            return i

        args: Any
        kwargs: Any
        args, kwargs = torch.fx.map_arg((arguments(n), n.kwargs), swap)
        if op_name(n) in ("view", "_unsafe_view"):  # coordinates are broadcast, so only reshape fits them
            return torch.reshape(*args, **kwargs)
        return n.target(*args, **kwargs)  # type: ignore[operator]

    coords = [run(a) for a in range(w.axes)]
    if isinstance(coords[0], tuple | list):
        return [position_of(*parts) for parts in zip(*coords, strict=True)], carriers
    if op_name(n) in _MERGING and value.ndim == 2 + w.axes < len(w.trace.shapes[arguments(n)[0]]):
        coords = _between(coords)
    return position_of(*coords), carriers


def _between(coords: list[Tensor]) -> list[Tensor]:
    """Cells that came out of one (a pixel shuffle written as views, copies of a cell) lie beside each other in it."""
    for d in range(1, coords[0].ndim):
        moving = [a for a, t in enumerate(coords) if changes(t, d)]
        if len(moving) == 1 and (r := _run(t := coords[moving[0]], d)) > 1:
            at = (torch.arange(t.shape[d], dtype=torch.float32) + 0.5) / r - 0.5
            coords[moving[0]] = resample(t.index_select(d, torch.arange(0, t.shape[d], r)), d, at)
    return coords


def _run(t: Tensor, d: int) -> int:
    """How many cells in a row have the same coordinate along a dimension; 1 where that is not so throughout."""
    steps = (t.diff(dim=d).nan_to_num().abs() > EPS).transpose(0, d).flatten(1).any(1)
    r = int(steps.int().argmax()) + 1
    wanted = torch.arange(1, t.shape[d]) % r == 0
    return r if t.shape[d] % r == 0 and torch.equal(steps, wanted) else 1


@rule("index index_select")
def _index(w: "Walk", n: Node, value: Any) -> Result:
    """Gathering by an index: known where the index is the same for every image, lost where it is computed from it."""
    indices = [i for i in n.all_input_nodes if i is not arguments(n)[0]]
    if any(i not in w.indices and i not in w.values for i in indices):
        w.trace.unknown[n] = "indices are computed from the image, so positions are not known"
        return LOST, [arguments(n)[0]]
    return _layout(w, n, value)


@rule("cat concat")
def _cat(w: "Walk", n: Node, value: Any) -> Result:
    """Maps side by side, as channels: where they lie less than a cell apart, their mean is the place of them all.

    Branches with other kernels or crops (NASNet's second path reads x[1::2]) so make one map, not a patch merging.
    """
    out, carriers = _layout(w, n, value)
    dim = int(w.fill(argument(n, 1, "dim", 0))) % value.ndim
    places = [w.pos(i) for i in arguments(n)[0]]
    known = [p for p in places if p is not None]
    if len(known) < 2 or len(known) < len(places) or not isinstance(out, Pos):
        return out, carriers
    lines = [[unexpanded(t) for t in p.axes] for p in known]
    if all(t.shape == f.shape and torch.equal(t, f) for own in lines for t, f in zip(own, lines[0], strict=True)):
        return out, carriers
    grids = [grid_of(p) for p in known]
    first = grids[0]
    if first is None or dim in first.dims or any(g is None or not first.like(g) for g in grids):
        return out, carriers

    def mean(parts: list[Tensor], cell: float, whole: Tensor) -> Tensor:
        parts = list(torch.broadcast_tensors(*(t.narrow(dim, 0, 1) for t in parts)))
        far = max(float((t - parts[0]).abs().nan_to_num().amax()) for t in parts)
        return torch.stack(parts).mean(0).expand(whole.shape) if EPS < far < cell else whole

    axes = range(w.axes)
    return position_of(*(mean([own[a] for own in lines], first.spacing[a], out.axes[a]) for a in axes)), carriers


@rule("im2col")
def _patches(w: "Walk", n: Node, value: Any) -> Result:
    """im2col that cuts a map into patches, (B, C H W) -> (B, C k k, N): a layout; overlapping windows are not."""
    source, size, dilation, padding, stride = arguments(n)
    if size != stride or max(dilation) > 1 or max(padding) > 0:
        w.trace.unknown[n] = "no rule for overlapping patches"
        return LOST, [source]
    return _layout(w, n, value)


@rule("slice")
def _slice(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    dim, step = int(w.fill(argument(n, 1, "dim", 0))), int(w.fill(argument(n, 4, "step", 1)))
    out, carriers = _layout(w, n, value)
    p = w.pos(source)
    if step > 1 and p is not None:
        rate = [1] * w.axes
        for a in range(w.axes):
            along = p.axis(a)
            if along.shape[dim] > 1 and varies(along.select(dim, 0) - along.select(dim, 1)) is False:
                moved = (along.select(dim, 1) - along.select(dim, 0)).abs().nan_to_num().amax()
                if moved > EPS:
                    rate[a] = step
        if max(rate) > 1 and value.shape[dim] > 1:
            w.trace.sites.append(Site(n, source, "slice", tuple(rate)))
    return out, carriers


@rule(
    """pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d"""
)
def _pad(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    pads = [int(v) for v in w.fill(arguments(n)[1])]

    def extend(t: Tensor) -> Tensor:
        for k in range(len(pads) // 2):
            low, high = pads[2 * k], pads[2 * k + 1]
            if low or high:
                dim = t.ndim - 1 - k
                t = resample(t, dim, torch.arange(-low, t.shape[dim] + high, dtype=torch.float32))
        return t

    return (p.map(extend) if p else None), [source]
