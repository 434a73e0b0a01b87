"""Cut a graph at its layers: one small module per level, in two variants (as trained, and with moved operands)."""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

from unstride.engine.movers import Batch, MovedAvgPool, Mover, for_each, stride_of
from unstride.errors import CaptureError
from unstride.geometry.edges import pinned_edges
from unstride.geometry.layers import Shift, Subsampling
from unstride.graph.capture import Graph
from unstride.graph.ops import ancestors, op_name

if TYPE_CHECKING:
    import sympy


def unchanged(module: nn.Module) -> nn.Module:
    """The module itself: a segment that is not rewritten."""
    return module


@dataclass(frozen=True, eq=False)
class Segment:
    """All ops of one level: reads values of lower levels, gives the values that later levels and the caller need.

    `segment.module(rows, states, *values)`: as many values as `inputs`, each a tensor, or Rows where it is lazy.
    """

    level: int
    module: nn.Module
    inputs: tuple[Node, ...]
    lazy: frozenset[Node]  # inputs that only movers read: they are handed over ungathered
    outputs: tuple[Node, ...]
    macs: int
    bytes: int  # live values per row, at the most
    bytes_as_cut: int  # the same before the segment was rewritten to run faster
    largest: int  # bytes of its largest value per row


@dataclass(eq=False)
class Cutter:
    """Builds segments of a graph for a set of wanted nodes. `pinned`: see `geometry.edges`.

    Of a live graph, whatever is computed from its parameters and buffers is computed again at every call.
    """

    graph: Graph
    found: Subsampling
    run_segment: Callable[[nn.Module], nn.Module] = unchanged
    root: nn.Module = field(default_factory=nn.Module)
    folded: dict[Node, Any] = field(default_factory=dict)
    pinned: bool = False

    def __post_init__(self) -> None:
        self.kind: dict[Node, str] = {}
        for n in self.graph.fx.nodes:
            if n is self.graph.image:
                self.kind[n] = "data"
            elif n.op == "placeholder":
                self.kind[n] = "live" if self.graph.is_live else "static"
                self._fold(n, self.graph.constants.get(n.name))
            elif n.op == "call_function":
                self.kind[n] = self._kind(n)
                if self.kind[n] == "static":
                    args, kwargs = torch.fx.map_arg((n.args, n.kwargs), lambda a: self.folded[a])
                    with torch.no_grad():
                        self._fold(n, n.target(*args, **kwargs))

    def _fold(self, n: Node, value: Any) -> None:
        if isinstance(value, Tensor):
            value = value if self.graph.is_live else value.detach()
            self.root.register_buffer(_attribute(n), value, persistent=False)
        self.folded[n] = value

    def _kind(self, n: Node) -> str:
        if isinstance(n.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat):
            return "size"
        if n in self.graph.from_image:
            return "data"
        kinds = {self.kind[i] for i in n.all_input_nodes}
        return "static" if kinds <= {"static"} else "sized" if kinds & {"sized", "size"} else "live"

    def segment(self, level: int, wanted: Iterable[Node], moved: bool, start: Iterable[Node] = ()) -> Segment:
        """Ops of `level` that `wanted` needs; `wanted` may lie on any level, `start` are values taken as given."""
        wanted = list(dict.fromkeys(wanted))
        given = set(start)
        needed = ancestors(wanted, until=given)
        own = [
            n
            for n in self.graph.fx.nodes
            if n in needed
            and n not in given
            and n.op == "call_function"
            and self.kind[n] == "data"
            and self.found.level[n] == level
        ]
        inside = set(own)
        later = {
            n for n in self.graph.fx.nodes if n in needed and self.kind.get(n) == "data" and self.found.level[n] > level
        }
        # What was computed as trained is read again by moved ops, which may read the value before a pad.
        feeds_later = {i for n in later for i in _reads(n, self.moves(n))}
        if not moved:
            feeds_later |= {i for n in later for i in n.all_input_nodes}
        outputs = tuple(n for n in own if n in wanted or n in feeds_later)
        builder = SegmentBuilder(self, moved)
        inputs, lazy = builder.build(own, inside, outputs)
        macs = sum(self.found.trace.macs.get(n, 0) for n in own)
        cut = GraphModule(self.root, builder.out, f"Level{level}")
        as_cut = live_bytes(cut.graph)
        module = self.run_segment(cut)
        graph = module.graph if isinstance(module, GraphModule) else cut.graph
        size, largest = live_bytes(graph), max(n.meta.get("bytes", 0) for n in graph.nodes)
        return Segment(level, module, inputs, lazy, outputs, macs, size, as_cut, largest)

    def size(self, n: Node) -> int:
        """Bytes of a value of one image; a pooling makes indices (int64) beside it, whether they are read or not."""
        size = tensor_bytes(self.shape(n), self.graph.dtype)
        return size + 8 * size // self.graph.dtype.itemsize if "max_pool" in op_name(n) else size

    def shape(self, n: Node) -> Any:
        """Of a value, of one image."""
        return self.found.trace.shapes.get(n)

    def moves(self, n: Node) -> dict[Node, Shift]:
        """By operand. A strided op whose operand's edges are pinned reads it as it always does: it has no site."""
        return {s.operand: self._as_moved(s) for s in self.found.shifts if s.node is n}

    def _as_moved(self, s: Shift) -> Shift:
        pinned = pinned_edges(s.site, self.graph.image, s.grid.size) if self.pinned and s.site is not None else None
        return s if pinned is None else replace(s, site=None, pinned=pinned)


