"""`unstride.tune(model, data, cost=1.5)`: the best recipe for this network under a mean cost, and its proof."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from unstride.data import Dataset, check_limit
from unstride.data.batches import legend
from unstride.enhanced import Enhanced, enhance
from unstride.errors import DataError, OptionError, UnstrideWarning
from unstride.evaluation.loop import asked_task, check_task, dataset_of
from unstride.evaluation.measures import measure_of
from unstride.evaluation.words import doubts_of
from unstride.models import LoadedModel
from unstride.models import load as load_model
from unstride.tasks.confidence import two_class
from unstride.procedure.familiar import warn_looks
from unstride.procedure.gates import Stage
from unstride.tasks.tasks import TASKS
from unstride.tasks.temperature import nll, sure_temperature
from unstride.recipe.presets import get
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN
from unstride.storage.distributed import launched, world
from unstride.tuning.candidates import Unit, candidates, usual
from unstride.tuning.certificate import certify
from unstride.tuning.choose import OBJECTIVES, Choice, Chooser, choose, fold_of, laid, stages_of
from unstride.tuning.gather import Gathered, answers, gather, kept_in
from unstride.tuning.judges import JUDGES, check_neighbours
from unstride.tuning.parts import Part, parts
from unstride.tuning.pixels import Scene, scenes
from unstride.tuning.pool import Pool
from unstride.tuning.scenes import tune_scenes
from unstride.tuning.simulate import simulate
from unstride.tuning.tasks import Judged
from unstride.tuning.timing import with_times
from unstride.tuning.tuned import Line, Tuned, settled
from unstride.views.source import Source

CEILINGS = (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
FOLDS = 5
Given = TypeVar("Given", Part, Scene)
LEAST, LEAST_MAPS = 30, 10  # labelled images: with fewer nothing can be said; a map has many pixels


def tune(
    model: str | LoadedModel | nn.Module,
    data: str | Dataset | Iterable[Any],
    cost: float = 2.0,
    *,
    task: str | None = None,
    pool: str = "medium",
    objective: str | None = None,
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
    """Labelled images and a cost ceiling in, the best recipe and its proof out. It may answer "leave it alone".

    Example: `tuned = unstride.tune(model, loader, cost=1.5); print(tuned); tuned.save("tuned.toml")`

    cost       mean cost of an image, in plain forwards, that must not be exceeded
    data       KIND:PATH (see unstride.data), a Dataset, or batches of (images, labels); without labels there is
               `better.calibrate(images, cost=...)`
    task       by default what the data is labelled for; of batches classification, or what the model is known to be for
    pool       small, medium or large: how many looks are tried
    objective  of classes likelihood (the default), accuracy, or, in segmentation, miou; other tasks have one each
    window     in segmentation, images that are larger are tuned in such squares, as `SlidingWindow` runs them
    guard      points, or per cent of an error: a recipe that may lose more, with 95 % confidence, is refused
    cache_dir  folder for what the network said; a run that was killed goes on from there
    recipe     and options, what `enhance` takes: but for segmentation one more row of the table, "yours", and the
               start for nothing else
    """
    if not _number(cost) or cost < 1:
        raise OptionError(f"cost: got {cost!r}, wanted a number of plain forwards, at least 1")
    if guard is not None and (not _number(guard) or guard < 0):
        raise OptionError(f"guard: got {guard!r}, wanted a number of points, at least 0, or None")
    check_limit(limit)
    named = data if isinstance(data, str) else ""
    loaded, data, task = _loaded(model, data, weights, limit, task)
    module = loaded.model if isinstance(loaded, LoadedModel) else loaded
    ceilings = sorted({*CEILINGS, float(cost)}) if frontier else [float(cost)]
    if window is not None and task != "segmentation":
        raise OptionError(f"window: got {window}, but it is for segmentation, and this is {task}: leave it out")
    if progress and launched().leads:
        print(data.legend if isinstance(data, Dataset) else legend(task), file=sys.stderr)
    if task == "segmentation":
        if recipe is not None or options:
            raise OptionError(
                "recipe: in segmentation yours is not measured beside the others yet; `unstride evaluate` measures it"
            )
        better, seen = _ready(module, data, task, scenes(data, _like(module), window))
        by = objective or "likelihood"
        tuned = tune_scenes(better, seen, ceilings, cost, pool, by, guard, cache_dir, seed, progress, paper)
        return _doubted(replace(tuned, data=named), loaded, 1 / better.plan.classes)
    _check_objective(objective, task)
    better, given = _ready(module, data, task, parts(data, _like(module), task))
    units = candidates(given[0].source, pool, better.task)
    mine: Enhanced | None = None
    if recipe is not None or options:
        mine = better.with_options(recipe="default" if recipe is None else recipe).with_options(**options)
    with ExitStack() as stack:
        us = stack.enter_context(world())
        folder = stack.enter_context(kept_in(cache_dir, us))
        found = gather(better, given, units, folder, us, progress, paper)
        beside = {} if found.paper is None else {"paper, 10 states": found.paper}
        if mine is not None:
            beside["yours"] = answers(mine, given, folder, us, progress)
    if task in JUDGES:
        judged = Judged(found, better, seed, beside, given[0].source)
        return _doubted(replace(judged.tuned(ceilings, cost, guard), data=named), loaded, judged.judge.chance)
    by = objective or OBJECTIVES[0]
    tuning = Tuning(found, found.units, better, by, seed, beside, given[0].source)
    return _doubted(replace(tuning.tuned(ceilings, cost, guard), data=named), loaded, 1 / better.plan.classes)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _doubted(tuned: Tuned, model: LoadedModel | nn.Module, chance: float | None) -> Tuned:
    """The same, after a warning where the plain network is no better than guessing, as `evaluate` has it."""
    task, plain = tuned.better.task, tuned.lines[0]
    by = measure_of(task, {} if tuned.metric.startswith("recall") else None)
    found = {by.key: plain.value, "chance": chance}
    weights = model.weights if isinstance(model, LoadedModel) else "its own"
    for doubt in doubts_of(task, found, plain.certificate.images, weights) if launched().leads else ():
        warnings.warn(doubt, UnstrideWarning, stacklevel=3)
    return tuned


def _loaded(
    model: str | LoadedModel | nn.Module,
    data: str | Dataset | Iterable[Any],
    weights: str,
    limit: int | None,
    task: str | None,
) -> tuple[LoadedModel | nn.Module, Dataset | Iterable[Any], str]:
    """The model, its data, and what is chosen for: as the user says, or the data, or the model."""
    loaded = load_model(model, weights) if isinstance(model, str) else model
    told = asked_task(loaded, task)
    known = dataset_of(loaded, data, limit, None, told)
    if known is not None:
        data = known.serving(told)
        check_task(loaded, task, data)
        told = data.task
    told = told or "classification"
    if told not in (*JUDGES, "classification", "segmentation"):
        raise OptionError(
            f"tune chooses by labels, and there are none for {told}: it knows "
            f"{', '.join(('classification', 'segmentation', *JUDGES))}"
        )
    return loaded, data, told


def _check_objective(objective: str | None, task: str) -> None:
    known = (JUDGES[task].by,) if task in JUDGES else OBJECTIVES
    if objective not in (None, *known):
        raise OptionError(f"objective: got {objective!r}, wanted {' or '.join(known)}, by which {task} is chosen for")


def _like(model: nn.Module) -> Tensor:
    """Device and type of what the model takes."""
    return next((p.detach() for p in model.parameters() if p.is_floating_point()), torch.zeros(())).new_zeros(())


def _ready(model: nn.Module, data: Any, task: str, given: Iterable[Given]) -> tuple[Enhanced, list[Given]]:
    """The model in its plain state, and the labelled images, checked as they come: enough, with labels that fit."""
    better: Enhanced | None = None
    found: list[Given] = []
    for one in given:
        if better is None:
            better = _plain(model, one.source, data, task)
        one.check(better)
        found.append(one)
    if better is None:
        raise DataError("the data has no image")
    count, least = sum(len(one.source) for one in found), LEAST_MAPS if TASKS[task].maps else LEAST
    if count < least:
        raise DataError(f"{count} labelled images are too few to choose by; give at least {least}")
    if task == "embedding":
        check_neighbours(torch.cat([one.labels for one in found if isinstance(one, Part)]))
    return better, found


def _plain(model: nn.Module, source: Source, data: Any, task: str) -> Enhanced:
    example = source.rows([0]).render(PLAIN)
    if isinstance(model, Enhanced):
        if model.task != task:
            raise OptionError(f"the model was enhanced for {model.task}, but is to be tuned for {task}")
        if model.recipe.precision is not None:
            raise OptionError(
                f"precision: this model is enhanced for {model.recipe.precision}, and tune measures in the model's "
                "own; give the model itself, and the precision to what was tuned: enhance(model, example, "
                "recipe=FILE, precision=...)"
            )
        better = model.with_options(recipe="plain")
        better.fitted(example)
        return better
    preprocess = data.preprocess if isinstance(data, Dataset) else None
    return enhance(model, example, recipe="plain", task=task, preprocess=preprocess)


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
        self.right = two_class(self.pool.plain).argmax(1) == self.labels

    def tuned(self, ceilings: Sequence[float], cost: float, guard: float | None) -> Tuned:
        lines = [self._line("plain", self.pool.plain, torch.ones(len(self.pool)))]
        known = usual(self.units)
        fixed = {name: laid(units) for name, units in known.items()}
        lines += [self._fixed(name, stages, known[name]) for name, stages in fixed.items()]
        lines += [self._line(name, *found) for name, found in self.beside.items()]
        held: dict[float, Tensor] = {}
        frontier: dict[float, Recipe] = {}
        chooser = Chooser(self.pool, self.units, self.objective, self.seed)
        for ceiling, (logits, costs, warm) in self._crossed(ceilings).items():
            choice = chooser.choice(ceiling)
            frontier[ceiling] = self._recipe(self.pool, choice, f"tuned for {ceiling:g}")
            held[ceiling] = logits
            lines.append(self._line(f"tuned for {ceiling:g}", logits, costs, str(choice), nlls=warm))
        recipe, proof, words = settled(lines, frontier, cost, guard, self.objective)
        notes = tuple(f"left out: {why}" for why in self.found.left_out)
        near = [i for i, look in enumerate(self.pool.looks) if look.view == PLAIN and i]
        doubt = warn_looks(self.pool.plain, {"states": self.pool.logits[near]}) if near else None
        notes += (doubt,) if doubt is not None else ()
        spent = simulate(self.pool, recipe.stages, recipe.merge).cost
        better = self.better.with_options(recipe=recipe)
        run = {name: get("plain").changed(stages=stages) for name, stages in fixed.items()}
        run |= {r.name: r for ceiling, r in frontier.items() if ceiling <= cost}
        if self.source is not None:
            lines, time = with_times(lines, run, self.better, self.source)
            notes += (time,)
        return Tuned(
            recipe, cost, spent, frontier, tuple(lines), proof, words, better, self.pool, notes,
            held[cost], lambda pool: recipe if recipe.plain else self._again(pool, cost, recipe.name),
        )  # fmt: skip

    def _again(self, pool: Pool, ceiling: float, name: str) -> Recipe:
        return self._recipe(pool, choose(pool, self.units, ceiling, self.objective, self.seed), name)

    def _crossed(self, ceilings: Sequence[float]) -> dict[float, tuple[Tensor, Tensor, Tensor]]:
        """At each ceiling logits, costs and NLL of each image by a recipe that was chosen, and warmed, without it."""
        plain, each = self.pool.plain, torch.ones(len(self.pool), dtype=torch.float64)
        out = {ceiling: (torch.empty_like(plain), each.clone(), each.clone()) for ceiling in ceilings}
        for k in range(FOLDS):
            train, held = (self.folds != k).nonzero()[:, 0], (self.folds == k).nonzero()[:, 0]
            fitted, test = self.pool.rows(train), self.pool.rows(held)
            assert fitted.labels is not None and test.labels is not None
            chooser = Chooser(fitted, self.units, self.objective, self.seed)
            for ceiling, (logits, costs, warm) in out.items():
                choice = chooser.choice(ceiling)
                stages = stages_of(choice, fitted)
                done = simulate(test, stages, choice.merge)
                temperature = sure_temperature(simulate(fitted, stages, choice.merge).logits, fitted.labels)
                logits[held], costs[held] = done.logits, done.costs
                warm[held] = nll(done.logits, test.labels, temperature)
        return out

    def _line(self, name: str, logits: Tensor, costs: Tensor, what: str = "", nlls: Tensor | None = None) -> Line:
        right = two_class(logits).argmax(1) == self.labels
        turned = [int((a & ~b).sum()) for a, b in ((right, self.right), (self.right, right))]
        proof = certify(turned[0], turned[1], len(right))
        proof = proof if float(costs.max()) > 1 else proof.of_plain()
        if nlls is None:
            nlls = self._warmed(logits)
        return Line(name, float(right.float().mean()), float(nlls.mean()), proof, float(costs.mean()), what)

    def _warmed(self, logits: Tensor) -> Tensor:
        """NLL after one temperature, fitted on the other folds where that is sure."""
        out = torch.empty(len(logits), dtype=torch.float64)
        for k in range(FOLDS):
            train, held = self.folds != k, self.folds == k
            out[held] = nll(logits[held], self.labels[held], sure_temperature(logits[train], self.labels[train]))
        return out

    def _fixed(self, name: str, stages: Sequence[Stage], units: Sequence[Unit]) -> Line:
        done = simulate(self.pool, stages)
        return self._line(name, done.logits, done.costs, ", ".join(str(u) for u in units))

    def _recipe(self, pool: Pool, choice: Choice, name: str) -> Recipe:
        assert pool.labels is not None
        stages = stages_of(choice, pool)
        temperature = sure_temperature(simulate(pool, stages, choice.merge).logits, pool.labels)
        return Recipe(name, self.better.task, stages, choice.merge, temperature)
