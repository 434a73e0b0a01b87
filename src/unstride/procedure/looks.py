"""Stages of looks for a batch of pictures: each view prepared once, states from shared prefixes, merged as they come.

What the gates stop costs nothing more: the pictures that go on are put together again, so time falls as MACs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Node

from unstride.engine.engine import Run
from unstride.geometry.states import State
from unstride.procedure.aggregate import WeightedMean
from unstride.procedure.align import align_covered
from unstride.procedure.gates import Stage
from unstride.procedure.meaning import TASKS, Task
from unstride.procedure.prediction import cropped
from unstride.procedure.tasks import Plan, Target
from unstride.procedure.temperature import match_temperature
from unstride.views.canvas import Source, back
from unstride.views.policies import IDENTITY, View

Crop = tuple[float, ...] | None
Fit = Callable[[Tensor], tuple[Tensor, Plan, Crop]]


@dataclass(frozen=True)
class Look:
    """A view of the picture, in a state of the network."""

    view: View
    state: State

    def __str__(self) -> str:
        still = not any(map(any, self.state.selections))
        return str(self.view) if still else f"{self.view} in {self.state}"


@dataclass(eq=False)
class Seen:
    """What one look, or the mean over a view's states, said: logits of these rows, and the weight it counts with."""

    looks: tuple[Look, ...]
    rows: list[int]
    logits: Tensor
    weight: float


