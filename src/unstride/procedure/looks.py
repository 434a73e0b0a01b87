"""Stages of looks for a batch of images: each view prepared once, states from shared prefixes, merged as they come.

What the gates stop costs nothing more: the images that go on are put together again, so time falls as MACs do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from unstride.engine.engine import Engine
from unstride.geometry.states import State
from unstride.procedure.batch import Batch
from unstride.procedure.calibrate import Price
from unstride.procedure.gates import Gate, Stage
from unstride.procedure.meaning import TASKS, Task
from unstride.procedure.plans import MULTIPLE, Crop, padded
from unstride.procedure.tasks import Plan
from unstride.procedure.temperature import match_temperature
from unstride.procedure.tiles import Tiling, spread, tile_means
from unstride.views.canvas import Source, back
from unstride.views.policies import IDENTITY, View

Fit = Callable[[Tensor], tuple[Tensor, Plan, Crop]]


@dataclass(frozen=True)
class Look:
    """A view of the image, in a state of the network."""

    view: View
    state: State

    def __str__(self) -> str:
        return str(self.view) if self.state.plain else f"{self.view} in {self.state}"


@dataclass(eq=False)
class Seen:
    """What one look, or the mean over a view's states, said: logits of these rows, and the weight it counts with."""

    looks: tuple[Look, ...]
    rows: list[int]
    logits: Tensor
    weight: float


