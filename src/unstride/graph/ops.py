"""What an op of a graph is: its name, its arguments, whether it works element by element."""

import operator
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch.fx import Node


def arguments(n: Node) -> tuple[Any, ...]:
    """A node's arguments, without fx's type for them."""
    return n.args


def op_name(n: Node) -> str:
    target = n.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket).removeprefix("aten.")
    return getattr(target, "__name__", str(target))


# Element-wise ops that torch does not tag as such.
_POINTWISE = {
    "hardswish",
    "prelu",
    "log_sigmoid",
    "masked_fill",
    "where",
    "fill",
    "rsub",
    "divide",
    "multiply",
    "subtract",
}
_POINTWISE |= {"negative", "absolute", "true_divide", "hardswish_"}


def is_pointwise(n: Node) -> bool:
    if not isinstance(n.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in n.target.tags or op_name(n) in _POINTWISE


def is_getitem(node: Node) -> bool:
    return node.target is operator.getitem


def ancestors(nodes: Iterable[Node], until: Container[Node] = ()) -> set[Node]:
    """The nodes, and everything they are computed from; what the nodes of `until` are computed from is not followed."""
    seen: set[Node] = set()
    stack = list(nodes)
    while stack:
        n = stack.pop()
        if n not in seen:
            seen.add(n)
            if n not in until:
                stack += n.all_input_nodes
    return seen