@dataclass(eq=False)
class Merged:
    """The running mean of all looks, picture by picture, of what the task and `merge` average; or their median."""

    merge: str
    task: Task = TASKS["classification"]
    total: Tensor | None = None
    weight: Tensor | None = None
    kept: dict[int, list[Tensor]] = field(default_factory=dict)  # every look, only for the median

    def add(self, count: int, rows: list[int], logits: Tensor, weight: float, temperature: float) -> None:
        logits = logits.float() / temperature
        if self.merge == "median":
            for i, one in zip(rows, logits, strict=True):
                self.kept.setdefault(i, []).append(one)
        else:
            self.add_mean(count, rows, self.task.encode(logits, self.merge), weight)

    def add_mean(self, count: int, rows: list[int], logits: Tensor, weight: float) -> None:
        """What is merged already, such as a stage's own mean."""
        if self.total is None or self.weight is None:
            self.total = logits.new_zeros((count, *logits.shape[1:]))
            self.weight = logits.new_zeros((count, *[1] * (logits.ndim - 1)))
        self.total[rows] += weight * logits
        self.weight[rows] += weight

    def logits(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        if self.merge == "median":
            chosen = sorted(self.kept)[rows] if isinstance(rows, slice) else rows
            return torch.stack([_median(self.kept[i]) for i in chosen])
        assert self.total is not None and self.weight is not None
        return self.task.decode(self.total[rows] / self.weight[rows], self.merge)


def _median(looks: Sequence[Tensor]) -> Tensor:
    """Number by number; of an even number of looks, the mean of the two in the middle."""
    ordered = torch.stack(list(looks)).sort(0).values
    return (ordered[(len(looks) - 1) // 2] + ordered[len(looks) // 2]) / 2


@dataclass(eq=False)
class Looked:
    """What became of a batch: merged logits, and per picture its looks, MACs and why it ended."""

    merged: Merged
    macs: list[int]
    counts: list[int]
    stopped: list[str]
    tops: list[list[Tensor]]  # what each look said (its class), only where a gate asks for agreement
    beside: dict[int, Merged] = field(default_factory=dict)  # further maps of the output, by the number of the target
    plain: list[Batch] = field(default_factory=list)  # the plain view's runs: its own answer, and other outputs
    seen: list[Seen] = field(default_factory=list)  # only where it is to be explained
    sure: list[Tensor] = field(default_factory=list)  # of all pictures before each gate, only when calibrating
    spent: list[int] = field(default_factory=list)  # MACs of the first picture after each stage

    @property
    def plain_macs(self) -> int:
        return self.plain[0].plan.plain_macs


@dataclass(eq=False)
class Looking:
    """`Looking(fit, at_once, stages, "logits").run(source)`; `fit` prepares the network for a tensor's size."""

    fit: Fit
    at_once: Callable[[Plan, int], int]  # rows that may be under way together, for so many states
    stages: Sequence[Stage]
    merge: str = "logits"
    explain: bool = False
    gated: bool = True  # False: every gate lets everything through, as calibrating wants it
    task: Task = TASKS["classification"]

    def run(self, source: Source) -> Looked:
        count = len(source)
        out = Looked(Merged(self.merge, self.task), [0] * count, [0] * count, [""] * count, [[] for _ in range(count)])
        rows = list(range(count))
        kept: list[Batch] = []
        taken: set[Look] = set()
        for number, stage in enumerate(self.stages):
            if stage.gate is not None:
                rows = self._pass(stage, out, rows)
            if not rows:
                break
            known = {v for b in kept for v in b.views}
            fresh = list(self._start(source, stage, rows, known))
            if number == 0:  # before anything is taken: maps of other sizes are laid over the plain one
                out.plain = [b for b in fresh if b.views[0] == IDENTITY]
            for batch in [*fresh, *(b for b in kept if set(b.views) & set(stage.views))]:
                self._take(stage, batch, rows, out, taken)
            taken |= {Look(v, s) for v in stage.views for s in stage.chosen(out.plain[0].plan.found.space)}
            out.spent.append(out.macs[0])
            later = {v for s in self.stages[number + 1 :] for v in s.views}
            for batch in fresh:
                again = bool(set(batch.views) & later)
                batch.run.keep(range(batch.plan.engine.depth) if again else ())
                kept += [batch] if again else []
        for i in rows:
            out.stopped[i] = out.stopped[i] or "all looks"
        return out

    def _pass(self, stage: Stage, out: Looked, rows: list[int]) -> list[int]:
        """The rows that the gate lets through."""
        gate = stage.gate
        assert gate is not None
        own = [torch.stack(looks) for looks in zip(*(out.tops[i] for i in rows), strict=True)]
        now = self.task.sure(out.merged.logits(rows), gate.by, own)
        if not self.gated:
            out.sure.append(now)
            return rows
        opens = gate.opens(now).tolist()
        for i, again, value in zip(rows, opens, now.tolist(), strict=True):
            if not again:
                out.stopped[i] = f"{gate.by} {value:.3f} >= {gate.below:.3g}"
        return [i for i, again in zip(rows, opens, strict=True) if again]

    def _start(self, source: Source, stage: Stage, rows: list[int], known: set[View]) -> Iterator[Batch]:
        """Runs of the stage's new views over the rows; views of one size run together."""
        chosen = source if len(rows) == len(source) else source.rows(rows)
        groups: dict[tuple[int, ...], list[tuple[View, Tensor]]] = {}
        for view in stage.views:
            if view not in known:
                images = chosen.see(view)
                groups.setdefault(tuple(images.shape[1:]), []).append((view, images))
        for group in groups.values():
            fitted = [self.fit(images) for _, images in group]
            plan, crop = fitted[0][1:]
            together = max(1, self.at_once(plan, len(stage.chosen(plan.found.space))) // len(group))
            for start in range(0, len(rows), together):
                part = slice(start, start + together)
                run = plan.engine.start(torch.cat([images[part] for images, _, _ in fitted]))
                yield Batch(plan, run, tuple(v for v, _ in group), rows[part], crop)

    def _take(self, stage: Stage, batch: Batch, rows: list[int], out: Looked, taken: set[Look]) -> None:
        """The batch's looks of this stage into the mean."""
        alive = set(rows)
        here = [i for i in batch.rows if i in alive]
        views = [v for v in batch.views if v in stage.views]
        chosen = stage.chosen(batch.plan.found.space)
        agreement = any(s.gate is not None and s.gate.by == "agreement" for s in self.stages)
        for view in views if here else ():
            states = [s for s in chosen if Look(view, s) not in taken]
            for of, (logits, *more) in batch.look(view, states, here, out.plain[0] if out.plain else batch):
                weight = stage.weight(view) * len(of)
                out.merged.add(len(out.macs), here, logits, weight, stage.temperature(view))
                for k, further in enumerate(more, 1):
                    merged = out.beside.setdefault(k, Merged(self.merge, self.task))
                    merged.add(len(out.macs), here, further, weight, stage.temperature(view))
                if agreement:
                    for i, top in zip(here, self.task.own(logits), strict=True):
                        out.tops[i].append(top)
                if self.explain:
                    out.seen.append(Seen(tuple(Look(view, s) for s in of), here, logits, stage.weight(view)))
                for i in here:
                    out.counts[i] += len(of)
            for i, macs in batch.spent(view, here, len(states)):
                out.macs[i] += macs


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
        plan, lead, task = self.plan, self.plan.targets[0], self.plan.meaning
        found = self._found(view, states, rows)
        if not task.maps:
            for state, values in found:
                yield (state,), [lead.finish(values[lead.tap])]
        elif not task.classes:
            for state, values in found:
                yield (state,), [self._laid(view, state, values[t.tap], t, plain) for t in plan.targets]
        elif found:
            logits = cropped(_mean_map(plan, [(s, values[lead.tap]) for s, values in found]), self.crop)
            out = back(view, logits, plain.plan.graph.size, plain.out_size(lead))
            yield tuple(s for s, _ in found), [out]

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


def matched_stages(stages: Sequence[Stage], runs: Sequence[Looked]) -> tuple[Stage, ...]:
    """The stages with a temperature for every view of another size, so that it speaks as the plain one does.

    `runs` are explained and not gated; no labels are needed.
    """
    heard: dict[View, list[Tensor]] = {}
    for seen in (s for run in runs for s in run.seen):
        if not any(map(any, seen.looks[0].state.selections)):
            heard.setdefault(seen.looks[0].view, []).append(seen.logits)
    plain = torch.cat(heard[IDENTITY])
    warm = {
        view: match_temperature(torch.cat(logits), plain)
        for view, logits in heard.items()
        if any(op.name in ("Size", "Field") for op in view.ops)
    }
    return tuple(
        replace(s, temperatures=tuple(warm.get(v, 1.0) for v in s.views)) if any(v in warm for v in s.views) else s
        for s in stages
    )


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
