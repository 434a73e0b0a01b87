"""A chosen set of states as one module of constant shape: no search, no Python objects, so that it can be exported."""

import copy
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
from unstride.engine.segments import Builder, Cutter
from unstride.errors import OptionError
from unstride.geometry.grids import border_index, held_pieces
from unstride.geometry.states import Selection, State
from unstride.graph.ops import ancestors
from unstride.procedure.aggregate import Attention, sure_weight
from unstride.procedure.align import Offset, overlap
from unstride.procedure.options import Options
from unstride.procedure.tasks import Plan

Prefix = tuple[Selection, ...]


class StaticMove(nn.Module):
    """A Mover for one state: crops, pads and gathers whose sizes are constants."""

    def __init__(self, mover: Mover, state: State) -> None:
        super().__init__()
        self.start = mover.start(state)
        self.fill, self.mode, self.reach, self.dims = mover.fill, mover.mode, mover.reach, mover.dims
        self.hold = mover.hold
        self.tokens = mover.shift.grid if mover.shift.grid.tokens and mover.windows is None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is None:
            return self._move(x, self.dims)
        d, grid = self.tokens.dim, self.tokens
        last = d + len(grid.size) - 1
        body = x.narrow(d, grid.prefix, x.shape[d] - grid.prefix).unflatten(d, grid.size)
        body = self._move(body, range(d, last + 1)).flatten(d, last)
        return torch.cat([x.narrow(d, 0, grid.prefix), body], d) if grid.prefix else body

    def _move(self, x: Tensor, dims: Sequence[int | None]) -> Tensor:
        for a, d in enumerate(dims):
            if d is None:
                continue
            extent = int(x.shape[d])
            if self.hold is not None:
                pieces = held_pieces(self.start[a], extent, self.hold[a])
                at = [range(start, start + read) if read > 1 else [start] * count for _, count, start, read in pieces]
                x = x.index_select(d, torch.tensor(list(itertools.chain(*at)), device=x.device))
                continue
            length = self.reach[a] if self.reach is not None else extent
            if self.mode != "constant":
                x = x.index_select(d, border_index(self.start[a], length, extent, self.mode).to(x.device))
                continue
            first = min(max(0, -self.start[a]), length)
            last = max(first, min(length, extent - self.start[a]))
            x = x.narrow(d, min(self.start[a] + first, extent), last - first)
            if first or last < length:
                x = F.pad(x, [0, 0] * (x.ndim - 1 - d) + [first, length - last], value=self.fill)
        return x


