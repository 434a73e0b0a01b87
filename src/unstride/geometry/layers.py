"""Graph -> Subsampling: strided ops joined into layers, and everything that was left out, with its reason."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from unstride.errors import NothingToSubsample
from unstride.geometry.grids import Grid, grid_of
from unstride.geometry.positions import (
    Lost,
    Pos,
    Site,
    Trace,
    Window,
    has_axis,
)
from unstride.geometry.states import StateSpace
from unstride.geometry.walk import walk
from unstride.graph.capture import Graph
from unstride.graph.ops import ancestors, op_name

_CLOSE = 1e-2
_NO_RULE = "mixes neighbouring positions in a way without a rule"


@dataclass(frozen=True)
class SubsamplingLayer:
    """A group of strided ops that move together. `cost`: MACs behind it, as a share of a plain forward."""

    index: int
    rate: tuple[int, int]
    ops: tuple[tuple[str, str], ...]  # (module path, kind)
    stride: tuple[int, int]  # cumulative, after this layer
    map: tuple[int, int]
    cost: float

    def __str__(self) -> str:
        ops = " + ".join(path for path, _ in self.ops)
        return (
            f"{self.index}: x{self.rate[0]}x{self.rate[1]}  {ops}  (stride {self.stride[0]}, "
            f"{self.map[0]}x{self.map[1]} cells, one more state costs {self.cost:.0%})"
        )


@dataclass(frozen=True)
class LeftOut:
    """A strided op that is no layer, and why."""

    op: str
    reason: str


@dataclass(frozen=True, eq=False)
class Shift:
    """`node` reads `operand` moved by sum_l s_l * steps[l] cells (layers from 1); sites and followers alike."""

    node: Node
    operand: Node
    steps: tuple[dict[int, int], dict[int, int]]
    grid: Grid
    site: Site | None = None


@dataclass(frozen=True, eq=False)
class Feature:
    """The value that states are aggregated at: its node, its grid (None: no grid) and which layers move it."""

    node: Node
    grid: Grid | None


@dataclass(frozen=True, eq=False)
class Subsampling:
    """What a graph throws away, and all that the engine must know to get it back."""

    layers: tuple[SubsamplingLayer, ...]
    left_out: tuple[LeftOut, ...]
    unknown: tuple[str, ...]
    shifts: tuple[Shift, ...]
    level: dict[Node, int]
    paths: dict[Node, tuple[frozenset[int], frozenset[int]]]  # layers that have moved a value, per axis
    strides: tuple[tuple[float, float], ...]  # cell size before each layer, in pixels
    trace: Trace = field(repr=False)

    @property
    def space(self) -> StateSpace:
        return StateSpace(tuple(layer.rate for layer in self.layers), self.strides)

    def grid(self, node: Node) -> Grid | None:
        pos = self.trace.pos.get(node)
        return grid_of(pos) if isinstance(pos, Pos) else None

    def require_layers(self) -> None:
        """Raises NothingToSubsample, with every reason there is, where the model has no layer."""
        if not self.layers:
            reasons = [f"{x.op}: {x.reason}" for x in self.left_out]
            reasons += [f"{u}; strided ops after it cannot be used" for u in self.unknown]
            more = [f"and {len(reasons) - 8} more"] if len(reasons) > 8 else []
            why = "; ".join(reasons[:8] + more) or "no strided op leads to a map that the output is made from"
            raise NothingToSubsample(f"this model throws nothing away that could be moved ({why}). Use it as it is.")


class _Groups:
    """Union-find over sites."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def join(self, i: int, j: int) -> bool:
        i, j = self.find(i), self.find(j)
        self.parent[max(i, j)] = min(i, j)
        return i != j


def find_layers(graph: Graph, trace: Trace | None = None) -> Subsampling:
    """Analyse a graph: what it subsamples, which ops move together, what cannot be used."""
    return _Analysis(graph, trace or walk(graph)).run()


