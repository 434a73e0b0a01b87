"""Learned test-time augmentation: how the views of a policy are combined, from their logits on labelled images.

meantta and maxtta learn nothing; gps chooses views (`gps`); augtta learns a weight for each view, classtta one for each
view and class, non-negative, with sum 1 over the views (Shanmugam et al., ICCV 2021). With a Search in the recipe, the
logits of a view are those of its search: B_total = B_tta x B_ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unstride.errors import InputError, OptionError
from unstride.learning.gps import VARIANTS, GreedyStep, select_views
from unstride.learning.images import LearningImages, batches_of
from unstride.method.training import TrainingEpoch
from unstride.pipeline import Pipeline
from unstride.recipe import policies
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, View
from unstride.storage.cache import Cache, RunKey, tell_reused
from unstride.storage.distributed import World
from unstride.storage.progress import progress as show_progress
from unstride.storage.provenance import versions
from unstride.tasks.tasks import two_class

METHODS = ("meantta", "maxtta", "gps", "gps-shanmugam", "augtta", "classtta")
LEARNED = METHODS[2:]
EPOCHS = 30
LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4  # of SGD, as in the code of Shanmugam et al.
VIEWS_TOGETHER = 10  # whose logits lie in one cache: policies of 10, 30, 100 and 150 views share them
MEMORY = 1 << 30  # bytes of logits that are kept while weights are fitted
NONE = 1e-6  # a view with a smaller weight is not run


def views_of(policy: str, seed: int = 0) -> tuple[View, ...]:
    """`views_of("standard:30")`: the first 30 views of a policy, by name or from a file; without a number, all."""
    if not isinstance(policy, str):
        raise OptionError(f"policy: got {policy!r}, expected text such as 'standard:30' or 'expanded:100'.")
    name, colon, count = policy.rpartition(":")
    if colon and count.isdigit():
        return policies.get(name, seed).first(int(count))
    return tuple(policies.get(policy, seed))


# ---------------------------------------------------------------- logits of views


@dataclass(eq=False)
class ViewLogits(Sequence[tuple[Tensor, Tensor]]):
    """Logits (V, n, K) of all views and labels (n,), some images at a time; read from the caches when asked for."""

    caches: list[Cache]
    images: LearningImages
    size: int

    def __post_init__(self) -> None:
        self.batches = list(batches_of(len(self.images), self.size))
        self.memory: dict[int, Tensor] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        rows = self.batches[index]
        if index not in self.memory:
            logits = torch.stack([self._image(self.images.keys[row]) for row in rows], 1)
            if self.bytes + logits.nbytes > MEMORY:
                return logits, self._labels(rows)
            self.memory[index], self.bytes = logits, self.bytes + logits.nbytes
        return self.memory[index], self._labels(rows)

    def _image(self, key: str) -> Tensor:
        values = [cache.get(key) for cache in self.caches]
        return torch.cat([value["logits"] for value in values if value is not None])

    def _labels(self, rows: range) -> Tensor:
        return torch.tensor([self.images.labels[row] for row in rows])


def view_logits(
    pipeline: Pipeline,
    recipe: Recipe,
    views: Sequence[View],
    parts: Sequence[LearningImages],
    *,
    batch_size: int,
    folder: Path | None,
    us: World,
    show: bool,
) -> list[ViewLogits]:
    """The logits of each view by itself, through the recipe's one stage; each image runs once, in any run."""
    groups = [views[k : k + VIEWS_TOGETHER] for k in range(0, len(views), VIEWS_TOGETHER)]
    settings = _settings(pipeline, recipe, parts[0], batch_size)
    caches = [Cache.open(folder, RunKey("view-logits", {**settings, "views": list(map(str, g))})) for g in groups]
    _report_reused(caches, parts, us)
    todo = [(images, rows) for images in parts for rows in batches_of(len(images), batch_size)]
    own = todo[us.rank :: us.size]
    with show_progress("batches of views", len(own) * len(groups), show and us.leads) as advance:
        for images, rows in own:
            for cache, group in zip(caches, groups, strict=True):
                missing = [row for row in rows if images.keys[row] not in cache]
                if missing:
                    logits = _run(pipeline, recipe, group, images, missing)
                    keys = [images.keys[row] for row in missing]
                    cache.put({key: {"logits": values} for key, values in zip(keys, logits, strict=True)})
                advance(1, "")
    us.wait()
    for cache in caches:
        cache.reload()
    us.wait()
    return [ViewLogits(caches, images, batch_size) for images in parts]


