"""Trace -> sites: the ops that thin the grid out and can be moved, and why the others cannot."""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from unstride.geometry.edges import padded
from unstride.geometry.grids import Grid, grid_at
from unstride.geometry.layers import module_path
from unstride.geometry.positions import Pos, Site, Trace
from unstride.graph.capture import Graph
from unstride.graph.ops import op_name

CLOSE = 1e-2  # cell sizes that agree, as a share
_NO_RULE = "mixes neighbouring positions in a way without a rule"


class Sites:
    """`all` usable sites in the order of the graph, `at` a node (by number); `left`: what is none, and why."""

    def __init__(self, graph: Graph, trace: Trace) -> None:
        self.trace, self.left = trace, dict[str, str]()
        self._grids: dict[Node, Grid | None] = {}
        order = {n: i for i, n in enumerate(graph.fx.nodes)}
        self.all = sorted((s for s in self._found() if self._usable(s)), key=lambda s: order[s.node])
        self.at: dict[Node, list[int]] = defaultdict(list)
        for i, s in enumerate(self.all):
            self.at[s.node].append(i)

    def grid(self, n: Node) -> Grid | None:
        if n not in self._grids:
            self._grids[n] = grid_at(self.trace, n)
        return self._grids[n]

    def cell(self, s: Site, a: int) -> float:
        """How far apart the cells lie that a site reads, along an axis."""
        grid = self.grid(s.operand)
        assert grid is not None  # or it would not be usable
        return grid.spacing[a]

    def name(self, n: Node) -> str:
        return f"{module_path(n)} ({op_name(n)})"

    def _found(self) -> list[Site]:
        sites = [self._through_pad(s) for s in self.trace.sites]
        for n in self.trace.merges:  # several ops may mix what one op has cut into patches
            seen = {(s.node, s.operand) for s in sites}
            sites += [s for s in self._merges(n) if (s.node, s.operand) not in seen]
        return sites

    def _merges(self, n: Node) -> list[Site]:
        """Patch merging by reshapes: the op that mixes neighbours, and the last plain grid before it."""
        pos = self.trace.pos[n]
        out = self.grid(n)
        if not isinstance(pos, Pos) or out is None:
            self.left[self.name(n)] = _NO_RULE
            return []
        found: list[Site] = []

        def back(node: Node, seen: int) -> None:
            for source in dict.fromkeys(n for axis in self.trace.sources[node] for n in axis):
                grid = self.grid(source)
                if grid is None and seen < 32 and source.op == "call_function":
                    if self.left.get(self.name(source)) == _NO_RULE:  # a part of this merging (rows, then columns)
                        del self.left[self.name(source)]
                    back(source, seen + 1)
                elif grid is not None:
                    ratio = [o / g if g else 1.0 for o, g in zip(out.spacing, grid.spacing, strict=True)]
                    rate = tuple(max(round(r), 1) for r in ratio)
                    if max(ratio) < 1.5:  # as fine as before: branches that lie a little apart
                        continue
                    if all(abs(r - k) < CLOSE * r or r < 1.5 for r, k in zip(ratio, rate, strict=True)):
                        found.append(Site(node, source, "merge", rate))
                    else:
                        self.left[self.name(n)] = _NO_RULE

        back(n, 0)
        return list({(s.node, s.operand): s for s in found}.values())

    def _through_pad(self, s: Site) -> Site:
        """A reflecting (replicating, circular) pad is part of the window behind it: it goes on beyond its own end."""
        pad = padded(s.operand)
        if s.windows is None or pad is None or pad.mode == "constant" or any(w.start for w in s.windows):
            return s
        windows = tuple(
            replace(w, start=low, end=w.end + high, far=w.far + high)
            for w, (low, high) in zip(s.windows, pad.sides, strict=True)
        )
        return replace(s, windows=windows, reads=pad.source, mode=pad.mode)

    def _usable(self, s: Site) -> bool:
        grid = self.grid(s.operand)
        if grid is None or (s.windows is not None and (grid.tokens or not {*grid.dims} <= {*range(2, 5), None})):
            self.left[self.name(s.node)] = "its input is not a plain map of the image (windows or mixed positions)"
            return False
        if any(r > 1 and grid.dims[a] == self.rows(s.operand) for a, r in enumerate(s.rate)):
            self.left[self.name(s.node)] = "its input has cells of one image as rows of the batch"
            return False
        return True

    @staticmethod
    def rows(n: Node) -> int | None:
        """The dimension of a value that counts images, or cells of images besides."""
        value = n.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else ()
        return next((d for d, size in enumerate(sizes) if isinstance(size, torch.SymInt)), None)