@dataclass(eq=False)
class Merged:
    """The running mean of all looks, image by image, of what the task and `merge` average; or their median."""

    merge: str
    task: Task = TASKS["classification"]
    total: Tensor | None = None
    weight: Tensor | None = None
    kept: dict[int, list[Tensor]] = field(default_factory=dict)  # every look, only for the median

    def add(
        self,
        count: int,
        rows: list[int],
        logits: Tensor,
        weight: float,
        temperature: float,
        where: Tensor | None = None,
    ) -> None:
        """`where` (rows, 1, H, W): only there."""
        logits = logits.float() / temperature
        if self.merge == "median":
            for i, one in zip(rows, logits, strict=True):
                self.kept.setdefault(i, []).append(one)
        else:
            encoded = self.task.encode(logits, self.merge)
            self.add_mean(count, rows, encoded, weight if where is None else weight * where)

    def add_mean(self, count: int, rows: list[int], logits: Tensor, weight: float | Tensor) -> None:
        """What is merged already, such as a stage's own mean."""
        if self.total is None or self.weight is None:
            self.total = logits.new_zeros((count, *logits.shape[1:]))
            self.weight = logits.new_zeros((count, *[1] * (logits.ndim - 1)))
        if isinstance(weight, Tensor) and weight.shape[1:] != self.weight.shape[1:]:
            self.weight = self.weight.expand(count, *weight.shape[1:]).clone()
        at = slice(None) if len(rows) == count else rows  # a list is slow to index with
        self.total[at] += weight * logits
        self.weight[at] += weight

    def logits(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        if self.merge == "median":
            chosen = sorted(self.kept)[rows] if isinstance(rows, slice) else rows
            return torch.stack([_median(self.kept[i]) for i in chosen])
        assert self.total is not None and self.weight is not None
        if not isinstance(rows, slice) and len(rows) == len(self.total):
            rows = slice(None)
        return self.task.decode(self.total[rows] / self.weight[rows], self.merge)


def _median(looks: Sequence[Tensor]) -> Tensor:
    """Number by number; of an even number of looks, the mean of the two in the middle."""
    ordered = torch.stack(list(looks)).sort(0).values
    return (ordered[(len(looks) - 1) // 2] + ordered[len(looks) // 2]) / 2


@dataclass(eq=False)
class Looked:
    """What became of a batch: merged logits, and per image its looks, MACs and why it ended."""

    merged: Merged
    macs: list[int]
    counts: list[int]
    stopped: list[str]
    tops: list[list[Tensor]]  # what each look said (its class), only where a gate asks for agreement
    beside: dict[int, Merged] = field(default_factory=dict)  # further maps of the output, by the number of the target
    plain: list[Batch] = field(default_factory=list)  # the plain view's runs: its own answer, and other outputs
    seen: list[Seen] = field(default_factory=list)  # only where it is to be explained
    sure: list[Tensor] = field(default_factory=list)  # of all images (or tiles) before each gate, when calibrating
    spent: list[int] = field(default_factory=list)  # MACs of the first image after each stage

    @property
    def plain_macs(self) -> int:
        return self.plain[0].plan.plain_macs

    def tiling(self, view: View, gate: Gate) -> Tiling:
        """How a view is looked at in parts."""
        first = self.plain[0]
        size = first.plan.graph.size if first.crop is None else cropped_size(first.plan.graph.size, first.crop)
        return Tiling.of(view, gate, size, total_stride(first.plan), 1 if first.crop is None else MULTIPLE)


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
        rows, tiles = list(range(count)), dict[int, Tensor]()
        kept: list[Batch] = []
        taken: set[Look] = set()
        gate: Gate | None = None
        for number, stage in enumerate(self.stages):
            if stage.gate is not None:
                gate = stage.gate
                rows, tiles = self._pass(gate, out, rows, tiles)
            if not rows:
                break
            fresh = []
            if tiles and gate is not None:
                self._parts(source, stage, gate, tiles, out, taken, kept)
            else:
                fresh = self._whole(source, stage, rows, out, taken, kept)
            taken |= {Look(v, s) for v in stage.views for s in stage.chosen(out.plain[0].plan.found.space)}
            out.spent.append(out.macs[0])
            later = {v for s in self.stages[number + 1 :] for v in s.views}
            for batch in fresh:
                again = bool(set(batch.views) & later)
                batch.run.keep(range(batch.plan.engine.depth) if again else ())
                kept += [batch] if again else []
        for i in rows:
            share = f" at {float(tiles[i].double().mean()):.0%} of the tiles" if i in tiles else ""
            out.stopped[i] = out.stopped[i] or f"all looks{share}"
        return out

    def _engine(self, plan: Plan) -> Engine:
        """One for all stages: a later one goes on where an earlier one was."""
        return plan.engine_for(s for stage in self.stages for s in stage.chosen(plan.found.space))

    def _pass(
        self, gate: Gate, out: Looked, rows: list[int], tiles: dict[int, Tensor]
    ) -> tuple[list[int], dict[int, Tensor]]:
        """The rows, or their tiles, that the gate lets through."""
        own = [torch.stack(looks) for looks in zip(*(out.tops[i] for i in rows), strict=True)]
        now = self.task.sure(out.merged.logits(rows), gate.by, own)
        if gate.tile is not None:
            now = tile_means(now, out.tiling(IDENTITY, gate).size, gate.tile)
        elif now.ndim > 1:
            now = now.flatten(1).mean(1)
        if not self.gated:
            out.sure.append(now)
            return rows, {}
        opens = dict(zip(rows, gate.opens(now), strict=True))
        if gate.tile is not None:
            opens = {i: again & tiles[i] if i in tiles else again for i, again in opens.items()}
        for i, value in zip(rows, now, strict=True):
            if not opens[i].any():
                out.stopped[i] = f"{gate.by} {float(value.min()):.3f} >= {gate.below:.3g}"
        going = [i for i in rows if opens[i].any()]
        return going, {i: opens[i] for i in going} if gate.tile is not None else {}

    def _whole(
        self, source: Source, stage: Stage, rows: list[int], out: Looked, taken: set[Look], kept: list[Batch]
    ) -> list[Batch]:
        """The stage's looks at whole images; the runs that were begun for it."""
        known = {v for b in kept for v in b.views}
        fresh = list(self._start(source, stage, rows, known))
        if not out.plain:  # before anything is taken: maps of other sizes are laid over the plain one
            out.plain = [b for b in fresh if b.views[0] == IDENTITY]
        for batch in [*fresh, *(b for b in kept if set(b.views) & set(stage.views))]:
            self._take(stage, batch, rows, out, taken)
        return fresh

    def _parts(
        self, source: Source, stage: Stage, gate: Gate, tiles: dict[int, Tensor], out: Looked, taken: set[Look],
        kept: list[Batch],
    ) -> None:  # fmt: skip
        """The stage's looks at open tiles, window by window; an image that is mostly open is looked at whole."""
        first = out.plain[0]
        size = first.out_size(first.plan.targets[0])
        for view in stage.views:
            states = [s for s in stage.chosen(first.plan.found.space) if Look(view, s) not in taken]
            tiling = out.tiling(view, gate)
            covers = {i: tiling.cover(where) for i, where in tiles.items()} if states else {}
            whole = [i for i, windows in covers.items() if windows is None]
            if whole:
                self._whole(source, stage.only(view), whole, out, taken, kept)
            for i, windows in covers.items():
                if windows:
                    images = source.rows([i]).see(view)
                    cut = tiling.cut(images if first.crop is None else padded(images)[0], windows)
                    maps, macs = self._windows(cut, view, states)
                    logits = back(view, tiling.paste(maps, windows), tiling.size, size)
                    where = spread(tiles[i], tiling.size, size, tiling.tile)[None, None]
                    self._add_part(stage, view, states, i, logits, where.to(logits.device), out)
                    out.macs[i] += macs

    def _windows(self, cut: Tensor, view: View, states: Sequence[State]) -> tuple[Tensor, int]:
        """Maps of windows (N, C, ...) of one view, and the MACs of all of them."""
        cut, plan, crop = self.fit(cut)
        maps, macs = [], 0
        for part in cut.split(max(1, self.at_once(plan, len(states)))):
            batch = Batch(plan, self._engine(plan).start(part), (view,), list(range(len(part))), crop)
            maps.append(batch.map(view, states, batch.rows))
            macs += sum(m for _, m in batch.spent(view, batch.rows, len(states)))
        return torch.cat(maps), macs

    def _add_part(
        self, stage: Stage, view: View, states: Sequence[State], row: int, logits: Tensor, where: Tensor, out: Looked
    ) -> None:
        if self.explain:  # elsewhere the look says what was known before
            looks = tuple(Look(view, s) for s in states)
            out.seen.append(Seen(looks, [row], logits.where(where, out.merged.logits([row])), stage.weight(view)))
        weight = stage.weight(view) * len(states)
        out.merged.add(len(out.macs), [row], logits, weight, stage.temperature(view), where.float())
        out.counts[row] += len(states)

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
                shown = [images[part] for images, _, _ in fitted]
                run = self._engine(plan).start(shown[0] if len(shown) == 1 else torch.cat(shown))
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


def part_prices(stages: Sequence[Stage], run: Looked) -> list[Price]:
    """What each stage costs, in plain forwards: where it looks at tiles only, by the area of their windows."""
    spent = [m / run.plain_macs for m in run.spent]
    costs = [now - before for before, now in zip([0.0, *spent], spent, strict=False)]
    prices: list[Price] = []
    gate: Gate | None = None
    for stage, cost in zip(stages, costs, strict=True):
        gate = stage.gate or gate
        prices.append(cost)
        if gate is not None and gate.tile is not None:
            prices[-1] = partial(_part_price, cost, [run.tiling(view, gate) for view in stage.views])
    return prices


def _part_price(cost: float, tilings: Sequence[Tiling], alive: Tensor) -> float:
    """The mean over images whose tiles (N, rows, columns) are open."""
    areas = [math.prod(t.shown) for t in tilings]
    shares = [[t.share(where) for where in alive] for t in tilings]
    return cost * sum(a * sum(own) / len(own) for a, own in zip(areas, shares, strict=True)) / sum(areas)


def total_stride(plan: Plan) -> tuple[int, ...]:
    """Pixels after which the whole network repeats itself, per axis."""
    strides = zip(plan.found.strides, plan.found.layers, strict=True)
    steps = [[round(s * r) for s, r in zip(before, layer.rate, strict=True)] for before, layer in strides]
    return tuple(math.lcm(*along) for along in zip(*steps, strict=True))


def cropped_size(size: Sequence[int], crop: Sequence[float]) -> tuple[int, ...]:
    """Of the image that was filled up to this size."""
    return tuple(round(n * share) for n, share in zip(size, crop, strict=True))


def matched_stages(stages: Sequence[Stage], seen: Sequence[Seen]) -> tuple[Stage, ...]:
    """The stages with a temperature for every view of another size, so that it speaks as the plain one does.

    `seen`: what every look said of all images, with all gates open; no labels are needed.
    """
    heard: dict[View, list[Tensor]] = {}
    for one in seen:
        if not any(map(any, one.looks[0].state.selections)):
            heard.setdefault(one.looks[0].view, []).append(one.logits)
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