def _settings(pipeline: Pipeline, recipe: Recipe, images: LearningImages, batch_size: int) -> dict[str, Any]:
    """What the logits depend on beside image and view."""
    key = pipeline.with_recipe(alone(recipe, (PLAIN,))).key(images.source([0]).render(PLAIN))
    return {**key, "batch_size": batch_size, "versions": versions()}


def _report_reused(caches: Sequence[Cache], parts: Sequence[LearningImages], us: World) -> None:
    keys = [key for images in parts for key in images.keys]
    if us.leads:
        tell_reused(sum(all(key in cache for cache in caches) for key in keys), len(keys), caches[0].folder)


def _run(
    pipeline: Pipeline, recipe: Recipe, views: Sequence[View], images: LearningImages, rows: Sequence[int]
) -> Tensor:
    """(n, V, K)."""
    source = images.source(rows)
    outputs = [pipeline.better.replace(alone(recipe, (view,))).run(source).output for view in views]
    logits = torch.stack([two_class(output.float()).cpu() for output in outputs], 1)
    if not bool(logits.isfinite().all()):
        row = rows[int((~logits.isfinite()).flatten(1).any(1).nonzero()[0])]
        raise InputError(
            f"{images.part} images, {images.names[row]}: the model's logits are not finite, so nothing can be learned "
            "from this image. Half precision may have overflowed: use float32, or leave the image out."
        )
    return logits


def alone(recipe: Recipe, views: Sequence[View]) -> Recipe:
    """The recipe's stage with other views."""
    stage = replace(recipe.stages[0], views=tuple(views), weights=(), temperatures=())
    return replace(recipe, stages=(stage,), combine="", temperature=1.0, tensors=None)


# ---------------------------------------------------------------- methods


@dataclass(frozen=True, eq=False)
class ViewFit:
    """How views are combined, and how that was found.

    Attributes:
        weights: (V,) or (V, K), with sum 1 over the views.
        combine: "logits", "probabilities" or "max", as in a recipe.
        epochs: of augtta and classtta. Epoch 0 is the mean of the views, and is never kept.
        kept: the epoch with the best validation accuracy.
        steps: of gps.
    """

    method: str
    weights: Tensor
    combine: str = "logits"
    epochs: tuple[TrainingEpoch, ...] = ()
    kept: int | None = None
    steps: tuple[GreedyStep, ...] = ()


def fit_views(
    method: str,
    train: Sequence[tuple[Tensor, Tensor]],
    validation: Sequence[tuple[Tensor, Tensor]],
    *,
    epochs: int = EPOCHS,
    seed: int = 0,
    after: Callable[[TrainingEpoch], object] | None = None,
) -> ViewFit:
    """The weights of a learned method, from logits (V, n, K) and labels (n,)."""
    if method in VARIANTS:
        steps = select_views(train, VARIANTS[method])
        counts = torch.bincount(torch.tensor([step.view for step in steps]), minlength=len(train[0][0]))
        combine = "probabilities" if method == "gps" else "logits"
        return ViewFit(method, counts.float() / len(steps), combine, steps=tuple(steps))
    return _descend(method, train, validation, epochs, seed, after)


