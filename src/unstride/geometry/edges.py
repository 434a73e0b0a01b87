"""What a moved layer reads at the edges of its map.

Two selections, s and s - R, take the same phase of a layer of rate R. `best_sides` chooses the one that loses less. A
state reads the map s cells later: beyond the map it reads values that no training image had there, and cells at the
other end are no longer read. A 3x3 window with stride 2 and padding 1 on both sides of an even map leaves one cell of
its padding unread at the end, so +1 loses nothing. With TF's "same" padding, which pads only the end, -1 loses nothing:
it pads the start instead.

The outermost cells of a map differ from the others: every op before them read padding there, and the network relies on
that. So where a state is used without a search, the cells at the edge of a large map stay where they are and what lies
between them moves (`pinned_edges`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from unstride.geometry.positions import Site
from unstride.geometry.states import Sides
from unstride.graph.ops import arguments, op_name

LARGE = 48  # cells: the edge of a smaller map is a large part of it, and more cells of a deep layer depend on an edge
_MODES = {"reflection": "reflect", "replication": "replicate", "constant": "constant"}


@dataclass(frozen=True, eq=False)
class Padded:
    """What a pad adds to `source`: (start, end) per axis."""

    source: Node
    sides: tuple[tuple[int, int], ...]
    mode: str


def padded(n: Node) -> Padded | None:
    """A node that pads every spatial axis of a map (B, C, ...), and no other; else None."""
    name = op_name(n)
    if n.op != "call_function" or not ("_pad" in name or name == "pad"):
        return None
    args: Any = arguments(n)
    mode = _MODES.get(name.split("_")[0]) or (args[2] if len(args) > 2 else n.kwargs.get("mode", "constant"))
    pads, value = list(args[1]), n.meta.get("val")
    if value is None or len(pads) != 2 * (value.ndim - 2) or not all(isinstance(v, int) for v in pads):
        return None
    return Padded(args[0], tuple(zip(pads[-2::-2], pads[-1::-2], strict=True)), str(mode))


@dataclass(frozen=True)
class _Reading:
    """How an op reads an axis: cells before the map and beyond its end (below 0: left unread), padding of its own."""

    before: int
    beyond: int
    padding: int

    def loss(self, s: int) -> int:
        """Cells that state s reads beyond any padding of the op, and cells of the map that it does not read."""
        ends = (self.before - s, self.beyond + s)
        return sum(max(0, e - self.padding) if e > 0 else -e for e in ends)


def best_sides(sites: Sequence[Site], rate: Sequence[int], sizes: Sequence[Sequence[int]]) -> Sides:
    """Per axis, the selection for each phase 0 .. R - 1; `sizes` are those of the sites' operands in cells."""
    out = []
    for a, r in enumerate(rate):
        readings = [_reading(s, a, size[a]) for s, size in zip(sites, sizes, strict=True) if s.rate[a] > 1]

        def rank(s: int, readings: list[_Reading] = readings) -> tuple[int, int, int]:
            return sum(x.loss(s) for x in readings), abs(s), -s

        out.append((0, *(min(s, s - r, key=rank) for s in range(1, r))))
    return tuple(out)


def pinned_edges(s: Site, image: Node, size: Sequence[int]) -> tuple[tuple[int, int], ...] | None:
    """Per axis, how many cells at each end of the operand stay when it is moved; None: all of it moves.

    No cell of the image itself stays.
    """
    pad = padded(s.operand)
    sides = ((0, 0),) * len(size) if pad is None else pad.sides
    edge = 0 if (s.operand if pad is None else pad.source) is image else 1
    if s.kind == "resize" or (edge and min(n for n, r in zip(size, s.rate, strict=True) if r > 1) < LARGE):
        return None
    return tuple((low + edge, high + edge) for low, high in sides)


def _reading(s: Site, a: int, cells: int) -> _Reading:
    if s.windows is not None:
        d = next(d for d in range(len(s.windows)) if s.axis(d) == a)
        w = s.windows[d]
        before, beyond, far = w.start, w.end, w.far
        pad = padded(s.operand)
        if pad is not None and pad.mode == "constant":  # "same" padding as TF does it: a pad, then an op without any
            low, high = pad.sides[d]
            before, beyond, far = before + low, beyond + high, far + high
        return _Reading(before, beyond, max(before, far, 0))
    if s.kind == "slice":
        start = _start(s, cells)
        return _Reading(-start, start + (-(-(cells - start) // s.rate[a]) - 1) * s.rate[a] + 1 - cells, 0)
    return _Reading(0, -cells % s.rate[a], 0)


def _start(s: Site, cells: int) -> int:
    """Where a strided slice begins."""
    args: Any = arguments(s.node)
    start = args[2] if len(args) > 2 else s.node.kwargs.get("start")
    return min(max(start + cells if start < 0 else start, 0), cells - 1) if isinstance(start, int) else 0
