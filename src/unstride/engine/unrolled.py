"""States as one module of constant shape: no search and no Python objects, so that it can be exported.

The graph is copied once for each node of the states' prefix trie: shared prefixes are computed once.
"""

from __future__ import annotations

import itertools
import math
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from unstride.engine.movers import AVG_POOL, MovedAvgPool, Mover
from unstride.engine.segments import Cutter, SegmentBuilder
from unstride.geometry.grids import border_index, pinned_pieces
from unstride.geometry.states import Selection, State
from unstride.graph.ops import ancestors


def unrolled(cutter: Cutter, states: Sequence[State], taps: Sequence[Node]) -> GraphModule:
    """images -> for each state, the value of each tap."""
    with torch.no_grad():
        return _Unroller(cutter).unroll(states, taps)


class StaticMover(nn.Module):
    """A `Mover` for one state: crops, pads and gathers whose sizes are constants."""

    def __init__(self, mover: Mover, state: State) -> None:
        super().__init__()
        self.start = mover.start(state)
        self.fill, self.mode, self.reach, self.dims = mover.fill, mover.mode, mover.reach, mover.dims
        self.pinned = mover.pinned
        self.tokens = mover.shift.grid if mover.shift.grid.tokens and mover.windows is None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is None:
            return self._moved(x, self.dims)
        d, grid = self.tokens.dim, self.tokens
        last = d + len(grid.size) - 1
        body = x.narrow(d, grid.prefix, x.shape[d] - grid.prefix).unflatten(d, grid.size)
        body = self._moved(body, range(d, last + 1)).flatten(d, last)
        return torch.cat([x.narrow(d, 0, grid.prefix), body], d) if grid.prefix else body

    def _moved(self, x: Tensor, dims: Sequence[int | None]) -> Tensor:
        for a, d in enumerate(dims):
            if d is None:
                continue
            extent, start = int(x.shape[d]), self.start[a]
            length = self.reach[a] if self.reach is not None else extent
            if self.pinned is not None:
                pieces = pinned_pieces(start, extent, self.pinned[a])
                read = [range(at, at + n) if n > 1 else [at] * count for _, count, at, n in pieces]
                x = x.index_select(d, torch.tensor(list(itertools.chain(*read)), device=x.device))
            elif self.mode != "constant":
                x = x.index_select(d, border_index(start, length, extent, self.mode).to(x.device))
            else:
                first = min(max(0, -start), length)
                last = max(first, min(length, extent - start))
                x = x.narrow(d, min(start + first, extent), last - first)
                if first or last < length:
                    x = F.pad(x, [0, 0] * (x.ndim - 1 - d) + [first, length - last], value=self.fill)
        return x


class StaticAvgPool(nn.Module):
    """A `MovedAvgPool` for one state: what each window counts is a constant."""

    def __init__(self, pool: MovedAvgPool, state: State) -> None:
        super().__init__()
        self.size, self.stride, self.area, self.scale = pool.size, pool.stride, math.prod(pool.size), pool.scale
        self.divide: Tensor | None
        self.register_buffer("divide", None if pool.counts is None else pool.counted(state), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mean = AVG_POOL[len(self.size)](x, self.size, self.stride)  # exports ignore divisor_override
        return mean * self.scale if self.divide is None else mean * (self.area / self.divide.to(x))


class _Unroller(SegmentBuilder):
    def __init__(self, cutter: Cutter) -> None:
        super().__init__(cutter, moved=True)
        self.zero = State.zero(len(cutter.found.layers), len(cutter.graph.size))
        self.state = self.zero
        self.states = None  # type: ignore[assignment]  # which a mover of many rows would be given

    def _module(self, module: nn.Module, args: tuple[Any, ...]) -> Node:
        if isinstance(module, Mover):
            module, args = StaticMover(module, self.state), args[:1]
        elif isinstance(module, MovedAvgPool):
            module, args = StaticAvgPool(module, self.state), args[:1]
        return super()._module(module, args)

    def unroll(self, states: Sequence[State], taps: Sequence[Node]) -> GraphModule:
        image = self.out.placeholder("images")
        self.rows = self.out.call_function(torch.ops.aten.sym_size.int, (image, 0))
        graph, found = self.c.graph, self.c.found
        values: dict[tuple[Selection, ...], ChainMap[Node, Any]] = {(): ChainMap({graph.image: image})}
        needed = ancestors(list(taps))
        own = [n for n in graph.fx.nodes if n in needed and n.op == "call_function" and self.c.kind[n] == "data"]
        for level in range(len(found.layers) + 1):
            for prefix in dict.fromkeys(s.selections[:level] for s in states):
                values.setdefault(prefix, values[prefix[:-1]].new_child() if level else values[()])
                self.env = values[prefix]  # type: ignore[assignment]
                self.state = State(prefix + self.zero.selections[level:])
                for n in own:
                    if found.level[n] == level:
                        self.env[n] = self._copy(n, {} if self.state.plain else self.c.moves(n))
        self.out.output([[values[s.selections][tap] for tap in taps] for s in states])
        return GraphModule(self.c.root, self.out, "Unrolled")
