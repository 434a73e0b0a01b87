"""Convolutions with weights packed once, and the sum and activation after them in the same call (oneDNN).

The results are those of the separate ops to float rounding; eager torch walks the map once more for each op.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from unstride.engine.bounds import wild_now
from unstride.engine.movers import LAST, Batch, Mover, Rows, for_each, neighbours
from unstride.engine.norms import FusedNorm
from unstride.engine.packing import AFTER, Activation, Packing
from unstride.engine.transposed import FusedTransposed
from unstride.geometry.layers import SubsamplingLayer
from unstride.geometry.natural import Padded, padded
from unstride.geometry.states import State

aten = torch.ops.aten
_CONV = (aten.conv2d.default, aten.conv3d.default)
_TRANSPOSED = (aten.conv_transpose2d.input, aten.conv_transpose3d.input)
_ALONE: dict[Any, Activation] = {
    aten.silu.default: ("swish", []),
    aten.hardswish.default: ("hardswish", []),
    aten.relu6.default: ("hardtanh", [0.0, 6.0]),
}
_DEAF = (
    "relu",
    "hardtanh",
)  # in the same pass these make a number of NaN: applied to the result where there may be one
_LARGE = 1 << 20  # bytes of one image's operand: to copy a smaller one takes no longer than to call one more op


class FusedConv(nn.Module):
    """activation(conv(x) + other), with or without the sum and the activation."""

    def __init__(
        self, weight: Packing, bias: Tensor | None, args: tuple[Any, ...], act: Activation, tame: bool
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.act = weight, bias, act
        self.hears = not tame and act[0] in _DEAF  # there may be NaN, which the same pass would not hear
        stride, padding, dilation, groups = args
        each = [for_each(v, weight.dense.ndim - 2) for v in (padding, stride, dilation)]
        self.where: tuple[Any, ...] = (*each, int(groups))
        self.spends = False  # the sum is written over `other`, which nobody reads afterwards

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        if torch.is_autocast_enabled("cpu"):  # the packed ops know nothing of it
            return self._separate(x, other)
        name, scalars = self.act
        if self.hears or (name in _DEAF and wild_now()):
            return AFTER[name](self._fused(x, other, "none", []), *scalars)
        return self._fused(x, other, name, scalars)

    def _fused(self, x: Tensor, other: Tensor | None, name: str, scalars: list[float]) -> Tensor:
        packed = self.weight(x.shape, *self.where)
        op = torch.ops.mkldnn._convolution_pointwise
        if other is None:
            return op.default(x, packed, self.bias, *self.where, name, scalars, "")  # a packet looks for it: slow
        after = None if name == "none" else name
        layout = LAST[x.ndim]
        if self.spends and other.is_contiguous(memory_format=layout):
            op = torch.ops.mkldnn._convolution_pointwise_
            return op.binary(other, x, packed, self.bias, *self.where, "add", None, after, scalars, "")
        other = other.contiguous(memory_format=layout)
        return op.binary(x, other, packed, self.bias, *self.where, "add", None, after, scalars, "")

    def _separate(self, x: Tensor, other: Tensor | None) -> Tensor:
        padding, stride, dilation, groups = self.where
        y = (F.conv2d if x.ndim == 4 else F.conv3d)(x, self.weight.dense, self.bias, stride, padding, dilation, groups)
        y = y if other is None else y + other
        name, scalars = self.act
        return AFTER[name](y, *scalars)


class MovedDepthwise(nn.Module):
    """A strided depthwise convolution of moved rows: zero taps are put before its own, so that nothing is copied.

    Where a state reads farther back, the op pads more and the zero taps come after its own. A selection that would give
    another number of outputs so has its rows copied; so have rows that are not finite, of which a zero tap is no 0.
    """

    def __init__(
        self,
        mover: Mover,
        weight: Tensor,
        bias: Tensor | None,
        args: tuple[Any, ...],
        act: Activation,
        tame: bool,
        taps: Sequence[Sequence["_Taps"]],
    ) -> None:
        super().__init__()
        self.mover, self.tame = mover, tame
        stride, _, dilation, groups = args
        self.by_start: dict[tuple[int, ...], FusedConv] = {}
        for some in itertools.product(*taps):
            wider = Packing(F.pad(weight, [side for t in reversed(some) for side in t.zeros]))
            where = (stride, [t.padding for t in some], dilation, groups)
            self.by_start[tuple(t.start for t in some)] = FusedConv(wider, bias, where, act, tame)
        self.copied = FusedConv(Packing(weight), bias, (stride, 0, dilation, groups), act, tame)

    @staticmethod
    def taps(
        mover: Mover, layers: Sequence[SubsamplingLayer], weight: Tensor, args: tuple[Any, ...], size: Sequence[int]
    ) -> list[list["_Taps"]] | None:
        """Per axis, the selections whose taps can be moved on maps of this size; None where no natural one can."""
        axes = tuple(range(weight.ndim - 2))
        stride, dilation, groups = for_each(args[0], len(axes)), for_each(args[2], len(axes)), args[3]
        if mover.windows is None or mover.reach is None or mover.shift.site is None:
            return None
        steps, rate = mover.shift.steps, mover.shift.site.rate
        depthwise = weight.shape[1] == 1 and weight.shape[0] == groups and set(dilation) == {1}
        if not depthwise or mover.axes != axes or mover.mode != "constant" or mover.batch != Batch(0, 1):
            return None
        if any(list(s.values()) != [1] for s in steps) or any(layers[k - 1].rate != rate for s in steps for k in s):
            return None  # other sites of the layer may thin out more
        found = []
        for a in axes:
            own = weight.shape[2 + a]
            wanted = (mover.reach[a] - own) // stride[a] + 1
            pad = mover.windows[a].start
            spare = size[a] + 2 * pad - own - (wanted - 1) * stride[a]  # cells that its last window leaves unread
            fit = [t for s in range(1 - rate[a], rate[a]) if (t := _Taps.of(s, pad, spare, stride[a])) is not None]
            if not {s - pad for k in steps[a] for s in layers[k - 1].sides[a]} <= {t.start for t in fit}:
                return None
            found.append(fit)
        return found

    def forward(self, x: Tensor | Rows, states: Sequence[State]) -> Tensor:
        places = x.places if isinstance(x, Rows) else tuple((x, r) for r in range(len(states)))
        starts = [self.mover.start(s) for s in states]
        parts, done = [], 0
        for t, first, count in neighbours(places, starts):
            rows, conv = t.narrow(0, first, count), self.by_start.get(starts[done])
            part = conv(rows) if conv else None
            if part is None or ((not self.tame or wild_now()) and not part.sum().isfinite()):
                part = self.copied(self.mover(rows, states[done : done + count]))
            parts.append(part)
            done += count
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class PaddedDepthwise(nn.Module):
    """A depthwise convolution after a pad with zeros, as TF's "same" has it: zero taps instead of a copy of the map.

    Both ends are padded as the wider one is, and the taps that then read farther than the network does are 0. Where the
    map is not finite, of which a zero tap is no 0, it is padded after all.
    """

    def __init__(
        self, sides: Sequence[tuple[int, int]], weight: Tensor, bias: Tensor | None, args: tuple[Any, ...],
        act: Activation, tame: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        stride, padding, dilation, groups = args
        wide = [max(pair) for pair in sides]
        zeros = [w - side for w, pair in zip(reversed(wide), reversed(sides), strict=True) for side in pair]
        own = for_each(padding, len(wide))
        where = (stride, [w + p for w, p in zip(wide, own, strict=True)], dilation, groups)
        self.conv, self.tame = FusedConv(Packing(F.pad(weight, zeros)), bias, where, act, tame), tame
        self.copied = FusedConv(Packing(weight), bias, args, act, tame)
        self.pads = [side for pair in reversed(sides) for side in pair]

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        if (not self.tame or wild_now()) and not out.sum().isfinite():
            return self.copied(F.pad(x, self.pads))
        return out


@dataclass(frozen=True)
class _Taps:
    """How a convolution reads from `start` on: with more padding, and with zero taps before or after its own."""

    start: int
    padding: int
    zeros: tuple[int, int]

    @classmethod
    def of(cls, s: int, padding: int, spare: int, stride: int) -> "_Taps | None":
        """Those of selection s, if there are `spare` cells after the last window; None: they would be too few."""
        if s >= 0:
            return cls(s - padding, padding, (s, 0)) if spare >= s else None
        return cls(s - padding, padding - s, (0, max(0, spare - 2 * s - (stride - 1))))  # no window more


@dataclass(eq=False)
class Fuser:
    """Rewrites segments of one network; a weight that several segments use is packed for all of them."""

    layers: Sequence[SubsamplingLayer]
    packings: dict[tuple[Any, ...], Packing] = field(default_factory=dict)

    def __call__(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, GraphModule)
        for i, n in enumerate(list(module.graph.nodes)):
            if n.target in _CONV:
                self._conv(module, n, f"conv_{i}")
            elif n.target in _TRANSPOSED:
                self._transposed(module, n, f"transposed_{i}")
            elif n.target is aten.instance_norm.default:
                _norm(module, n, f"norm_{i}")
        module.graph.eliminate_dead_code()
        _spend(module)
        module.recompile()
        for name, child in module.named_children():
            module.__dict__[name] = child.forward  # a module's own call looks for hooks first, and here are none
        return module

    def _conv(self, module: GraphModule, n: Node, name: str) -> None:
        args: list[Any] = [*n.args, *(None, 1, 0, 1, 1)[len(n.args) - 2 :]]
        weight, bias = _constant(module, args[1]), _constant(module, args[2])
        if weight is None or weight.dtype != torch.float32 or (args[2] is not None and bias is None) or n.kwargs:
            return
        end, other = _sum_after(n)
        tame = bool(end.meta.get("tame"))
        end, act = _activation_after(module, end, other is not None)
        where, inputs = tuple(args[3:7]), (args[0],) if other is None else (args[0], other)
        moved = self._large_mover(module, args[0], weight, where) if other is None else None
        pad = _zero_pad(args[0], weight, where) if other is None else None
        if moved is not None:
            made: nn.Module = MovedDepthwise(moved[0], weight, bias, where, act, tame, moved[1])
            inputs = args[0].args
        elif pad is not None:
            made, inputs = PaddedDepthwise(pad.sides, weight, bias, where, act, tame), (pad.source,)
        else:
            made = FusedConv(self._packing(weight), bias, where, act, tame)
        _put(module, name, made, inputs, end, parts=moved is not None)

    def _transposed(self, module: GraphModule, n: Node, name: str) -> None:
        args: list[Any] = [*n.args, *(None, 1, 0, 0, 1, 1)[len(n.args) - 2 :]]
        weight, bias = _constant(module, args[1]), _constant(module, args[2])
        if weight is None or weight.dtype != torch.float32 or (args[2] is not None and bias is None) or n.kwargs:
            return
        if args[6] == 1:  # oneDNN has no way for the depthwise one
            packing = self._packing(weight, transposed=True)
            made = FusedTransposed(packing, bias, tuple(args[3:8]), bool(n.meta.get("tame")))
            _put(module, name, made, (args[0],), n, parts=made.cells is not None)

    def _packing(self, weight: Tensor, transposed: bool = False) -> Packing:
        key = (weight.data_ptr(), weight.shape, weight.stride(), transposed)
        return self.packings.setdefault(key, Packing(weight, transposed))

    def _large_mover(
        self, module: GraphModule, operand: Node, weight: Tensor, where: tuple[Any, ...]
    ) -> tuple[Mover, list[list[_Taps]]] | None:
        """What moves a large operand for one convolution alone, if that could move its taps instead."""
        mover = module.get_submodule(str(operand.target)) if operand.op == "call_module" else None
        if not isinstance(mover, Mover) or _only_user(operand) is None:
            return None
        shape = operand.args[0].meta["val"].shape[1:]  # type: ignore[union-attr]
        large = math.prod(shape) * weight.itemsize >= _LARGE
        taps = MovedDepthwise.taps(mover, self.layers, weight, where, shape[1:]) if large else None
        return (mover, taps) if taps is not None else None


def _zero_pad(operand: Any, weight: Tensor, where: tuple[Any, ...]) -> Padded | None:
    """What pads a depthwise convolution's operand with zeros, for it alone."""
    pad = padded(operand) if isinstance(operand, Node) and _only_user(operand) is not None else None
    if pad is None or pad.mode != "constant" or min(map(min, pad.sides)) < 0 or any(_filled(operand)):
        return None
    depthwise = weight.shape[1] == 1 and weight.shape[0] == where[3]
    return pad if depthwise and set(for_each(where[2], len(pad.sides))) == {1} else None


