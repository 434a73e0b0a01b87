"""One rule per op: how its result lies on the image, and whether it thins the grid out.

Layout ops are simply executed on the coordinates; windows, contractions and merges have a rule; an op that is not in
the table is named in the report and hides positions (`LOST`), never guessed.
"""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.geometry.grids import grid_of
from unstride.geometry.positions import (
    EPS,
    FIXED,
    LOST,
    Lost,
    Pos,
    Site,
    Window,
    blank,
    contract,
    core,
    has_axis,
    nowhere,
    resample,
    settle,
    varies,
)
from unstride.graph.ops import arguments, op_name

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk

Result = tuple[Any, list[Node]]  # the position of the value, and the operands it came from
Rule = Callable[["Walk", Node, Any], Result]


def pointwise(w: "Walk", n: Node, value: Any) -> Result:
    inputs = n.all_input_nodes
    known = [i for i in inputs if isinstance(w.trace.pos.get(i), Pos)]
    lost = [i for i in inputs if isinstance(w.trace.pos.get(i), Lost)]
    if not known:
        return (LOST if lost else None), lost
    shape = w.trace.shapes[n]
    if isinstance(shape, list):  # e.g. frexp: every output sits where the input does
        shape = shape[0]

    def axis(a: int) -> Tensor:
        out = w.coords(known[0], a)
        out = out if out.shape == shape else out.expand(shape)
        for other in known[1:]:
            if core(out).isnan().any():
                out = _first_known(out, w.coords(other, a).expand(shape))
        return out

    first = w.pos(known[0])
    same = len(known) == 1 and first is not None and first.y.shape == shape
    pos = first if same else settle(axis(0), axis(1))
    return pos, known + lost


def _first_known(a: Tensor, b: Tensor) -> Tensor:
    if nowhere(a):
        return b
    a_core, b_core = core(a), core(b)
    return torch.where(a_core.isnan(), b_core, a_core).expand(a.shape)


def _same(w: "Walk", n: Node, value: Any) -> Result:
    """Norms, softmax, dropout, copies: each output element sits where its input element does."""
    source = n.all_input_nodes[0]
    p = w.pos(source)
    if isinstance(value, tuple | list):
        ok = p is not None
        shapes = w.trace.shapes[n]
        return [p if ok and s == tuple(p.y.shape) else None for s in shapes], [source]  # type: ignore[union-attr]
    return p, [source]


def _layout(w: "Walk", n: Node, value: Any) -> Result:
    """Views, permutations, slices, concatenations: executed on the coordinates themselves."""
    carriers = [i for i in n.all_input_nodes if w.pos(i) is not None]

    def run(a: int) -> Any:
        def swap(i: Node) -> Any:
            if i in w.values:
                return w.values[i]
            if i in w.indices:
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

    y, x = run(0), run(1)
    if isinstance(y, tuple | list):
        return [settle(a, b) for a, b in zip(y, x, strict=True)], carriers
    return settle(y, x), carriers


def _index(w: "Walk", n: Node, value: Any) -> Result:
    """Gathering by an index: known where the index is the same for every image, lost where it is computed from it."""
    indices = [i for i in n.all_input_nodes if i is not arguments(n)[0]]
    if any(i not in w.indices and i not in w.values for i in indices):
        w.trace.unknown[n] = "indices are computed from the image, so positions are not known"
        return LOST, [arguments(n)[0]]
    return _layout(w, n, value)


def _cat(w: "Walk", n: Node, value: Any) -> Result:
    """Maps side by side, as channels: where they lie less than a cell apart, their mean is the place of them all.

    Branches with other kernels or crops (NASNet's second path reads x[1::2]) so make one map, not a patch merging.
    """
    out, carriers = _layout(w, n, value)
    dim = int(w.fill(_arg(n, 1, "dim", 0))) % value.ndim
    places = [w.pos(i) for i in arguments(n)[0]]
    known = [p for p in places if p is not None]
    if len(known) < 2 or len(known) < len(places) or not isinstance(out, Pos):
        return out, carriers
    lines = [(core(p.y), core(p.x)) for p in known]
    if all(y.shape == lines[0][0].shape and torch.equal(y, lines[0][0]) for y, _ in lines) and all(
        x.shape == lines[0][1].shape and torch.equal(x, lines[0][1]) for _, x in lines
    ):
        return out, carriers
    grids = [grid_of(p) for p in known]
    first = grids[0]
    if first is None or dim in first.dims or any(g is None or not first.like(g) for g in grids):
        return out, carriers

    def mean(parts: list[Tensor], cell: float, whole: Tensor) -> Tensor:
        parts = list(torch.broadcast_tensors(*(t.narrow(dim, 0, 1) for t in parts)))
        far = max(float((t - parts[0]).abs().nan_to_num().amax()) for t in parts)
        return torch.stack(parts).mean(0).expand(whole.shape) if EPS < far < cell else whole

    y = mean([y for y, _ in lines], first.spacing[0], out.y)
    x = mean([x for _, x in lines], first.spacing[1], out.x)
    return settle(y, x), carriers


