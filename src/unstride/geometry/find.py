"""Graph -> Subsampling: strided ops joined into layers, and everything that was left out, with its reason."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Node

from unstride.geometry.edges import best_sides
from unstride.geometry.grids import Grid
from unstride.geometry.groups import Groups
from unstride.geometry.layers import Shift, SkippedOp, Subsampling, SubsamplingLayer, module_path
from unstride.geometry.positions import LostPosition, Pos, Site, Trace
from unstride.geometry.sites import Sites
from unstride.geometry.walk import walk
from unstride.graph.capture import Graph
from unstride.graph.ops import ancestors

_SIDE_PATH = "side path: its grid never returns to the main path (keys/values, gates)"


def find_layers(graph: Graph, trace: Trace | None = None) -> Subsampling:
    """Analyse a graph: what it subsamples, which ops move together, what cannot be used."""
    trace = trace or walk(graph)
    sites = Sites(graph, trace)
    groups = Groups(graph, trace, sites)
    wanted, members = _wanted(graph, trace, groups), groups.members()
    chosen = sorted((g for g in members if g in wanted), key=lambda g: (max(groups.weight(g)), members[g][0]))
    index = {g: k for k, g in enumerate(chosen, 1)}
    shifts = [*_moved(groups, index), *_following(groups, index)]
    level = _levels(graph, shifts)
    behind = _behind(graph, trace, level, len(chosen))
    paths = {
        n: tuple(frozenset(index[g] for g in map(groups.find, p) if g in index) for p in pair)
        for n, pair in groups.path.items()
    }
    return Subsampling(
        layers=tuple(_layer(groups, k, members[g], behind[k]) for g, k in index.items()),
        left_out=tuple(SkippedOp(op, reason) for op, reason in sorted(_left_out(groups, index).items())),
        unknown=tuple(f"{sites.name(n)}: {why}" for n, why in trace.unknown.items()),
        shifts=tuple(shifts),
        level=level,
        paths=paths,
        strides=tuple(groups.weight(g) for g in chosen),
        trace=trace,
    )


def _left_out(groups: Groups, index: dict[int, int]) -> dict[str, str]:
    sites = groups.sites
    left = dict(sites.left)
    for i, s in enumerate(sites.all):
        if i in groups.pinned:
            left[sites.name(s.node)] = groups.pinned[i]
        elif groups.find(i) not in index:
            left[sites.name(s.node)] = _SIDE_PATH
    for n, reason in sites.trace.passed.items():
        left.setdefault(sites.name(n), reason)
    return left


# ---------------------------------------------------------------- what is on the main path
def _wanted(graph: Graph, trace: Trace, groups: Groups) -> set[int]:
    """Groups that move a value from which the outputs are made (not those that act through gates or keys only)."""
    out: set[int] = set()
    for n in _final_maps(graph, trace):
        out |= {groups.find(i) for p in groups.path[n] for i in p}
    return out


def _final_maps(graph: Graph, trace: Trace) -> list[Node]:
    """Values with a position that are outputs, or that are last read by a node from which no position returns."""
    leaves = [leaf for leaf in graph.leaves if isinstance(leaf, Node)]
    returns: set[Node] = set()  # nodes from which a value with a position can still be reached
    for n in reversed(list(graph.fx.nodes)):
        if _placed(trace, n) or any(u in returns for u in n.users):
            returns.add(n)
    needed = ancestors(leaves)
    return [
        n
        for n in graph.fx.nodes
        if n in needed
        and _placed(trace, n)
        and (n in leaves or any(u in needed and u not in returns for u in n.users if u.op != "output"))
    ]


def _placed(trace: Trace, n: Node) -> bool:
    p = trace.pos.get(n)
    parts = p if isinstance(p, list) else [p]
    return any(isinstance(q, Pos | LostPosition) for q in parts)


# ---------------------------------------------------------------- what the engine needs
def _moved(groups: Groups, index: dict[int, int]) -> Iterator[Shift]:
    """The sites of the layers: each reads its operand moved by its layer's selection."""
    for i, s in enumerate(groups.sites.all):
        k = index.get(groups.find(i))
        if k is not None and i not in groups.pinned:
            steps = tuple({k: 1} if r > 1 else {} for r in s.rate)
            grid = groups.sites.grid(s.operand)
            assert grid is not None  # or it would not be usable
            yield Shift(s.node, s.operand, steps, grid, s)


def _following(groups: Groups, index: dict[int, int]) -> Iterator[Shift]:
    """Values that meet moved ones without having been moved: they go along, by whole cells."""
    for (n, source), axes in groups.follow.items():
        grid = groups.sites.grid(source)
        assert grid is not None
        steps = tuple(
            {index[g]: round(groups.weight(g)[a] / grid.spacing[a]) for g in map(groups.find, axes[a]) if g in index}
            for a in range(groups.axes)
        )
        if any(steps):
            yield Shift(n, source, steps, grid)


def _levels(graph: Graph, shifts: list[Shift]) -> dict[Node, int]:
    """The last layer that each value depends on."""
    own: dict[Node, int] = defaultdict(int)
    for s in shifts:
        own[s.node] = max([own[s.node], *(layer for axis in s.steps for layer in axis)])
    level: dict[Node, int] = {}
    for n in graph.fx.nodes:
        level[n] = max([own[n], *(level[i] for i in n.all_input_nodes)], default=0)
    return level


def _behind(graph: Graph, trace: Trace, level: dict[Node, int], layers: int) -> list[float]:
    """MACs that depend on each layer, as a share of all."""
    total = sum(trace.macs.values()) or 1
    needed = ancestors([leaf for leaf in graph.leaves if isinstance(leaf, Node)])
    behind = [0] * (layers + 1)
    for n, count in trace.macs.items():
        if n in needed:
            for k in range(level[n] + 1):
                behind[k] += count
    return [b / total for b in behind]


def _layer(groups: Groups, k: int, members: list[int], cost: float) -> SubsamplingLayer:
    sites = [groups.sites.all[i] for i in members]
    axes = range(groups.axes)
    rate = tuple(max(s.rate[a] for s in sites) for a in axes)
    sizes = [g.size for s in sites if (g := _after(groups.sites, s)) is not None]
    size = tuple(map(min, *sizes)) if len(sizes) > 1 else (sizes or [(0,) * groups.axes])[0]  # slices come one by one
    ops = tuple(dict.fromkeys((module_path(s.node), s.kind) for s in sites))
    read = [g for s in sites if (g := groups.sites.grid(s.operand)) is not None]
    stride = tuple(round(max(groups.sites.cell(s, a) * s.rate[a] for s in sites)) or 1 for a in axes)
    sides = best_sides(sites, rate, [g.size for g in read])
    return SubsamplingLayer(k, rate, ops, stride, size, cost, sides)


def _after(sites: Sites, s: Site) -> Grid | None:
    """The grid that a site makes."""
    if s.kind != "merge":
        return sites.grid(s.node)
    operand = sites.grid(s.operand)
    assert operand is not None
    return replace(operand, size=tuple(-(-n // r) for n, r in zip(operand.size, s.rate, strict=True)))
