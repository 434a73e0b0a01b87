"""Metrics of predictions, from one or a few numbers of each image. Pure functions over arrays; shares are in 0..1.

    mean(correct)                           # one number, the accuracy
    mean(correct, weights)                  # (D,): of D weightings of the images, as a bootstrap draws them

Every metric is a function of values of single images, so that gains are paired and images can be drawn with
replacement. Without `weights` each image counts once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.nn.functional import normalize

from unstride.errors import DataError, InputError

Array = NDArray[np.float64]
BINS = 15
IGNORE = 255  # of a mask: no label


def _weights(weights: Array | None, images: int) -> Array:
    if not images:
        raise DataError("No image was measured, so there is no metric.")
    return np.ones((1, images)) if weights is None else np.asarray(weights, dtype=np.float64)


def _result(values: Array, weights: Array | None) -> Any:
    return float(values[0]) if weights is None else values


def mean(values: ArrayLike, weights: Array | None = None) -> Any:
    """The mean of one number of each image (N,)."""
    own = np.asarray(values, dtype=np.float64)
    w = _weights(weights, len(own))
    return _result(w @ own / w.sum(1), weights)


# ---------------------------------------------------------------- of single images
@dataclass(frozen=True, eq=False)
class ClassScores:
    """What of each image counts for one class by softmax: (N,) each."""

    correct: NDArray[np.bool_]
    top5: NDArray[np.bool_]
    nll: Array
    brier: Array
    confidence: Array
    predicted: NDArray[np.int64]


def class_scores(logits: Tensor, labels: Tensor) -> ClassScores:
    """Of logits (N, K) and labels (N,). Of equal logits the lower class counts as the higher, as argmax has it."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise InputError(
            f"scores: got logits {tuple(logits.shape)} and labels {tuple(labels.shape)} {labels.dtype}, expected "
            "(N, K) and integers (N,)."
        )
    check_logits(logits)
    labels = labels.to(logits.device)
    wrong = labels[(labels < 0) | (labels >= logits.shape[1])]
    if len(wrong):
        last = logits.shape[1] - 1
        raise DataError(f"label: got {int(wrong[0])}, expected 0 to {last}. The data's classes are not the model's.")
    logits = logits.detach().double()
    own = logits.gather(1, labels[:, None])
    index = torch.arange(logits.shape[1], device=logits.device)
    rank = ((logits > own) | ((logits == own) & (index < labels[:, None]))).sum(1)
    logs = logits.log_softmax(1)
    chances = logs.exp()
    target = torch.nn.functional.one_hot(labels, logits.shape[1])
    return ClassScores(
        correct=(rank < 1).cpu().numpy(),
        top5=(rank < 5).cpu().numpy(),
        nll=-logs.gather(1, labels[:, None])[:, 0].cpu().numpy(),
        brier=(chances - target).square().sum(1).cpu().numpy(),
        confidence=chances.amax(1).cpu().numpy(),
        predicted=logits.argmax(1).cpu().numpy(),
    )


def check_logits(output: Tensor) -> None:
    """Outputs that are not finite measure nothing."""
    if not bool(torch.isfinite(output).all()):
        rows = (~torch.isfinite(output.flatten(1))).any(1).nonzero()[:5, 0].tolist()
        raise InputError(
            f"output: got values that are not finite in rows {rows}. Half precision may have overflowed: try float32."
        )


# ---------------------------------------------------------------- calibration
def _bins(confidence: Array, bins: int) -> NDArray[np.int64]:
    """Equal bins (low, high]."""
    return np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)


def calibration_error(confidence: ArrayLike, correct: ArrayLike, weights: Array | None = None, bins: int = BINS) -> Any:
    """Expected calibration error: the mean distance of confidence and accuracy over equal bins, by their share."""
    sure, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    w = _weights(weights, len(sure))
    gap = np.zeros((len(sure), bins))
    gap[np.arange(len(sure)), _bins(sure, bins)] = sure - right
    return _result(np.abs(w @ gap).sum(1) / w.sum(1), weights)


def reliability(confidence: ArrayLike, correct: ArrayLike, bins: int = BINS) -> list[tuple[float, float, int]]:
    """(mean confidence, accuracy, images) of each bin that holds an image."""
    sure, right = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    at = _bins(sure, bins)
    chosen = [at == k for k in range(bins) if bool((at == k).any())]
    return [(float(sure[rows].mean()), float(right[rows].mean()), int(rows.sum())) for rows in chosen]


