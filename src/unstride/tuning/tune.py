"""`tune(models, data, cost=1.5)`: the best recipe for a compute budget, and whether to use it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from unstride.errors import DataError, OptionError, UnstrideWarning
from unstride.evaluation.findings import key_sample
from unstride.evaluation.labelled import Data, groups_of, open_labelled, scoring_of
from unstride.evaluation.measuring import first_image
from unstride.evaluation.rows import decision_of
from unstride.evaluation.scoring import Scoring
from unstride.evaluation.timing import TimeRatio, time_ratio
from unstride.execution.independence import warn_of_batch_dependence
from unstride.models.weights import place
from unstride.pipeline import Pipeline, open_pipeline
from unstride.recipe.recipe import Recipe
from unstride.storage.distributed import World, launched, world
from unstride.storage.files import as_path
from unstride.storage.progress import progress as show_progress
from unstride.tasks.tasks import TASKS
from unstride.tuning.candidates import PassGroup, SearchSpace, pool_groups
from unstride.tuning.choose import FOLDS, Chooser
from unstride.tuning.evidence import TUNED, Baseline, Evidence, short_names
from unstride.tuning.objectives import OBJECTIVES, Outcomes
from unstride.tuning.passes import PassRunner, usable_groups
from unstride.tuning.pool import Pool, PoolStore, gather_pool
from unstride.tuning.reading import LabelledReader, pil_pairs
from unstride.tuning.result import Tuned
from unstride.tuning.simulate import build
from unstride.tuning.unlabelled import GatesOnly, set_gates, without_labels
from unstride.views.source import Canvas, PILImages, Source

FEWEST, FEWEST_MAPS = 30, 10  # labelled images: with fewer nothing can be chosen; a map has many pixels
TIMED_IMAGES, TRIES = 8, 3


def tune(
    models: Any,
    data: Any,
    *,
    cost: float = 1.5,
    against: str | Path | Recipe | None = None,
    margin: float | None = None,
    metric: str | None = None,
    objective: str = "nll",
    group: str | Sequence[Any] | None = None,
    max_time_ratio: float | None = None,
    frontier: Sequence[float] = (),
    partners: str | None = None,
    task: str | None = None,
    weights: str | Path | None = "default",
    device: str | None = None,
    cache: str | Path | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    split: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Tuned | GatesOnly:
    """Find the best recipe of one to five networks for a compute budget, test it, and say whether to use it.

    Each network computes every pass once. Recipes are then simulated: which networks, in which order, in which views
    and states, behind which gates. Figures are cross-validated: each image by a recipe that was chosen without it.

    Args:
        models: a SPEC, a module, a `LoadedModel`, what `enhance` returned; or a list or dict of these. Cost 1.0 is one
            forward pass of the first one.
        data: labelled images: KIND:PATH (see `unstride.data`), a Dataset, or batches of (images, labels). Images
            without labels (a folder, PIL images, a tensor) only set the gates for the cost.
        cost: the most that an image may cost on average; it may be below 1. On a new set as large as the labelled one,
            the mean cost exceeds it with a probability of at most 5 %.
        against: the baseline: a network by name or SPEC, or a recipe. By default the first network alone.
        margin: the loss that is acceptable where the recipe is cheaper, in the metric's unit; by default half a point.
        metric: the one that decides, such as "Dice"; by default the usual one of the task.
        objective: what recipes are chosen by: "nll" after one temperature, or "accuracy". Other tasks have one each.
        group: a column of csv data, or one value for each image (patient, video, site): folds and intervals keep them
            together.
        max_time_ratio: the most measured time, as a multiple of the first network's forward pass.
        frontier: further costs to choose recipes for.
        partners: "auto" suggests smaller networks for one of timm, and loads them where a hub can be reached.
        cache: folder for the passes. A run that was killed goes on, and another cost or seed reuses them.

    Example: `tuned = unstride.tune(["timm:mobilenetv2_100", "timm:resnet50"], "folder:val", cost=1.5); print(tuned)`
    """
    _check(cost, objective, max_time_ratio, frontier, batch_size)
    if partners is not None:
        from unstride.tuning.partners import with_partners

        models = with_partners(models, partners, weights)
    if without_labels(data):
        return set_gates(models, data, cost, task=task, weights=weights, device=device, limit=limit, progress=progress)
    show = progress and launched().leads
    if (pairs := pil_pairs(data)) is not None:
        models = dict(open_pipeline(models, weights=weights, task=task, device=device).networks)
        data = pairs.dataset(next(iter(models.values())).preprocess)
    pipeline, images = open_labelled(models, data, task=task, limit=limit, split=split, weights=weights, device=device)
    scoring = scoring_of(pipeline, images, metric)
    groups = groups_of(images, group)
    ceilings = sorted({*map(float, frontier), float(cost)})
    with ExitStack() as stack:
        us = stack.enter_context(world())
        folder = stack.enter_context(_cache_folder(cache, us))
        example = first_image(images)[None].to(*place(pipeline.better.model))
        if us.leads:
            warn_of_batch_dependence(pipeline.better.networks, example)
        store = PoolStore(pipeline, images, folder, example, show)
        usable, notes = usable_passes(pipeline, images, ceilings[-1])
        pool = gather_pool(store, usable, us, batch_size, show)
        _check_pool(pool, objective)
        evidence = Evidence.of(pipeline, images, pool, scoring, groups, seed)
        baseline = evidence.baseline(against, store, us, batch_size, show)
        tuning = _Tuning(evidence, baseline, objective, max_time_ratio, seed, margin)
        with show_progress("choosing", len(ceilings) * (FOLDS + 1), show) as advance:
            return tuning.tuned(float(cost), ceilings, notes, advance)


# ---------------------------------------------------------------- checks
def _check(cost: Any, objective: Any, max_time_ratio: Any, frontier: Sequence[Any], batch_size: Any) -> None:
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise OptionError(f"batch_size: got {batch_size!r:.60}, expected a whole number, 1 or more.")
    if not isinstance(frontier, Sequence):
        raise OptionError(f"frontier: got {frontier!r:.60}, expected costs such as (1.5, 2, 4).")
    for name, value in (("cost", cost), *(("frontier", f) for f in frontier), ("max_time_ratio", max_time_ratio)):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 < value < 1e12) and not (name == "max_time_ratio" and value is None):
            unit = (
                "times the first network's time" if name == "max_time_ratio" else "forward passes of the first network"
            )
            raise OptionError(f"{name}: got {value!r}, expected more than 0 {unit}.")
    if objective not in OBJECTIVES:
        raise OptionError(f"objective: got {objective!r}, expected {' or '.join(map(repr, OBJECTIVES))}.")


def _check_pool(pool: Pool, objective: str) -> None:
    fewest = FEWEST_MAPS if pool.maps is not None else FEWEST
    if len(pool) < fewest:
        raise DataError(f"data: got {len(pool)} labelled images, expected at least {fewest} to choose by.")
    if objective == "accuracy" and pool.task != "classification":
        raise OptionError(f"objective: 'accuracy' is for classification, and this is {pool.task}. Leave it out.")


@contextmanager
def _cache_folder(cache: str | Path | None, us: World) -> Iterator[Path | None]:
    """The user's folder; without one memory, or, of several processes, a temporary folder that all of them see."""
    if cache is not None or us.size == 1:
        yield None if cache is None else as_path(cache, "cache")
        return
    with ExitStack() as stack:
        folder = Path(us.share(stack.enter_context(TemporaryDirectory()) if us.leads else ""))
        if not folder.is_dir():
            raise DataError("cache: processes on several machines have no temporary folder in common. Give cache.")
        yield folder
        us.wait()


