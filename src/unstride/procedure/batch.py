"""Images under way through the network: what a view says in some states, brought back over the plain image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor
from torch.fx import Node

from unstride.engine.engine import Run
from unstride.geometry.states import State
from unstride.procedure.aggregate import WeightedMean
from unstride.procedure.align import align_covered
from unstride.procedure.plans import Crop
from unstride.procedure.prediction import cropped
from unstride.procedure.tasks import Plan, Target
from unstride.views.canvas import back
from unstride.views.policies import View


@dataclass(eq=False)
class Batch:
    """Some rows under way in one or more views of one size: view after view, each with all rows."""

    plan: Plan
    run: Run
    views: tuple[View, ...]
    rows: list[int]
    crop: Crop
    counted: dict[int, int] = field(default_factory=dict)

    def places(self, view: View, rows: Sequence[int]) -> list[int]:
        """Which of the run's images these rows are in this view."""
        first = self.views.index(view) * len(self.rows)
        at = {row: first + k for k, row in enumerate(self.rows)}
        return [at[row] for row in rows]

    def look(
        self, view: View, states: Sequence[State], rows: Sequence[int], plain: Batch
    ) -> Iterator[tuple[tuple[State, ...], list[Tensor]]]:
        """(states, outputs) in plain coordinates: of each state, in segmentation of the mean over the states.

        Further outputs than the main one are those that are merged as well: maps of numbers, features.
        """
        targets, task = self.plan.targets, self.plan.meaning
        states = sorted(states, key=lambda s: not s.plain)  # the plain one is there already
        if task.maps and task.classes:
            if states:
                size = plain.out_size(plain.plan.targets[0])
                yield tuple(states), [back(view, self.map(view, states, rows), plain.plan.graph.size, size)]
            return
        for state, values in self._found(view, states, rows):
            if task.maps:
                yield (state,), [self._laid(view, state, values[t.tap], t, plain) for t in targets]
            else:
                yield (state,), [targets[0].finish(values[targets[0].tap])]

    def map(self, view: View, states: Sequence[State], rows: Sequence[int]) -> Tensor:
        """(rows, K, ...): the mean over the states, in the view's own coordinates."""
        tap = self.plan.targets[0].tap
        found = ((state, values[tap]) for state, values in self._found(view, states, rows))
        return cropped(_mean_map(self.plan, states, found), self.crop)

    def _found(
        self, view: View, states: Sequence[State], rows: Sequence[int]
    ) -> Iterator[tuple[State, dict[Node, Tensor]]]:
        """(state, what it has at the taps) one after the other, as many computed together as memory allows."""
        engine, places = self.plan.engine, self.places(view, rows)
        rest = [s for s in states if not s.plain]
        if len(rest) < len(states):
            whole = {tap: self.run.plain[tap] for tap in engine.taps}
            yield self.plan.found.space.zero, {t: v if len(places) == len(v) else v[places] for t, v in whole.items()}
        together = len(rest) if len(engine.parts([(k, s) for s in rest for k in places])) == 1 else 1
        for i in range(0, len(rest), max(1, together)):
            some = rest[i : i + together]
            values = self.run.add([(k, s) for s in some for k in places])
            parts = zip(*(v.tensor_split(len(some)) for v in values), strict=True)
            yield from ((s, dict(zip(engine.taps, part, strict=True))) for s, part in zip(some, parts, strict=True))

    def _laid(self, view: View, state: State, value: Tensor, target: Target, plain: Batch) -> Tensor:
        """One state's map, moved to where the plain one lies; features stay the map that they are."""
        plan, offset = self.plan, self.plan.offset(state, target)
        if offset is not None and not offset.still:
            moved = align_covered(plan.maps(value, target).float(), offset)
            value = moved if plan.task == "features" else plan.unmap(moved, value, target)
        elif plan.task == "features":
            value = plan.maps(value, target)
        out = value if plan.task == "features" else target.finish(value)
        out = cropped(out, self.crop)
        maps = out if out.ndim == 2 + len(plan.graph.size) else out.unsqueeze(1)
        twin = plain.plan.targets[plan.targets.index(target)]
        maps = back(view, maps, plain.plan.graph.size, plain.out_size(twin))
        return maps if out.ndim == maps.ndim else maps.squeeze(1)

    def out_size(self, target: Target) -> tuple[int, ...]:
        """(H, W) of an output's map."""
        if self.plan.task == "features":
            assert target.grid is not None
            return target.grid.size
        shape = self.plan.found.trace.shapes[target.leaf]
        size = cropped(torch.empty(shape, device="meta"), self.crop).shape[-len(self.plan.graph.size) :]
        return tuple(int(n) for n in size)

    def spent(self, view: View, rows: Sequence[int], looks: int) -> Iterator[tuple[int, int]]:
        """(row, MACs) since it was asked last."""
        head = looks * sum(t.head.macs for t in self.plan.targets if t.head is not None)
        for place, row in zip(self.places(view, rows), rows, strict=True):
            now = self.run.macs[place]
            yield row, now - self.counted.get(place, 0) + head
            self.counted[place] = now


def _mean_map(plan: Plan, states: Sequence[State], found: Iterator[tuple[State, Tensor]]) -> Tensor:
    """Maps of several states, aligned and averaged, through the network's own upsampling."""
    target = plan.targets[0]
    first, value = next(found)
    if len(states) == 1 and first.plain:
        return target.finish(value)
    mean, like = WeightedMean(len(value)), torch.empty_like(value, device="meta")
    for state, one in chain([(first, value)], found):
        ones = torch.ones(len(one), device=one.device)
        mean.add(slice(None), plan.maps(one, target), ones, plan.offset(state, target))
    return target.finish(plan.unmap(mean.value(), like, target))
