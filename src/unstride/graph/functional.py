"""In-place ops of an exported graph -> functional ones, where that is plainly exact; other graphs take the long way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, Node

from unstride.graph.ops import is_pointwise, op_name

if TYPE_CHECKING:
    from torch.export import ExportedProgram

aten = torch.ops.aten

# Ops whose result never shares memory with an input, beside the element-wise ones. What is not listed may be a view.
_FRESH = {"conv1d", "conv2d", "conv3d", "conv_transpose2d", "convolution", "linear", "matmul", "bmm", "mm", "addmm"}
_FRESH |= {"batch_norm", "layer_norm", "group_norm", "instance_norm", "softmax", "scaled_dot_product_attention"}
_FRESH |= {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "mean", "sum", "amax", "amin"}
_FRESH |= {"upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "cat", "stack", "clone", "baddbmm"}
_FRESH |= {"zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like", "lift_fresh_copy"}
_FRESH |= {"new_zeros", "new_ones", "new_full", "new_empty", "copy", "slice_scatter", "select_scatter"}

# In-place ops whose functional twins keep the written value's dtype and shape, whatever they read beside it.
_KEEP = {"fill_", "copy_", "masked_fill_", "zero_"}

# A view -> the op that puts a changed view back into the value that it shows, with the same further arguments.
_BACK: dict[object, torch._ops.OpOverload] = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops. Example: `x.relu_()` becomes `x.relu()`, which later readers of x read.

    `run_decompositions` does this for any program but traces it all over again (more than half of a capture's time), so
    programs whose in-place ops work on fresh values, or on slices of them, are rewritten here.
    """
    nodes = list(program.graph.nodes)
    if any(n.op == "get_attr" or (n.op == "call_function" and _opaque(n)) for n in nodes):
        return program.run_decompositions({})
    writes = [n for n in nodes if n.op == "call_function" and _mutates(n)]
    order = {n: i for i, n in enumerate(nodes)}
    for n in writes:
        chain = _chain(n)
        stale = None if chain is None else _stale(n, chain[0], order)
        if chain is None or stale is None:  # what was rewritten so far is exact, so the long way may go on from here
            program.graph_module.recompile()
            return program.run_decompositions({})
        _rewrite(program.graph, n, chain, stale, order)
    if writes:
        program.graph.eliminate_dead_code()
    return program


def _opaque(n: Node) -> bool:
    """Higher-order ops hold graphs of their own."""
    return isinstance(n.target, torch._ops.HigherOrderOperator)


def _mutates(n: Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def _fresh(n: Node) -> bool:
    if not isinstance(n.target, torch._ops.OpOverload):
        return False
    pointwise = is_pointwise(n) and all(r.alias_info is None for r in n.target._schema.returns)
    if op_name(n) == "einsum":
        return isinstance(n.args[1], list | tuple) and len(n.args[1]) > 1  # of one value it may be a mere permutation
    return pointwise or op_name(n) in _FRESH


def _twin(n: Node) -> torch._ops.OpOverload | None:
    """relu_.default -> relu.default"""
    assert isinstance(n.target, torch._ops.OpOverload)
    name = op_name(n)
    if name == "zero_":
        return aten.zeros_like.default
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    twin = getattr(packet, n.target._overloadname, None) if packet is not None else None
    if not isinstance(twin, torch._ops.OpOverload) or not (is_pointwise(n) or name in _KEEP):
        return None
    theirs, ours = twin._schema.arguments, n.target._schema.arguments
    return twin if [a.name for a in theirs] == [a.name for a in ours] else None


def _chain(n: Node) -> list[Node] | None:
    """What a write changes, from the fresh value down to the view that is written on; None: not plain.

    Example: `x[0, 1:].fill_(3)` -> [x, select, slice].
    """
    at = n.args[0] if n.args else None
    if not isinstance(at, Node) or _twin(n) is None:
        return None
    if op_name(n) not in _KEEP:
        values = [i.meta.get("val") for i in n.all_input_nodes]
        dtypes = {v.dtype for v in values if isinstance(v, torch.Tensor)}
        if len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:  # in place, the result cannot be promoted
            return None
    chain = [at]
    while chain[0].target in _BACK:
        above = chain[0].args[0]
        assert isinstance(above, Node)
        chain.insert(0, above)
    return chain if _fresh(chain[0]) else None


def _stale(n: Node, base: Node, order: dict[Node, int]) -> list[Node] | None:
    """The views of `base` (in order) that are read after the write `n`; None if one may be another kind of view."""
    found, seen, plain = [], [base], {base}
    for at in seen:  # grows on the way
        for u in at.users:
            if order[u] < order[n] and u not in seen and not _fresh(u) and not _is_size(u):
                seen.append(u)
                if u.target in _BACK and at in plain:
                    plain.add(u)
    for at in seen[1:]:
        if any(order[u] > order[n] for u in at.users):
            if at not in plain:
                return None
            found.append(at)
    return sorted(found, key=order.__getitem__)


def _is_size(n: Node) -> bool:
    return isinstance(n.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)


def _rewrite(graph: Graph, n: Node, chain: list[Node], stale: list[Node], order: dict[Node, int]) -> None:
    """`v.op_()` -> `op(v)`, put back into what v is a view of; views that are read later are taken anew."""
    twin, base = _twin(n), chain[0]
    assert twin is not None
    anew: dict[Node, Node] = {}

    def add(target: torch._ops.OpOverload, args: tuple, kwargs: dict, like: Node) -> Node:
        new = graph.call_function(target, args, kwargs)
        new.meta = {**n.meta, "val": like.meta.get("val")}  # a value of the same shape and dtype
        order[new] = order[n]
        return new

    def view(old: Node) -> Node:
        if old not in anew:
            above = old.args[0]
            assert isinstance(above, Node) and isinstance(old.target, torch._ops.OpOverload)
            anew[old] = add(old.target, (view(above), *old.args[1:]), old.kwargs, old)
        return anew[old]

    with graph.inserting_before(n):
        new = add(twin, n.args, n.kwargs, chain[-1])
        for above, v in zip(chain[-2::-1], chain[:0:-1], strict=True):
            new = add(_BACK[v.target], (above, new, *v.args[1:]), v.kwargs, above)
        anew[base] = new
        for old in [base, *stale]:
            old.replace_all_uses_with(view(old), delete_user_cb=lambda user: order[user] > order[n])
        if n.users:
            n.replace_all_uses_with(view(chain[-1]))
    graph.erase_node(n)
