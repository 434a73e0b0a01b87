"""The choice: which looks, behind which gate, under a mean cost, so that the answers are most likely right.

Greedy over units of looks for every share of images that may look again; beside it what a user would do instead and
other balanced sets, behind the gate where they just spend the ceiling. How far to go is decided on images that the
choice did not see. The best of all that are surely better than plain wins, or what people do, as they do it, where
that is about as good; it may be "plain".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstride.tasks.confidence import two_class
from unstride.procedure.calibrate import threshold
from unstride.procedure.gates import Gate, Stage, sureness
from unstride.procedure.looks import Look
from unstride.tasks.temperature import fit_temperature
from unstride.recipe.view import PLAIN, View
from unstride.tuning.candidates import Unit, sets
from unstride.tuning.pool import Pool

SHARES = (0.1, 0.2, 0.3, 0.5, 1.0)
FOLDS = 5
CLASSES = 48  # of each image, the likeliest: enough to choose by
STEPS = 8  # units that a stage may have
VARIANTS = ((1.0, "logits"), (1.0, "probabilities"), (0.5, "logits"), (2.0, "logits"), (2.0, "probabilities"))
OBJECTIVES = ("likelihood", "accuracy")


@dataclass(frozen=True)
class Choice:
    """Units behind a gate that this share of images passes; no units is the plain network with a temperature.

    `weight`: what each further look counts beside the plain one; `matched`: each view at its own temperature.
    """

    units: tuple[Unit, ...] = ()
    share: float = 1.0
    weight: float = 1.0
    merge: str = "logits"
    matched: bool = True

    def __str__(self) -> str:
        if not self.units:
            return "plain"
        looks = ", ".join(map(str, self.units))
        looks += "" if self.weight == 1 else f", weighed {self.weight:g} to 1"
        looks += "" if self.merge == "logits" else f", merged as {self.merge}"
        return looks if self.share >= 1 else f"{looks} for the least sure {self.share:.0%}"


@dataclass(frozen=True, eq=False)
class Table:
    """A pool made ready for choosing: for every unit the sum of its logits (N, M) and how many looks it has."""

    units: tuple[Unit, ...]
    sums: Tensor  # (U, N, M)
    shares: Tensor  # (U, N, M), the sum of its probabilities
    counts: Tensor  # (U,)
    plain: Tensor  # (N, M)
    labels: Tensor  # (N,), among the M classes
    margin: Tensor  # (N,)
    costs: Tensor  # (U,), beside the plain look

    def rows(self, at: Tensor) -> Table:
        return Table(
            self.units, self.sums[:, at], self.shares[:, at], self.counts, self.plain[at], self.labels[at],
            self.margin[at], self.costs,
        )  # fmt: skip


def temperatures_of(pool: Pool, units: Sequence[Unit]) -> dict[View, float]:
    """What brings each view to the plain one's temperature: larger ones are often louder."""
    assert pool.labels is not None
    views = dict.fromkeys((PLAIN, *(u.view for u in units)))
    still = {v: Look(v, pool.work[v].near[0]) for v in views}  # a larger image may have more layers that subsample
    own = {v: fit_temperature(pool.logits[pool.index[look]], pool.labels) for v, look in still.items()}
    return {v: t / own[PLAIN] for v, t in own.items()}


def table(pool: Pool, units: Sequence[Unit], temperatures: Mapping[View, float]) -> Table:
    """Each view at its temperature, the likeliest classes of each image, and what units cost."""
    logits, labels = _likeliest(pool)
    sums, shares, counts, costs = [], [], [], []
    for unit in units:
        looks = looks_of(pool, unit)
        at = [pool.index[look] for look in looks]
        warm = logits[at] / temperatures.get(unit.view, 1.0)
        sums.append(warm.sum(0))
        shares.append(warm.softmax(-1).sum(0))
        counts.append(len(at))
        costs.append(pool.cost([pool.looks[0], *looks]) - 1.0)
    margin = sureness(pool.plain, "margin")
    return Table(
        tuple(units), torch.stack(sums), torch.stack(shares), torch.tensor(counts, dtype=torch.float32), logits[0],
        labels, margin, torch.tensor(costs),
    )  # fmt: skip


def looks_of(pool: Pool, unit: Unit) -> list[Look]:
    """A unit's looks beside the plain one."""
    states = pool.states(Stage((unit.view,), unit.states), unit.view)
    return [look for s in states if (look := Look(unit.view, s)) != pool.looks[0]]


def _likeliest(pool: Pool) -> tuple[Tensor, Tensor]:
    """Logits (L, N, M) of each image's likeliest classes, its own label among them, and where that lies."""
    assert pool.labels is not None
    logits = two_class(pool.logits.float(), 2)
    if logits.shape[2] <= CLASSES:
        return logits, pool.labels
    mean = logits.mean(0)
    top = mean.scatter(1, pool.labels[:, None], math.inf).topk(CLASSES, 1).indices
    kept = logits.gather(2, top.expand(len(logits), *top.shape))
    return kept, (top == pool.labels[:, None]).float().argmax(1)


