"""Pictures under way through the network: what a view says in some states, brought back over the plain picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
        found = [(state, values[tap]) for state, values in self._found(view, states, rows)]
        return cropped(_mean_map(self.plan, found), self.crop)

    def _found(
        self, view: View, states: Sequence[State], rows: Sequence[int]
    ) -> list[tuple[State, dict[Node, Tensor]]]:
        """What each state has at the taps."""
        taps, zero, places = self.plan.engine.taps, self.plan.found.space.zero, self.places(view, rows)
        rest = [s for s in states if s != zero]
        found: list[tuple[State, dict[Node, Tensor]]] = []
        if zero in states:
            whole = {tap: self.run.plain[tap] for tap in taps}
            found.append((zero, {t: v if len(places) == len(v) else v[places] for t, v in whole.items()}))
        if rest:
            values = self.run.add([(k, s) for s in rest for k in places])
            parts = zip(*(v.tensor_split(len(rest)) for v in values), strict=True)
            found += [(s, dict(zip(taps, part, strict=True))) for s, part in zip(rest, parts, strict=True)]
        return found

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


def _mean_map(plan: Plan, found: list[tuple[State, Tensor]]) -> Tensor:
    """Maps of several states, aligned and averaged, through the network's own upsampling."""
    target = plan.targets[0]
    if len(found) == 1 and not any(map(any, found[0][0].selections)):
        return target.finish(found[0][1])
    mean = WeightedMean(len(found[0][1]))
    ones = torch.ones(len(found[0][1]), device=found[0][1].device)
    for state, value in found:
        mean.add(slice(None), plan.maps(value, target), ones, plan.offset(state, target))
    return target.finish(plan.unmap(mean.value(), found[0][1], target))
