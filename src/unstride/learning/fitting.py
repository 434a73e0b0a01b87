"""`fit`: labelled images -> a recipe with fitted numbers.

fitted = unstride.fit("timm:resnet18", "folder:train", schedule="fast", out="fitted.toml")
unstride.enhance(model, recipe="fitted.toml")
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unstride.enhanced import Enhanced
from unstride.errors import OptionError, TaskAssumed, UnstrideWarning
from unstride.learning.attention import train_attention
from unstride.learning.images import LearningImages, learning_images
from unstride.learning.report import Fitted, attention_report, view_report
from unstride.learning.tta import (
    EPOCHS,
    LEARNED,
    METHODS,
    ViewFit,
    fit_views,
    measured,
    view_logits,
    view_recipe,
    views_of,
)
from unstride.method.attention import Attention
from unstride.method.training import SCHEDULES, Schedule, TrainingEpoch
from unstride.models.weights import place
from unstride.pipeline import Pipeline, open_pipeline
from unstride.recipe.files import check_name
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Search
from unstride.recipe.view import PLAIN
from unstride.storage.contents import FileDigests
from unstride.storage.distributed import World, world
from unstride.storage.files import as_path, check_file, check_folder
from unstride.storage.locks import exclusive
from unstride.storage.progress import progress as show_progress

ATTENTION = "attention"
POLICY = "standard:30"  # the views of learned TTA
BATCH = 32


def fit(
    model: Any,
    data: Any = None,
    *,
    method: str = ATTENTION,
    schedule: str | Schedule = "paper",
    validation: Any = None,
    budget: int | None = None,
    heads: int = 1,
    epochs: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    policy: str = POLICY,
    recipe: str | Path | Recipe | None = None,
    weights: str | Path | None = "default",
    task: str | None = None,
    device: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    cache: str | Path | None = None,
    progress: bool = True,
    **changes: Any,
) -> Fitted:
    """Fit numbers of a recipe on labelled images; the network stays as it is.

    Args:
        model: a SPEC, a module, what `models.load` or `enhance` returned.
        data: KIND:PATH, a `Dataset`, or batches (images, labels). meantta and maxtta, which learn nothing, need none.
        method: "attention" is the paper's learned aggregation and criterion. Learned TTA: "gps" (as first published),
            "gps-shanmugam" (three different views), "augtta" (a weight for each view), "classtta" (for each view and
            class), "meantta", "maxtta".
        schedule: of the attention. "paper": AdamW, cosine annealing, lr 1e-6, batches of 32, and, not printed, 5
            epochs. "fast" is ours: lr 3e-3, for a few hundred images.
        validation: images to choose the epoch by; by default one fifth of `data`, drawn at random by the seed.
        budget: states of each image in training (30, as the paper); for TTA, states inside each view.
        heads: of the attention.
        epochs: by default 5 for the attention, 30 for the weights of views.
        seed: of the split, the initialisation and every draw. `fit_seeds` repeats a fit with several.
        out: recipe file to write (.toml or .json). A killed run with the same settings continues where it was; its
            work lies in OUT.partial until it is done.
        policy: views of TTA, as NAME:COUNT: standard:30, expanded:100, segmentation, or a policy file.
        recipe: what is fitted: a recipe with a Search and aggregate="learned" ("paper-learned" by default); for TTA a
            recipe of one stage, such as "plain" (the default) or "paper" (a search inside each view).
        limit: use so many images of `data`, drawn at random by the seed.
        cache: keep maps and logits there, also after the run, for other seeds and methods.
        changes: fields of the recipe, as in `enhance`.

    Raises:
        OptionError, DataError: what is wrong, and where; images with NaN are errors.
    """
    _check_options(method, schedule, epochs, seed, heads, budget, batch_size, policy)
    if method != ATTENTION and budget is not None:
        changes["budget"] = budget
    chosen = _recipe_of(model, method, recipe)
    pipeline = _opened(model, recipe=chosen, weights=weights, task=task, device=device, **changes)
    _check_recipe(pipeline, method)
    _check_out(out)
    if cache is not None:
        check_folder(as_path(cache, "cache"), "cache")
    if data is None:
        return _unlearned(pipeline, method, policy, seed, out)
    folder = Path(cache) if cache is not None else None if out is None else _partial(Path(out))
    with world() as us:
        if us.size > 1 and folder is None:
            raise OptionError("cache: got none, but several processes need a folder that all of them see.")
        lock = contextlib.nullcontext() if folder is None else exclusive(folder, us.leads)
        with lock:
            images = learning_images(
                pipeline,
                data,
                validation,
                seed=seed,
                split=split,
                limit=limit,
                digests=FileDigests(folder),
                show=progress and us.leads,
            )
            if method == ATTENTION:
                timetable = _timetable(schedule, budget, epochs, batch_size)
                fitted = _attention(pipeline, images, timetable, seed, heads, folder, us, progress)
            else:
                steps = {"epochs": epochs or EPOCHS, "seed": seed, "batch_size": batch_size or BATCH}
                fitted = _views(pipeline, images, method, policy, steps, folder, us, progress)
            if us.leads:
                _finish(fitted, out, folder if cache is None else None)
    return fitted


def fit_seeds(model: Any, data: Any, *, seeds: int | Iterable[int] = 5, **options: Any) -> Iterator[Fitted]:
    """The same fit with several seeds, one after another, as the paper repeats its experiments (section 5.1).

    Every seed draws its own training and validation images and initialises the attention anew. Give `cache` so that
    images that were drawn before are not computed again.

    Args:
        seeds: their number (0, 1, ...), or the seeds.
        options: of `fit`, but for `out`.

    Example: `[f.report.fitted for f in fit_seeds("sample", "sample", seeds=5, schedule="fast")]`
    """
    for name in ("seed", "out"):
        if name in options:
            raise OptionError(f"{name}: fit_seeds decides it. Leave it out, and save what it yields.")
    for seed in range(seeds) if isinstance(seeds, int) else seeds:
        yield fit(model, data, seed=seed, **options)


# ---------------------------------------------------------------- the two kinds of methods


def _attention(
    pipeline: Pipeline,
    images: tuple[LearningImages, LearningImages],
    schedule: Schedule,
    seed: int,
    heads: int,
    folder: Path | None,
    us: World,
    show: bool,
) -> Fitted:
    recipe = pipeline.better.recipe
    train, validation = images
    result = train_attention(
        pipeline, recipe, train, validation, schedule, seed=seed, heads=heads, folder=folder, us=us, show=show
    )
    attention = Attention(result.tensors["out"].numel(), heads).to(place(pipeline.better.model)[0])
    attention.load_state_dict(result.tensors)
    made = _with(pipeline, recipe, attention=attention.requires_grad_(False))
    return Fitted(attention_report(result, *images), made)


def _views(
    pipeline: Pipeline,
    images: tuple[LearningImages, LearningImages],
    method: str,
    policy: str,
    steps: dict[str, Any],
    folder: Path | None,
    us: World,
    show: bool,
) -> Fitted:
    recipe, views, seed = pipeline.better.recipe, views_of(policy), int(steps["seed"])
    more = {"batch_size": steps["batch_size"], "folder": folder, "us": us, "show": show}
    train, validation = view_logits(pipeline, recipe, views, images, **more)
    (base,) = view_logits(pipeline, Recipe(), (PLAIN,), images[1:], **more)
    if method in LEARNED:
        with show_progress(
            f"fitting {method}", steps["epochs"] + 1, show and us.leads and method.endswith("tta")
        ) as go:
            fit = fit_views(
                method, train, validation, epochs=steps["epochs"], seed=seed, after=lambda epoch: go(1, _note(epoch))
            )
    else:
        fit = _fixed(method, len(views))
    uniform = torch.full((len(views),), 1 / len(views))
    figures = {
        "base": measured(torch.ones(1), base),
        "mean": measured(uniform, validation),
        "fitted": measured(fit.weights, validation, how=fit.combine),
    }
    names = tuple(str(views[step.view]) for step in fit.steps)
    report = view_report(fit, policy, len(views), seed, *images, figures, names)
    made, per_class = view_recipe(recipe, views, fit)
    if per_class is not None and _one_score(pipeline, images[1]):
        per_class = per_class[:, 1:]
    return Fitted(report, _with(pipeline, made, view_weights=per_class))


def _one_score(pipeline: Pipeline, images: LearningImages) -> bool:
    """Whether the model returns the score of the second of two classes alone; that of the first is 0."""
    return pipeline.better.replace(Recipe()).run(images.source([0])).output.shape[1] == 1


def _note(epoch: TrainingEpoch) -> str:
    return f"validation accuracy {epoch.accuracy:.2%}"


def _fixed(method: str, views: int) -> ViewFit:
    return ViewFit(method, torch.full((views,), 1 / views), "max" if method == "maxtta" else "logits")


def _unlearned(pipeline: Pipeline, method: str, policy: str, seed: int, out: str | Path | None) -> Fitted:
    """meantta and maxtta without data."""
    if method not in METHODS or method in LEARNED:
        raise OptionError(f"data: got none, but {method} learns from labelled images. Pass KIND:PATH or batches.")
    views = views_of(policy)
    fit = _fixed(method, len(views))
    made, _ = view_recipe(pipeline.better.recipe, views, fit)
    fitted = Fitted(view_report(fit, policy, len(views), seed), _with(pipeline, made))
    _finish(fitted, out, None)
    return fitted


def _with(pipeline: Pipeline, recipe: Recipe, attention: Attention | None = None, view_weights: Any = None) -> Pipeline:
    """The same networks with a recipe and what was fitted for it."""
    old = pipeline.better
    weights = None if view_weights is None else view_weights.to(place(old.model)[0])
    recipe = replace(recipe, tensors=None)
    better = Enhanced(old.networks, recipe, attention or old.attention, old.preprocess, old.assumed, weights)
    return replace(pipeline, better=better, stored=None)


def _finish(fitted: Fitted, out: str | Path | None, work: Path | None) -> None:
    if fitted.report.warning is not None:
        warnings.warn(UnstrideWarning(fitted.report.warning), stacklevel=3)
    if out is not None:
        fitted.save(out)
    if work is not None:
        shutil.rmtree(work, ignore_errors=True)


# ---------------------------------------------------------------- options


def _recipe_of(model: Any, method: str, recipe: Any) -> Any:
    """What is fitted where nobody says it; an enhanced model brings its own recipe."""
    if recipe is not None:
        return recipe
    own = model.recipe if isinstance(model, Enhanced) else None
    if method == ATTENTION:
        return (
            own
            if own is not None and own.search is not None and own.search.aggregation == "learned"
            else "paper-learned"
        )
    return "plain" if own is None else own


def _opened(model: Any, **options: Any) -> Pipeline:
    """The pipeline. Labels are classes, so nobody needs to be told what the output is taken for."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = open_pipeline(model, **options)
    for warning in caught:
        if not issubclass(warning.category, TaskAssumed):
            warnings.warn(warning.message, stacklevel=3)
    return pipeline