# ---------------------------------------------------------------- which passes
def usable_passes(pipeline: Pipeline, data: Data, ceiling: float) -> tuple[list[PassGroup], list[str]]:
    """The groups of passes that the networks take and a ceiling allows, and what is left out."""
    better = pipeline.better
    _, source, _ = next(LabelledReader(data, better, 1).batches(range(len(data))))
    names = ["base", *list(pipeline.networks)[1:]]
    prepared = {name: better.networks[name].preprocess or better.preprocess for name in names}
    margins = {name: _margin(source, prepared[name]) for name in names}
    groups = pool_groups(prepared, source.size, pipeline.task, margins)
    kept, refused = usable_groups(PassRunner(better), source, groups, ceiling)
    shown = short_names(pipeline)
    notes = [
        f"Left out: {', '.join(_shown(w, shown) for w in what)} ({why.partition('. ')[0]})."
        for why, what in refused.items()
    ]
    return kept, notes


def _shown(group: str, names: Mapping[str, str]) -> str:
    network, _, rest = group.partition(": ")
    return f"{names.get(network, network)}: {rest}"


def _margin(source: Source, preprocess: Any) -> float:
    """How much more of the image there is than the crop shows, linearly: 256 of 224 is 1.143."""
    size = source.size
    if isinstance(source, Canvas):
        return float(round(min(source.pixels.shape[2 + a] / size[a] for a in (0, 1)), 4))
    if isinstance(source, PILImages) and preprocess is not None and isinstance(preprocess.resize, int):
        own = preprocess.size or size
        return max(1.0, round(preprocess.resize / max(own), 4))
    return 1.0