def _filled(pad: Node) -> list[Any]:
    """What a pad is asked to fill in, where it says so: numbers other than 0."""
    return [v for v in [*pad.args[2:], *pad.kwargs.values()] if isinstance(v, int | float) and v != 0]


def _norm(module: GraphModule, n: Node, name: str) -> None:
    """Where it takes a map's own statistics; with running ones it is another op."""
    args: list[Any] = list(n.args)
    weight, bias = _constant(module, args[1]), _constant(module, args[2])
    known = all(given is None or got is not None for given, got in ((args[1], weight), (args[2], bias)))
    if known and args[3] is None and args[4] is None and args[5] and not n.kwargs:
        end, act = _activation_after(module, n, False)
        _put(module, name, FusedNorm(weight, bias, float(args[7]), act), (args[0],), end, parts=True)


def _put(
    module: GraphModule, name: str, made: nn.Module, inputs: tuple[Any, ...], end: Node, parts: bool = False
) -> None:
    """`made` in the place of the ops up to `end`; `parts`: there are parts, and all of them together."""
    module.add_submodule(name, made)
    with module.graph.inserting_before(end):  # where everything it reads is there
        fused = module.graph.call_module(name, inputs)
    fused.meta = dict(end.meta)
    if parts:
        fused.meta["bytes"] = 2 * end.meta.get("bytes", 0)
    end.replace_all_uses_with(fused)


