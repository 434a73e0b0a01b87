"""Ops whose result lies where their operands do: element by element, norms, copies."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Node

from unstride.geometry.positions import (
    OTHER_DIRECTION,
    LostPosition,
    Pos,
    first_known,
    in_other_directions,
    position_of,
    unexpanded,
)
from unstride.geometry.rules.base import Result, rule
from unstride.graph.ops import arguments

if TYPE_CHECKING:
    from unstride.geometry.walk import Walk


def pointwise(w: "Walk", n: Node, value: Any) -> Result:
    """Any op that torch tags as such: no entry in the table is needed."""
    inputs = n.all_input_nodes
    known = [i for i in inputs if isinstance(w.trace.pos.get(i), Pos)]
    lost = [i for i in inputs if isinstance(w.trace.pos.get(i), LostPosition)]
    if not known:
        return (w.lost(lost) if lost else None), lost
    first = w.trace.pos[known[0]]
    if any(w.trace.pos[i] is OTHER_DIRECTION for i in lost):
        return OTHER_DIRECTION, known + lost
    if any(in_other_directions(first, w.trace.pos[i]) for i in known[1:] if w.trace.pos[i] is not first):
        w.trace.unknown[n] = OTHER_DIRECTION.why
        return OTHER_DIRECTION, known + lost
    shape = w.trace.shapes[n]
    if isinstance(shape, list):  # e.g. frexp: every output sits where the input does
        shape = shape[0]

    def axis(a: int) -> Tensor:
        out = w.coords(known[0], a)
        out = out if out.shape == shape else out.expand(shape)
        for other in known[1:]:
            if unexpanded(out).isnan().any():
                out = first_known(out, w.coords(other, a).expand(shape))
        return out

    same = len(known) == 1 and first.shape == shape
    pos = first if same else position_of(*map(axis, range(w.axes)))
    return pos, known + lost


@rule(
    """batch_norm _native_batch_norm_legit_no_training native_batch_norm layer_norm native_layer_norm group_norm
    native_group_norm instance_norm rms_norm softmax _softmax log_softmax _log_softmax dropout native_dropout clone
    contiguous to _to_copy alias detach type_as lift_fresh_copy feature_dropout alpha_dropout cumsum glu_same
    _assert_tensor_metadata normalize_same cudnn_batch_norm fused_rms_norm _fused_rms_norm"""
)
def _same(w: "Walk", n: Node, value: Any) -> Result:
    """Norms, softmax, dropout, copies: each output element sits where its input element does."""
    source = n.all_input_nodes[0]
    p = w.pos(source)
    if isinstance(value, tuple | list):
        ok = p is not None
        shapes = w.trace.shapes[n]
        return [p if ok and s == tuple(p.shape) else None for s in shapes], [source]  # type: ignore[union-attr]
    return p, [source]


@rule("zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty rand_like randn_like")
def _like(w: "Walk", n: Node, value: Any) -> Result:
    return None, []


@rule("copy")
def _copy(w: "Walk", n: Node, value: Any) -> Result:
    source = arguments(n)[1]
    p = w.pos(source)
    shape = w.trace.shapes[n]
    return (p.map(lambda t: t.expand(shape)) if p else None), [source]
