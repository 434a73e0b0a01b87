"""Ops that sum over something: reductions, linear layers, matrix products, attention."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node

from unstride.geometry.positions import (
    LOST,
    Pos,
    contract,
    first_known,
    has_axis,
    has_no_position,
    no_position,
    position_of,
    unexpanded,
)
from unstride.geometry.rules.base import Result, argument, rule, summed
from unstride.geometry.rules.elementwise import pointwise
from unstride.graph.ops import arguments, op_name

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk


@rule(
    """mean sum amax amin max min var std var_mean std_mean linalg_vector_norm norm logsumexp
    argmax argmin prod any all median nanmean"""
)
def _reduce(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    if len(n.args) > 1 and isinstance(arguments(n)[1], Node):  # the larger of two tensors, element by element
        return pointwise(w, n, value)
    p = w.pos(source)
    if p is None:
        return None, []
    norm = op_name(n) in ("linalg_vector_norm", "norm")
    dims = argument(n, 2 if norm else 1, "dim", None)
    dims = list(range(p.ndim)) if dims is None else ([dims] if isinstance(dims, int) else [int(d) for d in dims])
    dims = [d % p.ndim for d in dims]
    first = value[0] if isinstance(value, tuple) else value
    pos = summed(w, n, p, dims, keepdim=first.ndim == p.ndim)
    return ([pos] * len(value) if isinstance(value, tuple) else pos), [source]


@rule("linear")
def _linear(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[0]
    p = w.pos(source)
    return (None, []) if p is None else (_by_matrix(w, n, p, summed(w, n, p, [-1], value.shape), -1), [source])


def _by_matrix(w: "Walk", n: Node, p: Pos, out: Pos | None, dim: int) -> Any:
    """Where a product with a matrix lies; one over whole rows of cells makes others of them, nobody knows which."""
    shape = w.trace.shapes[n]
    if len(shape) > 2 and shape[dim] > 1 and any(has_axis(p, a) and not has_axis(out, a) for a in range(w.axes)):
        w.trace.unknown[n] = "a matrix over all cells along an axis, so positions are not known"
        return LOST
    return out


@rule("matmul bmm mm addmm baddbmm")
def _matmul(w: "Walk", n: Node, value: Any) -> Result:
    """(.., i, k) @ (.., k, j): the position of row i, or else of column j. Attention so follows its queries."""
    first = 1 if op_name(n) in ("addmm", "baddbmm") else 0
    a, b = arguments(n)[first : first + 2]
    pa, pb = w.pos(a), w.pos(b)
    if pb is None and value.ndim >= 2 and pa is not None:
        out = summed(w, n, pa, [-1], value.shape)
        return (out if b in w.graph.from_image else _by_matrix(w, n, pa, out, -1)), [a]
    if value.ndim < 2 or (pa is not None and pa.ndim < 2) or (pb is not None and pb.ndim < 2):
        return None, []
    rows, carriers = [], []
    for axis in range(w.axes):
        row = no_position(value.shape)
        if pa is not None and (t := _unmixed(pa, axis, [-1])) is not None:
            row = t.expand(value.shape)
            carriers.append(a)
        if pb is not None and unexpanded(row).isnan().any() and (t := _unmixed(pb, axis, [-2])) is not None:
            row = first_known(row, t.expand(value.shape))
            if a not in carriers:
                carriers.append(b)
        rows.append(row)
    if pa is None and pb is not None and a not in w.graph.from_image:
        return _by_matrix(w, n, pb, position_of(*rows), -2), [b]
    return position_of(*rows), carriers


def _unmixed(p: Pos, axis: int, dims: list[int], keepdim: bool = True) -> Tensor | None:
    """Coordinates after a sum over `dims`; None where it mixes neighbours or leaves none."""
    if not has_axis(p, axis):
        return None
    t, mixed = contract(p.axis(axis), dims, keepdim)
    return None if mixed or has_no_position(t) else t


@rule(
    """scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention"""
)
def _attention(w: "Walk", n: Node, value: Any) -> Result:
    q = arguments(n)[0]
    p = w.pos(q)
    first = value[0] if isinstance(value, tuple) else value
    pos = p.map(lambda t: contract(t, [-1])[0].expand(first.shape)) if p is not None else None
    return ([pos] + [None] * (len(value) - 1) if isinstance(value, tuple) else pos), [q]


@rule("einsum")
def _einsum(w: "Walk", n: Node, value: Any) -> Result:
    equation, operands = arguments(n)[0], arguments(n)[1]
    left, right = equation.replace(" ", "").split("->")
    letters = left.split(",")
    if "." in left or any(len(set(t)) != len(t) for t in letters):
        w.trace.unknown[n] = f"einsum {equation}"
        return LOST, [o for o in operands if w.pos(o) is not None]
    out, carriers = [], []
    for axis in range(w.axes):
        row = no_position(value.shape)
        for o, names in zip(operands, letters, strict=True):
            p = w.pos(o)
            if p is None or not unexpanded(row).isnan().any():
                continue
            t = _unmixed(p, axis, [i for i, c in enumerate(names) if c not in right], keepdim=False)
            if t is None:
                continue
            kept = [c for c in names if c in right]
            t = t.permute([kept.index(c) for c in right if c in kept])
            shape = [value.shape[i] if c in kept else 1 for i, c in enumerate(right)]
            row = first_known(row, t.reshape(shape).expand(value.shape))
            carriers.append(o)
        out.append(row)
    return position_of(*out), carriers
