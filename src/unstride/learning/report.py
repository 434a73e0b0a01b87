"""What a fit found: figures on the validation images, what was kept, and whether training did anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unstride.enhanced import Enhanced
from unstride.execution.opening import write_fitted
from unstride.learning.images import LearningImages
from unstride.learning.tta import LEARNED, ViewFit
from unstride.method.training import STILL, TrainingEpoch, TrainingResult
from unstride.pipeline import Pipeline
from unstride.recipe.files import check_name, write
from unstride.recipe.recipe import Recipe
from unstride.storage.fingerprint import fingerprint


@dataclass(frozen=True)
class FitReport:
    """Accuracies from 0 to 1, on the validation images; None where there were none (meantta, maxtta without data).

    Attributes:
        schedule: "paper", "fast" or "" (view methods have one schedule).
        base, mean, fitted: accuracy of the base model, of the mean of the states or views, of what was fitted.
        kept: the epoch that is in the recipe; epoch 0, the mean, never is. None for methods without epochs.
        moved: whether the result differs from the mean. If not, `warning` says so.
        steps: of GPS, the view of each step.
    """

    method: str
    schedule: str
    seed: int
    train_images: int
    validation_images: int
    base: float | None = None
    mean: float | None = None
    fitted: float | None = None
    mean_nll: float | None = None
    fitted_nll: float | None = None
    kept: int | None = None
    moved: bool = True
    warning: str | None = None
    settings: str = ""
    epochs: tuple[TrainingEpoch, ...] = ()
    steps: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    def figures(self) -> dict[str, Any]:
        """What a recipe file keeps of it."""
        names = ("method", "schedule", "seed", "train_images", "validation_images", "base", "mean", "fitted", "kept")
        own = {name: getattr(self, name) for name in (*names, "mean_nll", "fitted_nll", "moved")}
        finite = {k: v for k, v in own.items() if not isinstance(v, float) or math.isfinite(v)}
        return {k: v for k, v in finite.items() if v not in (None, "")}

    def __str__(self) -> str:
        name = self.method + (f", schedule {self.schedule!r}" if self.schedule else "")
        lines = [f"{name} ({self.settings}), seed {self.seed}" if self.settings else name]
        if self.fitted is not None and self.base is not None and self.mean is not None:
            images = f"{self.validation_images:,} image{'s' * (self.validation_images != 1)}"
            lines.append(
                f"validation accuracy ({images}): base model {self.base:.2%}, mean {self.mean:.2%}, fitted "
                f"{self.fitted:.2%}"
            )
            lines.append(f"validation NLL: mean {self.mean_nll:.4f}, fitted {self.fitted_nll:.4f}")
        if self.kept is not None:
            own = self.epochs[self.kept]
            lines.append(
                f"epoch {self.kept} of {len(self.epochs) - 1} kept, trained on {self.train_images:,} images: moved "
                f"{own.moved:.2g} from the mean, {own.changed:.2%} of the predictions changed"
            )
        if self.steps:
            lines.append(f"views in the order of the search: {', '.join(self.steps)}")
        return "\n".join([*lines, *([f"WARNING: {self.warning}"] if self.warning else [])])


@dataclass(frozen=True, eq=False)
class Fitted:
    """What `fit` returns: a recipe with fitted numbers, ready to run and to be saved.

    Example: `fitted.better(images)`, `print(fitted)`, `fitted.save("fitted.toml")`
    """

    report: FitReport
    pipeline: Pipeline

    @property
    def better(self) -> Enhanced:
        """The model with what was fitted."""
        return self.pipeline.better

    @property
    def recipe(self) -> Recipe:
        return self.pipeline.better.recipe

    @property
    def epochs(self) -> tuple[TrainingEpoch, ...]:
        return self.report.epochs

    def save(self, path: str | Path) -> Path:
        """Write the recipe, and what was fitted in a safetensors file beside it."""
        path, better, recipe = Path(path), self.pipeline.better, self.recipe
        check_name(path)
        if better.attention is not None or better.view_weights is not None:
            beside = path.with_suffix(".safetensors")
            write_fitted(beside, better.attention, better.view_weights, fingerprint(better.model))
            recipe = replace(recipe, tensors=beside.name)
        return write(path, recipe, self.pipeline.stored_networks(), self.report.figures())

    def __str__(self) -> str:
        random = "\nThe model has random weights, so accuracy means nothing." if self.pipeline.untrained else ""
        return f"{self.report}{random}\n{self.recipe}"


def attention_report(result: TrainingResult, train: LearningImages, validation: LearningImages) -> FitReport:
    """What training of the attention did."""
    schedule, start, best = result.schedule, result.epochs[0], result.best
    heads = "" if result.heads == 1 else f", {result.heads} heads"
    settings = f"lr {schedule.lr:g}, {schedule.epochs} epochs, batches of {schedule.batch_size}, {result.states} states"
    return FitReport(
        method="attention",
        schedule=schedule.name,
        seed=result.seed,
        train_images=len(train),
        validation_images=len(validation),
        base=result.plain,
        mean=start.accuracy,
        fitted=best.accuracy,
        mean_nll=start.nll,
        fitted_nll=best.nll,
        kept=result.kept,
        moved=result.warning is None,
        warning=result.warning,
        settings=settings + heads,
        epochs=result.epochs,
    )


def view_report(
    fit: ViewFit,
    policy: str,
    views: int,
    seed: int,
    train: LearningImages | None = None,
    validation: LearningImages | None = None,
    figures: Mapping[str, TrainingEpoch] | None = None,
    steps: tuple[str, ...] = (),
) -> FitReport:
    """What fitting of view weights did. `figures`: of the base model, the mean and the result, on validation images."""
    epochs = figures or {}
    own = epochs.get("fitted")
    still = own is not None and fit.method in LEARNED and not own.changed and own.moved < STILL
    warning = "Fitting did not move the weights of the views: results are those of their mean. Use more images."
    accuracies = {name: epoch.accuracy for name, epoch in epochs.items()}
    return FitReport(
        method=fit.method,
        schedule="",
        seed=seed,
        train_images=len(train) if train is not None else 0,
        validation_images=len(validation) if validation is not None else 0,
        base=accuracies.get("base"),
        mean=accuracies.get("mean"),
        fitted=accuracies.get("fitted"),
        mean_nll=epochs["mean"].nll if epochs else None,
        fitted_nll=own.nll if own is not None else None,
        kept=fit.kept,
        moved=not still,
        warning=warning if still else None,
        settings=f"{views} views of {policy}",
        epochs=fit.epochs,
        steps=steps,
    )
