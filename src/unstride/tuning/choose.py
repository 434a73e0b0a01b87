"""The choice: which networks, views and states, in which order, behind which gates, under a mean cost.

A beam search over steps makes the candidates; beside them stands what people do. Of all, the one with the fewest passes
is taken whose cross-validated loss is within one standard error of the best. No candidate is taken that a single
network, plain or flipped, beats at no more cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstride.errors import OptionError
from unstride.evaluation.decisions import one_standard_error, safe_shares
from unstride.evaluation.metric_names import lower_is_better
from unstride.tasks.tasks import TASKS
from unstride.tuning.candidates import Candidate, SearchSpace, Step, standards
from unstride.tuning.objectives import Outcomes, gated_losses
from unstride.tuning.simulate import build, simulate

SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7)
TILE_SHARES = (0.05, 0.1, 0.2, 0.35, 0.5)
NARROWER = (0.2, 0.4, 0.7, 1.0)  # of those that pass a gate, the part that passes the next one
LEAST = 0.02  # the smallest share of all images for which a step is worth having
FOLDS = 5
STEPS = 4
FIRSTS, BEAM, FINALISTS = 6, 6, 12
WEIGHTS = (0.5, 2.0)
ONE_SIDED = 1.645  # standard errors: 5 % lie beyond
Rows = NDArray[np.int64]
Array = NDArray[np.floating[Any]]


@dataclass(eq=False)
class Chooser:
    """Chooses among the outcomes of a pool.

    Args:
        time_ratio: the most measured time, as a multiple of the first network's forward pass.
        clusters: of each image, what it must not be separated from: its group, and copies of it.
    """

    outcomes: Outcomes
    space: SearchSpace
    clusters: Rows
    time_ratio: float | None = None
    seed: int = 0
    advance: Callable[[int, str], None] = lambda step, note: None
    _safe: dict[object, tuple[float, ...]] = field(default_factory=dict)
    _tiled: dict[object, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.task = TASKS[self.outcomes.pool.task]
        self.tiles = self.task.maps
        self.usual = standards(self.space, self._combine(1))
        several = self._combine(2)
        self.usual = {
            n: replace(c, combine=several if len(c.networks) > 1 else c.combine) for n, c in self.usual.items()
        }

    # -- the choice
    def choose(self, ceiling: float, rows: Rows) -> Candidate:
        """By these images, under a mean cost."""
        search = _Search(self, ceiling, rows)
        finalists = search.finalists()
        losses = self.cross_validated(finalists, rows)
        costs = [self.cost(c) for c in finalists]
        alone = [c for name, c in self.usual.items() if len(c.networks) == 1 and len(c.groups) < 3 and c in finalists]
        known = set(self.usual.values())
        quality = cache(lambda candidate: self.quality(candidate, rows))
        while True:
            standard = [i for i, c in enumerate(finalists) if c in known]
            index = one_standard_error(losses, [len(c.groups) for c in finalists], costs, standard)
            chosen = finalists[index]
            if chosen in alone or not self._beaten(chosen, costs[index], alone, quality):
                self.advance(1, "")
                return chosen
            finalists.pop(index)
            costs.pop(index)
            losses = np.delete(losses, index, 1)

    def _beaten(
        self, chosen: Candidate, cost: float, alone: Sequence[Candidate], quality: Callable[[Candidate], float]
    ) -> bool:
        """Whether a single network, plain or flipped, has a better metric at no more cost."""
        rivals = [c for c in alone if self.cost(c) <= cost * (1 + 1e-9)]
        return any(quality(rival) > quality(chosen) for rival in rivals)

    def quality(self, candidate: Candidate, rows: Rows) -> float:
        """The metric on these images, higher is better."""
        pool, scoring = self.outcomes.pool.some(rows), self.outcomes.scoring
        stats = scoring.stats(simulate(pool, build(candidate, pool)).outputs, pool.targets)
        value = float(scoring.value(scoring.join([stats])))
        return -value if lower_is_better(scoring.metric) else value

    def cross_validated(self, candidates: Sequence[Candidate], rows: Rows) -> Array:
        """Losses (N, C): thresholds and temperature of each image come from other images."""
        folds = fold_of(self.clusters[rows], FOLDS, self.seed)
        parts = [folds == k for k in np.unique(folds)]
        return np.stack([self.losses(candidate, rows, parts) for candidate in candidates], 1)

    # -- losses
    def losses(self, candidate: Candidate, rows: Rows, parts: Sequence[NDArray[np.bool_]] = ()) -> Array:
        """What images lose (n,). Thresholds and a temperature come from all of them; of each part, from the others."""
        answers = [self.outcomes.of(candidate, k) for k in range(1, len(candidate.steps) + 1)]
        steps = [answer.losses[:, rows] for answer in answers]
        before = [
            answer.confidence[candidate.by][rows] if step.share < previous.share else None
            for answer, previous, step in zip(answers, candidate.steps, candidate.steps[1:], strict=False)
        ]
        valid = None if self.outcomes.valid is None else self.outcomes.valid[rows]
        every = np.ones(len(rows), dtype=bool)
        if not parts:
            loss, best = gated_losses(candidate, steps, before, valid, every)
            return loss[best]
        found = np.empty(len(rows))
        for held in parts:
            loss, best = gated_losses(candidate, steps, before, valid, ~held)
            found[held] = loss[best, held]
        return found

    # -- cost
    def cost(self, candidate: Candidate) -> float:
        """The expected mean cost."""
        prices = self.prices(candidate)
        return prices[0] + sum(p * s for p, s in zip(prices[1:], self._areas(candidate), strict=True))

    def prices(self, candidate: Candidate) -> list[float]:
        """Of each step, for the images that take it."""
        return [sum(self.outcomes.prices[g] for g in step.groups) for step in candidate.steps]

    def _areas(self, candidate: Candidate) -> tuple[float, ...]:
        """Of each further step, the part of its cost that an image pays on average."""
        if not (self.tiles and candidate.gated):
            return candidate.shares
        return tuple(float(self._tile_costs(candidate, k).mean()) / p for k, p in self._steps(candidate))

    def _steps(self, candidate: Candidate) -> list[tuple[int, float]]:
        return list(enumerate(self.prices(candidate)))[1:]

    def _tile_costs(self, candidate: Candidate, number: int) -> Tensor:
        """Of each image (N,), what a step behind a gate with tiles costs."""
        maps, step = self.outcomes.pool.maps, candidate.steps[number]
        assert maps is not None
        if step.share >= 1:
            return torch.stack([self.outcomes.costs[g] for g in step.groups]).sum(0)
        network = candidate.steps[0].groups[0].network
        key = (network, step.groups, step.share)
        if key not in self._tiled:
            below = maps.threshold(network, step.share)
            parts = [self.outcomes.costs[g] * maps.areas(network, g.view, below) for g in step.groups]
            self._tiled[key] = torch.stack(parts).sum(0)
        return self._tiled[key]

    def safe(self, candidate: Candidate, ceiling: float, images: int) -> tuple[float, ...] | None:
        """Its shares, brought down until as many new images exceed the ceiling in at most 5 % of draws.

        None where they are too small to be worth a step.
        """
        prices = self.prices(candidate)
        if prices[0] > ceiling + 1e-9:
            return None
        found = self._safe_shares(ceiling, prices, candidate.shares, images) if candidate.shares else ()
        if self.time_ratio is not None:
            times = [sum(self.outcomes.times[g] for g in step.groups) for step in candidate.steps]
            if times[0] > self.time_ratio + 1e-9:
                return None
            if found:
                found = tuple(map(min, found, self._safe_shares(self.time_ratio, times, candidate.shares, images)))
        return found if min(found, default=1.0) >= LEAST else None

    def _safe_shares(
        self, ceiling: float, prices: Sequence[float], shares: tuple[float, ...], images: int
    ) -> tuple[float, ...]:
        key = (round(ceiling, 4), tuple(round(p, 3) for p in prices), shares, images)
        if key not in self._safe:
            full = prices[0] + sum(p * s for p, s in zip(prices[1:], shares, strict=True))
            fits = min(shares) == 1 and full <= ceiling + 1e-9
            self._safe[key] = shares if fits else safe_shares(ceiling, prices[0], prices[1:], shares, images, images)
        return self._safe[key]

    def fits_tiles(self, candidate: Candidate, ceiling: float, rows: Rows) -> bool:
        """The same for gates with tiles, whose cost is not proportional to the share."""
        costs = torch.stack([self._tile_costs(candidate, k) for k, _ in self._steps(candidate)]).sum(0)[rows]
        first = self.prices(candidate)[0]
        error = float(costs.std()) * (2 / max(1, len(rows))) ** 0.5  # of these images, and of as many new ones
        return first + float(costs.mean()) + ONE_SIDED * error <= ceiling + 1e-9

    def _combine(self, networks: int) -> str:
        several = "probabilities" if networks > 1 and self.task.classes else ""
        usual = "probabilities" if self.tiles and self.task.classes else self.task.combines[0]
        return several or usual

    def combine_for(self, candidate: Candidate) -> Candidate:
        """With the usual way to combine passes of one network, or of several."""
        return replace(candidate, combine=self._combine(len(candidate.networks)))


class _Search:
    """Candidates under one ceiling, by the loss on some images."""

    def __init__(self, chooser: Chooser, ceiling: float, rows: Rows) -> None:
        self.chooser, self.ceiling, self.rows = chooser, ceiling, rows
        self.scored: dict[Candidate, float] = {}
        self.gated = bool(chooser.outcomes.measures)
        self.least = max(LEAST, 1 / len(rows))

    def finalists(self) -> list[Candidate]:
        """The best candidates with several shares each, and what people do."""
        usual = [c for c in self.chooser.usual.values() if self._fits(c)]
        if not usual:
            least = min(self.chooser.cost(c) for c in self.chooser.usual.values())
            raise OptionError(f"cost: got {self.ceiling:g}, but the cheapest network costs {least:.3g} forward passes.")
        for candidate in usual:
            self._score(candidate)
        beam = self._firsts()
        for _ in range(STEPS - 1):
            found = self._extended(beam)
            if not found:
                break
            best = self._best(found, BEAM)
            beam = self._best([*best, *self._refined(best)], BEAM)
        best = self._best(list(self.scored), FINALISTS)
        several = [c for some in best for c in self._share_variants(some)]
        return list(dict.fromkeys([*usual, *best, *several]))

    def _fits(self, candidate: Candidate) -> bool:
        safe = self.chooser.safe(candidate, self.ceiling, len(self.rows))
        return safe == candidate.shares

    def _score(self, candidate: Candidate) -> float:
        if candidate not in self.scored:
            self.scored[candidate] = float(self.chooser.losses(candidate, self.rows).mean())
        return self.scored[candidate]

    def _best(self, candidates: Iterable[Candidate], count: int) -> list[Candidate]:
        """The best of each structure, whatever its shares."""
        found: dict[Candidate, Candidate] = {}
        for candidate in sorted(dict.fromkeys(candidates), key=lambda c: self.scored[c]):
            found.setdefault(candidate.structure, candidate)
        return list(found.values())[:count]

    def _firsts(self) -> list[Candidate]:
        chooser = self.chooser
        firsts = [
            some for some in chooser.space.firsts() if some[0].plain or not chooser.tiles
        ]  # maps are laid over it
        made = [chooser.combine_for(Candidate((Step(groups),), "")) for groups in firsts]
        fitting = [c for c in made if self._fits(c)]
        for candidate in fitting:
            self._score(candidate)
        plain = [c for c in fitting if len(c.groups) == 1 and c.groups[0].plain]
        return list(dict.fromkeys([*plain, *self._best(fitting, FIRSTS)]))

    def _extended(self, beam: Sequence[Candidate]) -> list[Candidate]:
        found = []
        for candidate in beam:
            for groups in self.chooser.space.extensions(candidate.groups):
                other = groups[0].network not in candidate.networks and self.chooser.task.classes
                for join in ("average", "replace") if other else ("average",):
                    made = self.chooser.combine_for(candidate.added(Step(groups, join=join)))
                    found += [c for c in self._with_shares(made) if self._score(c) < self.scored[candidate]]
        return found

    def _with_shares(self, candidate: Candidate) -> list[Candidate]:
        """Under the ceiling: for all images if that fits, else behind gates for as many as are safe, and for half."""
        before = candidate.shares[:-1]
        open_ = candidate.with_shares((*before, before[-1] if before else 1.0))
        if self._fits_at_all(open_):
            return [open_] if not self.gated else [open_, *self._patterns(candidate, (0.5,))]
        return self._patterns(candidate, (1.0, 0.5)) if self.gated else []

    def _fits_at_all(self, candidate: Candidate) -> bool:
        if self.chooser.tiles and candidate.gated:
            return self.chooser.fits_tiles(candidate, self.ceiling, self.rows)
        return self._fits(candidate)

    def _patterns(self, candidate: Candidate, scales: Sequence[float]) -> list[Candidate]:
        if self.chooser.tiles:
            return self._tile_patterns(candidate)
        narrow = NARROWER if len(candidate.shares) > 1 else (1.0,)
        before = candidate.shares[:-1]
        found = []
        for part in narrow:
            wanted = candidate.with_shares((*before, part * (before[-1] if before else 1.0)))
            safe = self.chooser.safe(wanted, self.ceiling, len(self.rows))
            if safe is not None:
                found += [candidate.with_shares(tuple(scale * s for s in safe)) for scale in scales]
        return [c for c in found if min(c.shares) >= self.least]

    def _tile_patterns(self, candidate: Candidate) -> list[Candidate]:
        """One gate with tiles, right after a single plain pass."""
        first = candidate.steps[0].groups
        if len(first) > 1 or not first[0].plain or any(g.states is not None for g in candidate.groups):
            return []
        if len(candidate.steps) > 2:
            return []
        made = [candidate.with_shares((share,)) for share in TILE_SHARES]
        return [c for c in made if self.chooser.fits_tiles(c, self.ceiling, self.rows)]

    def _refined(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Other weights, gates and ways to combine."""
        found = []
        for candidate in candidates:
            combines = {c for c in self.chooser.task.combines if c in ("logits", "probabilities")}
            other = combines - {candidate.combine} if not self.chooser.tiles else set()
            found += [replace(candidate, combine=c) for c in sorted(other)]
            *before, last = candidate.steps
            if len(before) and last.join == "average" and len(candidate.networks) > 1:
                found += [replace(candidate, steps=(*before, replace(last, weight=w))) for w in WEIGHTS]
            if candidate.gated:
                found += [replace(candidate, by=by) for by in self._measures(candidate)]
        for candidate in found:
            self._score(candidate)
        return found

    def _measures(self, candidate: Candidate) -> list[str]:
        several = len(candidate.steps[0].groups) > 2
        known = [m for m in self.chooser.outcomes.measures if m != "agreement" or several]
        return [m for m in known if m != candidate.by]

    def _share_variants(self, candidate: Candidate) -> list[Candidate]:
        """The same with smaller shares."""
        if not candidate.gated or self.chooser.tiles:
            return []
        first = candidate.shares[0]
        factors = [share / first for share in SHARES if share < first]
        made = [candidate.with_shares(tuple(f * s for s in candidate.shares)) for f in factors]
        return [c for c in made if min(c.shares) >= self.least]


def fold_of(clusters: Rows, folds: int, seed: int) -> Rows:
    """The fold of each image: clusters stay together, and folds are about equal."""
    names, number, sizes = np.unique(clusters, return_inverse=True, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    load, found = np.zeros(folds), np.empty(len(names), dtype=np.int64)
    for cluster in order:
        found[cluster] = load.argmin()
        load[found[cluster]] += sizes[cluster]
    return found[number]
