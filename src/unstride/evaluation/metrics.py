"""How good predictions are, and whether a change helps. Pure functions; shares are in 0..1, not per cent.

    plain, better = score(plain_logits, labels), score(better_logits, labels)
    summarise(better).top1
    compare(plain, better).verdict  # "helps", "no measurable effect" or "hurts"

What is computed per image (Scores, areas) can be stored, joined across processes in any split, and summarised once, so
that the numbers do not depend on batches or shards. Sort by image before `compare_segmentation`: it draws by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unstride.errors import DataError, InputError, OptionError

IGNORE = 255
BINS = 15
RESAMPLES = 2000
LEVEL = 0.95

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Scores:
    """One number per image and measure, each (N,)."""

    top1: NDArray[np.bool_]
    top5: NDArray[np.bool_]
    nll: Floats
    brier: Floats
    confidence: Floats

    def __len__(self) -> int:
        return len(self.top1)

    @staticmethod
    def joined(parts: Sequence[Scores]) -> Scores:
        """The scores of several batches as those of one."""
        names = ("top1", "top5", "nll", "brier", "confidence")
        return Scores(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


@dataclass(frozen=True)
class Classification:
    """Means over n images: accuracies, negative log-likelihood (nats), expected calibration error, Brier score."""

    n: int
    top1: float
    top5: float
    nll: float
    ece: float
    brier: float


@dataclass(frozen=True)
class Segmentation:
    """From one confusion matrix of the whole data set. Absent classes are NaN in `iou` and `acc`, and not averaged.

    `dice`: the mean over classes of 2 |A and B| / (|A| + |B|), of the same areas; a mean over cases is another number.
    """

    miou: float
    aacc: float
    macc: float
    dice: float
    iou: tuple[float, ...]
    acc: tuple[float, ...]


@dataclass(frozen=True)
class Gain:
    """Better minus plain, with its paired bootstrap interval. corrected, corrupted: images, or pixels of masks."""

    gain: float
    low: float
    high: float
    corrected: int
    corrupted: int
    n: int

    @property
    def verdict(self) -> str:
        """In words, by whether the interval excludes zero."""
        return "helps" if self.low > 0 else "hurts" if self.high < 0 else "no measurable effect"


# ------------------------------------------------------------------------------------------------------ classification


def score(logits: Tensor, labels: Tensor | Sequence[int]) -> Scores:
    """logits (N, K), labels (N,) -> Scores. Of equal logits the lower class counts as the higher, as argmax has it."""
    labels = torch.as_tensor(labels).to(logits.device)
    _check(logits, labels)
    logits = logits.detach().double()
    own = logits.gather(1, labels[:, None])
    index = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own) | ((logits == own) & (index < labels[:, None]))
    rank = before.sum(1)
    logs = logits.log_softmax(1)
    probabilities = logs.exp()
    target = torch.nn.functional.one_hot(labels, logits.shape[1])
    return Scores(
        top1=(rank < 1).cpu().numpy(),
        top5=(rank < 5).cpu().numpy(),
        nll=-logs.gather(1, labels[:, None])[:, 0].cpu().numpy(),
        brier=(probabilities - target).square().sum(1).cpu().numpy(),
        confidence=probabilities.amax(1).cpu().numpy(),
    )


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise InputError(
            f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)} {labels.dtype}; wanted (N, K) and N integers"
        )
    if not bool(torch.isfinite(logits).all()):
        rows = (~torch.isfinite(logits)).any(1).nonzero()[:5, 0].tolist()
        raise InputError(f"logits are not finite in rows {rows}; half precision may have overflowed, try float32")
    wrong = labels[(labels < 0) | (labels >= logits.shape[1])]
    if len(wrong):
        raise DataError(
            f"label {int(wrong[0])} for a model of {logits.shape[1]} classes (0 to {logits.shape[1] - 1}); "
            "the data set's classes are not the model's"
        )


def summarise(scores: Scores) -> Classification:
    """Scores of N images -> their means, and the calibration error over the set."""
    if not len(scores):
        raise DataError("no image was scored; there is nothing to summarise")
    return Classification(
        n=len(scores),
        top1=float(scores.top1.mean()),
        top5=float(scores.top5.mean()),
        nll=float(scores.nll.mean()),
        ece=calibration_error(scores.confidence, scores.top1),
        brier=float(scores.brier.mean()),
    )


def calibration_error(confidence: Floats, correct: NDArray[np.bool_], bins: int = BINS) -> float:
    """Expected calibration error: mean distance of confidence and accuracy over equal bins (lo, hi], by their share."""
    at = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = np.bincount(at, confidence - correct, bins)  # the sum over a bin, so the bins' shares are in it
    return float(np.abs(gap).sum() / len(confidence))


def compare(plain: Scores, better: Scores, seed: int = 0) -> Gain:
    """Gain in top-1 over the same images in the same order."""
    if len(plain) != len(better) or not len(plain):
        raise InputError(f"{len(plain)} plain, {len(better)} enhanced predictions; wanted the same images")
    change = better.top1.astype(np.float64) - plain.top1
    low, high = bootstrap(change, seed)
    return Gain(float(change.mean()), low, high, int((change > 0).sum()), int((change < 0).sum()), len(change))


def bootstrap(values: Floats, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of the mean of values (N,), resampled with replacement."""
    if resamples < 1 or not 0 < level < 1:
        raise OptionError(f"resamples {resamples}, level {level}; wanted at least 1, and a level between 0 and 1")
    rng, n = np.random.default_rng(seed), len(values)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) <= 64:  # corrected, corrupted, same: how often each is drawn is all that matters
        means = rng.multinomial(n, counts / n, resamples) @ distinct / n
    else:
        means = np.concatenate([np.sort(values)[at].mean(1) for at in _draws(rng, n, resamples)])
    return _interval(means, level)


