"""How a task is scored: what is kept of each image, and metrics, losses and gains of many.

scoring = scoring_for("classification")
stats = scoring.join([scoring.stats(output, targets) for output, targets in batches])
scoring.metrics(stats)["accuracy"], scoring.gain(before, after)

Everything follows from numbers of single images: those are cached, joined in any order, drawn with replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from unstride.errors import OptionError
from unstride.evaluation import image_stats, metrics
from unstride.evaluation.intervals import LEVEL, ConfidenceInterval, PairedCounts, bootstrap_gain, paired_gain
from unstride.evaluation.metric_names import lower_is_better
from unstride.evaluation.metrics import IGNORE, Array
from unstride.tasks.tasks import task_named

NEIGHBOURS = 5
DRAWS = 2000

Stats = Mapping[str, Any]  # arrays or tensors by name, whose first axis is the images
Metric = Callable[[Stats, Array | None], Any]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Scoring:
    """How outputs of a task are scored.

    Args:
        metric: the one that is compared.
        classes: names of the classes or labels, in the model's order; () where they are not known.
        ignore: of a mask, the value of pixels without a label.
    """

    task: str
    metric: str
    classes: tuple[str, ...] = ()
    ignore: int | None = IGNORE

    def stats(self, output: Tensor, targets: Sequence[Any] | Tensor) -> dict[str, Tensor]:
        """What counts of each image of a batch, on the CPU. `targets`: as the data gives them, one for each image."""
        if self.task == "segmentation":
            return image_stats.of_maps(output, targets, self.ignore)
        if self.task == "multilabel-segmentation":
            return image_stats.of_label_maps(output, targets, self.ignore)
        return _STATS[self.task](output, targets)

    def join(self, parts: Sequence[Stats]) -> dict[str, Any]:
        """The stats of several batches, in their order."""
        return {
            name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in (parts[0] if parts else ())
        }

    def split(self, stats: Stats) -> list[dict[str, Tensor]]:
        """The stats of each image alone; `join` is the inverse."""
        return [{name: torch.as_tensor(v)[k : k + 1] for name, v in stats.items()} for k in range(count(stats))]

    def metrics(self, stats: Stats, weights: Array | None = None) -> dict[str, Any]:
        """Every metric of the task by name. `weights` (D, N): (D,) values, of D weightings of the images."""
        return {name: compute(stats, weights) for name, compute in self._metrics(stats).items()}

    def value(self, stats: Stats, weights: Array | None = None) -> Any:
        """The metric that is compared."""
        known = self._metrics(stats)
        if self.metric not in known:
            raise OptionError(f"metric: {self.metric!r} cannot be had of these labels; there are {', '.join(known)}.")
        return known[self.metric](stats, weights)

    def loss(self, stats: Stats) -> Array:
        """A number for each image (N,), lower is better: NLL where there are classes, otherwise an error."""
        return image_stats.loss(stats)

    def gain(
        self,
        before: Stats,
        after: Stats,
        groups: ArrayLike | None = None,
        level: float = LEVEL,
        seed: int = 0,
    ) -> ConfidenceInterval:
        """The gain in the metric, positive where the result is better, paired by image.

        Args:
            groups: of each image, the patient, video or site; images of one are drawn together.
        """
        was, now = (self.correct(stats) for stats in (before, after))
        if was is not None and now is not None:
            if groups is None:
                return paired_gain(PairedCounts.from_correct(was, now), level)
            change = now.astype(np.float64) - was
            rows = np.asarray(groups)[self._counted(before)]
            return bootstrap_gain(lambda w: w @ change / w.sum(1), len(change), rows, level, DRAWS, seed)
        sign = -1.0 if lower_is_better(self.metric) else 1.0

        def difference(weights: Array) -> Array:
            return np.asarray(sign * (self.value(after, weights) - self.value(before, weights)))

        return bootstrap_gain(difference, count(before), groups, level, DRAWS, seed)

    def correct(self, stats: Stats) -> Bools | None:
        """Whether each image (each query, of pairs) is right, where the metric is the share of those that are."""
        found = _correct(self.metric, stats)
        return None if found is None else np.asarray(found, dtype=bool)

    def changed(self, before: Stats, after: Stats) -> tuple[Bools, Bools]:
        """Of each image, whether its own result is better, and whether it is worse."""
        was, now = (image_stats.quality(stats) for stats in (before, after))
        return now > was, now < was

    def by_class(self, stats: Stats) -> Array | None:
        """The value of each class: accuracy, average precision or IoU; NaN where a class does not occur."""
        if "areas" in stats:
            return np.asarray(metrics.class_iou(stats["areas"])[0])
        if "predicted" in stats:
            labels, correct = np.asarray(stats["label"]), np.asarray(stats["correct"], dtype=np.float64)
            size = max(len(self.classes), int(labels.max()) + 1)
            total, right = np.bincount(labels, minlength=size), np.bincount(labels, correct, size)
            return np.divide(right, total, out=np.full(size, np.nan), where=total > 0)
        if "scores" in stats:
            scores, target = np.asarray(stats["scores"]), np.asarray(stats["target"])
            return np.array([metrics.average_precision(s, t) for s, t in zip(scores.T, target.T, strict=True)])
        return None

    def _counted(self, stats: Stats) -> Any:
        """The rows that the metric is over: of pairs only the queries."""
        return image_stats.pair_hits(stats)[1] if "pairs" in stats else slice(None)

    def _metrics(self, stats: Stats) -> Mapping[str, Metric]:
        return _PAIRS if "pairs" in stats else METRICS[self.task]


def scoring_for(
    task: str, metric: str | None = None, classes: int | Sequence[str] | None = None, ignore: int | None = IGNORE
) -> Scoring:
    """The scoring of a task, by its usual metric or another one.

    Example: `scoring_for("segmentation", "Dice")`
    """
    name = task_named(task).name
    if name not in METRICS:
        raise OptionError(f"task: {name!r} has no labels to be measured with; there are {', '.join(METRICS)}.")
    known = list(METRICS[name])
    by_name = {other.casefold(): other for other in known}
    if metric is not None and str(metric).casefold() not in by_name:
        raise OptionError(f"metric: got {metric!r}, expected one of {', '.join(known)} for {name}.")
    chosen = known[0] if metric is None else by_name[metric.casefold()]
    names = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes or ())
    return Scoring(name, chosen, names, ignore)


def count(stats: Stats) -> int:
    """How many images these are of."""
    return len(next(iter(stats.values()))) if stats else 0


# ---------------------------------------------------------------- which metrics a task has, the usual one first
def _mean_of(name: str) -> Metric:
    return lambda stats, weights: metrics.mean(stats[name], weights)


def _of_areas(function: Callable[..., Any]) -> Metric:
    return lambda stats, weights: function(stats["areas"], weights)


def _over_labels(function: Callable[..., Any]) -> Metric:
    return lambda stats, weights: metrics.mean_over_labels(function, stats["scores"], stats["target"], weights)


def _shares(metric: str) -> Metric:
    """A metric that is the share of images, or queries, that are right."""

    def share(stats: Stats, weights: Array | None) -> Any:
        right = _correct(metric, stats)
        assert right is not None
        rows = image_stats.pair_hits(stats)[1] if "pairs" in stats else slice(None)
        return metrics.mean(right, None if weights is None else weights[:, rows])

    return share


def _correct(metric: str, stats: Stats) -> Any:
    if metric == "accuracy":
        return stats["correct"]
    if metric == "top-5":
        return stats["top5"]
    if metric == "exact match":
        return ((np.asarray(stats["scores"]) > 0) == (np.asarray(stats["target"]) > 0.5)).all(1)
    if metric == "k-NN accuracy":
        return image_stats.neighbour_hits(stats, NEIGHBOURS)[1]
    if metric in ("recall@1", "recall@5"):
        hits = image_stats.pair_hits(stats)[0] if "pairs" in stats else image_stats.neighbour_hits(stats, NEIGHBOURS)[0]
        return hits[:, : int(metric[-1])].any(1)
    return None


_PAIRS: dict[str, Metric] = {name: _shares(name) for name in ("recall@1", "recall@5")}
METRICS: dict[str, dict[str, Metric]] = {
    "classification": {
        "accuracy": _mean_of("correct"),
        "top-5": _mean_of("top5"),
        "NLL": _mean_of("nll"),
        "Brier": _mean_of("brier"),
        "ECE": lambda stats, weights: metrics.calibration_error(stats["confidence"], stats["correct"], weights),
    },
    "multilabel": {
        "mAP": _over_labels(metrics.average_precision),
        "AUROC": _over_labels(metrics.auroc),
        "exact match": _shares("exact match"),
    },
    "segmentation": {
        "mIoU": _of_areas(metrics.mean_iou),
        "Dice": _of_areas(metrics.dice),
        "pixel accuracy": _of_areas(metrics.pixel_accuracy),
        "mean accuracy": _of_areas(metrics.mean_accuracy),
        "NLL": _mean_of("nll"),
    },
    "multilabel-segmentation": {
        "mIoU": _of_areas(metrics.mean_iou),
        "Dice": _of_areas(metrics.dice),
        "NLL": _mean_of("nll"),
    },
    "regression": {
        "RMSE": lambda stats, weights: metrics.root_mean_square(stats["squares"], None, weights),
        "MAE": lambda stats, weights: metrics.mean_error(stats["errors"], None, weights),
    },
    "dense": {
        "RMSE": lambda stats, weights: metrics.root_mean_square(stats["squares"], stats["pixels"], weights),
        "AbsRel": lambda stats, weights: metrics.mean_error(stats["relative"], stats["pixels"], weights),
        "within 1.25": lambda stats, weights: metrics.mean_error(stats["within"], stats["pixels"], weights),
    },
    "embedding": {**_PAIRS, "k-NN accuracy": _shares("k-NN accuracy")},
}

_STATS: dict[str, Callable[[Tensor, Any], dict[str, Tensor]]] = {
    "classification": image_stats.of_classes,
    "multilabel": image_stats.of_labels,
    "regression": image_stats.of_numbers,
    "dense": image_stats.of_depth,
    "embedding": image_stats.of_vectors,
}
