r"""`evaluate(model, data)`: what unstride gains on labelled images and what that costs, in one resumable pass.

    rows = unstride.evaluate("sample", "sample", budgets=(1, 4, 10), limit=200)
    rows[-1].metrics["top1"], rows[-1].gain["low"], rows[-1].verdict

With `out`, a run that was killed goes on where it was: the scores of each finished batch are kept in `out`/cache, and
also serve evaluations of other images. Under torchrun the images are dealt to the processes (`out` must be a folder
that all of them see); the numbers are those of one process with as many threads, because everything is computed from
the scores of the single images, in their order. One machine, and several (the same command on each; HOST is one of
them):

    torchrun --nproc-per-node 2 --max-restarts 3 -m unstride evaluate SPEC --data DATA --out FOLDER
    torchrun --nnodes 2 --nproc-per-node 4 --max-restarts 3 --rdzv-backend c10d --rdzv-id RUN \
        --rdzv-endpoint HOST:29500 -m unstride evaluate SPEC --data DATA --out SHARED_FOLDER
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from unstride.data import TASKS, Dataset, check_limit
from unstride.data import load as load_data
from unstride.data.batches import FromBatches
from unstride.data.items import check_labels
from unstride.enhanced import Enhanced, enhance
from unstride.errors import DataError, OptionError, UnstrideWarning
from unstride.evaluation.identity import CACHE, describe_run, file_digests, first_image, run_key
from unstride.evaluation.measures import measure_of
from unstride.evaluation.metrics import check_mask
from unstride.evaluation.page import check_report, write_report
from unstride.evaluation.rows import Row, append_rows, read_rows
from unstride.evaluation.runner import Runner, check_budgets, make_tta, own_budgets
from unstride.evaluation.shards import Shard
from unstride.evaluation.summary import summarise
from unstride.evaluation.words import doubts
from unstride.evaluation.work import Job, work
from unstride.models import LoadedModel
from unstride.models import load as load_model
from unstride.models.tasks import library_task
from unstride.models.weights import place
from unstride.procedure.gates import Stage
from unstride.procedure.meaning import task_named
from unstride.recipe.files import read
from unstride.recipe.saving import task_said
from unstride.storage.cache import Cache
from unstride.storage.distributed import launched, world
from unstride.storage.files import check_folder
from unstride.storage.fingerprint import text_digest
from unstride.storage.provenance import provenance
from unstride.tta import TTA, methods
from unstride.views.images import Preprocess

CURVE = (1, 4, 10, 15)  # states per image of the paper's search


def evaluate(
    model: str | LoadedModel | nn.Module,
    data: str | Dataset | Iterable[Any],
    budgets: Sequence[int] | None = None,
    *,
    weights: str | Path = "default",
    task: str | None = None,
    tta: str | TTA | None = None,
    tta_method: str = "mean",
    out: str | Path | None = None,
    report: str | Path | None = None,
    batch_size: int | None = None,
    limit: int | None = None,
    split: str | None = None,
    seed: int = 0,
    progress: bool = False,
    **options: Any,
) -> list[Row]:
    """The plain network's Row first, then the recipe's (the default one where none is named).

    With `budgets`, one Row for each of the paper's search; with `tta`, the same budgets again inside its views.

    model      a name (see unstride.models), what `unstride.models.load` returned, a module, or one from `enhance`
    data       a name (see unstride.data), a Dataset, or batches of (images, labels) as the model takes them, such as
               a DataLoader that does not shuffle; a module of your own needs one of the last two
    tta        "flip", "POLICY:VIEWS" (such as "standard:15"), the file of a fitted TTA, or a TTA
    out        folder for `rows.jsonl` and the cache; without it nothing is kept
    report     file for a self-contained page (.html): the curves, the cost, the images that changed, the layers
    budgets    states per image of the paper's search; 1, 4, 10 and 15 of recipe="paper", otherwise the recipe's own
    options    what `enhance` takes: recipe, criterion, aggregate, layers, order, ...; a recipe with stages of looks
               has no budgets

    Images that cannot be read are counted in `errors` and named; the rest is evaluated.
    """
    asked = check_budgets(CURVE if budgets is None else budgets)
    _check(out, report, batch_size, limit, seed)
    if launched().size > 1 and out is None:
        raise OptionError("out: several processes need a folder that all of them see, such as out='runs/mine'")
    if isinstance(model, str):
        model = load_model(model, weights)
    if not isinstance(model, LoadedModel | nn.Module):
        raise OptionError(f"model is {type(model).__name__}; wanted a name, a module or what models.load gives")
    if task in (None, "auto") and task_said(options.get("recipe")) == "embedding":
        task = "embedding"  # labels by one class serve two tasks, and say the other one
    told = asked_task(model, task)
    known = dataset_of(model, data, limit, split, told)
    dataset = (FromBatches(data, told) if known is None else known).serving(told)
    by = measure_of(dataset.task)
    if dataset.preprocess is None and (isinstance(tta, str) or report is not None):
        raise OptionError("tta by name, and a report, need the images themselves: give a Dataset, not batches")
    check_task(model, task, dataset)
    better = _enhanced(model, dataset, options, seed, budgets is not None or tta is not None)
    if split is None:
        _warn_tuned_on(options.get("recipe"), data)
    asked = check_budgets(own_budgets(better, CURVE)) if budgets is None else asked
    views, wide = _views(tta, tta_method, better, dataset.preprocess, seed)
    job = Job(Runner(better, asked, views), dataset, wide, batch_size or by.batch, seed)
    digests = file_digests(job, out, progress)
    about = describe_run(job, job.dataset.fingerprint(digests))
    run = text_digest(about)[:16]
    named = {**about, **_names(model, job), "run": run}
    if progress and launched().leads:
        print(dataset.legend, file=sys.stderr)
    with ExitStack() as stack:
        us = stack.enter_context(world())
        if us.share(run) != run:
            raise OptionError("the processes disagree on the model, the data or the options; start all of them alike")
        folder = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        read_rows(folder / "rows.jsonl")  # a file that cannot take rows is better found now than after the work
        shards = work(job, Cache.open(folder / CACHE, run_key(job, about)), job.dataset.keys(digests), us, progress)
        rows: list[Row] = []
        if us.leads:
            whole = Shard.joined(shards)
            rows = append_rows(folder / "rows.jsonl", _rows(job, whole, shards, named))
            for doubt in doubts(rows):
                warnings.warn(doubt, UnstrideWarning, stacklevel=2)
            if report is not None:
                write_report(Path(report), rows, whole, job)
        return us.share(rows)


# ------------------------------------------------------------------------------------------------------------- set up


def _check(out: Any, report: Any, batch_size: Any, limit: Any, seed: Any) -> None:
    """What can be wrong before anything is loaded."""
    check_limit(limit)
    for name, value, least, most in (("batch_size", batch_size, 1, 2**31), ("seed", seed, 0, 2**63)):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and least <= value < most) and not (value is None and name == "batch_size"):
            raise OptionError(f"{name} is {value!r}; wanted a whole number, {least} or more")
    for name, path in (("out", out), ("report", report)):
        if not isinstance(path, str | Path | None):
            raise OptionError(f"{name} is {path!r}; wanted a path")
    if report is not None:
        check_report(Path(report))
    if out is not None:
        check_folder(out, "out")


def _warn_tuned_on(recipe: Any, data: Any) -> None:
    """Where a recipe's file says that it was tuned on this very data set."""
    written = isinstance(recipe, str | Path) and Path(recipe).suffix in (".toml", ".json")
    found = read(recipe) if written and isinstance(data, str) else None
    if found is not None and len(found.recipe.stages) > 1 and _same_data(found.figures.get("data"), data):
        warnings.warn(
            f"{recipe} was tuned on images of {data}, by their labels: its gain there flatters. What to expect "
            "is in its file; to see it hold, evaluate on other images",
            UnstrideWarning,
            stacklevel=3,
        )


