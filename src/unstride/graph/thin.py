"""Which cells of a plain network's maps are never read: a 1x1 convolution of stride 2 leaves three of four.

    thin = thinned(graph, wanted=[feature_map])
    thin[conv]      # (2, 2): of this value only every second cell of every second row is ever read

What is not read need not be computed: a convolution takes a larger stride, what works cell by cell fewer cells. Exact,
and for the plain network only: its states are made of just those cells.
"""

import math
from collections.abc import Iterable

from torch import Tensor
from torch.fx import Node

from unstride.graph.capture import Graph
from unstride.graph.ops import arguments, op_name

Step = tuple[int, ...]  # along each axis: every n-th cell
_CELLWISE = ("relu", "relu6", "hardtanh", "leaky_relu", "silu", "hardswish", "gelu", "sigmoid", "add")


def thinned(graph: Graph, wanted: Iterable[Node]) -> dict[Node, Step]:
    """The values of which less than everything is read, and how much; `wanted` are read whole, whoever reads them."""
    whole = (1,) * len(graph.size)
    kept = {*wanted, *graph.leaf_nodes, graph.image}
    found: dict[Node, Step] = {}
    for n in reversed(list(graph.fx.nodes)):
        if n in kept or not n.users or not (is_conv(graph, n) or is_cellwise(graph, n)):
            continue
        asked = [
            reads(graph, user, found.get(user, whole)) if n in _operands(graph, user) else whole for user in n.users
        ]
        step = tuple(math.gcd(*along) for along in zip(*asked, strict=True))
        if step != whole:
            found[n] = step
    return found


def reads(graph: Graph, n: Node, step: Step) -> Step:
    """Which cells of its operands an op reads for every `step`-th cell of its own."""
    if is_conv(graph, n):
        weight = graph.constants.get(getattr(n.args[1], "name", ""))
        if weight is None or not _single(n, weight):
            return (1,) * len(step)
        return tuple(s * t for s, t in zip(step, conv_stride(n, len(step)), strict=True))
    return step if is_cellwise(graph, n) else (1,) * len(step)


def is_conv(graph: Graph, n: Node) -> bool:
    """A convolution along the picture's axes, with its padding in numbers."""
    own = op_name(n) == f"conv{len(graph.size)}d" and n in graph.from_image and n.args[0] in graph.from_image
    return own and not n.kwargs and not (len(n.args) > 4 and isinstance(n.args[4], str))


def is_cellwise(graph: Graph, n: Node) -> bool:
    """An op that makes each cell of the cells in the same place, of maps of one size that are made of the picture."""
    if op_name(n) not in _CELLWISE or n.kwargs or not graph.from_image.issuperset((n, *n.all_input_nodes)):
        return False
    shapes = [getattr(i.meta.get("val"), "shape", ()) for i in (n, *n.all_input_nodes)]
    operands = all(isinstance(a, Node) for a in n.args) if op_name(n) == "add" else True
    return operands and len({str(s) for s in shapes}) == 1 and len(shapes[0]) == len(graph.size) + 2


def conv_stride(n: Node, axes: int) -> Step:
    """A convolution's, along each axis."""
    stride = n.args[3] if len(n.args) > 3 else 1
    each = stride if isinstance(stride, list | tuple) else (stride,) * axes
    return tuple(int(s) for s in (each * axes if len(each) == 1 else each))  # type: ignore[arg-type]


def _single(n: Node, weight: Tensor) -> bool:
    """Whether each window is one cell, and none lies beyond the map."""
    padding = n.args[4] if len(n.args) > 4 else 0
    pads = padding if isinstance(padding, list | tuple) else (padding,)
    return set(weight.shape[2:]) == {1} and not any(pads)


def _operands(graph: Graph, n: Node) -> tuple[Node, ...]:
    """What an op reads cell by cell: not a convolution's weights."""
    first = arguments(n)[:1] if is_conv(graph, n) else arguments(n)
    return tuple(a for a in first if isinstance(a, Node))