# ---------------------------------------------------------------- choice, test, decision
@dataclass(eq=False)
class _Tuning:
    """A pool, what is chosen from it, and the tests."""

    evidence: Evidence
    baseline: Baseline
    objective: str
    max_time_ratio: float | None
    seed: int
    margin: float | None

    def tuned(
        self, cost: float, ceilings: Sequence[float], notes: Sequence[str], advance: Callable[[int, str], None]
    ) -> Tuned:
        evidence, pool = self.evidence, self.evidence.pool
        scoring: Scoring = evidence.scoring
        outcomes = Outcomes(pool, scoring, self.objective)
        space = SearchSpace(pool.groups)
        chooser = Chooser(outcomes, space, evidence.clusters, self.max_time_ratio, self.seed, advance)
        recipe, time = self._timed(chooser, cost)
        rows, stats = evidence.rows(chooser, self.baseline)
        found: dict[float, Recipe] = {}
        tests = {}
        for ceiling in ceilings:
            written = recipe if ceiling == cost else self._written(chooser, ceiling)
            found[ceiling] = written
            tests[ceiling] = evidence.test(chooser, written, ceiling, self.baseline)
            rows.append(tests[ceiling][0])
        row, stats[f"{TUNED}{cost:g}"] = tests[cost]
        decision = decision_of(row, rows, self.margin)
        better = evidence.pipeline.with_recipe(recipe)
        notes = [*notes, *evidence.notes(row, rows, stats[row.name], self.baseline, recipe, time)]
        if self.max_time_ratio is not None and time is not None and time.ratio.low > self.max_time_ratio:
            warnings.warn(
                UnstrideWarning(f"max_time_ratio: the recipe takes {time} of the base model's time."), stacklevel=3
            )
        return Tuned(
            recipe=recipe,
            decision=decision,
            rows=tuple(rows),
            frontier=found,
            pipeline=better,
            cost=row.cost,
            ceiling=cost,
            notes=tuple(notes),
            time=time,
            stats=stats,
            data=evidence.data,
            scoring=scoring,
            indices=np.asarray(pool.rows),
            image_keys=tuple(key_sample(pool.keys)),
        )

    def _written(self, chooser: Chooser, ceiling: float) -> Recipe:
        every = np.arange(len(self.evidence.pool))
        candidate = chooser.choose(ceiling, every)
        return build(candidate, self.evidence.pool, f"{TUNED}{ceiling:g}")

    def _timed(self, chooser: Chooser, cost: float) -> tuple[Recipe, TimeRatio | None]:
        """The recipe, and its measured time where that is bounded: the bound is lowered until the time holds."""
        recipe = self._written(chooser, cost)
        if self.max_time_ratio is None:
            return recipe, None
        for _ in range(TRIES):
            time = self._time(recipe)
            if time.ratio.estimate <= self.max_time_ratio or chooser.time_ratio is None:
                break
            chooser.time_ratio *= 0.97 * self.max_time_ratio / time.ratio.estimate
            recipe = self._written(chooser, cost)
        return recipe, self._time(recipe)

    def _time(self, recipe: Recipe) -> TimeRatio:
        data, better = self.evidence.data, self.evidence.pipeline.better
        size = 1 if TASKS[recipe.task].maps else TIMED_IMAGES
        _, source, _ = next(LabelledReader(data, better, size).batches(range(min(len(data), size))))
        plain = Recipe(task=recipe.task)
        return time_ratio(better.replace(recipe), better.replace(plain), source)