def _same_data(one: Any, other: str) -> bool:
    """Whether two names are of one data set, however its path is written."""
    if not isinstance(one, str):
        return False
    (kind, _, path), (another, _, elsewhere) = one.partition(":"), other.partition(":")
    return kind == another and Path(path).resolve() == Path(elsewhere).resolve()


def _views(
    tta: str | TTA | None, method: str, better: Enhanced, preprocess: Preprocess | None, seed: int
) -> tuple[TTA | None, Preprocess | None]:
    """The augmentation that was asked for, and the preprocessing that leaves its crops their room."""
    if not isinstance(tta, str | TTA | None):
        raise OptionError(f"tta is {tta!r}; wanted flip, POLICY:VIEWS, the file of a fitted TTA, or a TTA")
    methods.get(method)
    wide = None
    if isinstance(tta, str):
        assert preprocess is not None
        tta, wide = make_tta(tta, method, better, preprocess, seed)
    if tta is not None and len(tta.used) < 2:
        raise OptionError(f"tta: {tta.policy.name} with {len(tta.used)} view(s) in use; wanted at least 2")
    return tta, wide


def asked_task(model: LoadedModel | nn.Module, task: str | None) -> str | None:
    """What the user says, otherwise what the model is known to be for; None leaves it to the data."""
    if task not in (None, "auto"):
        return task_named(task).name
    module = model.model if isinstance(model, LoadedModel) else model
    if isinstance(module, Enhanced):
        return module.task
    return (model.task if isinstance(model, LoadedModel) else None) or library_task(module)