class StaticAvgPool(nn.Module):
    """MovedAvgPool for one state: what each window counts is a constant."""

    def __init__(self, pool: MovedAvgPool, state: State) -> None:
        super().__init__()
        self.size, self.stride, self.area, self.scale = pool.size, pool.stride, math.prod(pool.size), pool.scale
        divide = pool.counted(state) if pool.counts is not None else None
        self.divide: Tensor | None
        self.register_buffer("divide", divide, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # not by divisor_override: ONNX has none, and exports ignore it
        mean = AVG_POOL[len(self.size)](x, self.size, self.stride)
        return mean * self.scale if self.divide is None else mean * (self.area / self.divide.to(x))


class StaticAggregate(nn.Module):
    """Taps of all states -> one tap, as `enhance(..., states=...)` aggregates them."""

    def __init__(self, plan: Plan, k: int, states: Sequence[State], options: Options) -> None:
        super().__init__()
        target = plan.targets[k]
        self.grid = target.grid
        self.offsets = [plan.offset(s, target) if options.align else None for s in states]
        self.kind = "mean" if options.aggregate == "attention" and k else options.aggregate
        self.covered = options.border == "renormalise"
        self.per_pixel = plan.task == "segmentation"
        self.maps, self.unmap = (lambda v: plan.maps(v, target)), (lambda m, like: plan.unmap(m, like, target))
        self.attention: Attention | None = None
        if self.kind == "attention":
            self.attention = copy.deepcopy(options.attention).requires_grad_(False)  # type: ignore[union-attr]

    def forward(self, values: list[Tensor], logits: list[Tensor]) -> Tensor:
        maps = [self.maps(v).float() for v in values]
        if self.kind in ("max", "attention"):
            moved = [self._moved(m, o) for m, o in zip(maps, self.offsets, strict=True)]
            if self.attention is not None:
                return self.unmap(self.attention(torch.stack(moved, 1)), values[0])
            return self.unmap(torch.stack(moved, 1).amax(1), values[0])
        parts = [self._weighed(*p) for p in zip(maps, logits or maps, self.offsets, strict=True)]
        total, weight = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        return self.unmap(total / weight.clamp(min=1e-12), values[0])

    def _weighed(self, m: Tensor, logits: Tensor, offset: Offset | None) -> tuple[Tensor, Tensor]:
        """A state's aligned map times its weight, and the weight, which is that of the aligned map in segmentation."""
        moved = self._moved(m, offset)
        weight = torch.ones((), device=m.device)
        if self.kind == "entropy" and self.per_pixel:
            weight = sure_weight(moved).unsqueeze(1)
        elif self.kind == "entropy":
            weight = sure_weight(logits).view(-1, *[1] * (m.ndim - 1))
        if self.covered and offset is not None and m.ndim > 2:
            weight = weight * _cover(m, offset)
        return moved * weight, weight

    def _moved(self, m: Tensor, offset: Offset | None) -> Tensor:
        if offset is None or m.ndim < 3:
            return m
        moved = _align(m, offset)
        if not self.covered:
            return moved
        cover = _cover(m, offset)
        moved = moved / cover.clamp(min=1e-12)
        return moved.masked_fill(cover <= 0, float("-inf")) if self.kind == "max" else moved


def _align(m: Tensor, offset: Offset | None) -> Tensor:
    """Align (B, C, H, W) with zeros where there is no source, by pads and sums alone."""
    if offset is None or m.ndim < 3:
        return m
    size = [int(n) for n in m.shape[2:]]
    out: Tensor | None = None
    for cells, weight in offset.taps():
        if all(abs(k) < n for k, n in zip(cells, size, strict=True)):
            part = m[overlap(size, cells)[1]] * weight
            sides = [side for k in reversed(cells) for side in (max(k, 0), max(-k, 0))]
            part = F.pad(part, sides) if any(sides) else part
            out = part if out is None else out + part
    return torch.zeros_like(m) if out is None else out


def _cover(m: Tensor, offset: Offset) -> Tensor:
    return _align(torch.ones((1, 1, *m.shape[2:]), device=m.device), offset)


class _Unrolled(Builder):
    """Copies the graph once per node of the states' prefix trie, so that shared prefixes are computed once."""

    def __init__(self, cutter: Cutter, plan: Plan, states: Sequence[State], options: Options) -> None:
        super().__init__(cutter, moved=True)
        self.plan, self.all, self.options = plan, states, options
        self.made: list[nn.Module] = []
        image = self.out.placeholder("images")
        self.rows = self.out.call_function(torch.ops.aten.sym_size.int, (image, 0))
        self.envs: dict[Prefix, ChainMap[Node, Any]] = {(): ChainMap({plan.graph.image: image})}
        self.state = plan.found.space.zero
        self.states = None  # type: ignore[assignment]  # what a per-row mover would be given

    def _module(self, module: nn.Module, args: tuple[Any, ...]) -> Node:
        if isinstance(module, Mover):
            module, args = StaticMove(module, self.state), args[:1]
        elif isinstance(module, MovedAvgPool):
            module, args = StaticAvgPool(module, self.state), args[:1]
        name = f"static_{len(self.made)}"
        self.made.append(module)
        self.c.root.add_module(name, module)
        return self.out.call_module(name, args)

    def unroll(self) -> GraphModule:
        """All states aggregated: the leaves of the network's output."""
        plan = self.plan
        ends, spared = self._ends()
        logits = self._heads(ends) if plan.task == "classification" else []
        leaves: list[Any] = list(plan.graph.leaves)
        final: dict[Node, Any] = {n: ends[0][n] for n in spared}
        for k, target in enumerate(plan.targets):
            merge = StaticAggregate(plan, k, self.all, self.options)
            merged = self._module(merge, ([e[target.tap] for e in ends], logits))
            final[target.leaf] = self._after(target.tap, target.leaf, merged)
            if k == 0:
                for leaf, _ in plan.also:
                    final[leaf] = self._after(target.tap, leaf, merged)
        self.env = ChainMap()  # type: ignore[assignment]
        beside = {x: self._value(x) for x in leaves if isinstance(x, Node) and x not in final}
        self.out.output(tuple({**final, **beside}[x] if isinstance(x, Node) else x for x in leaves))
        return GraphModule(self.c.root, self.out, "Fixed")

    def unroll_each(self) -> GraphModule:
        """The main output of each state by itself."""
        target = self.plan.targets[0]
        self.out.output(tuple(self._after(target.tap, target.leaf, e[target.tap]) for e in self._ends()[0]))
        return GraphModule(self.c.root, self.out, "EachState")

    def _ends(self) -> tuple[list[ChainMap[Node, Any]], list[Node]]:
        """What each state has computed up to the taps, shared prefixes once; and the outputs that only plain has."""
        plan, found = self.plan, self.plan.found
        taps = list(dict.fromkeys(t.tap for t in plan.targets))
        spared = [leaf for leaf in plan.engine.plain if leaf not in taps]
        needed, plain = ancestors(taps), ancestors([*taps, *spared])
        depth = plan.engine.depth
        for level in range(depth + 1):
            own = [n for n in plan.graph.fx.nodes if n.op == "call_function" and self.c.kind[n] == "data"]
            own = [n for n in own if found.level[n] == level and n in plain]
            for prefix in dict.fromkeys(s.selections[:level] for s in self.all):
                zero = not any(map(any, prefix))
                self.env = self.envs[prefix] = self.envs[prefix[:-1]].new_child() if level else self.envs[()]  # type: ignore[assignment]
                self.state = State(prefix + plan.found.space.zero.selections[level:])
                for n in own:
                    if zero or n in needed:
                        self.env[n] = self._copy(n, {} if zero else self.c.moves(n))
        return [self.envs[s.selections] for s in self.all], spared

    def _heads(self, ends: Sequence[ChainMap[Node, Any]]) -> list[Node]:
        """Each state's own logits, where the weights need them."""
        if self.options.aggregate != "entropy":
            return []
        target = self.plan.targets[0]
        return [self._after(target.tap, target.leaf, e[target.tap]) for e in ends]

    def _after(self, tap: Node, leaf: Node, value: Node) -> Node:
        """The network's own head on a value of the tap."""
        self.env = ChainMap({tap: value})  # type: ignore[assignment]
        inside = ancestors([leaf], until={tap})
        for n in self.plan.graph.fx.nodes:
            if n in inside and n is not tap and n.op == "call_function" and self.c.kind[n] == "data":
                self.env[n] = self._copy(n, {})
        return self.env[leaf]


class Fixed(nn.Module):
    """A network with a fixed set of states: takes (B, C, H, W) of one image size, returns what the network returns.

    `held`: the edges of large maps stay, as in looks.

    Example: `program = torch.export.export(module, (images,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))`
    """

    def __init__(self, plan: Plan, states: Sequence[State], options: Options, held: bool = False) -> None:
        super().__init__()
        if options.align == "stitch":
            raise OptionError(
                "align='stitch' makes finer maps than the network's own: a fixed module takes True or False"
            )
        self.states = tuple(states)
        cutter = Cutter(plan.graph, plan.found, held=held)
        with torch.no_grad():
            self.body = _Unrolled(cutter, plan, self.states, options).unroll()
        self.rebuild = plan.graph.rebuild
        self.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> Any:
        return self.rebuild(list(self.body(images)))

    def train(self, mode: bool = True) -> "Fixed":
        """Always as in evaluation: the graph was captured so."""
        return super().train(False)

    def extra_repr(self) -> str:
        return f"{len(self.states)} states"


class EachState(nn.Module):
    """A network in several states, each by itself, as looks take them, of constant shape.

    (B, C, H, W) -> the main output of each.
    """

    def __init__(self, plan: Plan, states: Sequence[State], options: Options) -> None:
        super().__init__()
        with torch.no_grad():
            cutter = Cutter(plan.graph, plan.found, held=True)
            self.body = _Unrolled(cutter, plan, tuple(states), options).unroll_each()
        self.requires_grad_(False).eval()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.body(images))
