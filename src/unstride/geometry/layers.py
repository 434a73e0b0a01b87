"""What a graph subsamples, in nouns: its layers, what was left out, which operands a selection moves."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from torch.fx import Node

from unstride.errors import NothingToSubsample
from unstride.geometry.grids import Grid, by, grid_at
from unstride.geometry.positions import Pos, Site, Trace
from unstride.geometry.states import Sides, StateSpace
from unstride.graph.capture import Graph
from unstride.graph.ops import ancestors, op_name


@dataclass(frozen=True)
class SubsamplingLayer:
    """A group of strided ops that move together. `cost`: MACs behind it, as a share of all.

    `sides`: per axis, the selection that stands for each phase where its ops lose least, s or s - R.
    """

    index: int
    rate: tuple[int, ...]
    ops: tuple[tuple[str, str], ...]  # (module path, kind)
    stride: tuple[int, ...]  # cumulative, after this layer
    map: tuple[int, ...]
    cost: float
    sides: Sides

    def __str__(self) -> str:
        ops = " + ".join(path for path, _ in self.ops)
        stride = by(self.stride if len({*self.stride}) > 1 else self.stride[:1])
        return (
            f"{self.index}: x{by(self.rate)}  {ops}  (stride {stride}, "
            f"{by(self.map)} cells, one more state costs {self.cost:.0%}{self._side()})"
        )

    def _side(self) -> str:
        """Shown only where it is not the paper's."""
        before = [min(s) < 0 for s in self.sides]
        shown = " x ".join("/".join(map(str, s)) for s in self.sides)
        return f", loses least at {shown}" if any(before) else ""


@dataclass(frozen=True)
class SkippedOp:
    """A strided op that is no layer, and why."""

    op: str
    reason: str


@dataclass(frozen=True, eq=False)
class Shift:
    """`node` reads `operand` moved by sum_l s_l * steps[l] cells (layers from 1); sites and followers alike.

    `pinned`: cells at each end of an axis that stay, see `edges.pinned_edges`.
    """

    node: Node
    operand: Node
    steps: tuple[dict[int, int], ...]  # per axis
    grid: Grid
    site: Site | None = None
    pinned: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, eq=False)
class Subsampling:
    """The activations that a graph discards, and what the engine must know to compute them."""

    layers: tuple[SubsamplingLayer, ...]
    left_out: tuple[SkippedOp, ...]
    unknown: tuple[str, ...]
    shifts: tuple[Shift, ...]
    level: dict[Node, int]
    paths: dict[Node, tuple[frozenset[int], ...]]  # layers that have moved a value, per axis
    strides: tuple[tuple[float, ...], ...]  # cell size before each layer, in pixels
    trace: Trace = field(repr=False)

    @cached_property
    def space(self) -> StateSpace:
        rates, sides = (layer.rate for layer in self.layers), (layer.sides for layer in self.layers)
        return StateSpace(tuple(rates), self.strides, tuple(sides))

    def grid(self, node: Node) -> Grid | None:
        return grid_at(self.trace, node)

    def uncut(self) -> "Subsampling":
        """The same network with nothing to move in it."""
        return replace(self, layers=(), shifts=(), strides=(), level=dict.fromkeys(self.level, 0))

    @property
    def mostly_convolutions(self) -> bool:
        """Is at least half of the work done by convolutions?"""
        macs = self.trace.macs
        return sum(m for n, m in macs.items() if op_name(n).startswith("conv")) >= 0.5 * max(1, sum(macs.values()))

    def require_layers(self) -> None:
        """Raises NothingToSubsample, with all reasons, where the model has no layer."""
        if not self.layers:
            reasons = [f"{x.op}: {x.reason}" for x in self.left_out]
            reasons += [f"{u}; strided ops after it cannot be used" for u in self.unknown]
            more = [f"and {len(reasons) - 8} more"] if len(reasons) > 8 else []
            why = "; ".join(reasons[:8] + more) or "no strided op leads to a map that the output is made from"
            raise NothingToSubsample(f"this model throws nothing away that could be moved ({why}). Use it as it is.")


def module_path(n: Node) -> str:
    """Where in the user's model an op lives: `layer2.0.downsample.0`."""
    stack = n.meta.get("nn_module_stack")
    if not stack:
        return n.name
    path = str(list(stack.values())[-1][0])
    return path.removeprefix("L__self___").removeprefix("L['self'].") or n.name


def feature_node(graph: Graph, found: Subsampling, leaf: Node) -> Node | None:
    """The last single value with a position through which everything to `leaf` must pass; None if there is none."""
    needed = ancestors([leaf])
    nodes = [n for n in graph.fx.nodes if n in needed and n in graph.from_image]
    last: dict[Node, int] = {}
    order = {n: i for i, n in enumerate(nodes)}
    for n in nodes:
        for i in n.all_input_nodes:
            last[i] = order[n]
    best = None
    live: set[Node] = set()
    for i, n in enumerate(nodes):
        live = {v for v in live if last.get(v, -1) > i}
        if last.get(n, -1) > i or n is leaf:
            live.add(n)
        if live == {n} and isinstance(found.trace.pos.get(n), Pos):
            best = n
    return best
