"""A recipe on a pool: what `Enhanced.run` returns and what it costs, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from unstride.errors import OptionError
from unstride.execution.calibrate import threshold
from unstride.execution.record import Combine
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Stage
from unstride.tasks.tasks import TASKS
from unstride.tasks.temperature import fit_temperature, safe_temperature
from unstride.tuning.candidates import Candidate, Groups, PassGroup, groups_of_recipe, recipe_of
from unstride.tuning.pool import Pool


@dataclass(frozen=True, eq=False)
class Simulated:
    """Outputs (N, ...) and costs (N,) of a recipe, and which images (N,), or pixels (N, P), passed each gate."""

    outputs: Tensor
    costs: Tensor
    passed: tuple[Tensor, ...]
    stages: tuple[Stage, ...]

    @property
    def cost(self) -> float:
        return float(self.costs.mean())


def can_simulate(pool: Pool, recipe: Recipe) -> bool:
    """Whether a pool has every pass of a recipe, and its gates can be followed."""
    if recipe.precision is not None or recipe.tensors is not None or groups_of_recipe(recipe, pool.groups) is None:
        return False
    gates = [s.gate for s in recipe.stages if s.gate is not None]
    if not gates or not TASKS[recipe.task].maps:
        return all(gate.below is not None for gate in gates)
    before = recipe.stages[: next(i for i, s in enumerate(recipe.stages) if s.gate is not None)]
    alone = len(before) == 1 and len(before[0].views) == 1 and not before[0].temperatures
    known = pool.maps is not None and gates[0].tile == pool.maps.gate.tile and gates[0].by == "margin"
    return alone and known and len(gates) == 1 and gates[0].below is not None


def simulate(pool: Pool, recipe: Recipe, shares: Sequence[float] | None = None) -> Simulated:
    """What a recipe does with the images of a pool.

    Args:
        shares: of each gate, the share of all images (or tiles) that passes; its threshold is set to that. Without,
            the recipe's own thresholds count. `stages` of the result have the thresholds.
    """
    groups = groups_of_recipe(recipe, pool.groups)
    if groups is None:
        raise OptionError(f"recipe: {recipe.name or 'it'} has a pass that was not computed.")
    if TASKS[recipe.task].maps:
        return _simulate_maps(pool, recipe, groups, shares)
    run = _Simulation(pool, recipe)
    left = list(shares or ())
    for stage, own in zip(recipe.stages, groups, strict=True):
        run.stage(stage, own, left.pop(0) if left and stage.gate is not None else None)
    value = run.total.value()
    return Simulated(value / recipe.temperature, run.costs, tuple(run.passed), tuple(run.stages))


class _Simulation:
    """One recipe on vectors, stage by stage, as the runner has it."""

    def __init__(self, pool: Pool, recipe: Recipe) -> None:
        self.pool, self.recipe, self.task = pool, recipe, TASKS[recipe.task]
        count = len(pool)
        self.total = Combine(recipe.combine, self.task, count)
        self.costs = torch.zeros(count, dtype=torch.float64)
        self.alive = torch.ones(count, dtype=torch.bool)
        self.answers: list[Tensor] = []
        self.passed: list[Tensor] = []
        self.stages: list[Stage] = []

    def stage(self, stage: Stage, groups: Groups, share: float | None) -> None:
        if stage.gate is not None:
            stage = replace(stage, gate=self._gate(stage.gate, share))
        self.stages.append(stage)
        rows = self.alive.nonzero()[:, 0].tolist()
        if not rows:
            return
        result = self.total
        if stage.join == "replace":
            result, self.answers = Combine(self.recipe.combine, self.task, len(self.pool)), []
        for group in groups:
            self.costs[rows] += self.pool.costs(group)[rows]
            for output in self.pool.passes(group):
                warm = output[rows] / stage.temperature(group.view)
                result.add(rows, warm, stage.weight(group.view))
                self.answers.append(self.task.answer(output))
        if stage.join == "replace":
            self.total.replace(rows, result)

    def _gate(self, gate: Gate, share: float | None) -> Gate:
        alive = self.alive
        confidence = self.task.confidence(self.total.value(), gate.by, self.answers).cpu()
        if share is not None:
            left = int(alive.sum())
            below = threshold(confidence[alive], min(1.0, share * len(alive) / max(1, left)))
            gate = replace(gate, below=below, share=share)
        passing = gate.passes(confidence) & alive
        self.alive = passing
        self.passed.append(passing)
        return gate


def _simulate_maps(pool: Pool, recipe: Recipe, groups: Sequence[Groups], shares: Sequence[float] | None) -> Simulated:
    """The same at the pixels that are kept; behind a gate, in the tiles that pass."""
    assert pool.maps is not None
    task, maps = TASKS[recipe.task], pool.maps
    total = Combine(recipe.combine, task, len(pool))
    costs = torch.zeros(len(pool), dtype=torch.float64)
    where: Tensor | None = None
    below = 0.0
    network = recipe.stages[0].network
    stages: list[Stage] = []
    rows = list(range(len(pool)))
    for stage, own in zip(recipe.stages, groups, strict=True):
        if stage.gate is not None:
            gate = stage.gate
            if shares:
                gate = replace(gate, below=maps.threshold(network, shares[0]), share=shares[0])
            assert gate.below is not None
            below, where = gate.below, maps.open_pixels(network, gate.below)
            stage = replace(stage, gate=gate)
        stages.append(stage)
        result = total if stage.join == "average" else Combine(recipe.combine, task, len(pool))
        for group in own:
            area = 1.0 if where is None else maps.areas(network, group.view, below)
            costs += pool.costs(group) * area
            for output in pool.passes(group):
                mask = None if where is None else where[:, None, None, :].float()
                result.add(rows, output / stage.temperature(group.view), stage.weight(group.view), mask)
        if stage.join == "replace":
            total.replace(rows, result)
    passed = () if where is None else (where,)
    return Simulated(total.value() / recipe.temperature, costs, passed, tuple(stages))


def plain_outputs(pool: Pool, network: str) -> Tensor:
    """Of a network alone, (N, ...)."""
    return pool.passes(PassGroup(network))[0]


def build(candidate: Candidate, pool: Pool, name: str = "") -> Recipe:
    """A candidate as a recipe: thresholds and temperatures come from the images of the pool."""
    task = TASKS[pool.task]
    tile = pool.maps.gate if pool.maps is not None else None
    gates: list[Gate | None] = [None]
    shares = []
    for before, share in pairwise((1.0, *candidate.shares)):
        gate = None
        if share < before:
            shares.append(share)
            gate = Gate(candidate.by, share=share) if tile is None else replace(tile, share=share, below=None)
        gates.append(gate)
    labels = pool.targets.long() if pool.task == "classification" else None
    temperatures = None
    if labels is not None and len(candidate.networks) > 1:
        plain = {g.network: pool.passes(g)[0] for g in pool.groups if g.plain}
        temperatures = {name: fit_temperature(plain[name], labels) for name in candidate.networks}
    recipe = recipe_of(candidate, task.name, gates, temperatures, name)
    done = simulate(pool, recipe, shares)
    recipe = recipe.changed(stages=done.stages)
    if labels is not None and len(candidate.groups) > 1:
        recipe = recipe.changed(temperature=safe_temperature(done.outputs, labels))
    return recipe