def _descend(
    method: str,
    train: Sequence[tuple[Tensor, Tensor]],
    validation: Sequence[tuple[Tensor, Tensor]],
    epochs: int,
    seed: int,
    after: Callable[[TrainingEpoch], object] | None,
) -> ViewFit:
    """SGD on the NLL, weights clamped at 0 after each step, from the mean of the views."""
    views, _, classes = train[0][0].shape
    shape = (views, classes) if method == "classtta" else (views,)
    raw = torch.full(shape, 1.0 / views, requires_grad=True)
    optimiser = torch.optim.SGD([raw], lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
    order = torch.Generator().manual_seed(seed)
    rows: list[TrainingEpoch] = []
    kept, best = 1, normalised(raw.detach())
    for number in range(epochs + 1):
        loss = _pass(raw, optimiser, train, order) if number else None
        weights = normalised(raw.detach())
        rows.append(measured(weights, validation, number, loss))
        if number == 1 or (number and _better(rows[number], rows[kept])):
            kept, best = number, weights
        if after is not None:
            after(rows[number])
    return ViewFit(method, best, epochs=tuple(rows), kept=kept)


def _pass(
    raw: Tensor, optimiser: torch.optim.Optimizer, train: Sequence[tuple[Tensor, Tensor]], order: torch.Generator
) -> float:
    """One epoch; the mean loss."""
    total = images = 0.0
    for index in torch.randperm(len(train), generator=order).tolist():
        logits, labels = train[index]
        loss = cross_entropy(combined(logits, normalised(raw)), labels)
        (raw.grad,) = torch.autograd.grad(loss, [raw])
        optimiser.step()
        with torch.no_grad():
            raw.copy_(_clamped(raw))
        total, images = total + float(loss.detach()) * len(labels), images + len(labels)
    return total / images


def _better(new: TrainingEpoch, old: TrainingEpoch) -> bool:
    return (new.accuracy, -new.nll) > (old.accuracy, -old.nll)


def _clamped(weights: Tensor) -> Tensor:
    """Without negative weights; a class whose views all lost their weight starts anew from the mean."""
    positive = weights.clamp(min=0)
    return torch.where(positive.sum(0, keepdim=True) > 0, positive, torch.full_like(weights, 1 / len(weights)))


def normalised(weights: Tensor) -> Tensor:
    """Non-negative weights with sum 1 over the views; uniform where all are 0."""
    positive = _clamped(weights)
    return positive / positive.sum(0, keepdim=True)


def combined(logits: Tensor, weights: Tensor, how: str = "logits") -> Tensor:
    """Logits (V, n, K) of the views -> (n, K), with gradients for the weights (V,) or (V, K)."""
    if how == "max":
        return logits.amax(0)
    values = logits.softmax(-1) if how == "probabilities" else logits
    total = torch.zeros_like(values[0])
    for value, weight in zip(values, weights, strict=True):
        total = torch.addcmul(total, value, weight)
    return total.clamp(min=1e-30).log() if how == "probabilities" else total


@torch.no_grad()
def measured(
    weights: Tensor,
    blocks: Sequence[tuple[Tensor, Tensor]],
    epoch: int = 0,
    loss: float | None = None,
    how: str = "logits",
) -> TrainingEpoch:
    """Accuracy and NLL of the combined views, and how far they are from their mean."""
    images, right, changed, nll, distance, size = 0, 0, 0, 0.0, 0.0, 0.0
    for logits, labels in blocks:
        mean, own = logits.mean(0), combined(logits, weights, how)
        right += int((own.argmax(1) == labels).sum())
        changed += int((own.argmax(1) != mean.argmax(1)).sum())
        nll += float(cross_entropy(own, labels, reduction="sum"))
        distance += float((own - mean).double().square().sum())
        size += float(mean.double().square().sum())
        images += len(labels)
    moved = (distance / size) ** 0.5 if size else 0.0
    return TrainingEpoch(
        epoch, LR if loss is not None else 0.0, loss, right / images, nll / images, moved, changed / images
    )


def view_recipe(recipe: Recipe, views: Sequence[View], fit: ViewFit) -> tuple[Recipe, Tensor | None]:
    """A recipe that combines the views as fitted, and the weights (V, K) where each class has its own."""
    used = (fit.weights.reshape(len(views), -1) > NONE).any(1).tolist()
    kept = [k for k, runs in enumerate(used) if runs]
    weights = fit.weights[kept]
    per_class = weights.ndim == 2
    uniform = per_class or fit.combine == "max" or bool((weights - weights[0]).abs().max() < 1e-9)
    stage = replace(
        recipe.stages[0],
        views=tuple(views[k] for k in kept),
        weights=() if uniform else tuple((weights / weights.sum()).tolist()),
        temperatures=(),
    )
    made = replace(recipe, stages=(stage,), combine=fit.combine, temperature=1.0, tensors=None, name=fit.method)
    return made, weights.clone() if per_class else None
