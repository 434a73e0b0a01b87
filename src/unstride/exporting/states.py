"""A list of states of one network as a module of constant shape, combined as `execution.aggregation` combines them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.engine.segments import Cutter
from unstride.engine.unrolled import unrolled
from unstride.errors import OptionError
from unstride.execution.executors import Network
from unstride.execution.graph_executor import GraphExecutor
from unstride.geometry.states import State
from unstride.method.aggregate import LEAST, entropy_weight
from unstride.method.align import Offset, overlap
from unstride.method.split import Target
from unstride.recipe.stage import Stage
from unstride.tasks.tasks import Task


class StatesModule(nn.Module):
    """Images (B, C, H, W) -> for each output of the network (B, S, ...): one for each state, or one aggregate (S = 1).

    Args:
        example: images of the one size that it takes.
        each: every state's output by itself.
    """

    def __init__(
        self, network: Network, task: Task, stage: Stage, states: Sequence[State], example: Tensor, each: bool
    ) -> None:
        super().__init__()
        executor = GraphExecutor(network, task, stage.state_space, stage.pinned)
        split, _, crop = executor.prepare(example[:1])
        if crop is not None:
            raise OptionError(
                f"export: the network takes images of {tuple(example.shape[2:])} only with padding, and states of "
                "padded images cannot be exported. Choose a size that the network accepts."
            )
        self.split, self.task, self.stage, self.network, self.each = split, task, stage, network, each
        self.states = tuple(states)
        self.taps = list(dict.fromkeys(t.tap for t in split.targets))
        self.body = unrolled(Cutter(split.graph, split.found, pinned=stage.pinned), self.states, self.taps)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        values = self.body(images)
        outputs = []
        for k, target in enumerate(self.split.targets):
            of_states = [v[self.taps.index(target.tap)] for v in values]
            made = self._each(of_states, target) if self.each else [self._aggregate(k, target, of_states, values)]
            outputs.append(torch.stack([self.network.base_classes(m) for m in made], 1))
        return tuple(outputs)

    def _each(self, values: Sequence[Tensor], target: Target) -> list[Tensor]:
        outputs = []
        for state, value in zip(self.states, values, strict=True):
            offset = self.split.offset(state, target) if self.task.maps else None
            if offset is not None and not offset.is_zero:
                value = self.split.unmap(_aligned(self.split.maps(value, target), offset, True), value, target)
            outputs.append(_finished(target, value))
        return outputs

    def _aggregate(self, k: int, target: Target, values: Sequence[Tensor], of_taps: Any) -> Tensor:
        covered, kind = self.stage.at_border == "renormalise", self.stage.aggregation
        maps = [self.split.maps(v, target).float() for v in values]
        offsets = [self._offset(state, target) for state in self.states]
        if kind == "max":
            moved = [_aligned(m, o, covered, -torch.inf) for m, o in zip(maps, offsets, strict=True)]
            return self._head(target, torch.stack(moved).amax(0), values[0])
        total: Any = 0.0
        weight: Any = 0.0
        for j, (m, offset) in enumerate(zip(maps, offsets, strict=True)):
            own, certain = self._weighed(m, offset, covered, of_taps[j][self.taps.index(self.split.targets[0].tap)], j)
            total, weight = total + own, weight + certain
        return self._head(target, total / weight.clamp(min=1e-12), values[0])

    def _weighed(self, m: Tensor, offset: Offset | None, covered: bool, first: Tensor, j: int) -> tuple[Tensor, Tensor]:
        """A state's aligned map times its weight, and the weight."""
        kind, inside = self.stage.aggregation, _coverage(m, offset) if covered else m.new_ones(())
        if self.task.maps and m.ndim > 3 and kind == "entropy":
            moved = _aligned(m, offset, covered)
            certain = entropy_weight(moved).unsqueeze(1) * inside
            return moved * certain, certain
        if self.task.maps and m.ndim > 3 and kind == "entropy-unaligned":
            own = entropy_weight(m).unsqueeze(1)
            return _aligned(m * own, offset, False), _aligned(own, offset, False)
        certain = self._certainty(first, j).view(-1, *[1] * (m.ndim - 1))
        return _aligned(m, offset, False) * certain, inside * certain

    def _certainty(self, value: Tensor, j: int) -> Tensor:
        """The weight of a state in each image (B,), from its own prediction."""
        if self.stage.aggregation == "mean":
            return value.new_ones(1)
        target = self.split.targets[0]
        if self.stage.aggregation == "entropy":
            offset = self._offset(self.states[j], target)
            maps = _aligned(self.split.maps(value, target).float(), offset, self.stage.at_border == "renormalise")
            value = self.split.unmap(maps, value, target)
        return (1.0 - self.task.uncertainty(_finished(target, value))).clamp(min=LEAST)

    def _offset(self, state: State, target: Target) -> Offset | None:
        offset = None if self.stage.align == "none" else self.split.offset(state, target)
        return offset.nearest() if offset is not None and self.stage.align == "nearest" else offset

    def _head(self, target: Target, maps: Tensor, like: Tensor) -> Tensor:
        return _finished(target, self.split.unmap(maps, like, target))


def _finished(target: Target, value: Tensor) -> Tensor:
    return value if target.head is None else target.head.module(value.shape[0], (), value)[0]


def _aligned(m: Tensor, offset: Offset | None, covered: bool, empty: float = 0.0) -> Tensor:
    """Maps on the common grid by pads and sums alone; `empty` is what a maximum has where there is no source."""
    if offset is None or m.ndim < 3 or offset.is_zero:
        return m
    size = [int(n) for n in m.shape[2:]]
    out: Tensor | None = None
    for cells, weight in offset.taps():
        if all(abs(k) < n for k, n in zip(cells, size, strict=True)):
            part = m[overlap(size, cells)[1]] * weight
            sides = [side for k in reversed(cells) for side in (max(k, 0), max(-k, 0))]
            part = F.pad(part, sides) if any(sides) else part
            out = part if out is None else out + part
    out = torch.zeros_like(m) if out is None else out
    if not covered:
        return out
    inside = _coverage(m, offset)
    out = out / inside.clamp(min=1e-12)
    return out.masked_fill(inside <= 0, empty) if empty else out


def _coverage(m: Tensor, offset: Offset | None) -> Tensor:
    if offset is None or m.ndim < 3:
        return m.new_ones(())
    return _aligned(m.new_ones((1, 1, *m.shape[2:])), offset, False)