def _patches(w: "Walk", n: Node, value: Any) -> Result:
    """im2col that cuts a map into patches, (B, C H W) -> (B, C k k, N): a layout; overlapping windows are not."""
    source, size, dilation, padding, stride = arguments(n)
    if size != stride or max(dilation) > 1 or max(padding) > 0:
        w.trace.unknown[n] = "no rule for overlapping patches"
        return LOST, [source]
    return _layout(w, n, value)


def _slice(w: "Walk", n: Node, value: Any) -> Result:
    source, dim, step = arguments(n)[0], int(w.fill(_arg(n, 1, "dim", 0))), int(w.fill(_arg(n, 4, "step", 1)))
    out, carriers = _layout(w, n, value)
    p = w.pos(source)
    if step > 1 and p is not None:
        rate = [1, 1]
        for a in (0, 1):
            along = p.axis(a)
            if along.shape[dim] > 1 and varies(along.select(dim, 0) - along.select(dim, 1)) is False:
                moved = (along.select(dim, 1) - along.select(dim, 0)).abs().nan_to_num().amax()
                if moved > EPS:
                    rate[a] = step
        if max(rate) > 1 and value.shape[dim] > 1:
            w.trace.sites.append(Site(n, source, "slice", (rate[0], rate[1])))
    return out, carriers


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


def _windows(
    w: "Walk",
    n: Node,
    kind: str,
    stride: list[int],
    padding: list[int],
    size: list[int],
    dilation: list[int],
    out: Tensor,
) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    if p is None or p.y.ndim != 4:
        if p is not None:
            w.trace.unknown[n] = f"{kind} over a value of {p.y.ndim} dimensions"
            return LOST, [source]
        return None, []
    mixes = kind == "conv"
    mixed = [False, False]
    shape = tuple(out.shape)
    coords = []
    for a in (0, 1):
        t = p.axis(a)
        if mixes:
            t, mixed[a] = contract(t, [1])
        for d in (0, 1):
            centre = (
                torch.arange(shape[2 + d], dtype=torch.float32) * stride[d]
                - padding[d]
                + dilation[d] * (size[d] - 1) / 2
            )
            t = resample(t, 2 + d, centre)
        coords.append(t.expand(shape))
    if mixes:
        w.mixing(n, (mixed[0], mixed[1]))
    result = settle(coords[0], coords[1])
    rate = [1, 1]
    for a in (0, 1):
        if stride[a] > 1 and has_axis(p, a):
            if has_axis(result, a):
                rate[a] = stride[a]
            else:
                w.trace.passed[n] = f"its output is one cell {'high' if a == 0 else 'wide'}: a global pool"
    if max(rate) > 1:
        h, wd = w.trace.shapes[source][2:]
        windows = []
        for d, extent in ((0, h), (1, wd)):
            reach = (shape[2 + d] - 1) * stride[d] + dilation[d] * (size[d] - 1) + 1
            windows.append(Window(size[d], dilation[d], padding[d], reach - padding[d] - extent))
        w.trace.sites.append(Site(n, source, kind, (rate[0], rate[1]), (windows[0], windows[1])))
    return result, [source]


def _pair(v: Any, default: int = 0) -> list[int]:
    if v is None or v == []:
        return [default, default]
    if isinstance(v, int):
        return [v, v]
    v = [int(i) for i in v]
    return v if len(v) == 2 else [v[0], v[0]]


def _arg(n: Node, i: int, name: str, default: Any) -> Any:
    if len(n.args) > i:
        return arguments(n)[i]
    return n.kwargs.get(name, default)


