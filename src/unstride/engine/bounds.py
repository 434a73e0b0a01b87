"""How large a network's values can get. Where nothing can overflow, finite pictures give finite values throughout, and
an activation may be applied in the pass of its convolution, which would make a number of NaN.
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.graph.capture import Graph
from unstride.graph.ops import op_name

LARGEST = 1e6  # of a picture's numbers
SAFE = 1e30  # a convolution by way of transforms (Winograd) has larger numbers on its way
_SQUARED = 1e18  # its square is a number yet, and so is the mean of such squares
_SAME = {"relu", "silu", "hardswish", "mean", "reshape", "flatten", "permute", "slice", "squeeze", "unsqueeze"}
_SAME |= {"transpose", "expand", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"}
_SAME |= {f"{op}{n}d" for op in ("max_pool", "avg_pool", "adaptive_avg_pool", "upsample_nearest") for n in (1, 2, 3)}
_WEIGHTED = {"linear"} | {f"{op}{n}d" for op in ("conv", "conv_transpose") for n in (1, 2, 3)}
_ONE = ("sigmoid", "hardsigmoid", "softmax", "tanh")
_wild: ContextVar[bool] = ContextVar("wild", default=False)


def mark_tame(graph: Graph) -> None:
    """Note in a node's meta ("tame") that no picture within +-LARGEST takes it, or what it is made of, beyond SAFE."""
    known: dict[Node, float] = {graph.image: LARGEST}
    for n in graph.fx.nodes:
        if n.op == "call_function":
            bound = bound_of(n, known, graph.constants)
            if bound is not None and bound < SAFE:  # not for NaN
                known[n] = bound
                n.meta["tame"] = True


def is_wild(images: Tensor) -> bool:
    """Whether a picture is not finite, or beyond what the bounds are for."""
    low, high = torch.aminmax(images)
    return not bool((low >= -LARGEST) & (high <= LARGEST))  # nor for NaN


def wild_now() -> bool:
    """Whether what runs now was made of such pictures."""
    return _wild.get()


@contextlib.contextmanager
def wild_inside() -> Iterator[None]:
    token = _wild.set(True)
    try:
        yield
    finally:
        _wild.reset(token)


def bound_of(n: Node, known: dict[Node, float], constants: dict[str, Tensor]) -> float | None:
    """What the op's values cannot exceed, from what it reads; None where that cannot be said."""
    name, args = op_name(n), list[Any](n.args)
    if name in _ONE:
        return 1.0 if args[0] in known else None
    if name == "cat":
        return max((known.get(a, torch.inf) for a in args[0]), default=None)
    if not args or args[0] not in known:
        return None
    own = known[args[0]]
    if name in ("relu6", "hardtanh"):
        return 6.0 if name == "relu6" else max(map(abs, [*args[1:], *(-1.0, 1.0)[len(args) - 1 :]]))
    if name in ("pad", "constant_pad_nd"):  # by its own values, or by one that may be given
        return max([own, *(abs(v) for v in args[2:] if isinstance(v, int | float))])
    if name in _SAME:
        return own
    if name in ("add", "mul") and not n.kwargs:
        other = known.get(args[1]) if isinstance(args[1], Node) else abs(args[1])
        return None if other is None else own + other if name == "add" else own * other
    if name in _WEIGHTED:
        return _weighted(name, own, args, constants)
    if name in ("leaky_relu", "prelu"):
        slope = args[1] if len(args) > 1 else 0.01
        most = _largest(slope, constants) if isinstance(slope, Node) else abs(slope)
        return None if most is None else own * max(1.0, most)
    if name in ("instance_norm", "group_norm"):
        return _normed(n, own, args, constants)
    return None


def _normed(n: Node, own: float, args: list[Any], constants: dict[str, Tensor]) -> float | None:
    """By its own statistics no value is farther from the mean than by the variance of all that the mean is taken of."""
    groups, (weight, bias) = (args[1], args[2:4]) if op_name(n) == "group_norm" else (None, args[1:3])
    scale = 1.0 if weight is None else _largest(weight, constants)
    shift = 0.0 if bias is None else _largest(bias, constants)
    if scale is None or shift is None or own > _SQUARED or (groups is None and not args[5]):
        return None
    channels, cells = args[0].meta["val"].shape[1], math.prod(args[0].meta["val"].shape[2:])
    return math.sqrt(cells * (1 if groups is None else channels // groups)) * scale + shift


def _weighted(name: str, own: float, args: list[Any], constants: dict[str, Tensor]) -> float | None:
    """A convolution's or linear layer's: the largest sum of an output's weights, signs left aside."""
    if not isinstance(args[1], Node) or args[1].name not in constants:
        return None
    weight, bias = constants[args[1].name], args[2] if len(args) > 2 else None
    most = 0.0 if bias is None else _largest(bias, constants)
    by_output = weight.transpose(0, 1) if "transpose" in name else weight
    return None if most is None else float(by_output.double().abs().flatten(1).sum(1).max()) * own + most


def _largest(n: Any, constants: dict[str, Tensor]) -> float | None:
    """The largest number of a constant, signs left aside; None where it is none."""
    return float(constants[n.name].abs().max()) if isinstance(n, Node) and n.name in constants else None