def losses(logits: Tensor, labels: Tensor, objective: str, temperature: float = 1.0) -> Tensor:
    """(..., N, M) -> (..., N): what is to be small."""
    if objective == "accuracy":
        return (logits.argmax(-1) != labels).double()
    chosen = logits.gather(-1, labels.expand(logits.shape[:-1])[..., None])[..., 0]
    return ((logits / temperature).logsumexp(-1) - chosen / temperature).double()


def greedy(t: Table, share: float, ceiling: float, objective: str, temperature: float) -> list[int]:
    """Units in the order in which they help most, as long as the mean cost stays under the ceiling."""
    rows = (t.margin < threshold(t.margin, share)).nonzero()[:, 0]
    room = (ceiling - 1.0) / share
    total, count, chosen = t.plain[rows], 1.0, list[int]()
    labels = t.labels[rows]
    if not len(rows):
        return []
    while len(chosen) < STEPS:
        spent = float(t.costs[chosen].sum()) if chosen else 0.0
        open_ = [u for u in range(len(t.units)) if u not in chosen and spent + float(t.costs[u]) <= room + 1e-9]
        if not open_:
            break
        means = (total + t.sums[open_][:, rows]) / (count + t.counts[open_])[:, None, None]
        best = _cheapest(t, open_, losses(means, labels, objective, temperature))
        chosen.append(best)
        total, count = total + t.sums[best][rows], count + float(t.counts[best])
    return chosen


def _cheapest(t: Table, units: Sequence[int], own: Tensor) -> int:
    """Of the units whose losses (U, N) are within a standard error of the best, the cheapest, then the plainest."""
    best = own[int(own.mean(1).argmin())]
    fine = [u for u, loss in zip(units, own, strict=True) if difference(loss, best) <= 1.0]
    return min(fine, key=lambda u: (round(float(t.costs[u]), 2), len(t.units[u].view.ops)))


def merged(t: Table, units: Sequence[int], below: float, weight: float = 1.0, merge: str = "logits") -> Tensor:
    """(N, M): the mean over the plain look and the units where the margin is below the threshold."""
    if not units:
        return t.plain
    chosen, count = list(units), 1.0 + weight * float(t.counts[list(units)].sum())
    if merge == "logits":
        mean = (t.plain + weight * t.sums[chosen].sum(0)) / count
    else:
        mean = ((t.plain.softmax(-1) + weight * t.shares[chosen].sum(0)) / count).clamp(min=1e-12).log()
    return torch.where((t.margin < below)[:, None], mean, t.plain)


@dataclass(frozen=True)
class Way:
    """How `steps` units are come by: the first of the greedy order, or a set of `units` that is tried as it is.

    What people do is not `matched`, the mean of all views as loud as they are, unless that is surely worse.
    """

    steps: int = 0
    share: float = 1.0
    units: tuple[int, ...] = ()
    matched: bool = True


PLAIN_WAY = Way()
Path = Callable[[Table], list[int]]  # units, from the images that they may be chosen on
Part = tuple[Table, Table, Tensor]  # of a fold: the other images, its own, and which they are


def choose(pool: Pool, units: Sequence[Unit], ceiling: float, objective: str = "likelihood", seed: int = 0) -> Choice:
    """The choice under this ceiling."""
    return Chooser(pool, units, objective, seed).choice(ceiling)


class Chooser:
    """`Chooser(pool, units).choice(1.5)`: what was found out for one ceiling is known for the next."""

    def __init__(self, pool: Pool, units: Sequence[Unit], objective: str = "likelihood", seed: int = 0) -> None:
        self.units, self.objective = units, objective
        if units:
            self.whole = table(pool, units, temperatures_of(pool, units))
            self.own = fit_temperature(self.whole.plain, self.whole.labels)
            folds = fold_of(len(pool), FOLDS, seed)
            self.parts = {True: list(_parts(self.whole, folds)), False: list(_parts(table(pool, units, {}), folds))}
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def choice(self, ceiling: float) -> Choice:
        """Under this ceiling: cross-validated over how far the greedy order is followed behind which gate."""
        if not self.units:
            return Choice()
        whole, tried = self.whole, {PLAIN_WAY: losses(self.whole.plain, self.whole.labels, self.objective, self.own)}
        for share in SHARES:
            paths = [self._greedy(fitted, share, ceiling) for fitted, _, _ in self.parts[True]]
            for steps in range(1, min(map(len, paths)) + 1):
                tried[Way(steps, share)] = self._held(True, [path[:steps] for path in paths], share)
        known, every = sets(self.units)
        for some in sorted(every):
            share = min(1.0, math.floor(100 * (ceiling - 1 + 1e-9) / float(whole.costs[list(some)].sum())) / 100)
            if share < SHARES[0]:  # behind the gate where it just spends the ceiling
                continue
            found = {m: self._held(m, [list(some)] * FOLDS, share) for m in (some not in known, True)}
            matched = False not in found or difference(found[False], found[True]) > 2.0
            tried[Way(len(some), share, some, matched)] = found[matched]
        way = surest(tried, known)
        if way == PLAIN_WAY:
            return Choice()

        def path_of(t: Table) -> list[int]:
            return list(way.units) or self._greedy(t, way.share, ceiling)[: way.steps]

        chosen = tuple(self.units[u] for u in path_of(whole))
        merge = refined(self.parts[way.matched], way.share, path_of, self.objective)
        return Choice(chosen, way.share, *merge, way.matched)

    def _greedy(self, t: Table, share: float, ceiling: float) -> list[int]:
        return greedy(t, share, ceiling, self.objective, self.own)

    def _held(self, matched: bool, paths: Sequence[list[int]], share: float) -> Tensor:
        """What each image loses (N,) by the units that were chosen on the other folds."""
        key = (matched, tuple(map(tuple, paths)), share)
        if key not in self._known:
            parts = self.parts[matched]
            out = self._known[key] = torch.empty(sum(len(held) for _, _, held in parts), dtype=torch.float64)
            for (fitted, test, held), took in zip(parts, paths, strict=True):
                below = threshold(fitted.margin, share)
                out[held] = _lost(fitted, test, took, below, VARIANTS[0], self.objective)
        return self._known[key]


