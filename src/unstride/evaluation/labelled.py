"""Labelled images for a pipeline: by name, as a Dataset, or as batches; checked against what the model predicts.

pipeline, data = open_labelled("timm:resnet18", "folder:val", recipe="flip")
data = labelled_data(pipeline, "folder:val", limit=500)
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from unstride.data import TASKS as DATA_TASKS
from unstride.data import Dataset, check_limit, load
from unstride.data.batches import FromBatches
from unstride.data.items import check_labels
from unstride.errors import DataError, OptionError, TaskAssumed, UnstrideWarning
from unstride.evaluation.metrics import check_mask
from unstride.evaluation.scoring import Scoring, scoring_for
from unstride.execution.opening import is_file
from unstride.models import LoadedModel
from unstride.pipeline import Pipeline, open_pipeline, wrapped
from unstride.recipe.recipe import Recipe
from unstride.tasks.tasks import TASKS, task_named
from unstride.views.images import Preprocess

SCORES = ("classification", "multilabel", "regression")  # one head (B, K): the labels say what it was trained for
MASKS = ("segmentation", "multilabel-segmentation")
Data = Dataset | FromBatches

_WORDS = r"patient|subject|case|video|vid|scan|person|site|clip|study|slide|sequence"
_NAMED = re.compile(rf"(?:^|[^a-z])((?:{_WORDS})[ _-]?[0-9a-z]*[0-9][0-9a-z]*)", re.IGNORECASE)
_NUMBERED = re.compile(r"^(.*\d.*?)[_-][a-z]*\d+$", re.IGNORECASE)


def open_labelled(
    model: Any,
    data: Any,
    *,
    task: str | None = None,
    limit: int | None = None,
    split: str | None = None,
    **options: Any,
) -> tuple[Pipeline, Data]:
    """A pipeline and labelled images that fit each other. Where nobody says the task, the labels do.

    Args:
        data: as in `labelled_data`.
        options: as in `open_pipeline`: recipe, weights, device, changes of the recipe.
    """
    check_limit(limit)
    recipe = options.get("recipe", "default")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = open_pipeline(model, task=task, **options)
    for warning in caught:
        if not issubclass(warning.category, TaskAssumed):  # the labels say it
            warnings.warn(warning.message, stacklevel=2)
    named = None if task is None else task_named(task).name
    fixed = named or (pipeline.task if isinstance(recipe, Recipe) or is_file(recipe) else None)
    batches = None if isinstance(data, str | Dataset) else _batches(data, fixed, limit, split)
    found = DATA_TASKS.get(data.partition(":")[0]) if isinstance(data, str) else (batches or data).task
    wanted = fixed or _wanted(pipeline, found)
    other = wanted != pipeline.task or pipeline.base.for_task(wanted) is not pipeline.base
    if other and not hasattr(model, "is_enhanced"):
        pipeline = open_pipeline(dict(pipeline.networks), task=wanted, **options)
    return pipeline, labelled_data(pipeline, data if batches is None else batches, task, limit, split)


def _wanted(pipeline: Pipeline, labelled: str | None) -> str:
    """The task of the model, but where the labels know better."""
    own = pipeline.task
    open_to = pipeline.better.assumed or (own in SCORES and labelled in SCORES)
    return labelled if labelled is not None and open_to else own


def labelled_data(
    model: Pipeline | LoadedModel | nn.Module,
    data: str | Dataset | FromBatches | Iterable[Any],
    task: str | None = None,
    limit: int | None = None,
    split: str | None = None,
) -> Data:
    """Images whose labels are checked against what the model predicts.

    Args:
        data: KIND:PATH (see `unstride.data`), a Dataset, or batches of (images, labels) as the model takes them, such
            as a DataLoader that does not shuffle.
        task: what the output means; by default the pipeline's task.
        limit: use so many images, spread evenly.
        split: of the data, by its name.
    """
    check_limit(limit)
    loaded, known = _model_of(model)
    wanted = task_named(task).name if task is not None else known
    if wanted is not None:
        scoring_for(wanted)  # a task without labels is named before these labels are found not to fit
    if isinstance(data, str):
        made: Data = _named(loaded, data, wanted, limit, split)
    elif isinstance(data, Dataset):
        made = _part(data, limit, split)
    else:
        made = _batches(data, wanted, limit, split)
    return _checked(made, loaded, wanted)


def scoring_of(pipeline: Pipeline, data: Data, metric: str | None = None) -> Scoring:
    """The scoring of these images, with the names of the classes where they are known, else their number."""
    scoring = scoring_for(pipeline.task, metric)
    if not TASKS[scoring.task].classes:
        return scoring
    names = pipeline.classes or data.classes or pipeline.base.labels
    return scoring_for(scoring.task, metric, names)


# ---------------------------------------------------------------- where images come from
def _model_of(model: Any) -> tuple[LoadedModel, str | None]:
    """The base network, and the task where it is known."""
    if isinstance(model, Pipeline):
        return model.base, model.task
    if isinstance(model, LoadedModel):
        return model, model.task
    if getattr(model, "is_enhanced", False):
        pipeline = open_pipeline(model)
        return pipeline.base, pipeline.task
    if isinstance(model, nn.Module):
        loaded = wrapped(model)
        return loaded, loaded.task
    raise OptionError(f"model: got {type(model).__name__}, expected a pipeline, a loaded model or a module.")


def _named(loaded: LoadedModel, data: str, task: str | None, limit: int | None, split: str | None) -> Dataset:
    kind = DATA_TASKS.get(data.partition(":")[0], "classification")
    meaning = task or kind
    prepared = loaded.for_task(kind)
    if _unprepared(loaded):
        raise OptionError(
            f"data: got the name {data!r} with a module whose preprocessing is not known. Load the data with "
            "unstride.data.load(name, preprocess), or the model with unstride.models.load(spec)."
        )
    has_classes = meaning != "embedding" and TASKS[meaning].classes  # a vector of 512 numbers has not 512 classes
    return load(data, prepared.preprocess, split, limit, classes=prepared.labels if has_classes else None)


def _unprepared(loaded: LoadedModel) -> bool:
    """Whether it is a module of the caller, and nobody said how its images are prepared."""
    usual = (Preprocess(), Preprocess(resize=None, crop=None))
    module = type(loaded.model)
    return loaded.spec == module.__name__ and loaded.preprocess in usual and not module.__module__.startswith("timm.")


def _part(data: Dataset, limit: int | None, split: str | None) -> Dataset:
    if split is not None:
        raise OptionError("split: the data set is loaded already. Choose the split where you load it.")
    count = len(data) if limit is None else min(limit, len(data))
    return replace(data, chosen=[data.chosen[i * len(data) // count] for i in range(count)])


def _batches(data: Any, task: str | None, limit: int | None, split: str | None) -> FromBatches:
    if limit is not None or split is not None:
        raise OptionError("limit and split: they are of named data. Give fewer batches, or others.")
    if isinstance(data, FromBatches):
        return data
    if isinstance(data, Iterable) and not isinstance(data, bytes | Mapping):
        return FromBatches(data, task)
    single = " For single images, torch.utils.data.DataLoader(data, batch_size=32) makes batches of them."
    raise OptionError(
        f"data: got {type(data).__name__}, expected KIND:PATH such as folder:photos, a Dataset, or batches of images "
        f"and labels.{single if hasattr(data, '__getitem__') else ''}"
    )


def _checked(data: Data, loaded: LoadedModel, task: str | None) -> Data:
    data = data.serving(task)
    if task is not None and task != data.task and not {task, data.task} <= set(MASKS):
        raise OptionError(f"task: {loaded.spec} is for {task}, but {data.name} is labelled for {data.task}.")
    if isinstance(data, FromBatches):
        _check_batches(data, loaded)
    return data


def _check_batches(data: FromBatches, loaded: LoadedModel) -> None:
    """Class numbers and masks, against the classes of the model. Named data was checked where it was read."""
    if data.task not in ("classification", "segmentation"):
        return
    labels = loaded.labels
    known = labels if isinstance(labels, int) or labels is None else len(labels)
    if data.task == "classification":
        check_labels(*data.labelled(), known)
    for i, mask in enumerate(data.masks if known is not None else ()):
        check_mask(mask, known or 0, name=f"image {i}: its mask")


# ---------------------------------------------------------------- groups
def groups_of(data: Data, group: str | Sequence[Any] | None) -> list[str] | None:
    """Of each image the patient, video or site, so that folds and intervals keep them together.

    Args:
        group: a column of csv data, or one value for each image. By default a column titled group; where there is none,
            file names that suggest groups are warned about.
    """
    if group is None and isinstance(data, Dataset) and data.groups:
        group = data.groups
    if group is None:
        suggested = suggested_groups(data)
        if suggested is not None:
            warnings.warn(UnstrideWarning(_suggestion(data, suggested)), stacklevel=3)
        return None
    if not hasattr(group, "__len__"):
        raise OptionError(f"group: got {group!r:.60}, expected a column of csv data, or one value for each image.")
    found = _column(data, group) if isinstance(group, str) else [str(value) for value in group]
    if len(found) != len(data):
        raise OptionError(f"group: got {len(found)} values for {len(data)} images, expected one for each.")
    if len(set(found)) < 2:
        raise DataError(f"group: all {len(found)} images are of one group, expected at least 2 groups.")
    return found


def _column(data: Data, name: str) -> list[str]:
    if isinstance(data, FromBatches):
        raise OptionError(f"group: {name!r} is a column of csv:PATH data. For batches give one value for each image.")
    return [str(value) for value in data.column(name)]


def suggested_groups(data: Data) -> list[str] | None:
    """Groups that the file names suggest, such as patient07 of patient07_slice3.png; None where they do not."""
    if isinstance(data, FromBatches) or len(data) < 8:
        return None
    items = [(item.id, item.target if isinstance(item.target, int) else None) for item in data]
    for find in (_by_word, _by_number):
        found = [find(name) for name, _ in items]
        named = [name for name in found if name is not None]
        sizes = Counter(named)
        together = sum(size for size in sizes.values() if size > 1)
        classes = {label for _, label in items if label is not None}
        if len(sizes) >= max(3, len(classes) + 1) and together >= 0.8 * len(items):
            return [name or item for name, (item, _) in zip(found, items, strict=True)]
    return None


def _by_word(name: str) -> str | None:
    match = _NAMED.search(name)
    return match[1].lower() if match else None


def _by_number(name: str) -> str | None:
    path = Path(name)
    match = _NUMBERED.match(path.stem)
    return match[1] if match and match[1] != path.parent.name else None


def _suggestion(data: Data, groups: Sequence[str]) -> str:
    count, name = len(set(groups)), groups[0]
    return (
        f"{data.name}: the file names suggest {count} groups, such as {name!r}. Images of one patient, video or site "
        "are alike, so that intervals are too narrow without groups. Pass group=COLUMN of csv data."
    )