def _spend(module: GraphModule) -> None:
    """A sum may be written over its other operand, and a norm over its only one, where one of ours made that and it is
    read last here.
    """
    order = {n: i for i, n in enumerate(module.graph.nodes)}
    made = {n: module.get_submodule(n.target) for n in order if n.op == "call_module"}
    ours = {n: m for n, m in made.items() if isinstance(m, FusedConv | FusedTransposed | FusedNorm)}

    def last(value: Any, n: Node) -> bool:
        others = [u for u in value.users if u is not n] if value in ours else [n]
        return all(order[u] < order[n] and (u in ours or _fresh(u)) for u in others)

    for n, m in ours.items():
        if isinstance(m, FusedNorm) and last(n.args[0], n):
            m.spends = True
            n.meta["bytes"] //= 2  # not "over": the squares take as much on the way
        elif isinstance(m, FusedConv) and len(n.args) > 1 and n.args[0] is not n.args[1] and last(n.args[1], n):
            m.spends, n.meta["over"] = True, n.args[1]


def _fresh(n: Node) -> bool:
    """Whether an op's results share no memory with what it reads."""
    schema = getattr(n.target, "_schema", None)
    return schema is not None and all(r.alias_info is None for r in schema.returns)


def _constant(module: nn.Module, v: Any) -> Tensor | None:
    return getattr(module, str(v.target), None) if isinstance(v, Node) and v.op == "get_attr" else None