def _draws(rng: np.random.Generator, n: int, resamples: int) -> Iterator[Integers]:
    """Indices of n images drawn with replacement, (some, n), a few resamples at a time: memory stays small."""
    step = max(1, 2_000_000 // n)
    for start in range(0, resamples, step):
        yield rng.integers(0, n, (min(step, resamples - start), n))


def _interval(values: Floats, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# -------------------------------------------------------------------------------------------------------- segmentation


def confusion(prediction: Tensor, target: Tensor, classes: int, ignore: int | None = IGNORE) -> Integers:
    """prediction, target (..., H, W) of class indices -> (K, K) pixel counts, target by prediction.

    Add them up over images. Pixels whose target is `ignore` are left out, whatever was predicted there.
    """
    if prediction.shape != target.shape:
        raise InputError(f"prediction {tuple(prediction.shape)} and target {tuple(target.shape)} differ in shape")
    check_mask(target, classes, ignore)
    seen = torch.ones_like(target, dtype=torch.bool) if ignore is None else target != ignore
    truth, guess = target[seen].long(), prediction[seen].long()
    if len(wrong := _strange(guess, classes)):
        raise InputError(f"prediction holds class {wrong}; wanted 0 to {classes - 1}")
    counts = torch.bincount(truth * classes + guess, minlength=classes * classes)
    return counts.view(classes, classes).cpu().numpy()


def check_mask(target: Tensor, classes: int, ignore: int | None = IGNORE, name: str = "target") -> None:
    """A DataError that names what a mask holds beside classes 0 to K - 1 and `ignore`."""
    if len(wrong := _strange(target if ignore is None else target[target != ignore], classes)):
        void = "" if ignore is None else f", or {ignore} where there is no label"
        raise DataError(f"{name} holds class {wrong}; wanted 0 to {classes - 1}{void}")


def _strange(values: Tensor, classes: int) -> list[int]:
    """The first few that are no class."""
    found: list[int] = values[(values < 0) | (values >= classes)].unique()[:5].tolist()
    return found


def areas(matrix: Integers) -> Integers:
    """Confusion (..., K, K) -> (..., 3, K): pixels right, predicted and labelled of each class. All that mIoU needs."""
    right = np.diagonal(matrix, axis1=-2, axis2=-1)
    return np.stack([right, matrix.sum(-2), matrix.sum(-1)], -2)


def summarise_segmentation(matrix: Integers) -> Segmentation:
    """Confusion of the whole data set (K, K) -> mIoU, aAcc, mAcc and the classes' own.

    As in mmsegmentation, a class that is neither labelled nor predicted anywhere has no IoU (NaN) and does not count in
    the mean; one that is predicted but never labelled has IoU 0 and counts, but has no accuracy.
    """
    return summarise_areas(areas(matrix))


def summarise_areas(total: Integers) -> Segmentation:
    """The same from areas (3, K), summed over the data set."""
    right, predicted, labelled = total.astype(np.float64)
    if not labelled.sum():
        raise DataError("no labelled pixel was seen; check the masks and the ignore index")
    iou, acc = _ratio(right, predicted + labelled - right), _ratio(right, labelled)
    return Segmentation(
        miou=float(np.nanmean(iou)),
        aacc=float(right.sum() / labelled.sum()),
        macc=float(np.nanmean(acc)),
        dice=float(np.nanmean(_ratio(2 * right, predicted + labelled))),
        iou=tuple(iou.tolist()),
        acc=tuple(acc.tolist()),
    )


def _ratio(part: Floats, whole: Floats) -> Floats:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def compare_segmentation(plain: Integers, better: Integers, flips: tuple[int, int] = (0, 0), seed: int = 0) -> Gain:
    """Gain in mIoU from areas per image, (N, 3, K) each, in the same order; whole images are resampled.

    `flips` are the pixels corrected and corrupted, see `changed`.
    """
    if plain.shape != better.shape or plain.ndim != 3 or plain.shape[1] != 3 or not len(plain):
        raise InputError(f"areas {plain.shape} and {better.shape}; wanted (N, 3, K) of the same images, at least one")
    gain = summarise_areas(better.sum(0)).miou - summarise_areas(plain.sum(0)).miou
    rng = np.random.default_rng(seed)
    both = np.stack([plain, better], 1).reshape(len(plain), -1).astype(np.float64)
    n = len(plain)
    totals = np.concatenate(
        [np.stack([np.bincount(row, minlength=n) for row in at]) @ both for at in _draws(rng, n, RESAMPLES)]
    )
    right, predicted, labelled = np.moveaxis(totals.reshape(RESAMPLES, 2, 3, -1), 2, 0)
    drawn = labelled.sum((1, 2)) > 0  # a resample may hold nothing but images without a label
    miou = np.nanmean(_ratio(right, predicted + labelled - right)[drawn], -1)
    low, high = _interval(miou[:, 1] - miou[:, 0], LEVEL)
    return Gain(gain, low, high, *flips, n=n)


def changed(plain: Tensor, better: Tensor, target: Tensor, ignore: int | None = IGNORE) -> tuple[int, int]:
    """Predictions and target, (..., H, W): how many pixels were corrected, and how many corrupted."""
    seen = torch.ones_like(target, dtype=torch.bool) if ignore is None else target != ignore
    was, now = (plain == target)[seen], (better == target)[seen]
    return int((~was & now).sum()), int((was & ~now).sum())