def dataset_of(
    model: LoadedModel | nn.Module,
    data: str | Dataset | Iterable[Any],
    limit: int | None,
    split: str | None,
    asked: str | None,
) -> Dataset | None:
    """What was asked of a data set, by its name or as it is; None: these are batches."""
    if isinstance(data, Dataset):
        if split is not None:
            raise OptionError("split: the data set is loaded already; choose the split where you load it")
        count = len(data) if limit is None else min(limit, len(data))
        return dataclasses.replace(data, chosen=[data.chosen[i * len(data) // count] for i in range(count)])
    if isinstance(data, Iterable) and not isinstance(data, str | bytes | Mapping):
        if limit is not None or split is not None:
            raise OptionError("limit and split: they are of named data sets; give fewer batches, or others")
        return None
    if not isinstance(data, str):
        single = "; for single images, torch.utils.data.DataLoader(data, batch_size=32) makes batches of them"
        raise OptionError(
            f"data is {type(data).__name__}; wanted a name such as folder:photos, a Dataset of unstride.data, or "
            f"batches of images and labels{single if hasattr(data, '__getitem__') else ''}"
        )
    return _named_data(model, data, asked, limit, split)


def _named_data(
    model: LoadedModel | nn.Module, data: str, asked: str | None, limit: int | None, split: str | None
) -> Dataset:
    """KIND:PATH as this model takes it, with its class numbers for labels."""
    if not isinstance(model, LoadedModel):
        raise OptionError(
            f"data: got the name {data!r} with a module, whose preprocessing is not known; "
            "load the data with unstride.data.load(name, preprocess), or the model with unstride.models.load(spec)"
        )
    if asked is not None:
        measure_of(asked)  # a task without labels is said before these labels are found not to fit
    task = TASKS.get(data.partition(":")[0], "classification")
    plain = model.model.model if isinstance(model.model, Enhanced) else model.model
    classes = asked != "embedding" and task_named(task).classes  # a vector of 512 numbers has not 512 classes
    labels = dataclasses.replace(model.for_task(task), model=plain).labels if classes else None
    return load_data(data, model.for_task(task).preprocess, split, limit, classes=labels)


def check_task(model: LoadedModel | nn.Module, task: str | None, dataset: Dataset | FromBatches) -> None:
    """What the user says, and what the model is for, must be what the data is labelled for."""
    if task not in (None, "auto"):
        if task_named(task).name != dataset.task:
            raise OptionError(f"task is {task!r}, but {dataset.name} is labelled for {dataset.task}")
    elif isinstance(model, LoadedModel) and model.task not in (None, dataset.task):
        scores = ("classification", "multilabel", "regression")  # one head (B, K): the data say what it was trained for
        if not (model.task in scores and dataset.task in scores):
            raise OptionError(f"{model.spec} is for {model.task}, but {dataset.name} is labelled for {dataset.task}")


def _enhanced(
    model: LoadedModel | nn.Module,
    dataset: Dataset | FromBatches,
    options: Mapping[str, Any],
    seed: int,
    searches: bool,
) -> Enhanced:
    """Made ready with the first image that can be read: what the model cannot do at all is an error now."""
    module = model.model if isinstance(model, LoadedModel) else model
    if isinstance(module, Enhanced) and module.task != dataset.task:
        raise OptionError(
            f"the model was enhanced for {module.task}, but {dataset.name} is labelled for {dataset.task}"
        )
    example = first_image(dataset)[None].to(*place(module))
    usual = {"recipe": "paper"} if searches and not isinstance(module, Enhanced) else {}
    better = prepared(module, example, dataset.task, {"preprocess": dataset.preprocess, **usual, **options})
    if dataset.task == "classification":
        check_labels(*dataset.labelled(), better.plan.classes)
    for i, mask in enumerate(dataset.masks if isinstance(dataset, FromBatches) else ()):
        check_mask(mask, better.plan.classes, name=f"image {i}: its mask")
    if searches and better.recipe.name == "default":  # budgets, and views by a policy, ask for the search
        better = better.with_options(recipe="paper")
    if not better.recipe.plain and not better.recipe.searches and not better.recipe.stages and not searches:
        better = better.with_options(stages=(Stage(),))  # a temperature alone, beside the network as it came
    if not better.recipe.stages:
        return better.with_options(seed=seed or better.recipe.seed)
    if searches:
        raise OptionError(
            f"budgets and tta are of the paper's search; recipe {better.recipe.name!r} has stages of looks instead"
        )
    return better


def prepared(module: nn.Module, example: Tensor, task: str, options: Mapping[str, Any]) -> Enhanced:
    """Made ready for images like the example, or as it is if it was enhanced before, with these options."""
    if not isinstance(module, Enhanced):
        return enhance(module, example, task=task, **options)
    if module.task != task:
        raise OptionError(f"the model was enhanced for {module.task}, but is asked for {task}")
    better = module.with_options(**options)
    better.fitted(example)
    return better


def _names(model: LoadedModel | nn.Module, job: Job) -> dict[str, Any]:
    """How the model and the data are called."""
    return {"spec": _spec(model), "weights": getattr(model, "weights", "its own"), "data": job.dataset.name}


def _spec(model: LoadedModel | nn.Module) -> str:
    return model.spec if isinstance(model, LoadedModel) else type(getattr(model, "model", model)).__name__


# --------------------------------------------------------------------------------------------------------------- rows


def _rows(job: Job, whole: Shard, shards: Sequence[Shard], about: Mapping[str, Any]) -> list[Row]:
    if not len(whole.index):
        first = next(iter(whole.errors.values()), "")
        raise DataError(f"{job.dataset.name}: none of {len(job.dataset)} images could be evaluated; the first: {first}")
    classes = job.better.plan.classes
    summary = summarise(whole, shards, job.runner.settings, job.task, job.dataset.classes, job.seed, classes)
    shared = {k: v for k, v in about.items() if k not in ("budgets", "computation", "options", "versions")}
    return [
        Row(
            **shared,
            **provenance(),
            options={**about["options"], "recipe": job.better.recipe.name},
            **one,
            budget=setting.budget,
            views=setting.views,
            images=len(whole.index),
            errors=len(whole.errors),
            error_names=tuple(whole.errors[i] for i in sorted(whole.errors)[:20]),
            peak_memory=whole.memory,
            batch_size=job.batch_size,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        for setting, one in zip(job.runner.settings, summary, strict=True)
    ]
