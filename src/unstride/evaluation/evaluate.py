"""`evaluate(model, data)`: what recipes gain over the base model on labelled images, and what they cost.

    rows = unstride.evaluate("sample", "sample", recipe="flip")
    print(table(rows)); print(decision_of(rows[-1], rows))

With `out`, a run that was killed continues where it was, and more images reuse what was computed. Under torchrun the
images are dealt to the processes (`out` must be a folder that all of them see):

    torchrun --nproc-per-node 2 --max-restarts 3 -m unstride evaluate SPEC --data DATA --out FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unstride.data.batches import FromBatches
from unstride.errors import OptionError
from unstride.evaluation.findings import warn_of_rows, warn_of_run
from unstride.evaluation.intervals import ConfidenceInterval, bootstrap_gain
from unstride.evaluation.labelled import Data, groups_of, open_labelled, scoring_of
from unstride.evaluation.measuring import Measurement, first_image, measure, outputs_of, run_key
from unstride.evaluation.metrics import Array
from unstride.evaluation.plan import Plan, plan_of
from unstride.evaluation.report import check_report, strip_of, write_report
from unstride.evaluation.rows import COST_UNIT, Row, read_rows, write_rows
from unstride.evaluation.scoring import Scoring, count
from unstride.execution.independence import warn_of_batch_dependence
from unstride.execution.prediction import TIME_UNIT
from unstride.models.weights import place
from unstride.pipeline import Pipeline
from unstride.recipe.files import to_data
from unstride.recipe.recipe import Recipe
from unstride.storage.contents import FileDigests
from unstride.storage.distributed import launched, world
from unstride.storage.files import as_path, check_folder
from unstride.storage.fingerprint import text_digest
from unstride.storage.provenance import provenance

CACHE, ROWS = "cache", "rows.jsonl"  # in `out`


def evaluate(
    model: Any,
    data: Any,
    *,
    recipe: str | Path | Recipe | Sequence[str | Path | Recipe] = "default",
    against: str | Path | Recipe | None = None,
    budgets: Sequence[int] | None = None,
    metric: str | None = None,
    margin: float | None = None,
    group: str | Sequence[Any] | None = None,
    out: str | Path | None = None,
    report: str | Path | None = None,
    weights: str | Path | None = "default",
    task: str | None = None,
    device: str | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    split: str | None = None,
    seed: int = 0,
    progress: bool = True,
    **changes: Any,
) -> list[Row]:
    """Measure a recipe, or several, beside the networks alone. The rows: each network alone, then each recipe.

    Args:
        model: a SPEC, a module, what `enhance` returned, or a list of these; None where the recipe file names them.
        data: KIND:PATH (see `unstride.data`), a Dataset, or batches of (images, labels) as the model takes them.
        recipe: a name, a file, a `Recipe`; or a list of these. An .onnx file is measured as it is by default.
        against: the baseline of all gains: a network (name or SPEC), or a recipe. By default the first network alone.
        budgets: of a recipe with one Search, numbers of states: a row for each.
        metric: the one that is compared, such as "Dice"; by default the usual one of the task.
        margin: for the report's decision: the loss that is acceptable where a recipe is cheaper, in the metric's unit.
        group: a column of csv data, or one value for each image: patient, video, site. Intervals are by group.
        out: folder for rows.jsonl and for what a killed run continues from.
        report: file for a page (.html).
        weights, task, device, changes: as in `open_pipeline`.
        limit, split: of the data.
        seed: of the bootstrap.

    Example: `rows = evaluate("timm:resnet18", "folder:val", recipe="flip"); print(rows[-1])`
    """
    _check(out, report, batch_size, seed, margin)
    recipes: list[Any] = list(recipe) if isinstance(recipe, list | tuple) else [recipe]
    if recipes == ["default"] and _exported(model):
        recipes = ["plain"]
    options = {"weights": weights, "device": device, "recipe": recipes[0] if recipes else "plain", **changes}
    pipeline, images = open_labelled(model, data, task=task, limit=limit, split=split, **options)
    scoring = scoring_of(pipeline, images, metric)
    plan = plan_of(pipeline, recipes[1:], against, budgets, changes)
    if progress and launched().leads:
        print(images.legend, file=sys.stderr)
    warn_of_batch_dependence(pipeline.better.networks, _examples(images, pipeline))
    grouped = groups_of(images, group)
    folder = None if out is None else Path(out)
    keys = _keys(images, folder, progress)
    warn_of_run(pipeline, plan.stored, keys)
    with ExitStack() as stack:
        us = stack.enter_context(world())
        run = _run_digest(plan, scoring, images, keys, grouped)
        if us.share(run) != run:
            raise OptionError(
                "evaluate: the processes have different models, data or options. Start all of them alike."
            )
        earlier = _earlier(folder, run)
        cache = None if folder is None else folder / CACHE
        measurements = measure(plan.variants, images, scoring, keys, cache, batch_size, us, progress)
        rows: list[Row] = []
        if us.leads:
            common = _common(measurements)
            chosen = None if grouped is None else np.asarray(grouped)[common[0].indices]
            about = _about(pipeline, images, scoring, common[0], run, {"group": str(group or ""), "seed": seed})
            rows = rows_of(plan, common, scoring, chosen, about, seed)
            warn_of_rows(rows, pipeline, scoring, common[0])
            if folder is not None:
                write_rows(folder / ROWS, [*earlier, *rows])
            if report is not None:
                stats, places = {m.name: m.stats for m in common}, common[0].indices
                draw = _drawing(plan, images, scoring, rows)
                write_report(report, rows, stats, images, scoring, places, margin, draw=draw)
        return us.share(rows)


# ---------------------------------------------------------------- rows
def rows_of(
    plan: Plan,
    measurements: Sequence[Measurement],
    scoring: Scoring,
    groups: Any = None,
    about: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[Row]:
    """A row for each measurement, all of the same images. Cost 1.0 is the first one's."""
    by_name = {m.name: m for m in measurements}
    first, before = measurements[0], by_name[plan.baseline]
    variants = plan.recipes
    rows = []
    for own in measurements:
        compared = own is not before
        gain = scoring.gain(before.stats, own.stats, groups, seed=seed) if compared else None
        corrected, broken = scoring.changed(before.stats, own.stats)
        costs, unit = _costs(own, first)
        rows.append(
            Row(
                name=own.name,
                images=count(own.stats),
                metric=scoring.metric,
                metrics=scoring.metrics(own.stats),
                cost=mean_interval(costs, groups, seed),
                gain=gain,
                baseline=before.name if compared else "",
                corrected=int(corrected.sum()),
                broken=int(broken.sum()),
                macs=float(own.macs.mean()),
                seconds=_usual_seconds(own.seconds),
                cost_unit=unit,
                recipe=to_data(variants[own.name].pipeline.better.recipe),
                provenance=dict(about or {}),
            )
        )
    return rows