def _check_recipe(pipeline: Pipeline, method: str) -> None:
    recipe, name = pipeline.better.recipe, pipeline.better.recipe.name or "this recipe"
    if recipe.task != "classification":
        raise OptionError(f"task: fit learns from one class for each image, and this recipe is for {recipe.task}.")
    if len(recipe.stages) != 1 or recipe.stages[0].network != "base":
        raise OptionError(f"recipe: {name} has several stages or networks; fit needs one stage of the base network.")
    stage = recipe.stages[0]
    if method == ATTENTION and (not isinstance(stage.states, Search) or stage.aggregation != "learned"):
        raise OptionError(
            f"recipe: {name} has no Search with aggregate='learned', so there is no attention to train. Use "
            "'paper-learned'."
        )


def _timetable(schedule: str | Schedule, budget: int | None, epochs: int | None, batch_size: int | None) -> Schedule:
    usual = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    given = {"budget": budget, "epochs": epochs, "batch_size": batch_size}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return replace(usual, **chosen)


def _check_options(
    method: Any, schedule: Any, epochs: Any, seed: Any, heads: Any, budget: Any, batch_size: Any, policy: Any
) -> None:
    methods = (ATTENTION, *METHODS)
    if not isinstance(method, str) or method not in methods:
        raise OptionError(f"method: got {method!r}, expected one of {', '.join(methods)}.")
    if not isinstance(schedule, Schedule) and (not isinstance(schedule, str) or schedule not in SCHEDULES):
        raise OptionError(f"schedule: got {schedule!r}, expected one of {', '.join(map(repr, SCHEDULES))}.")
    if method != ATTENTION and schedule != "paper":
        raise OptionError(f"schedule: {method} has one schedule; leave it out. It is for method='attention'.")
    if method == ATTENTION and policy != POLICY:
        raise OptionError(f"policy: got {policy!r:.60}, but the attention learns from states; leave it out.")
    least = {"epochs": 1, "seed": 0, "heads": 1, "budget": 2 if method == ATTENTION else 1, "batch_size": 1}
    values = {"epochs": epochs, "seed": seed, "heads": heads, "budget": budget, "batch_size": batch_size}
    for name, value in values.items():
        optional = value is None and name not in ("seed", "heads")
        whole = isinstance(value, int) and not isinstance(value, bool) and least[name] <= value < 2**63
        if not optional and not whole:
            raise OptionError(f"{name}: got {value!r}, expected a whole number of at least {least[name]}.")


def _check_out(out: str | Path | None) -> None:
    if out is not None:
        check_name(out)
        check_folder(Path(out).parent, "out")
        if Path(out).parent.is_dir():
            check_file(out, "out")


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


__all__ = ["ATTENTION", "Fitted", "fit", "fit_seeds"]