def _sum_after(conv: Node) -> tuple[Node, Node | None]:
    """conv -> the sum that alone reads it, and its other operand, a map of the same shape."""
    user = _only_user(conv)
    if user is None or user.target is not aten.add.Tensor or user.kwargs or len(user.args) != 2:
        return conv, None
    other = user.args[1] if user.args[0] is conv else user.args[0]
    if not isinstance(other, Node) or other is conv or not _same_shape(conv, other):
        return conv, None
    return user, other


def _activation_after(module: nn.Module, n: Node, summed: bool) -> tuple[Node, Activation]:
    user = _only_user(n)
    if user is None or user.kwargs:
        return n, ("none", [])
    given: list[Any] = list(user.args[1:])
    if user.target is aten.relu.default:
        return user, ("relu", [])
    if summed:
        return n, ("none", [])
    if user.target is aten.hardtanh.default:
        return user, ("hardtanh", [float(v) for v in [*given, *(-1.0, 1.0)[len(given) :]]])
    if user.target is aten.leaky_relu.default:
        return user, ("leaky_relu", [float(v) for v in given or (0.01,)])
    if user.target is aten.prelu.default and user.args[0] is n:
        slope = _constant(module, given[0])
        if slope is not None and slope.numel() == 1:
            return user, ("leaky_relu", [float(slope)])
    return (user, _ALONE[user.target]) if user.target in _ALONE else (n, ("none", []))


def _only_user(n: Node) -> Node | None:
    return next(iter(n.users)) if len(n.users) == 1 else None


def _same_shape(a: Node, b: Node) -> bool:
    shapes = [getattr(n.meta.get("val"), "shape", None) for n in (a, b)]
    return shapes[0] is not None and str(shapes[0]) == str(shapes[1])  # as text: comparing symbols would fix them