def mean_interval(values: Array, groups: Any = None, seed: int = 0) -> ConfidenceInterval:
    """The mean of new images, with the interval that holds it."""
    mean, units = float(values.mean()), len(values) if groups is None else len(set(groups))
    if units < 2 or float(np.ptp(values)) == 0:
        return ConfidenceInterval(mean, mean, mean)
    found = bootstrap_gain(lambda w: w @ values / w.sum(1), len(values), groups, seed=seed)
    low, high = max(found.low, float(values.min())), min(found.high, float(values.max()))
    return ConfidenceInterval(mean, min(low, mean), max(high, mean), found.level)


def _costs(own: Measurement, first: Measurement) -> tuple[Array, str]:
    """Of each image, in forward passes of the first network; by measured time where MACs cannot be counted."""
    if own.macs.all() and first.macs.all():
        return own.macs / first.macs, COST_UNIT
    if np.isfinite(own.costs).all():
        return own.costs, COST_UNIT
    if own is first:
        return np.ones(len(own.costs)), COST_UNIT
    seconds, usual = _usual_seconds(own.seconds), _usual_seconds(first.seconds)
    ratio = seconds / usual if seconds and usual else float("nan")
    return np.full(len(own.costs), ratio), TIME_UNIT


def _usual_seconds(seconds: Array) -> float | None:
    timed = seconds[np.isfinite(seconds)]
    return float(np.median(timed)) if len(timed) else None