def _conv(w: "Walk", n: Node, value: Any) -> Result:
    kernel = w.trace.shapes[arguments(n)[1]]
    if len(kernel) != 4:
        return _sequence_conv(w, n, value)
    stride, dilation = _pair(_arg(n, 3, "stride", 1), 1), _pair(_arg(n, 5, "dilation", 1), 1)
    padding = _arg(n, 4, "padding", 0)
    if isinstance(padding, str):
        total = [d * (k - 1) for d, k in zip(dilation, kernel[2:], strict=True)]
        padding = [0, 0] if padding == "valid" else [t // 2 for t in total]
    return _windows(w, n, "conv", stride, _pair(padding), list(kernel[2:]), dilation, value)


def _sequence_conv(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    kernel = w.trace.shapes[arguments(n)[1]]
    if p is None or len(kernel) != 3:
        w.trace.unknown[n] = f"{len(kernel) - 2}-d convolution"
        return LOST, [source]
    if kernel[2] == 1 and _pair(_arg(n, 3, "stride", 1), 1)[0] == 1:  # a linear layer over channels
        y, my = contract(p.y, [1])
        x, mx = contract(p.x, [1])
        w.mixing(n, (my, mx))
        return settle(y.expand(value.shape), x.expand(value.shape)), [source]
    if not any(varies(t.nan_to_num().diff(dim=2)) or bool(t.diff(dim=2).nan_to_num().any()) for t in (p.y, p.x)):
        return p.map(lambda t: t[:, :1, :1].expand(value.shape)), [source]
    if value.shape[2] == p.y.shape[2]:  # neighbours along a sequence of tokens: each output stays where it was
        return p.map(lambda t: t.nanmean(1, keepdim=True).expand(value.shape)), [source]
    w.trace.unknown[n] = "1-d convolution along positions"
    return LOST, [source]


def _convolution(w: "Walk", n: Node, value: Any) -> Result:
    return _transposed(w, n, value) if arguments(n)[6] else _conv(w, n, value)


def _transposed(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    kernel = w.trace.shapes[arguments(n)[1]]
    if p is None or len(kernel) != 4:
        return (LOST if p is not None else None), [source]
    stride, padding = _pair(_arg(n, 3, "stride", 1), 1), _pair(_arg(n, 4, "padding", 0))
    dilation = _pair(_arg(n, 7, "dilation", 1) if op_name(n) == "conv_transpose2d" else _arg(n, 5, "dilation", 1), 1)

    def spread(t: Tensor) -> Tensor:
        t, _ = contract(t, [1])
        for d in (0, 1):
            o = torch.arange(value.shape[2 + d], dtype=torch.float32)
            t = resample(t, 2 + d, (o + padding[d] - dilation[d] * (kernel[2 + d] - 1) / 2) / stride[d])
        return t.expand(value.shape)

    return p.map(spread), [source]


def _pool(w: "Walk", n: Node, value: Any) -> Result:
    kind = "max_pool" if "max" in op_name(n) else "avg_pool"
    size = _pair(arguments(n)[1])
    stride = _pair(_arg(n, 2, "stride", None) or size, 1)
    padding = _pair(_arg(n, 3, "padding", 0))
    dilation = _pair(_arg(n, 4, "dilation", 1), 1) if kind == "max_pool" else [1, 1]
    if isinstance(value, tuple):
        pos, carriers = _windows(w, n, kind, stride, padding, size, dilation, value[0])
        if not any(u.target is operator.getitem and u.args[1] == 1 and u.users for u in n.users):
            return [pos, None], carriers
        # Indices say where each maximum was: they cannot be moved, and an unpooling puts values back there.
        w.trace.sites = [s for s in w.trace.sites if s.node is not n]
        w.trace.passed[n] = "its indices are used (unpooling), so its windows must stay where they are"
        return [pos, FIXED if pos is not None else None], carriers
    return _windows(w, n, kind, stride, padding, size, dilation, value)


def unpool(w: "Walk", n: Node, value: Any) -> Result:
    """max_unpool2d(values, indices): the finer map again; both operands must have moved alike."""
    source, indices = arguments(n)[0], arguments(n)[1]
    p = w.pos(source)
    if p is None or p.y.ndim != 4:
        return (LOST if p is not None else None), [source, indices]

    def spread(t: Tensor) -> Tensor:
        for d in (2, 3):
            before, after = t.shape[d], value.shape[d]
            t = resample(t, d, (torch.arange(after, dtype=torch.float32) + 0.5) * before / after - 0.5)
        return t

    return p.map(spread), [source, indices]


def _resize(w: "Walk", n: Node, value: Any, passed: str | None = None) -> Result:
    """Interpolation and adaptive pooling: output cell o sits at (o + 1/2) n / m - 1/2 (or corner to corner)."""
    source = arguments(n)[0]
    p = w.pos(source)
    if p is None or p.y.ndim != 4:
        return (LOST if p is not None else None), [source]
    corners = ("bilinear" in op_name(n) or "bicubic" in op_name(n)) and bool(_arg(n, 2, "align_corners", False))
    rate = [1, 1]

    def move(t: Tensor) -> Tensor:
        for d in (0, 1):
            before, after = t.shape[2 + d], value.shape[2 + d]
            o = torch.arange(after, dtype=torch.float32)
            centre = o * (before - 1) / max(after - 1, 1) if corners else (o + 0.5) * before / after - 0.5
            t = resample(t, 2 + d, centre)
        return t

    out = p.map(move)
    for d in (0, 1):
        before, after = p.y.shape[2 + d], value.shape[2 + d]
        if after < before and has_axis(out, d):
            if passed is None and before % after == 0 and not corners:
                rate[d] = before // after
            else:
                w.trace.passed[n] = passed or f"resizes {before} cells to {after}: not by an integer factor"
    if max(rate) > 1 and passed is None:
        w.trace.sites.append(Site(n, source, "resize", (rate[0], rate[1])))
    return out, [source]


def _adaptive(w: "Walk", n: Node, value: Any) -> Result:
    if isinstance(value, tuple):
        pos, carriers = _resize(w, n, value[0], "adaptive pooling")
        return [pos, pos], carriers
    return _resize(w, n, value, "adaptive pooling")


def _reduce(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    if len(n.args) > 1 and isinstance(arguments(n)[1], Node):  # the larger of two tensors, element by element
        return pointwise(w, n, value)
    p = w.pos(source)
    if p is None:
        return None, []
    name = op_name(n)
    dims = _arg(n, 2, "dim", None) if name in ("linalg_vector_norm", "norm") else _arg(n, 1, "dim", None)
    dims = list(range(p.y.ndim)) if dims is None else ([dims] if isinstance(dims, int) else [int(d) for d in dims])
    dims = [d % p.y.ndim for d in dims]
    first = value[0] if isinstance(value, tuple) else value
    keep = first.ndim == p.y.ndim
    y, my = contract(p.y, dims, keep)
    x, mx = contract(p.x, dims, keep)
    w.mixing(n, (my, mx))
    pos = settle(y, x)
    return ([pos] * len(value) if isinstance(value, tuple) else pos), [source]


def _linear(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    if p is None:
        return None, []
    y, my = contract(p.y, [-1])
    x, mx = contract(p.x, [-1])
    w.mixing(n, (my, mx))
    return settle(y.expand(value.shape), x.expand(value.shape)), [source]


def _matmul(w: "Walk", n: Node, value: Any) -> Result:
    """(.., i, k) @ (.., k, j): the position of row i, or else of column j. Attention so follows its queries."""
    a, b = (
        (arguments(n)[1], arguments(n)[2]) if op_name(n) in ("addmm", "baddbmm") else (arguments(n)[0], arguments(n)[1])
    )
    pa, pb = w.pos(a), w.pos(b)
    if pb is None and value.ndim >= 2 and pa is not None:
        y, my = contract(pa.y, [-1])
        x, mx = contract(pa.x, [-1])
        w.mixing(n, (my, mx))
        return settle(y.expand(value.shape), x.expand(value.shape)), [a]
    if value.ndim < 2 or (pa is not None and pa.y.ndim < 2) or (pb is not None and pb.y.ndim < 2):
        return None, []
    out, carriers = [], []
    for axis in (0, 1):
        row = blank(value.shape)
        if pa is not None:
            t, mixed = contract(pa.axis(axis), [-1])
            if not mixed and has_axis(pa, axis) and not nowhere(t):
                row = t.expand(value.shape)
                carriers.append(a)
        if pb is not None and core(row).isnan().any():
            t, mixed = contract(pb.axis(axis), [-2])
            if not mixed and has_axis(pb, axis) and not nowhere(t):
                row = _first_known(row, t.expand(value.shape))
                if a not in carriers:
                    carriers.append(b)
        out.append(row)
    return settle(out[0], out[1]), carriers


def _attention(w: "Walk", n: Node, value: Any) -> Result:
    q = arguments(n)[0]
    p = w.pos(q)
    first = value[0] if isinstance(value, tuple) else value
    pos = p.map(lambda t: contract(t, [-1])[0].expand(first.shape)) if p is not None else None
    return ([pos] + [None] * (len(value) - 1) if isinstance(value, tuple) else pos), [q]


def _einsum(w: "Walk", n: Node, value: Any) -> Result:
    equation, operands = arguments(n)[0], arguments(n)[1]
    left, right = equation.replace(" ", "").split("->")
    letters = left.split(",")
    if "." in left or any(len(set(t)) != len(t) for t in letters):
        w.trace.unknown[n] = f"einsum {equation}"
        return LOST, [o for o in operands if w.pos(o) is not None]
    out, carriers = [], []
    for axis in (0, 1):
        row = blank(value.shape)
        for o, names in zip(operands, letters, strict=True):
            p = w.pos(o)
            if p is None or not has_axis(p, axis) or not core(row).isnan().any():
                continue
            gone = [i for i, c in enumerate(names) if c not in right]
            t, mixed = contract(p.axis(axis), gone, keepdim=False) if gone else (p.axis(axis), False)
            if mixed or nowhere(t):
                continue
            kept = [c for c in names if c in right]
            t = t.permute([kept.index(c) for c in right if c in kept])
            shape = [value.shape[i] if c in kept else 1 for i, c in enumerate(right)]
            row = _first_known(row, t.reshape(shape).expand(value.shape))
            carriers.append(o)
        out.append(row)
    return settle(out[0], out[1]), carriers


def _shuffle_up(w: "Walk", n: Node, value: Any) -> Result:
    source, r = arguments(n)[0], int(w.fill(arguments(n)[1]))
    p = w.pos(source)

    def spread(t: Tensor) -> Tensor:
        t, _ = contract(t, [1])
        for d in (2, 3):
            t = resample(t, d, (torch.arange(value.shape[d], dtype=torch.float32) + 0.5) / r - 0.5)
        return t.expand(value.shape)

    return (p.map(spread) if p else None), [source]


def _like(w: "Walk", n: Node, value: Any) -> Result:
    return None, []


def _table() -> dict[str, Rule]:
    same = """batch_norm _native_batch_norm_legit_no_training native_batch_norm layer_norm native_layer_norm group_norm
        native_group_norm instance_norm rms_norm softmax _softmax log_softmax _log_softmax dropout native_dropout clone
        contiguous to _to_copy alias detach type_as lift_fresh_copy feature_dropout alpha_dropout cumsum glu_same
        _assert_tensor_metadata normalize_same cudnn_batch_norm fused_rms_norm _fused_rms_norm"""
    layout = """view reshape _unsafe_view permute transpose t flatten unflatten squeeze unsqueeze expand expand_as
        repeat select narrow split split_with_sizes chunk unbind stack hstack roll flip movedim moveaxis
        swapaxes pixel_unshuffle channel_shuffle native_channel_shuffle slice_scatter select_scatter unsafe_split tile
        unsafe_split_with_sizes unfold repeat_interleave numpy_T view_as reshape_as unsafe_chunk tensor_split"""
    reduce = """mean sum amax amin max min var std var_mean std_mean linalg_vector_norm norm logsumexp
        argmax argmin prod any all median nanmean"""
    table: dict[str, Rule] = dict.fromkeys(same.split(), _same)
    table.update(dict.fromkeys(layout.split(), _layout))
    table.update(dict.fromkeys(reduce.split(), _reduce))
    table.update(dict.fromkeys(["index", "index_select"], _index))
    table.update(dict.fromkeys(["pad", "constant_pad_nd", "reflection_pad2d", "replication_pad2d"], _pad))
    table.update(dict.fromkeys(["conv2d", "conv1d", "conv3d", "_convolution"], _conv))
    table.update(dict.fromkeys(["conv_transpose2d"], _transposed))
    table.update(dict.fromkeys(["max_pool2d", "max_pool2d_with_indices", "avg_pool2d"], _pool))
    sampling = ["upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_nearest_exact2d"]
    sampling += ["_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
    table.update(dict.fromkeys(sampling, _resize))
    adaptive = ["adaptive_avg_pool2d", "adaptive_max_pool2d", "_adaptive_avg_pool2d"]
    table.update(dict.fromkeys(adaptive, _adaptive))
    table.update(dict.fromkeys(["matmul", "bmm", "mm", "addmm", "baddbmm"], _matmul))
    flash = ["scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"]
    flash += ["_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"]
    table.update(dict.fromkeys(flash, _attention))
    table["convolution"] = _convolution
    table["slice"] = _slice
    table["im2col"] = _patches
    table.update(dict.fromkeys(["cat", "concat"], _cat))
    table["linear"] = _linear
    table["einsum"] = _einsum
    table["max_unpool2d"] = unpool
    table["pixel_shuffle"] = _shuffle_up
    created = "zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty rand_like randn_like"
    table.update(dict.fromkeys(created.split(), _like))
    table["copy"] = lambda w, n, value: _pointwise_of(w, n, arguments(n)[1])
    return table


def _pointwise_of(w: "Walk", n: Node, source: Any) -> Result:
    p = w.pos(source)
    shape = w.trace.shapes[n]
    return (p.map(lambda t: t.expand(shape)) if p else None), [source]


RULES = _table()
FLATTENING = {"adaptive_avg_pool2d", "mean", "sum", "amax", "max"}
