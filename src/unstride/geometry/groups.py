"""Sites -> groups: ops whose results meet again must move together, or one of them follows, or both stay."""

from collections import defaultdict
from collections.abc import Iterable

from torch.fx import Node

from unstride.geometry.positions import LOST, LostPosition, Trace
from unstride.geometry.sites import CLOSE, Sites
from unstride.graph.capture import Graph


class _UnionFind:
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


class Groups:
    """Sites by group (its lowest number): what has moved each value (`path`), what must `follow`, what is `pinned`."""

    def __init__(self, graph: Graph, trace: Trace, sites: Sites) -> None:
        self.graph, self.trace, self.sites = graph, trace, sites
        self.axes = len(graph.size)
        self._none = (frozenset[int](),) * self.axes
        self.pinned: dict[int, str] = {}
        self._sets = _UnionFind(len(sites.all))
        while not self._propagate():
            pass

    def find(self, i: int) -> int:
        """The group of a site."""
        return self._sets.find(i)

    def members(self) -> dict[int, list[int]]:
        """Group -> its sites, without those that are pinned."""
        out: dict[int, list[int]] = defaultdict(list)
        for i in range(len(self.sites.all)):
            if i not in self.pinned:
                out[self.find(i)].append(i)
        return out

    def weight(self, g: int) -> tuple[float, ...]:
        """Cell size of a group's input, per axis; 0 where it does not subsample that axis."""
        out = [0.0] * self.axes
        for i, s in enumerate(self.sites.all):
            if i not in self.pinned and self.find(i) == g:
                for a in range(self.axes):
                    if s.rate[a] > 1:
                        out[a] = self.sites.cell(s, a)
        return tuple(out)

    def _propagate(self) -> bool:
        """One pass over the graph: True when nothing was joined or pinned, so that paths and follows are final."""
        self.path: dict[Node, tuple[frozenset[int], ...]] = {}
        self.follow: dict[tuple[Node, Node], tuple[set[int], ...]] = {}
        # sites whose thinning still holds, per axis: an upsampled map has moved with a site, but is not thin any more
        self.live: dict[Node, tuple[frozenset[int], ...]] = {}
        changed = False
        for i, s in enumerate(self.sites.all):  # x[:, :, ::2, ::2] is two slices and one layer
            for j in self.sites.at[s.operand]:
                slices = s.kind == "slice" and self.sites.all[j].kind == "slice"
                if slices and i not in self.pinned and j not in self.pinned:
                    changed |= self._sets.join(i, j)
        for n in self.graph.fx.nodes:
            if n.op == "output":
                continue
            paths, live = [], []
            for a in range(self.axes):
                sources = self.trace.sources.get(n, ([],) * self.axes)[a]
                incoming = {source: self._incoming(n, source, a) for source in sources}
                joined = self._join(n, a, incoming)
                if joined is None:
                    return False
                merged, did = joined
                changed |= did
                paths.append(merged)
                live.append(self._live(n, sources, a))
            self.path[n], self.live[n] = tuple(paths), tuple(live)
        return not changed

    def _incoming(self, n: Node, source: Node, a: int) -> frozenset[int]:
        path = self.path.get(source, self._none)[a]
        return frozenset(self.find(i) for i in path | self._here(n, source, a))

    def _here(self, n: Node, source: Node, a: int) -> frozenset[int]:
        return frozenset(
            i
            for i in self.sites.at[n]
            if self.sites.all[i].operand is source and self.sites.all[i].rate[a] > 1 and i not in self.pinned
        )

    def _live(self, n: Node, sources: Iterable[Node], a: int) -> frozenset[int]:
        grid = self.sites.grid(n)
        cell = grid.spacing[a] if grid is not None else 0.0
        found: set[int] = set()
        for source in sources:
            found |= self.live.get(source, self._none)[a] | self._here(n, source, a)
        if not cell:
            return frozenset(found)
        return frozenset(i for i in found if self._made(i, a) <= cell * (1 + CLOSE))

    def _made(self, i: int, a: int) -> float:
        """How far apart the cells lie that a site makes."""
        s = self.sites.all[i]
        return self.sites.cell(s, a) * s.rate[a]

    def _join(self, n: Node, a: int, incoming: dict[Node, frozenset[int]]) -> tuple[frozenset[int], bool] | None:
        """Where values meet, their paths must agree: the same layers, or followers that can be moved by whole cells."""
        if not incoming:
            return frozenset(), False
        changed = False
        union = frozenset().union(*incoming.values())
        first = max(incoming.values(), key=len)
        longest = next(source for source, path in incoming.items() if path is first)
        for source, path in incoming.items():
            first_keys = sorted(self._key(n, longest, g, a) for g in first - path)
            other = sorted(self._key(n, source, g, a) for g in path - first)
            for one, two in zip(first_keys, other, strict=False):
                if one[:3] == two[:3]:
                    changed |= self._sets.join(one[3], two[3])
        if changed:
            incoming = {s: frozenset(self.find(g) for g in p) for s, p in incoming.items()}
            union = frozenset().union(*incoming.values())
        known = [source for source in incoming if self.trace.pos.get(source) is not LOST]
        certain = frozenset().union(*(incoming[source] for source in known))
        for source, path in incoming.items():
            missing = union - path
            if not missing:
                continue
            # what has lost its position may lie anywhere, and an op without a rule may join values in any way
            sound = missing <= certain and n not in self.trace.unknown
            reason = self._cannot_follow(source, missing, a) if sound else LOST.why
            if reason is not None:
                for i in range(len(self.sites.all)):
                    if self.find(i) in missing and i not in self.pinned:
                        self.pinned[i] = f"meets another grid at {self.sites.name(n)}, which {reason}"
                return None
            self.follow.setdefault((n, source), tuple(set() for _ in self._none))[a].update(missing)
        return union, changed

    def _key(self, n: Node, source: Node, g: int, a: int) -> tuple[float, int, bool, int]:
        """What must agree for two groups to be one layer: spacing, rate, and whether the map is still as thin."""
        g = self.find(g)
        site = next(s for i, s in enumerate(self.sites.all) if self.find(i) == g and s.rate[a] > 1)
        live = self.live.get(source, self._none)[a] | self._here(n, source, a)
        popped = g not in {self.find(i) for i in live}
        return round(self.sites.cell(site, a), 3), site.rate[a], popped, g

    def _cannot_follow(self, source: Node, missing: Iterable[int], a: int) -> str | None:
        pos = self.trace.pos.get(source)
        if isinstance(pos, LostPosition):
            return pos.why
        if source in self.trace.places:
            return "says where to read and cannot be moved along"
        grid = self.sites.grid(source)
        if grid is None:
            return "is not a plain grid and cannot be moved along"
        if grid.dims[a] == self.sites.rows(source):
            return "has cells of one image as rows of the batch and cannot be moved along"
        for g in missing:
            cells = self.weight(g)[a] / grid.spacing[a] if grid.spacing[a] else 0.5
            if abs(cells - round(cells)) > CLOSE or round(cells) < 1:
                return "cannot be moved along by whole cells"
        return None