class _Analysis:
    def __init__(self, graph: Graph, trace: Trace) -> None:
        self.graph, self.trace = graph, trace
        self.grids: dict[Node, Grid | None] = {}
        self.left: dict[str, str] = {}
        self.sites = [s for s in self._all_sites() if self._usable(s)]
        self.order = {n: i for i, n in enumerate(graph.fx.nodes)}
        self.sites.sort(key=lambda s: self.order[s.node])
        self.at: dict[Node, list[int]] = defaultdict(list)
        for i, s in enumerate(self.sites):
            self.at[s.node].append(i)
        self.pinned: dict[int, str] = {}
        self.cells = [  # of what each site makes, per axis
            tuple(self.grid(s.operand).spacing[a] * s.rate[a] for a in (0, 1))  # type: ignore[union-attr]
            for s in self.sites
        ]

    def grid(self, n: Node) -> Grid | None:
        if n not in self.grids:
            pos = self.trace.pos.get(n)
            self.grids[n] = grid_of(pos) if isinstance(pos, Pos) else None
        return self.grids[n]

    def name(self, n: Node) -> str:
        return f"{module_path(n)} ({op_name(n)})"

    # -- sites
    def _all_sites(self) -> list[Site]:
        sites = [self._through_pad(s) for s in self.trace.sites]
        for n in self.trace.merges:  # several ops may mix what one op has cut into patches
            seen = {(s.node, s.operand) for s in sites}
            sites += [s for s in self._merge_sites(n) if (s.node, s.operand) not in seen]
        return sites

    def _merge_sites(self, n: Node) -> list[Site]:
        """Patch merging by reshapes: the op that mixes neighbours, and the last plain grid before it."""
        pos = self.trace.pos[n]
        out = self.grid(n)
        if not isinstance(pos, Pos) or out is None:
            self.left[self.name(n)] = _NO_RULE
            return []
        found: list[Site] = []

        def back(node: Node, seen: int) -> None:
            for source in dict.fromkeys([*self.trace.sources[node][0], *self.trace.sources[node][1]]):
                grid = self.grid(source)
                if grid is None and seen < 32 and source.op == "call_function":
                    if self.left.get(self.name(source)) == _NO_RULE:  # a part of this merging (rows, then columns)
                        del self.left[self.name(source)]
                    back(source, seen + 1)
                elif grid is not None:
                    ratio = [o / g if g else 1.0 for o, g in zip(out.spacing, grid.spacing, strict=True)]
                    rate = (max(round(ratio[0]), 1), max(round(ratio[1]), 1))
                    if max(ratio) < 1.5:  # as fine as before: branches that lie a little apart
                        continue
                    if all(abs(r - k) < _CLOSE * r or r < 1.5 for r, k in zip(ratio, rate, strict=True)):
                        found.append(Site(node, source, "merge", rate))
                    else:
                        self.left[self.name(n)] = _NO_RULE

        back(n, 0)
        return list({(s.node, s.operand): s for s in found}.values())

    def _through_pad(self, s: Site) -> Site:
        """A reflecting (replicating, circular) pad is part of the window behind it: it goes on beyond its own end."""
        p = s.operand
        if (
            s.windows is None
            or p.op != "call_function"
            or op_name(p) not in ("pad", "reflection_pad2d", "replication_pad2d")
        ):
            return s
        mode = {"reflection_pad2d": "reflect", "replication_pad2d": "replicate"}.get(op_name(p)) or (
            p.args[2] if len(p.args) > 2 else p.kwargs.get("mode", "constant")
        )
        read: Any = p.args[0]
        pads = [int(v) for v in p.args[1]]  # type: ignore[union-attr, arg-type]
        if mode == "constant" or len(pads) != 4 or any(w.start for w in s.windows):
            return s
        wy, wx = s.windows
        windows = (replace(wy, start=pads[2], end=wy.end + pads[3]), replace(wx, start=pads[0], end=wx.end + pads[1]))
        return replace(s, windows=windows, reads=read, mode=str(mode))

    def _usable(self, s: Site) -> bool:
        grid = self.grid(s.operand)
        if grid is not None and (s.windows is None or (not grid.tokens and {*grid.dims} <= {2, 3, None})):
            return True
        self.left[self.name(s.node)] = "its input is not a plain map of the image (windows or mixed positions)"
        return False

    # -- paths and groups
    def run(self) -> Subsampling:
        self.groups = _Groups(len(self.sites))
        while not self._settle():
            pass
        wanted = self._wanted()
        members: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self.sites)):
            if i not in self.pinned:
                members[self.groups.find(i)].append(i)
        chosen = sorted((g for g in members if g in wanted), key=lambda g: (max(self._weight(g)), members[g][0]))
        index = {g: k for k, g in enumerate(chosen, 1)}
        for i, s in enumerate(self.sites):
            if i in self.pinned:
                self.left[self.name(s.node)] = self.pinned[i]
            elif self.groups.find(i) not in index:
                self.left[self.name(s.node)] = "side path: its grid never returns to the main path (keys/values, gates)"
        for n, reason in self.trace.passed.items():
            self.left.setdefault(self.name(n), reason)
        shifts = self._shifts(index)
        level = self._levels(shifts)
        self._cost = self._behind(level, len(chosen))
        layers = tuple(self._layer(k, members[g], index) for g, k in index.items())
        paths = {
            n: tuple(frozenset(index[g] for g in map(self.groups.find, p) if g in index) for p in pair)
            for n, pair in self.path.items()
        }
        return Subsampling(
            layers=layers,
            left_out=tuple(LeftOut(op, reason) for op, reason in sorted(self.left.items())),
            unknown=tuple(f"{self.name(n)}: {why}" for n, why in self.trace.unknown.items()),
            shifts=tuple(shifts),
            level=level,
            paths=paths,  # type: ignore[arg-type]
            strides=tuple(self._weight(g) for g in chosen),
            trace=self.trace,
        )

    def _weight(self, g: int) -> tuple[float, float]:
        """Cell size of a group's input, per axis; 0 where it does not subsample that axis."""
        out = [0.0, 0.0]
        for i, s in enumerate(self.sites):
            if i not in self.pinned and self.groups.find(i) == g:
                for a in (0, 1):
                    if s.rate[a] > 1:
                        out[a] = self.grid(s.operand).spacing[a]  # type: ignore[union-attr]
        return out[0], out[1]

    def _settle(self) -> bool:
        """One pass over the graph: True when nothing was joined or pinned, so that paths and follows are final."""
        self.path: dict[Node, tuple[frozenset[int], frozenset[int]]] = {}
        self.follow: dict[tuple[Node, Node], tuple[set[int], set[int]]] = {}
        # sites whose thinning still holds, per axis: an upsampled map has moved with a site, but is not thin any more
        self.live: dict[Node, tuple[frozenset[int], frozenset[int]]] = {}
        changed = False
        for i, s in enumerate(self.sites):  # x[:, :, ::2, ::2] is two slices and one layer
            for j in self.at[s.operand]:
                if (
                    s.kind == "slice"
                    and self.sites[j].kind == "slice"
                    and i not in self.pinned
                    and j not in self.pinned
                ):
                    changed |= self.groups.join(i, j)
        for n in self.graph.fx.nodes:
            if n.op == "output":
                continue
            paths, live = [], []
            for a in (0, 1):
                sources = self.trace.sources.get(n, ([], []))[a]
                incoming = {source: self._incoming(n, source, a) for source in sources}
                joined = self._join(n, a, incoming)
                if joined is None:
                    return False
                merged, did = joined
                changed |= did
                paths.append(merged)
                live.append(self._live(n, sources, a))
            self.path[n] = (paths[0], paths[1])
            self.live[n] = (live[0], live[1])
        return not changed

    def _incoming(self, n: Node, source: Node, a: int) -> frozenset[int]:
        path = self.path.get(source, (frozenset(), frozenset()))[a]
        return frozenset(self.groups.find(i) for i in path | self._here(n, source, a))

    def _here(self, n: Node, source: Node, a: int) -> frozenset[int]:
        return frozenset(
            i
            for i in self.at[n]
            if self.sites[i].operand is source and self.sites[i].rate[a] > 1 and i not in self.pinned
        )

    def _live(self, n: Node, sources: Iterable[Node], a: int) -> frozenset[int]:
        grid = self.grid(n)
        cell = grid.spacing[a] if grid is not None else 0.0
        found: set[int] = set()
        for source in sources:
            found |= self.live.get(source, (frozenset(), frozenset()))[a] | self._here(n, source, a)
        return frozenset(i for i in found if not cell or self.cells[i][a] <= cell * (1 + _CLOSE))

    def _join(self, n: Node, a: int, incoming: dict[Node, frozenset[int]]) -> tuple[frozenset[int], bool] | None:
        """Where values meet, their paths must agree: the same layers, or followers that can be moved by whole cells."""
        if not incoming:
            return frozenset(), False
        changed = False
        union = frozenset().union(*incoming.values())
        first = max(incoming.values(), key=len)
        longest = next(source for source, path in incoming.items() if path is first)
        for source, path in incoming.items():
            mine = sorted(self._key(n, longest, g, a) for g in first - path)
            other = sorted(self._key(n, source, g, a) for g in path - first)
            for one, two in zip(mine, other, strict=False):
                if one[:3] == two[:3]:
                    changed |= self.groups.join(one[3], two[3])
        if changed:
            incoming = {s: frozenset(self.groups.find(g) for g in p) for s, p in incoming.items()}
            union = frozenset().union(*incoming.values())
        for source, path in incoming.items():
            missing = union - path
            if not missing:
                continue
            reason = self._cannot_follow(source, missing, a)
            if reason is not None:
                for i in range(len(self.sites)):
                    if self.groups.find(i) in missing and i not in self.pinned:
                        self.pinned[i] = f"meets another grid at {self.name(n)}, which {reason}"
                return None
            self.follow.setdefault((n, source), (set(), set()))[a].update(missing)
        return union, changed

    def _key(self, n: Node, source: Node, g: int, a: int) -> tuple[float, int, bool, int]:
        """What must agree for two groups to be one layer: spacing, rate, and whether the map is still as thin."""
        g = self.groups.find(g)
        site = next(s for i, s in enumerate(self.sites) if self.groups.find(i) == g and s.rate[a] > 1)
        live = self.live.get(source, (frozenset(), frozenset()))[a] | self._here(n, source, a)
        popped = g not in {self.groups.find(i) for i in live}
        return round(self.grid(site.operand).spacing[a], 3), site.rate[a], popped, g  # type: ignore[union-attr]

    def _cannot_follow(self, source: Node, missing: Iterable[int], a: int) -> str | None:
        pos = self.trace.pos.get(source)
        if isinstance(pos, Lost):
            return pos.why
        grid = self.grid(source)
        if grid is None:
            return "is not a plain grid and cannot be moved along"
        for g in missing:
            cells = self._weight(g)[a] / grid.spacing[a] if grid.spacing[a] else 0.5
            if abs(cells - round(cells)) > _CLOSE or round(cells) < 1:
                return "cannot be moved along by whole cells"
        return None

    # -- what is on the main path
    def _wanted(self) -> set[int]:
        """Groups that move a value from which the outputs are made (not those that act through gates or keys only)."""
        out: set[int] = set()
        for n in self.final_maps():
            out |= {self.groups.find(i) for p in self.path[n] for i in p}
        return out

    def final_maps(self) -> list[Node]:
        """Values with a position that are outputs, or that are last seen by a node from which no position returns."""
        leaves = [leaf for leaf in self.graph.leaves if isinstance(leaf, Node)]
        returns: set[Node] = set()  # nodes from which a value with a position can still be reached
        for n in reversed(list(self.graph.fx.nodes)):
            if self._placed(n) or any(u in returns for u in n.users):
                returns.add(n)
        needed = ancestors(leaves)
        return [
            n
            for n in self.graph.fx.nodes
            if n in needed
            and self._placed(n)
            and (n in leaves or any(u in needed and u not in returns for u in n.users if u.op != "output"))
        ]

    def _placed(self, n: Node) -> bool:
        p = self.trace.pos.get(n)
        parts = p if isinstance(p, list) else [p]
        return any(has_axis(q, 0) or has_axis(q, 1) for q in parts)

    # -- what the engine needs
    def _shifts(self, index: dict[int, int]) -> list[Shift]:
        shifts = []
        for i, s in enumerate(self.sites):
            k = index.get(self.groups.find(i))
            if k is not None and i not in self.pinned:
                steps = tuple({k: 1} if r > 1 else {} for r in s.rate)
                shifts.append(Shift(s.node, s.operand, steps, self.grid(s.operand), s))  # type: ignore[arg-type]
        for (n, source), axes in self.follow.items():
            grid = self.grid(source)
            assert grid is not None
            steps = tuple(
                {
                    index[g]: round(self._weight(g)[a] / grid.spacing[a])
                    for g in map(self.groups.find, axes[a])
                    if g in index
                }
                for a in (0, 1)
            )
            if any(steps):
                shifts.append(Shift(n, source, steps, grid))  # type: ignore[arg-type]
        return shifts

    def _levels(self, shifts: list[Shift]) -> dict[Node, int]:
        own: dict[Node, int] = defaultdict(int)
        for s in shifts:
            own[s.node] = max(own[s.node], *s.steps[0], *s.steps[1], 0)
        level: dict[Node, int] = {}
        for n in self.graph.fx.nodes:
            level[n] = max([own[n], *(level[i] for i in n.all_input_nodes)], default=0)
        return level

    def _behind(self, level: dict[Node, int], layers: int) -> list[float]:
        total = sum(self.trace.macs.values()) or 1
        needed = ancestors([leaf for leaf in self.graph.leaves if isinstance(leaf, Node)])
        behind = [0] * (layers + 1)
        for n, count in self.trace.macs.items():
            if n in needed:
                for k in range(level[n] + 1):
                    behind[k] += count
        return [b / total for b in behind]

    def _layer(self, k: int, members: list[int], index: dict[int, int]) -> SubsamplingLayer:
        sites = [self.sites[i] for i in members]
        rate = tuple(max(s.rate[a] for s in sites) for a in (0, 1))
        weight = self._weight(self.groups.find(members[0]))
        stride = tuple(round(weight[a] * rate[a]) if weight[a] else 1 for a in (0, 1))
        size = next((g.size for s in sites if (g := self._after(s)) is not None), (0, 0))
        ops = tuple(dict.fromkeys((module_path(s.node), s.kind) for s in sites))
        return SubsamplingLayer(k, rate, ops, stride, size, self._cost[k])  # type: ignore[arg-type]

    def _after(self, s: Site) -> Grid | None:
        if s.kind != "merge":
            return self.grid(s.node)
        operand = self.grid(s.operand)
        assert operand is not None
        return replace(operand, size=(-(-operand.size[0] // s.rate[0]), -(-operand.size[1] // s.rate[1])))


def module_path(n: Node) -> str:
    """Where in the user's model an op lives: `layer2.0.downsample.0`."""
    stack = n.meta.get("nn_module_stack")
    if not stack:
        return n.name
    path = str(list(stack.values())[-1][0])
    return path.removeprefix("L__self___").removeprefix("L['self'].") or n.name


def mostly_convolutions(found: Subsampling) -> bool:
    macs = found.trace.macs
    return sum(m for n, m in macs.items() if op_name(n) == "conv2d") >= 0.5 * max(1, sum(macs.values()))


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


__all__ = ["Feature", "LeftOut", "Shift", "Subsampling", "SubsamplingLayer", "Window", "feature_node", "find_layers"]
