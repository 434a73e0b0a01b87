"""`unstride.tune(model, data, cost=1.5)`: the best recipe for this network under a mean cost, and its proof."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unstride.data import Dataset
from unstride.data import load as load_data
from unstride.enhanced import Enhanced, enhance
from unstride.errors import DataError, OptionError
from unstride.jobs.distributed import world
from unstride.models import Loaded
from unstride.models import load as load_model
from unstride.procedure.familiar import warn_states
from unstride.procedure.gates import Stage
from unstride.procedure.meaning import task_named
from unstride.procedure.temperature import fit_temperature, nll
from unstride.recipe import Recipe, get
from unstride.tuning.candidates import Unit, candidates, usual
from unstride.tuning.certificate import Certificate, certify, in_sequence, verdict
from unstride.tuning.choose import OBJECTIVES, Choice, choose, fold_of, stages_of
from unstride.tuning.gather import Gathered, answers, gather, parts
from unstride.tuning.pixels import scenes
from unstride.tuning.pool import Pool
from unstride.tuning.scenes import tune_scenes
from unstride.tuning.simulate import simulate
from unstride.tuning.timing import timed
from unstride.tuning.tuned import Line, Tuned
from unstride.views.canvas import Source
from unstride.views.policies import IDENTITY

CEILINGS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
FOLDS = 5
LEAST = 30  # labelled pictures: with fewer nothing can be said


def tune(
    model: str | Loaded | nn.Module,
    data: str | Dataset | Iterable[Any],
    cost: float = 2.0,
    *,
    task: str | None = None,
    pool: str = "medium",
    objective: str = "likelihood",
    guard: float | None = None,
    frontier: bool = True,
    paper: bool = True,
    limit: int | None = None,
    window: int | None = None,
    weights: str = "default",
    cache_dir: str | Path | None = None,
    seed: int = 0,
    progress: bool = False,
    recipe: str | Path | Recipe | None = None,
    **options: Any,
) -> Tuned:
    """Labelled pictures and a cost ceiling in, the best recipe and its proof out. It may answer "leave it alone".

    Example: `tuned = unstride.tune(model, loader, cost=1.5); print(tuned); tuned.save("tuned.toml")`

    cost       mean cost of a picture, in plain forwards, that must not be exceeded
    data       KIND:PATH (see unstride.data), a Dataset, or batches of (images, labels); without labels there is
               `better.calibrate(pictures, cost=...)`
    task       classification, or segmentation; by default what the data is labelled for
    pool       small, medium or large: how many looks are tried
    objective  likelihood, accuracy, or, in segmentation, miou
    window     in segmentation, pictures that are larger are tuned in such squares, as `SlidingWindow` runs them
    guard      points: a recipe that may lose more than that, with 95 % confidence, is refused
    cache_dir  folder for what the network said; a run that was killed goes on from there
    recipe     and options, what `enhance` takes: in classification one more row of the table, "yours", and the start
               for nothing else
    """
    if not isinstance(cost, int | float) or isinstance(cost, bool) or not cost >= 1:
        raise OptionError(f"cost: got {cost!r}, wanted a number of plain forwards, at least 1")
    model, data = _loaded(model, data, weights, limit)
    ceilings = [c for c in CEILINGS if c < cost] + [cost] if frontier else [cost]
    if _task(model, data, task) == "segmentation":
        if recipe is not None or options:
            raise OptionError(
                "recipe: in segmentation yours is not measured beside the others yet; `unstride evaluate` measures it"
            )
        seen = list(scenes(data, _like(model), window))
        if not seen:
            raise DataError("the data has no picture")
        better = _plain(model, seen[0].source, data, "segmentation")
        return tune_scenes(better, seen, ceilings, pool, objective, guard, cache_dir, seed, progress)
    if objective not in OBJECTIVES:
        raise OptionError(f"objective: got {objective!r}, wanted one of {', '.join(OBJECTIVES)}")
    given = list(parts(data, _like(model)))
    if not given:
        raise DataError("the data has no picture")
    better = _plain(model, given[0].source, data, "classification")
    units = candidates(given[0].source, pool, better.task)
    mine: Enhanced | None = None
    if recipe is not None or options:
        mine = better.with_options(recipe="default" if recipe is None else recipe).with_options(**options)
    with ExitStack() as stack:
        us = stack.enter_context(world())
        folder = Path(cache_dir) if cache_dir is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = gather(better, given, units, folder, us, progress, paper)
        beside = {} if found.paper is None else {"paper, 10 states": found.paper}
        if mine is not None:
            beside["yours"] = answers(mine, given, folder, us, progress)
    if len(found.pool) < LEAST:
        raise DataError(f"{len(found.pool)} labelled pictures are too few to choose by; give at least {LEAST}")
    kept = [u for u in units if u.view in found.pool.work]
    return Tuning(found, kept, better, objective, seed, beside, given[0].source).tuned(ceilings, cost, guard)


def _loaded(
    model: str | Loaded | nn.Module, data: str | Dataset | Iterable[Any], weights: str, limit: int | None
) -> tuple[nn.Module, Dataset | Iterable[Any]]:
    loaded = load_model(model, weights) if isinstance(model, str) else model
    if isinstance(data, str):
        if not isinstance(loaded, Loaded):
            raise OptionError(
                f"data: got the name {data!r} with a module, whose preprocessing is not known; load the data"
            )
        data = load_data(data, loaded.preprocess, None, limit, classes=loaded.classes or None)
    return loaded.model if isinstance(loaded, Loaded) else loaded, data


def _task(model: nn.Module, data: Any, asked: str | None) -> str:
    """What is chosen for: as the user says, or the data, or what the model was enhanced for."""
    told = next((given.task for given in (data, model) if isinstance(given, Dataset | Enhanced)), "classification")
    task = task_named(asked or told).name
    if task not in ("classification", "segmentation"):
        raise OptionError(
            f"tune chooses for classification and segmentation so far, this is {task}: compare recipes with "
            "unstride.evaluate(model, data, recipe=...)"
        )
    return task


def _like(model: nn.Module) -> Tensor:
    """Device and type of what the model takes."""
    return next((p.detach() for p in model.parameters() if p.is_floating_point()), torch.zeros(())).new_zeros(())


def _plain(model: nn.Module, source: Source, data: Any, task: str) -> Enhanced:
    if isinstance(model, Enhanced):
        return model.with_options(recipe="plain")
    preprocess = data.preprocess if isinstance(data, Dataset) else None
    return enhance(model, source.rows([0]).see(IDENTITY), recipe="plain", task=task, preprocess=preprocess)


class Tuning:
    """A pool, and all that is chosen and proved from it."""

    def __init__(
        self,
        found: Gathered,
        units: Sequence[Unit],
        better: Enhanced,
        objective: str,
        seed: int,
        beside: Mapping[str, tuple[Tensor, Tensor]],
        source: Source | None = None,
    ) -> None:
        self.found, self.pool, self.units, self.better = found, found.pool, list(units), better
        self.objective, self.seed, self.beside, self.source = objective, seed, beside, source
        assert self.pool.labels is not None
        self.labels: Tensor = self.pool.labels
        self.folds = fold_of(len(self.pool), FOLDS, seed + 1)
        self.right = self.pool.plain.argmax(1) == self.labels

    def tuned(self, ceilings: Sequence[float], cost: float, guard: float | None) -> Tuned:
        lines = [self._line("plain", self.pool.plain, torch.ones(len(self.pool)))]
        known = usual(self.units)
        fixed = {name: self._stages(units) for name, units in known.items()}
        lines += [self._fixed(name, stages, known[name]) for name, stages in fixed.items()]
        lines += [self._line(name, *found) for name, found in self.beside.items()]
        held: dict[float, Tensor] = {}
        frontier: dict[float, Recipe] = {}
        proofs: list[Certificate] = []
        for ceiling in ceilings:
            logits, costs, warm = self._crossed(ceiling)
            choice = choose(self.pool, self.units, ceiling, self.objective, self.seed)
            frontier[ceiling] = self._recipe(self.pool, choice, f"tuned for {ceiling:g}")
            held[ceiling] = logits
            line = self._line(f"tuned for {ceiling:g}", logits, costs, str(choice), nlls=warm)
            lines.append(line)
            proofs.append(line.certificate)
        proof, recipe = proofs[-1], frontier[cost]
        words = verdict(proof, len(recipe.stages) < 2, in_sequence(proofs), list(ceilings), guard)
        if guard is not None and 100 * proof.low < -guard:
            recipe = get("plain").changed(name="guarded")
        notes = tuple(f"left out: {why}" for why in self.found.left_out)
        near = [i for i, look in enumerate(self.pool.looks) if look.view == IDENTITY and i]
        doubt = warn_states(self.pool.plain, self.pool.logits[near]) if near else None
        notes += (doubt,) if doubt is not None else ()
        spent = simulate(self.pool, recipe.stages, recipe.merge).cost if recipe.stages else 1.0
        better = self.better.with_options(recipe=recipe)
        run = {name: get("plain").changed(stages=stages) for name, stages in fixed.items()}
        run |= {r.name: r for r in frontier.values()}
        return Tuned(
            recipe, spent, frontier, tuple(self._timed(lines, run)), proof, words, better, self.pool, notes,
            held[cost], lambda pool: recipe if recipe.plain else self._again(pool, cost, recipe.name),
        )  # fmt: skip

    def _again(self, pool: Pool, ceiling: float, name: str) -> Recipe:
        return self._recipe(pool, choose(pool, self.units, ceiling, self.objective, self.seed), name)

    def _timed(self, lines: Sequence[Line], recipes: dict[str, Recipe]) -> list[Line]:
        """The lines with the time that their recipes take here."""
        if self.source is None:
            return list(lines)
        there = [line for line in lines if line.name in recipes]
        ready = [self.better.with_options(recipe=recipes[line.name]) for line in there]
        ratios = dict(zip([x.name for x in there], timed(ready, [x.cost for x in there], self.source), strict=True))
        return [replace(line, time=ratios.get(line.name)) for line in lines]

    def _crossed(self, ceiling: float) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, costs and NLL of each picture by a recipe that was chosen, and warmed, without it."""
        logits, costs = torch.empty_like(self.pool.plain), torch.ones(len(self.pool), dtype=torch.float64)
        warm = torch.empty(len(self.pool), dtype=torch.float64)
        for k in range(FOLDS):
            train, held = (self.folds != k).nonzero()[:, 0], (self.folds == k).nonzero()[:, 0]
            fitted, test = self.pool.rows(train), self.pool.rows(held)
            choice = choose(fitted, self.units, ceiling, self.objective, self.seed)
            stages = stages_of(choice, fitted)
            done = simulate(test, stages, choice.merge)
            assert fitted.labels is not None and test.labels is not None
            temperature = fit_temperature(simulate(fitted, stages, choice.merge).logits, fitted.labels)
            logits[held], costs[held] = done.logits, done.costs
            warm[held] = nll(done.logits, test.labels, temperature)
        return logits, costs, warm

    def _line(self, name: str, logits: Tensor, costs: Tensor, what: str = "", nlls: Tensor | None = None) -> Line:
        right = logits.argmax(1) == self.labels
        proof = certify(int((right & ~self.right).sum()), int((~right & self.right).sum()), len(right))
        if nlls is None:
            nlls = self._warmed(logits)
        return Line(name, float(right.float().mean()), float(nlls.mean()), proof, float(costs.mean()), what)

    def _warmed(self, logits: Tensor) -> Tensor:
        """NLL after one temperature, fitted on the other folds."""
        out = torch.empty(len(logits), dtype=torch.float64)
        for k in range(FOLDS):
            train, held = self.folds != k, self.folds == k
            out[held] = nll(logits[held], self.labels[held], fit_temperature(logits[train], self.labels[train]))
        return out

    def _stages(self, units: Sequence[Unit]) -> tuple[Stage, ...]:
        """As a user would: all looks for all pictures, at one temperature."""
        return tuple(Stage(s.views, s.states) for s in stages_of(Choice(tuple(units)), self.pool))

    def _fixed(self, name: str, stages: Sequence[Stage], units: Sequence[Unit]) -> Line:
        done = simulate(self.pool, stages)
        return self._line(name, done.logits, done.costs, ", ".join(str(u) for u in units))

    def _recipe(self, pool: Pool, choice: Choice, name: str) -> Recipe:
        assert pool.labels is not None
        stages = stages_of(choice, pool)
        temperature = fit_temperature(simulate(pool, stages, choice.merge).logits, pool.labels)
        return Recipe(name, self.better.task, stages, choice.merge, temperature)