def _lost(
    fitted: Table, test: Table, units: list[int], below: float, variant: tuple[float, str], objective: str
) -> Tensor:
    warm = fit_temperature(merged(fitted, units, below, *variant), fitted.labels)
    return losses(merged(test, units, below, *variant), test.labels, objective, warm)


def _parts(whole: Table, folds: Tensor) -> Iterator[Part]:
    for k in range(FOLDS):
        held = (folds == k).nonzero()[:, 0]
        yield whole.rows((folds != k).nonzero()[:, 0]), whole.rows(held), held


def refined(parts: Sequence[Part], share: float, path_of: Path, objective: str) -> tuple[float, str]:
    """The weight of the further looks and what is averaged: other than equal logits only where it is surely better."""
    count = sum(len(held) for _, _, held in parts)
    found = {v: torch.empty(count, dtype=torch.float64) for v in VARIANTS}
    for fitted, test, held in parts:
        path, below = path_of(fitted), threshold(fitted.margin, share)
        for variant in VARIANTS:
            found[variant][held] = _lost(fitted, test, path, below, variant, objective)
    best = min(found, key=lambda v: float(found[v].mean()))
    return best if difference(found[VARIANTS[0]], found[best]) > 2.0 else VARIANTS[0]


def surest(tried: dict[Way, Tensor], known: Container[tuple[int, ...]] = ()) -> Way:
    """The best of all that are surely better than plain, or plain.

    A single further look is believed after one standard error, more of them after two: there are more to err with. What
    people do, the `known` sets, is taken instead where the best is ahead of it by less than half a standard error.
    """
    sure = [
        w for w in tried if w != PLAIN_WAY and difference(tried[PLAIN_WAY], tried[w]) > (1.0 if w.steps == 1 else 2.0)
    ]
    best = min(sure, key=lambda w: float(tried[w].mean()), default=PLAIN_WAY)
    usual = [w for w in sure if w.units in known and difference(tried[w], tried[best]) <= 0.5]
    return min(usual or [best], key=lambda w: float(tried[w].mean()))


def difference(a: Tensor, b: Tensor) -> float:
    """How much larger a's mean is than b's, in standard errors of the paired difference."""
    gap = a - b
    error = float(gap.std()) / math.sqrt(len(gap))
    return float(gap.mean()) / error if error > 0 else 0.0


def fold_of(count: int, folds: int, seed: int) -> Tensor:
    """Which fold each image is in: dealt out evenly, in an order that only the seed decides."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return torch.empty(count, dtype=torch.long).scatter(0, order, torch.arange(count) % folds)


def stages_of(choice: Choice, pool: Pool) -> tuple[Stage, ...]:
    """A choice as stages with thresholds and temperatures from this pool."""
    if not choice.units:
        return laid(())
    warm = temperatures_of(pool, choice.units) if choice.matched else None
    below = threshold(sureness(pool.plain, "margin"), choice.share)
    gate = Gate("margin", below, choice.share) if choice.share < 1 else None
    return laid(choice.units, gate, choice.weight, warm)


def laid(
    units: Sequence[Unit], gate: Gate | None = None, weight: float = 1.0, warm: Mapping[View, float] | None = None
) -> tuple[Stage, ...]:
    """Units after the plain look, behind a gate: as a user would, all of them for all images, at one temperature."""

    def stage(views: tuple[View, ...], states: str, gate: Gate | None) -> Stage:
        weights = () if weight == 1 else (weight,) * len(views)
        return Stage(views, states, gate, weights, () if warm is None else tuple(warm[v] for v in views))

    alone = tuple(u.view for u in units if u.states == "plain")
    stages = [stage(alone, "plain", gate)] if alone else []
    for unit in units:
        if unit.states != "plain":
            stages.append(stage((unit.view,), unit.states, None if stages else gate))
    return (Stage(), *stages)
