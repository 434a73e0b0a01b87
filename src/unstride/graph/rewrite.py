"""Exact rewrites of a graph: batch norm folded, no-ops removed, constants made once, channels last.

Results stay equal to float rounding. The rewritten graph has copies of the weights: it no longer follows the model.
`enhance(..., execution="auto")` runs the graph as it was captured, with the live weights.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.graph.capture import Graph
from unstride.graph.ops import is_getitem, op_name

aten = torch.ops.aten
_NOTHING = ("clone", "contiguous", "alias", "detach", "lift_fresh_copy", "dropout")
_FILLED = ("new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like")
_EVERYTHING = 2**63 - 1  # how a trace writes the end of a slice without one
_FOLDED = ("conv1d", "conv2d", "conv3d", "linear")
_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")


def frozen(graph: Graph) -> Graph:
    """The same function with fewer and cheaper ops, and copies of the weights.

    The given graph's nodes are reused and must not be used again.
    """
    constants = dict(graph.constants)
    leaves = list(graph.leaves)

    def swap(old: Node, new: Node) -> None:
        for i, leaf in enumerate(leaves):
            if leaf is old:
                leaves[i] = new
        old.replace_all_uses_with(new)

    for n in list(graph.fx.nodes):
        if n.op != "call_function":
            continue
        name = op_name(n)
        if name == "_assert_tensor_metadata":
            graph.fx.erase_node(n)
        elif name in ("view", "_unsafe_view"):  # a dropped copy may leave a value that cannot be viewed
            n.target = aten.reshape.default
        elif n.args and isinstance(n.args[0], Node) and _changes_nothing(n):
            swap(n, n.args[0])
        elif name in _FILLED and isinstance(n.args[0], Node):
            _detach(graph, n, swap)
        elif name in _NORMS:
            _fold(graph, n, constants, swap)
    graph.fx.eliminate_dead_code()
    read = {n.name for n in graph.fx.nodes if n.op == "placeholder" and n.users}
    copies = {name: t.detach().clone() for name, t in constants.items() if name in read}
    return replace(graph, constants=copies, leaves=tuple(leaves), is_live=False)


def _changes_nothing(n: Node) -> bool:
    """Whether an op gives back what it reads: a copy, a pad by nothing, a slice of everything."""
    name, args = op_name(n), list[Any](n.args)
    if name == "native_dropout":
        return not any(is_getitem(u) for u in n.users)
    if name in ("pad", "constant_pad_nd"):  # by reflection and the like: a moved layer goes on so beyond the border
        mode = args[2] if name == "pad" and len(args) > 2 else "constant"
        return not any(args[1]) and mode == "constant"
    if name == "slice":
        source, dim, start, end, step = args + [0, None, None, 1][len(args) - 1 :]
        size = source.meta["val"].shape[dim]
        last = size if isinstance(size, int) else _EVERYTHING
        return start in (None, 0) and step == 1 and (end is None or (isinstance(end, int) and end >= last))
    return name in _NOTHING


def _detach(graph: Graph, n: Node, swap: Any) -> None:
    """A constant in the likeness of a value no longer reads that value, so what is made of it is constant too."""
    like = n.meta["val"]
    if all(isinstance(size, int) for size in like.shape):
        fill: Any = n.args[-1] if "full" in op_name(n) else float("ones" in op_name(n))
        with graph.fx.inserting_before(n):
            made = graph.fx.call_function(
                aten.full.default, (list(like.shape), fill), {"dtype": like.dtype, "device": like.device}
            )
        made.meta = dict(n.meta)
        swap(n, made)


def _fold(graph: Graph, norm: Node, constants: dict[str, Tensor], swap: Any) -> None:
    """conv, then batch norm with fixed statistics = one conv with scaled weights."""
    conv = norm.args[0]
    if not isinstance(conv, Node) or conv.op != "call_function" or op_name(conv) not in _FOLDED:
        return
    if len(conv.users) != 1 or any(leaf is conv for leaf in graph.leaves):
        return
    legit = op_name(norm).startswith("_native")
    weight, bias, mean, var = norm.args[1:5]
    eps: Any = norm.args[6] if legit else norm.args[7]
    training = False if legit else bool(norm.args[5])
    own = conv.args[2] if len(conv.args) > 2 else conv.kwargs.get("bias")
    parts = [_constant(constants, v) for v in (weight, bias, mean, var, conv.args[1], own)]
    if training or parts[2] is None or parts[3] is None or parts[4] is None:
        return
    gamma, beta, mu, variance, kernel, offset = (p.double() if p is not None else None for p in parts)
    assert mu is not None and variance is not None and kernel is not None
    scale = (variance + float(eps)).rsqrt() * (gamma if gamma is not None else 1.0)
    shift = (beta if beta is not None else 0.0) - mu * scale + (offset * scale if offset is not None else 0.0)
    dtype = parts[4].dtype
    folded = (kernel * scale.view(-1, *[1] * (kernel.ndim - 1))).to(dtype)
    new_weight = _placeholder(graph, conv, "weight", folded, constants)
    new_bias = _placeholder(graph, conv, "bias", shift.to(dtype), constants)
    rest = list(conv.args[3:])
    conv.args = (conv.args[0], new_weight, new_bias, *rest)
    conv.kwargs = {k: v for k, v in conv.kwargs.items() if k not in ("weight", "bias")}
    outputs = [u for u in norm.users if is_getitem(u)] if legit else [norm]
    for out in outputs:
        if not legit or out.args[1] == 0:
            swap(out, conv)


def _constant(constants: dict[str, Tensor], v: Any) -> Tensor | None:
    return constants.get(v.name) if isinstance(v, Node) and v.op == "placeholder" else None


def _placeholder(graph: Graph, conv: Node, what: str, value: Tensor, constants: dict[str, Tensor]) -> Node:
    with graph.fx.inserting_before(next(iter(graph.fx.nodes))):
        node = graph.fx.placeholder(f"folded_{conv.name}_{what}")
    constants[node.name] = value
    return node


def channels_last(graph: Graph) -> Graph:
    """Weights laid out channels last; activations follow by themselves."""
    if graph.device.type not in ("cpu", "cuda"):
        return graph
    layout = torch.channels_last
    constants = {n: t.contiguous(memory_format=layout) if t.ndim == 4 else t for n, t in graph.constants.items()}
    return replace(graph, constants=constants)