def _common(measurements: Sequence[Measurement]) -> list[Measurement]:
    """The images that every variant could measure, so that all rows are of the same ones."""
    indices = measurements[0].indices
    for other in measurements[1:]:
        indices = np.intersect1d(indices, other.indices)
    if len(indices) < 2:
        raise OptionError(f"evaluate: got {len(indices)} images that could be measured, expected at least 2.")
    return [m if len(m.indices) == len(indices) else m.only(indices) for m in measurements]


def _drawing(plan: Plan, images: Data, scoring: Scoring, rows: Sequence[Row]) -> Any:
    """Draws what the baseline and the last row predict for an image, where that is a map of classes."""
    if scoring.task != "segmentation" or isinstance(images, FromBatches):
        return None
    pair = [plan.recipes[name] for name in (plan.baseline, rows[-1].name)]
    return strip_of(images, scoring, lambda index: outputs_of(pair, images, index))


# ---------------------------------------------------------------- set up
def _exported(model: Any) -> bool:
    """Whether an ONNX file is among the models: it is measured as it is, beside others."""
    specs = model.values() if isinstance(model, Mapping) else model if isinstance(model, list | tuple) else [model]
    return any(isinstance(spec, str) and spec.endswith(".onnx") for spec in specs)


def _check(out: Any, report: Any, batch_size: Any, seed: Any, margin: Any) -> None:
    """What can be wrong before anything is loaded."""
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        whole = type(value) is int and least <= value < 2**63
        if not whole and not (value is None and name == "batch_size"):
            raise OptionError(f"{name}: got {value!r}, expected a whole number, {least} or more.")
    number = isinstance(margin, int | float) and not isinstance(margin, bool)
    if margin is not None and not (number and 0 <= margin < 1e12):
        raise OptionError(f"margin: got {margin!r:.60}, expected 0 or more, in the unit of the metric.")
    if report is not None:
        check_report(as_path(report, "report"))
    if out is not None:
        check_folder(as_path(out, "out"), "out")
    elif launched().size > 1:
        raise OptionError("out: several processes need a folder that all of them see, such as out='runs/mine'.")


def _examples(images: Data, pipeline: Pipeline) -> torch.Tensor:
    """A few images of one size, as the base network takes them."""
    first = first_image(images)
    return first[None].to(*place(pipeline.better.model))


def _keys(images: Data, folder: Path | None, progress: bool) -> list[str]:
    """What identifies each image; files that an earlier run has read are not read again."""
    digests = FileDigests(None if folder is None else folder / CACHE)
    digests.read(images.files(), progress and launched().leads)
    return images.keys(digests)


def _run_digest(plan: Plan, scoring: Scoring, images: Data, keys: Sequence[str], groups: Any) -> str:
    """What these rows depend on."""
    example = first_image(images)[None]
    runs = [run_key(variant, scoring, example).digest for variant in plan.variants]
    return text_digest([runs, list(keys), scoring.metric, plan.baseline, groups])[:16]


def _earlier(folder: Path | None, run: str) -> list[Row]:
    """Rows of other runs in the folder, which stay."""
    path = None if folder is None else folder / ROWS
    if path is None or not path.is_file():
        return []
    return [row for row in read_rows(path) if row.provenance.get("run") != run]


def _about(
    pipeline: Pipeline, images: Data, scoring: Scoring, first: Measurement, run: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    """What it takes to measure these rows again."""
    data = images.name if not isinstance(images, FromBatches) else f"{len(images)} images in batches"
    return {
        "model": pipeline.spec,
        "weights": pipeline.weights,
        "data": data,
        "task": scoring.task,
        "unreadable": len(first.errors),
        "device": place(pipeline.better.model)[0].type,
        "run": run,
        **more,
        **provenance(),
    }