# ---------------------------------------------------------------- rankings
def _descending(scores: Array, target: Array, weights: Array) -> tuple[Array, Array]:
    """Cumulated weights (D, thresholds) of positives and of negatives, from the highest score; ties count together."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)
    own, truth = weights[:, order], target[order]
    return np.cumsum(own * truth, 1)[:, last], np.cumsum(own * (1 - truth), 1)[:, last]


def average_precision(scores: ArrayLike, target: ArrayLike, weights: Array | None = None) -> Any:
    """The area under precision over recall of scores (N,) for targets 0 or 1 (N,); NaN without a positive."""
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(target, dtype=np.float64)
    w = _weights(weights, len(values))
    hits, misses = _descending(values, truth, w)
    steps = np.diff(hits, axis=1, prepend=0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(hits > 0, hits / (hits + misses), 0.0)
        return _result((steps * precision).sum(1) / hits[:, -1], weights)


def auroc(scores: ArrayLike, target: ArrayLike, weights: Array | None = None) -> Any:
    """The chance that a positive scores above a negative, ties counted half; NaN where one kind is missing."""
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(target, dtype=np.float64)
    w = _weights(weights, len(values))
    hits, misses = _descending(values, truth, w)
    steps = np.diff(misses, axis=1, prepend=0.0)
    above = np.concatenate([np.zeros((len(w), 1)), hits[:, :-1]], 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return _result((steps * (above + hits) / 2).sum(1) / (hits[:, -1] * misses[:, -1]), weights)


def mean_over_labels(metric: Any, scores: ArrayLike, target: ArrayLike, weights: Array | None = None) -> Any:
    """`average_precision` or `auroc` of each label of (N, K), then their mean; labels that say nothing are left out."""
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(target, dtype=np.float64)
    w = _weights(weights, len(values))
    each = np.stack([metric(values[:, k], truth[:, k], w) for k in range(values.shape[1])])
    counts = np.isfinite(each).sum(0)
    with np.errstate(invalid="ignore"):
        return _result(np.nansum(each, 0) / np.where(counts > 0, counts, np.nan), weights)


# ---------------------------------------------------------------- maps of classes
def areas(predicted: Tensor, target: Tensor, classes: int, ignore: int | None = IGNORE) -> NDArray[np.int64]:
    """Of one image's maps (H, W) -> (3, K): pixels right, predicted and labelled of each class; unlabelled ones do
    not count.
    """
    if predicted.shape != target.shape:
        raise InputError(f"masks: got a prediction {tuple(predicted.shape)} for a mask {tuple(target.shape)}.")
    check_mask(target, classes, ignore)
    seen = torch.ones_like(target, dtype=torch.bool) if ignore is None else target != ignore
    truth, guess = target[seen].long(), predicted[seen].long()
    kinds = (truth[truth == guess], guess, truth)
    return torch.stack([torch.bincount(kind, minlength=classes) for kind in kinds]).cpu().numpy()


def check_mask(target: Tensor, classes: int, ignore: int | None = IGNORE, name: str = "mask") -> None:
    """A DataError that names what a mask holds beside classes 0 to K - 1 and `ignore`."""
    labelled = target if ignore is None else target[target != ignore]
    wrong = labelled[(labelled < 0) | (labelled >= classes)].unique()[:5].tolist()
    if wrong:
        void = "" if ignore is None else f", or {ignore} where there is no label"
        raise DataError(f"{name}: got class {wrong}, expected 0 to {classes - 1}{void}.")


def class_iou(counts: ArrayLike, weights: Array | None = None) -> Array:
    """IoU of each class (D, K) from `areas` (N, 3, K); NaN of a class that is neither labelled nor predicted."""
    right, predicted, labelled = _totals(counts, weights)
    return _ratio(right, predicted + labelled - right)


def mean_iou(counts: ArrayLike, weights: Array | None = None) -> Any:
    """The mean over classes, as in mmsegmentation: one that is predicted and never labelled has IoU 0."""
    return _result(_nanmean(class_iou(counts, weights)), weights)


def dice(counts: ArrayLike, weights: Array | None = None) -> Any:
    """The mean over classes of twice the common area, by the sum of both."""
    right, predicted, labelled = _totals(counts, weights)
    return _result(_nanmean(_ratio(2 * right, predicted + labelled)), weights)


def pixel_accuracy(counts: ArrayLike, weights: Array | None = None) -> Any:
    """The share of labelled pixels that are right."""
    right, _, labelled = _totals(counts, weights)
    return _result(_ratio(right.sum(1), labelled.sum(1)), weights)


def mean_accuracy(counts: ArrayLike, weights: Array | None = None) -> Any:
    """The mean over classes of the share of their pixels that are right."""
    right, _, labelled = _totals(counts, weights)
    return _result(_nanmean(_ratio(right, labelled)), weights)


def _totals(counts: ArrayLike, weights: Array | None) -> Any:
    own = np.asarray(counts, dtype=np.float64)
    w = _weights(weights, len(own))
    total = (w @ own.reshape(len(own), -1)).reshape(len(w), 3, -1)
    if weights is None and not total[:, 2].sum():
        raise DataError("masks: no pixel has a label. Check the masks, and the value of pixels without one.")
    return np.moveaxis(total, 1, 0)


def _ratio(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def _nanmean(values: Array) -> Array:
    there = np.isfinite(values)
    return _ratio(np.where(there, values, 0.0).sum(-1), there.sum(-1).astype(np.float64))


# ---------------------------------------------------------------- numbers and vectors
def root_mean_square(squares: ArrayLike, pixels: ArrayLike | None = None, weights: Array | None = None) -> Any:
    """The root of the mean of squared errors (N,); of maps, weighted by their measured pixels (N,)."""
    return np.sqrt(mean_error(squares, pixels, weights))


def mean_error(errors: ArrayLike, pixels: ArrayLike | None = None, weights: Array | None = None) -> Any:
    """The mean of errors (N,); of maps, weighted by their measured pixels (N,)."""
    own = np.asarray(errors, dtype=np.float64)
    size = np.ones(len(own)) if pixels is None else np.asarray(pixels, dtype=np.float64)
    w = _weights(weights, len(own)) * size
    return _result(w @ own / w.sum(1), weights)


def neighbours(vectors: Tensor, count: int, step: int = 1024) -> Tensor:
    """Of each vector (N, C) the `count` nearest others by cosine, nearest first: indices (N, count)."""
    units, found = normalize(vectors.double(), dim=1), []
    for start in range(0, len(units), step):
        near = units[start : start + step] @ units.T
        near[torch.arange(len(near)), torch.arange(start, start + len(near))] = -math.inf  # not itself
        found.append(near.topk(count, 1).indices)
    return torch.cat(found)


def neighbour_hits(vectors: Tensor, labels: Tensor, count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each of the nearest others has the same label (N, count), and whether their vote is right (N,)."""
    near = labels[neighbours(vectors, min(count, len(labels) - 1))]
    votes = (near[:, :, None] == near[:, None, :]).sum(2)  # of equals the nearest wins
    voted = near.gather(1, votes.max(1, keepdim=True).indices)[:, 0]
    return (near == labels[:, None]).numpy(), (voted == labels).numpy()


def pair_hits(vectors: Tensor, pairs: Tensor, count: int) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Whether each of the nearest in the gallery is a match of the query (Q, count), and the rows of the queries (Q,).

    Args:
        pairs: (N, 2 + M): the number of an image, 1 where it is in the gallery, the numbers of its matches.
    """
    gallery = (pairs[:, 1] == 1).nonzero()[:, 0]
    queries = torch.isin(pairs[:, 2:], pairs[gallery, 0]).any(1).nonzero()[:, 0]
    if not len(queries) or len(gallery) < 2:
        raise DataError(f"pairs: got {len(queries)} queries with a match and {len(gallery)} images, expected several.")
    units = normalize(vectors.double(), dim=1)
    near = (units[queries] @ units[gallery].T).masked_fill(pairs[queries, :1] == pairs[gallery, 0], -math.inf)
    found = pairs[gallery, 0][near.topk(min(count, len(gallery)), 1).indices]
    return (found[:, :, None] == pairs[queries, None, 2:]).any(2).numpy(), queries.numpy()
