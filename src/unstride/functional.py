"""In-place ops of an exported graph -> functional ones, where that is plainly exact; other graphs take the long way."""

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from unstride.positions import is_pointwise, op_name

# Ops whose result never shares memory with an input, beside the element-wise ones. What is not listed may be a view.
_FRESH = {"conv1d", "conv2d", "conv3d", "conv_transpose2d", "convolution", "linear", "matmul", "bmm", "mm", "addmm"}
_FRESH |= {
    "batch_norm",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "softmax",
    "scaled_dot_product_attention",
    "einsum",
}
_FRESH |= {"max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "mean", "sum", "amax", "amin"}
_FRESH |= {"upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "cat", "stack", "clone", "baddbmm"}


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program without in-place ops. Example: `x.relu_()` becomes `x.relu()`, which later readers of x read.

    `run_decompositions` does this for any program but traces it all over again (three quarters of a capture's time), so
    programs whose in-place ops work on fresh values without views are rewritten here.
    """
    nodes = list(program.graph.nodes)
    if any(n.op == "get_attr" or (n.op == "call_function" and _opaque(n)) for n in nodes):
        return program.run_decompositions({})
    writes = [n for n in nodes if n.op == "call_function" and _mutates(n)]
    order = {n: i for i, n in enumerate(nodes)}
    for n in writes:
        if not _simple(n, order):  # what was rewritten so far is exact, so the long way may go on from here
            program.graph_module.recompile()
            return program.run_decompositions({})
        _rewrite(program.graph, n, order)
    return program


def _opaque(n: Node) -> bool:
    """Higher-order ops hold graphs of their own."""
    return isinstance(n.target, torch._ops.HigherOrderOperator)


def _mutates(n: Node) -> bool:
    return isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable


def _fresh(n: Node) -> bool:
    if not isinstance(n.target, torch._ops.OpOverload):
        return False
    if _mutates(n):
        return _twin(n) is not None
    pointwise = is_pointwise(n) and all(r.alias_info is None for r in n.target._schema.returns)
    return pointwise or op_name(n) in _FRESH


def _twin(n: Node) -> torch._ops.OpOverload | None:
    """relu_.default -> relu.default"""
    assert isinstance(n.target, torch._ops.OpOverload)
    name = op_name(n)
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") and not name.endswith("__") else None
    twin = getattr(packet, n.target._overloadname, None) if packet is not None else None
    if not isinstance(twin, torch._ops.OpOverload) or not is_pointwise(n):
        return None
    theirs, ours = twin._schema.arguments, n.target._schema.arguments
    return twin if [a.name for a in theirs] == [a.name for a in ours] else None


def _simple(n: Node, order: dict[Node, int]) -> bool:
    base = n.args[0] if n.args else None
    if not isinstance(base, Node) or _twin(n) is None or not _fresh(base):
        return False
    tensors = [i.meta.get("val") for i in n.all_input_nodes]
    dtypes = {v.dtype for v in tensors if isinstance(v, torch.Tensor)}
    plain = len(dtypes) == 1 and next(iter(dtypes)).is_floating_point  # in place, the result cannot be promoted
    return plain and all(u is n or order[u] > order[n] or _fresh(u) for u in base.users)


def _rewrite(graph: Graph, n: Node, order: dict[Node, int]) -> None:
    twin, base = _twin(n), n.args[0]
    assert twin is not None and isinstance(base, Node)
    with graph.inserting_before(n):
        new = graph.call_function(twin, n.args, n.kwargs)
    new.meta = n.meta
    order[new] = order[n]
    n.replace_all_uses_with(new)
    base.replace_all_uses_with(new, delete_user_cb=lambda user: order[user] > order[n])
    graph.erase_node(n)
