"""The evidence for a recipe: what people do instead, and a cross-validated test beside a baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstride.evaluation.decisions import cost_interval
from unstride.evaluation.findings import slower_than_cost
from unstride.evaluation.intervals import ConfidenceInterval, PairedCounts, cross_validated
from unstride.evaluation.labelled import Data
from unstride.evaluation.measuring import Variant, measure
from unstride.evaluation.rows import COST_UNIT, Row
from unstride.evaluation.scoring import Scoring
from unstride.evaluation.timing import TimeRatio
from unstride.execution.prediction import TIME_UNIT
from unstride.pipeline import Pipeline
from unstride.recipe.files import to_data
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Stage
from unstride.storage.distributed import World
from unstride.storage.provenance import provenance
from unstride.tasks.tasks import TASKS
from unstride.tasks.temperature import fit_temperature
from unstride.tuning.candidates import PassGroup, groups_of_recipe
from unstride.tuning.choose import FOLDS, Chooser, Rows, fold_of
from unstride.tuning.pool import Pool, PoolStore
from unstride.tuning.simulate import Simulated, build, can_simulate, plain_outputs, simulate
from unstride.views.source import place

Z = 1.96  # standard errors of a 95 % interval
TUNED = "tuned for "  # and the ceiling: the name of a recipe
Stats = dict[str, Any]


def short_names(pipeline: Pipeline) -> dict[str, str]:
    """What networks are called in tables: without the library, and each name once."""
    specs = [loaded.spec.partition(":")[2] or loaded.spec for loaded in pipeline.networks.values()]
    names = ["base", *list(pipeline.networks)[1:]]
    return {n: s if specs.count(s) == 1 else f"{s} ({n})" for n, s in zip(names, specs, strict=True)}


@dataclass(frozen=True, eq=False)
class Baseline:
    """What gains are over. `cost` is in forward passes of the first network."""

    name: str
    recipe: Recipe
    stats: Stats
    cost: float


@dataclass(frozen=True, eq=False)
class Evidence:
    """A pool with what its images are measured by.

    Args:
        clusters: of each image, its group, and copies of it.
        groups: of each image the patient, video or site, where that is known.
    """

    pipeline: Pipeline
    data: Data
    pool: Pool
    scoring: Scoring
    clusters: Rows
    groups: NDArray[Any] | None
    folds: Rows
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, pipeline: Pipeline, data: Data, pool: Pool, scoring: Scoring, groups: Sequence[str] | None, seed: int
    ) -> Evidence:
        own = None if groups is None else np.asarray(groups)[list(pool.rows)]
        clusters = _clusters(plain_outputs(pool, "base"), own)
        about = {
            "data": data.name,
            "model": pipeline.spec,
            "images": len(pool),
            "seed": seed,
            "weights": pipeline.weights,
            **provenance(),
        }
        return cls(pipeline, data, pool, scoring, clusters, own, fold_of(clusters, FOLDS, seed + 1), about)

    @property
    def names(self) -> dict[str, str]:
        return short_names(self.pipeline)

    # -- figures
    def stats(self, outputs: Tensor) -> Stats:
        return self.scoring.join([self.scoring.stats(outputs, self.pool.targets)])

    def calibrated(self, outputs: Tensor) -> Tensor:
        """Logits at one temperature; each image's comes from other folds."""
        if self.pool.task != "classification":
            return outputs
        labels, found = self.pool.targets.long(), torch.empty_like(outputs)
        for k in np.unique(self.folds):
            fit, held = (torch.from_numpy(np.flatnonzero(rows)) for rows in (self.folds != k, self.folds == k))
            found[held] = outputs[held] / fit_temperature(outputs[fit], labels[fit])
        return found

    def _row(
        self,
        name: str,
        stats: Stats,
        cost: ConfidenceInterval,
        recipe: Recipe,
        baseline: Baseline,
        gain: ConfidenceInterval | None = None,
        seconds: float | None = None,
    ) -> Row:
        own = name == baseline.name
        corrected, broken = self.scoring.changed(baseline.stats, stats)
        return Row(
            name=name,
            images=len(self.pool),
            metric=self.scoring.metric,
            metrics={k: float(v) for k, v in self.scoring.metrics(stats).items()},
            cost=cost,
            gain=None if own else gain or self.scoring.gain(baseline.stats, stats, self.groups),
            baseline="" if own else baseline.name,
            corrected=0 if own else int(corrected.sum()),
            broken=0 if own else int(broken.sum()),
            macs=0.0 if self.pool.timed else cost.estimate * float(self.pool.macs[0].mean()),
            seconds=seconds,
            cost_unit=TIME_UNIT if self.pool.timed else COST_UNIT,
            recipe=to_data(recipe),
            provenance=self.about,
        )

    def _cost(self, recipe: Recipe, done: Simulated) -> ConfidenceInterval:
        """The expected mean cost on as many new images, with the interval that holds it."""
        costs = done.costs
        if not done.passed:
            return _fixed(done.cost)
        if TASKS[recipe.task].maps:
            arm = Z * float(costs.std()) * (2 / len(costs)) ** 0.5
            return ConfidenceInterval(done.cost, max(0.0, done.cost - arm), done.cost + arm)
        groups = groups_of_recipe(recipe, self.pool.groups)
        assert groups is not None
        prices, shares = [0.0], [1.0]
        passed = [float(p.double().mean()) for p in done.passed]
        for stage, own in zip(recipe.stages, groups, strict=True):
            if stage.gate is not None:
                prices.append(0.0)
                shares.append(passed[len(shares) - 1])
            prices[-1] += sum(float(self.pool.costs(g).mean()) for g in own)
        return cost_interval(prices[0], prices[1:], shares[1:], len(self.pool), len(self.pool))

    def _seconds(self, recipe: Recipe, done: Simulated) -> float | None:
        """Of an image, from the times of the passes."""
        groups = groups_of_recipe(recipe, self.pool.groups)
        if groups is None or TASKS[recipe.task].maps:
            return None
        total, share, passed = 0.0, 1.0, [float(p.double().mean()) for p in done.passed]
        for stage, own in zip(recipe.stages, groups, strict=True):
            share = passed.pop(0) if stage.gate is not None else share
            total += share * sum(float(self.pool.seconds[self.pool.groups.index(g)]) for g in own)
        return total

    # -- what people do, and the baseline
    def baseline(
        self,
        against: str | Path | Recipe | None,
        store: PoolStore,
        us: World,
        batch_size: int | None = None,
        show: bool = False,
    ) -> Baseline:
        """A network by name or SPEC, or a recipe; by default the first network alone."""
        name, recipe = self._against(against)
        if can_simulate(self.pool, recipe):
            done = simulate(self.pool, recipe)
            return Baseline(name, recipe, self.stats(self.calibrated(done.outputs)), done.cost)
        variant = Variant(name, self.pipeline.with_recipe(recipe))
        measured = us.share(
            measure([variant], self.data, self.scoring, store.keys, store.folder, batch_size, us, show)
        )[0].only(np.asarray(self.pool.rows))
        macs = float(np.mean(measured.macs)) / float(self.pool.macs[0].mean())
        return Baseline(name, recipe, dict(measured.stats), macs)

    def _against(self, against: str | Path | Recipe | None) -> tuple[str, Recipe]:
        task = self.pool.task
        for name, short in self.names.items():
            spec = list(self.pipeline.networks.values())[list(self.names).index(name)].spec
            if against is None or str(against) in (name, short, spec):
                return short, Recipe((Stage(network=name),), task, name="plain" if name == "base" else short)
        recipe = self.pipeline.better.replace(against).recipe
        name = recipe.name or str(against)
        return f"{name} (before)" if name.startswith(TUNED) else name, recipe

    def rows(self, chooser: Chooser, baseline: Baseline) -> tuple[list[Row], dict[str, Stats]]:
        """Each network alone, with a flip, all together, several scales: what a user would do otherwise."""
        rows, stats = [], {baseline.name: baseline.stats}
        for name, candidate in chooser.usual.items():
            first, plus, rest = name.partition(" + ")
            shown = self.names.get(first, first) + plus + rest
            recipe = build(candidate, self.pool, shown)
            done = simulate(self.pool, recipe)
            own = self.stats(self.calibrated(done.outputs))
            stats[shown] = own
            rows.append(self._row(shown, own, _fixed(done.cost), recipe, baseline, seconds=self._seconds(recipe, done)))
        if all(row.name != baseline.name for row in rows):
            rows.insert(0, self._row(baseline.name, baseline.stats, _fixed(baseline.cost), baseline.recipe, baseline))
        return rows, stats

    # -- the test
    def test(self, chooser: Chooser, written: Recipe, ceiling: float, baseline: Baseline) -> tuple[Row, Stats]:
        """Choose on the other folds, answer for each fold, compare with the baseline."""
        done = simulate(self.pool, written)
        cost, name = self._cost(written, done), f"{TUNED}{ceiling:g}"
        if written.stages == baseline.recipe.stages:
            gain = self.scoring.gain(baseline.stats, baseline.stats, self.groups)
            return self._row(name, baseline.stats, cost, written, baseline, gain), baseline.stats
        outputs = torch.empty_like(done.outputs)
        for k in np.unique(self.folds):
            fit, held = np.flatnonzero(self.folds != k), np.flatnonzero(self.folds == k)
            outputs[torch.from_numpy(held)] = self._held_out(chooser, ceiling, fit, held)
        stats = self.stats(outputs)
        gain = self.scoring.gain(baseline.stats, stats, self.groups)
        gain = cross_validated(gain, self._change(stats, self.stats(done.outputs)))
        return self._row(name, stats, cost, written, baseline, gain, self._seconds(written, done)), stats

    def _held_out(self, chooser: Chooser, ceiling: float, fit: Rows, held: Rows) -> Tensor:
        """What a recipe that was chosen on some images returns for others."""
        pool = self.pool.some(fit)
        recipe = build(chooser.choose(ceiling, fit), pool).changed(temperature=1.0)
        outputs = simulate(self.pool.some(held), recipe).outputs
        if pool.task != "classification":
            return outputs
        return outputs / fit_temperature(simulate(pool, recipe).outputs, pool.targets.long())

    def _change(self, stats: Stats, written: Stats) -> float:
        """The standard error of the gain of the written recipe over the cross-validated answers."""
        own, other = self.scoring.correct(stats), self.scoring.correct(written)
        if own is not None and other is not None and self.groups is None:
            return PairedCounts.from_correct(own, other).standard_error
        return self.scoring.gain(stats, written, self.groups).width / (2 * Z)

    # -- notes
    def notes(
        self, row: Row, rows: Sequence[Row], stats: Stats, baseline: Baseline, recipe: Recipe, time: TimeRatio | None
    ) -> list[str]:
        found = self._sizes(recipe)
        names = self.names
        found += [f"{n} is {names[n]}." for n in recipe.networks if n != names[n] and n != "base"]
        if self.pool.timed:
            found.append("Cost is measured time: the multiply-accumulates of these networks cannot be counted.")
        if time is not None:
            found.append(f"Measured time: {time} of {names['base']}.")
        if slow := slower_than_cost(row, rows):
            found.append(f"{slow[0].upper()}{slow[1:]}")
        return found + self._disagreement(row, stats, baseline)

    def _sizes(self, recipe: Recipe) -> list[str]:
        """Sizes as they run: views are rounded."""
        found = []
        for group in (g for own in groups_of_recipe(recipe, self.pool.groups) or () for g in own):
            prepared = self.pipeline.better.networks[group.network].preprocess
            if prepared is None or prepared.size is None or not any(op.name == "Size" for op in group.view.ops):
                continue
            size = place(group.view, prepared.size).size
            alone = float(self.pool.costs(PassGroup(group.network)).mean())
            ratio = float(self.pool.costs(group).mean()) / alone
            found.append(
                f"{self.names[group.network]} in view {group.view}: {prepared.size[0]} to {size[0]} px, {ratio:.2f}x."
            )
        return found

    def _disagreement(self, row: Row, stats: Stats, baseline: Baseline) -> list[str]:
        """Where NLL and accuracy disagree, both are shown."""
        if self.pool.task != "classification" or self.scoring.metric != "accuracy" or row.gain is None:
            return []
        change = np.asarray(self.scoring.loss(stats)) - np.asarray(self.scoring.loss(baseline.stats))
        mean, arm = float(change.mean()), Z * float(change.std(ddof=1)) / len(change) ** 0.5
        if mean * row.gain.estimate <= 0 or abs(mean) <= arm:
            return []
        direction = "lower" if mean < 0 else "higher"
        return [
            f"Accuracy decides, and NLL disagrees: it is {abs(mean):.4f} {direction} "
            f"(95 % CI of the change {mean - arm:+.4f} to {mean + arm:+.4f})."
        ]


def _fixed(cost: float) -> ConfidenceInterval:
    return ConfidenceInterval(cost, cost, cost)


def _clusters(outputs: Tensor, groups: NDArray[Any] | None) -> Rows:
    """A number for each image: images of one group, and copies of an image, have the same."""
    flat = outputs.flatten(1).contiguous().numpy()
    _, copies = np.unique(flat.view([("", flat.dtype)] * flat.shape[1])[:, 0], return_inverse=True)
    if groups is None:
        return np.asarray(copies, dtype=np.int64)
    found = np.unique(groups, return_inverse=True)[1].astype(np.int64)
    while True:  # a copy joins two groups
        least = np.full(copies.max() + 1, len(found))
        np.minimum.at(least, copies, found)
        joined = least[copies]
        smallest = np.full(found.max() + 1, len(found))
        np.minimum.at(smallest, found, joined)
        joined = smallest[found]
        if (joined == found).all():
            return found
        found = joined