class SegmentBuilder:
    def __init__(self, cutter: Cutter, moved: bool) -> None:
        self.c, self.moved = cutter, moved
        self.out = FxGraph()
        self.env: dict[Node, Node] = {}

    def build(
        self, own: list[Node], inside: set[Node], outputs: tuple[Node, ...]
    ) -> tuple[tuple[Node, ...], frozenset[Node]]:
        self.rows = self.out.placeholder("rows")
        self.states = self.out.placeholder("states")
        moves = {n: (self.c.moves(n) if self.moved else {}) for n in own}
        inputs: dict[Node, bool] = {}
        for n in own:
            for source in _reads(n, moves[n]):
                if self.c.kind[source] == "data" and source not in inside:
                    through = any(
                        (s.site.reads if s.site and s.site.reads else s.operand) is source for s in moves[n].values()
                    )
                    direct = any(i is source and source not in moves[n] for i in n.all_input_nodes)
                    inputs[source] = inputs.get(source, True) and through and not direct
        for source in inputs:
            self.env[source] = self.out.placeholder(source.name)
            self.env[source].meta = {**source.meta, "bytes": 0 if inputs[source] else self.c.size(source)}
        for n in own:
            self.env[n] = self._copy(n, moves[n])
            self.env[n].meta = {**n.meta, "bytes": self.c.size(n)}
        self.out.output(tuple(self.env[n] for n in outputs))
        return tuple(inputs), frozenset(s for s, lazy in inputs.items() if lazy)

    def _value(self, n: Node) -> Any:
        if n in self.env:
            return self.env[n]
        kind = self.c.kind[n]
        if kind == "static" or (kind == "live" and n.op == "placeholder"):
            folded = self.c.folded[n]
            self.env[n] = self.out.get_attr(_attribute(n)) if isinstance(folded, Tensor) else folded
        elif kind == "size":
            self.env[n] = self._size(n.meta["val"].node.expr)
        else:  # sized or live: made of the number of rows and of live tensors alone, so each segment makes its own
            self.env[n] = self.out.node_copy(n, self._value)
        return self.env[n]

    def _size(self, expr: "sympy.Expr") -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Symbol:
            return self.rows
        fold = {"Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "PythonMod": operator.mod}
        f = fold.get(type(expr).__name__) or (operator.mod if type(expr).__name__ == "Mod" else None)
        if f is None:
            raise CaptureError(f"a size that depends on the batch as {expr} is not understood")
        args = [self._size(a) for a in expr.args]
        value = args[0]
        for a in args[1:]:
            value = self.out.call_function(f, (value, a))
        return value

    def _copy(self, n: Node, moves: dict[Node, Shift]) -> Node:
        swap: dict[Node, Node] = {}
        for operand, shift in moves.items():
            source = shift.site.reads if shift.site is not None and shift.site.reads is not None else operand
            mover, shape = self._mover(n, source, shift), self.c.found.trace.shapes[source]
            read = shape if mover.reach is None else (*shape[:2], *mover.reach)  # windows stand out of small maps
            swap[operand] = self._module(mover, (self._value(source), self.states))
            swap[operand].meta["bytes"] = tensor_bytes(read, self.c.graph.dtype)
        site = next((s for s in moves.values() if s.site is not None and s.site.windows is not None), None)
        if site is not None and site.site is not None:
            return self._window_op(n, site, swap[site.operand])
        return self.out.node_copy(n, lambda i: swap.get(i) or self._value(i))

    def _mover(self, n: Node, source: Node, shift: Shift) -> Mover:
        shapes = self.c.found.trace.shapes
        out, stride = list[int](), list[int]()
        if shift.site is not None and shift.site.windows is not None:
            shape = shapes[n][0] if isinstance(shapes[n], list) else shapes[n]
            out, stride = list(shape[2:]), stride_of(n)
        return Mover(shift, batch_of(source), shapes[source][2:], out, stride)

    def _module(self, module: nn.Module, args: tuple[Any, ...]) -> Node:
        name = f"move_{len(list(self.c.root.children()))}"
        self.c.root.add_module(name, module)
        return self.out.call_module(name, args)

    def _window_op(self, n: Node, shift: Shift, prepared: Node) -> Node:
        """The strided op on an extracted window: its padding is in the window already."""
        name = op_name(n)
        if "conv" in name:
            args = [prepared, *n.args[1:]]
            while len(args) < 5:
                args.append([None, None, None, [1], [0]][len(args)])
            words = getattr(n.target, "_overloadname", "") == "padding"  # padding="valid" is an op of its own
            args[4] = "valid" if words else [0] * len(stride_of(n))
            kwargs = {k: v for k, v in n.kwargs.items() if k != "padding"}
            args = [self._value(a) if isinstance(a, Node) and a is not prepared else a for a in args]
            return self.out.call_function(n.target, tuple(args), kwargs)  # type: ignore[arg-type]
        stride = stride_of(n)
        size = for_each(n.args[1], len(stride))
        if "max_pool" in name:
            dilation = for_each(n.args[4] if len(n.args) > 4 else 1, len(stride))
            target: Any = n.target
            return self.out.call_function(target, (prepared, size, stride, [0] * len(stride), dilation, False))
        shapes = self.c.found.trace.shapes
        args = list(n.args) + [None] * (7 - len(n.args))
        pool = MovedAvgPool(
            shift,
            size,
            stride,
            tuple(shapes[n][2:]),
            tuple(shapes[shift.operand][2:]),
            count_pad=True if args[5] is None else bool(args[5]),
            divisor=args[6],  # type: ignore[arg-type]
            ceil=bool(args[4]),
        )
        return self._module(pool, (prepared, self.states))


def batch_of(n: Node) -> Batch:
    """Which dimension of a value counts images, and how many entries each image has there."""
    import sympy  # only where a graph was captured, which has imported it

    value = n.meta["val"]
    for d, size in enumerate(value.shape):
        if isinstance(size, torch.SymInt):
            expr = size.node.expr
            (symbol,) = expr.free_symbols or (None,)
            factor = sympy.simplify(expr / symbol) if symbol is not None else None
            if factor is not None and factor.is_Integer:
                return Batch(d, int(factor))
    raise CaptureError(f"{n.name}: no dimension of {tuple(value.shape)} is a multiple of the batch")


def live_bytes(graph: FxGraph) -> int:
    """The most bytes that one row has alive: every node says in its meta what it takes ("bytes"), and whether it is
    written over a value that it reads ("over").
    """
    owner: dict[Node, Node] = {}  # whose memory a value lies in
    last: dict[Node, Node] = {}
    for n in graph.nodes:
        shared = n.meta.get("over") or (n.all_input_nodes[0] if _is_view(n) else None)
        owner[n] = n if shared is None else owner[shared]
        last.update((owner[source], n) for source in n.all_input_nodes)
    ends: dict[Node, list[Node]] = {}
    for value, reader in last.items():
        ends.setdefault(reader, []).append(value)
    live = peak = sum(n.meta.get("bytes", 0) for n in graph.nodes if n.op == "placeholder")
    for n in graph.nodes:
        if owner[n] is n and n.op != "placeholder":
            live += n.meta.get("bytes", 0)
            peak = max(peak, live)
        live -= sum(value.meta.get("bytes", 0) for value in ends.get(n, ()))
    return max(peak, 1)


def _is_view(n: Node) -> bool:
    """Whether a value lies in the memory of the first value that its op reads."""
    if n.target is operator.getitem:
        return True
    schema = getattr(n.target, "_schema", None)
    shares = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return shares and bool(n.all_input_nodes) and op_name(n) not in ("reshape", "contiguous", "to", "flatten")


def _attribute(n: Node) -> str:
    """Where a constant is kept; fx names such as `to` or `half` are taken by nn.Module."""
    return f"constant_{n.name}"


def _reads(n: Node, moves: dict[Node, Shift]) -> list[Node]:
    """What a node reads: its inputs, or, through a mover that swallows a pad, the value before the pad."""
    out = []
    for i in n.all_input_nodes:
        shift = moves.get(i)
        out.append(
            shift.site.reads if shift is not None and shift.site is not None and shift.site.reads is not None else i
        )
    return out


def tensor_bytes(shape: Any, dtype: torch.dtype) -> int:
    if isinstance(shape, tuple):
        count = 1
        for s in shape:
            count *= s
        return count * dtype.itemsize
    return sum(tensor_bytes(s, dtype) for s in shape) if isinstance(shape, list) else 0
