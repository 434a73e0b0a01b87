"""Stages of looks for a batch of pictures: each view prepared once, states from shared prefixes, merged as they come.

What the gates stop costs nothing more: the pictures that go on are put together again, so time falls as MACs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from unstride.engine.engine import Run
from unstride.geometry.states import State
from unstride.procedure.aggregate import WeightedMean, top_class
from unstride.procedure.gates import Stage, sureness
from unstride.procedure.prediction import cropped
from unstride.procedure.tasks import Plan
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
    """The running mean of all looks, picture by picture: of logits, or of probabilities."""

    merge: str
    total: Tensor | None = None
    weight: Tensor | None = None

    def add(self, count: int, rows: list[int], logits: Tensor, weight: float, temperature: float) -> None:
        logits = logits.float() / temperature
        if self.merge == "probabilities":
            single = logits.shape[1] == 1
            logits = logits.sigmoid() if single else logits.softmax(1)
        self.add_mean(count, rows, logits, weight)

    def add_mean(self, count: int, rows: list[int], logits: Tensor, weight: float) -> None:
        """What is merged already, such as a stage's own mean."""
        if self.total is None or self.weight is None:
            self.total = logits.new_zeros((count, *logits.shape[1:]))
            self.weight = logits.new_zeros((count, *[1] * (logits.ndim - 1)))
        self.total[rows] += weight * logits
        self.weight[rows] += weight

    def logits(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        assert self.total is not None and self.weight is not None
        mean = self.total[rows] / self.weight[rows]
        if self.merge == "logits":
            return mean
        return mean.logit(1e-7) if mean.shape[1] == 1 else mean.clamp(min=1e-12).log()  # NaN stays NaN in both


@dataclass(eq=False)
class Looked:
    """What became of a batch: merged logits, and per picture its looks, MACs and why it ended."""

    merged: Merged
    macs: list[int]
    counts: list[int]
    stopped: list[str]
    tops: list[list[Tensor]]  # the class that each look gave, only where a gate asks for agreement
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

    def run(self, source: Source) -> Looked:
        count = len(source)
        out = Looked(Merged(self.merge), [0] * count, [0] * count, [""] * count, [[] for _ in range(count)])
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
        now = sureness(out.merged.logits(rows), gate.by, own)
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
            for of, logits in batch.look(view, states, here, out.plain[0] if out.plain else batch):
                weight = stage.weight(view) * len(of)
                out.merged.add(len(out.macs), here, logits, weight, stage.temperature(view))
                if agreement:
                    for i, top in zip(here, top_class(logits), strict=True):
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
    ) -> Iterator[tuple[tuple[State, ...], Tensor]]:
        """(states, logits) of each state, or of the mean over the states where they are maps, in plain coordinates."""
        plan, places = self.plan, self.places(view, rows)
        ordered = sorted(states, key=lambda s: not s.plain)  # the plain one is there already
        if plan.task == "classification":
            for state, value in self._values(places, ordered):
                yield (state,), plan.targets[0].finish(value)
        elif ordered:
            logits = cropped(_mean_map(plan, ordered, self._values(places, ordered)), self.crop)
            yield tuple(ordered), back(view, logits, plain.plan.graph.size, plain.out_size)

    def _values(self, places: list[int], states: Sequence[State]) -> Iterator[tuple[State, Tensor]]:
        """(state, tap of these images) one after the other, as many computed together as memory allows."""
        engine, tap = self.plan.engine, self.plan.targets[0].tap
        rest = [s for s in states if not s.plain]
        if len(rest) < len(states):
            whole = self.run.plain[tap]
            yield self.plan.found.space.zero, whole if len(places) == len(whole) else whole[places]
        asked = [(k, s) for s in rest for k in places]
        together = len(rest) if len(engine.parts(asked)) == 1 else 1
        for i in range(0, len(rest), max(1, together)):
            some = rest[i : i + together]
            found = dict(zip(engine.taps, self.run.add([(k, s) for s in some for k in places]), strict=True))
            yield from zip(some, found[tap].tensor_split(len(some)), strict=True)

    @property
    def out_size(self) -> tuple[int, ...]:
        """(H, W) of the output map."""
        shape = self.plan.found.trace.shapes[self.plan.targets[0].leaf]
        return tuple(int(n) for n in cropped(torch.empty(shape, device="meta"), self.crop).shape[2:])

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


def _mean_map(plan: Plan, states: Sequence[State], values: Iterator[tuple[State, Tensor]]) -> Tensor:
    """Maps of several states, aligned and averaged, through the network's own upsampling."""
    target = plan.targets[0]
    if len(states) == 1 and states[0].plain:
        return target.finish(next(values)[1])
    mean: WeightedMean | None = None
    for state, value in values:
        if mean is None:
            mean, like = WeightedMean(len(value)), torch.empty_like(value, device="meta")
            ones = torch.ones(len(value), device=value.device)
        mean.add(slice(None), plan.maps(value, target), ones, plan.offset(state, target))
    assert mean is not None
    return target.finish(plan.unmap(mean.value(), like, target))
