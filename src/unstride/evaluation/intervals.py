"""Confidence intervals of gains: paired accuracy, any metric by the bootstrap, and partly labelled disagreements.

The gain in accuracy is that of paired proportions: only images that a recipe corrects or breaks count. Its interval is
the mid-p interval of Fay and Lumbard (2021), which agrees with the mid-p McNemar test (Fagerland, Lydersen and Laake,
2013). `python -m benchmarks.coverage_of_intervals` shows why, beside the score interval of Tango (1998).

References: M. P. Fay and K. Lumbard, Statistics in Medicine 40 (2021) 1147-1159. M. W. Fagerland, S. Lydersen and
P. Laake, BMC Medical Research Methodology 13 (2013) 91.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
LEVEL = 0.95
GRID = 512  # points of a confidence distribution
BISECTIONS = 30
STRICTER = 0.9  # of the error: mid-p alone exceeds it by up to a tenth where few images change
INSTABILITY = 0.5  # the part of the variance between the written recipe and the folds' that counts; by simulation


@dataclass(frozen=True)
class ConfidenceInterval:
    """An estimate and the interval that holds the true value with the probability `level`."""

    estimate: float
    low: float
    high: float
    level: float = LEVEL

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"low is {self.low:g} and high is {self.high:g}, expected low <= high.")

    @property
    def width(self) -> float:
        return self.high - self.low

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high

    def describe(self, unit: str = "points", scale: float = 100.0) -> str:
        """`+2.6 points (95 % CI +1.4 to +3.8)`. Values are multiplied by `scale`."""
        values = [scale * v for v in (self.estimate, self.low, self.high)]
        decimals = _decimals(values)
        estimate, low, high = (f"{_no_negative_zero(v, decimals):+.{decimals}f}" for v in values)
        return f"{estimate} {unit} ({100 * self.level:g} % CI {low} to {high})"

    def __str__(self) -> str:
        return self.describe()


def _decimals(values: list[float]) -> int:
    """So many that the interval has two digits, and more where an end that is not zero would print as zero."""
    width = values[2] - values[1]
    decimals = 1
    while decimals < 6 and 0 < width < 16 * 10.0**-decimals:
        decimals += 1
    if not width:
        decimals = 2
    ends = [v for v in values[1:] if v != 0]
    while decimals < 6 and any(round(v, decimals) == 0 for v in ends):
        decimals += 1
    return decimals


def _no_negative_zero(value: float, decimals: int) -> float:
    return round(value, decimals) + 0.0


@dataclass(frozen=True)
class PairedCounts:
    """Of `images` images, a recipe corrects some of the baseline's predictions and breaks others."""

    corrected: float
    broken: float
    images: float

    def __post_init__(self) -> None:
        if self.images <= 0 or min(self.corrected, self.broken) < 0 or self.disagreements > self.images:
            raise ValueError(f"{self} is impossible: expected corrected + broken <= images, none negative, images > 0.")

    @classmethod
    def from_correct(cls, baseline: ArrayLike, recipe: ArrayLike) -> PairedCounts:
        """From two boolean arrays: whether each prediction is correct."""
        before, after = np.asarray(baseline, dtype=bool), np.asarray(recipe, dtype=bool)
        if before.shape != after.shape:
            raise ValueError(f"baseline has the shape {before.shape} and recipe {after.shape}, expected the same.")
        return cls(int((after & ~before).sum()), int((before & ~after).sum()), before.size)

    @property
    def gain(self) -> float:
        return (self.corrected - self.broken) / self.images

    @property
    def disagreements(self) -> float:
        return self.corrected + self.broken

    @property
    def standard_error(self) -> float:
        """Of the gain, without any correction for few disagreements."""
        return math.sqrt(max(0.0, self.disagreements - self.images * self.gain**2)) / self.images


# ---------------------------------------------------------------- paired proportions
def paired_gain(counts: PairedCounts, level: float = LEVEL) -> ConfidenceInterval:
    """The gain in accuracy with the interval of Fay and Lumbard (2021), in the mid-p form.

    The gain is the share of images that change, times (2 times the corrected part of them, minus 1). Each of the two
    has a confidence distribution, and an end of the interval is a quantile of their product. The lower end is above
    zero exactly where the one-sided mid-p McNemar test rejects at STRICTER * (1 - level) / 2.
    """
    error = STRICTER * (1 - level) / 2
    low = _lower_end(counts, error)
    high = -_lower_end(PairedCounts(counts.broken, counts.corrected, counts.images), error)
    return ConfidenceInterval(counts.gain, min(low, counts.gain), max(high, counts.gain), level)


def _lower_end(counts: PairedCounts, error: float) -> float:
    changed, images = counts.disagreements, counts.images
    parts = [beta_points(counts.corrected, counts.broken + 1), beta_points(counts.corrected + 1, counts.broken)]
    balance = 2 * np.concatenate([points for points, _ in parts]) - 1
    weights = np.concatenate([weights for _, weights in parts]) / 2  # half of each: the mid-p
    # Few changes make a gain small and a loss small: each sign takes the side that is the worse one for it.
    fewer = _cumulative(*beta_points(changed, images - changed + 1))
    more = _cumulative(*beta_points(changed + 1, images - changed))
    up, down = balance > 0, balance < 0
    none = float(weights[balance == 0].sum())

    def excess(gain: float) -> float:
        below = weights[up] @ fewer(gain / balance[up]) + weights[down] @ (1 - more(gain / balance[down]))
        return float(below) + none * (gain >= 0) - error

    return crossing(excess, -1.0, 1.0)


def _cumulative(points: Array, weights: Array) -> Callable[[Array], Array]:
    """The probability of a value or less."""
    if len(points) == 1:
        return lambda values: (values >= points[0]).astype(np.float64)
    below = np.cumsum(weights) - weights / 2
    return lambda values: np.interp(values, points, below, left=0.0, right=1.0)


def cross_validated(gain: ConfidenceInterval, change: float) -> ConfidenceInterval:
    """The interval for a recipe that is written after it was chosen on the same images.

    The correction is as large as the choice is unstable, and none where every fold chooses the written recipe. The
    usual one, the factor 1 + k / (k - 1) of Nadeau and Bengio (2003), is far too wide here.

    Args:
        gain: the interval of the cross-validated answers (each image by the recipe that was chosen without it).
        change: the standard error of the gain of the written recipe over the cross-validated answers. For accuracy it
            is `PairedCounts.from_correct(cross_validated, written).standard_error`.
    """
    if gain.width == 0:
        return gain
    error = gain.width / (2 * NormalDist().inv_cdf((1 + gain.level) / 2))
    factor = math.sqrt(1 + INSTABILITY * (change / error) ** 2)
    low, high = (gain.estimate + factor * (end - gain.estimate) for end in (gain.low, gain.high))
    return ConfidenceInterval(gain.estimate, low, high, gain.level)


def beta_points(a: float, b: float) -> tuple[Array, Array]:
    """A Beta distribution as points and weights. A parameter of zero puts all weight on that end."""
    if a <= 0 or b <= 0:
        return np.array([0.0 if a <= 0 else 1.0]), np.ones(1)
    mean = a / (a + b)
    deviation = math.sqrt(mean * (1 - mean) / (a + b + 1))
    reach = 9 * deviation + 8 / (a + b)
    edges = np.linspace(max(0.0, mean - reach), min(1.0, mean + reach), GRID + 1)
    points = (edges[1:] + edges[:-1]) / 2
    density = (a - 1) * np.log(points) + (b - 1) * np.log1p(-points)
    weights = np.exp(density - density.max())
    return points, weights / weights.sum()


def beta_quantile(a: float, b: float, probability: float) -> float:
    """The value that a Beta variable stays under with this probability."""
    points, weights = beta_points(a, b)
    if len(points) == 1:
        return float(points[0])
    step = points[1] - points[0]
    return float(np.interp(probability, np.cumsum(weights), points + step / 2))


def crossing(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises crosses zero."""
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


# ---------------------------------------------------------------- partly labelled disagreements
def gain_from_labels(
    outcomes: ArrayLike, disagreements: int, images: int, probabilities: ArrayLike | None = None, level: float = LEVEL
) -> ConfidenceInterval:
    """The gain in accuracy over all images where only some of the disagreements are labelled.

    With all of them labelled, the result is that of `paired_gain` on all images. With a random part, the estimate is
    the weighted mean of Hajek (1971) and the interval is that of the number of images that would give as much
    information (the variance of two-phase sampling: Saerndal, Swensson and Wretman, 1992, chapter 9).

    Args:
        outcomes: of each labelled disagreement, 1 (corrected), -1 (broken) or 0 (both predictions are wrong).
        disagreements: the number of images where the two predictions differ.
        images: the number of all images, labelled or not.
        probabilities: of each labelled disagreement, the probability that it was drawn. Without: all are equal.
    """
    signs = np.asarray(outcomes, dtype=np.float64)
    if not 0 <= len(signs) <= disagreements <= images:
        raise ValueError(f"{len(signs)} labels of {disagreements} disagreements of {images} images are impossible.")
    if not np.isin(signs, (-1, 0, 1)).all():
        raise ValueError("outcomes must be 1 (corrected), -1 (broken) or 0 (both wrong).")
    if disagreements == 0:
        return paired_gain(PairedCounts(0, 0, images), level)
    if len(signs) == 0:
        raise ValueError("No disagreement is labelled: expected at least one.")
    chances = np.full(len(signs), len(signs) / disagreements)
    if probabilities is not None:
        chances = np.asarray(probabilities, dtype=np.float64)
        if chances.shape != signs.shape or not ((chances > 0) & (chances <= 1)).all():
            raise ValueError("probabilities must be one for each outcome, above 0 and at most 1.")
    weights = 1 / chances
    share = disagreements / images
    corrected, broken = (share * float(weights @ (signs == sign)) / float(weights.sum()) for sign in (1, -1))
    effective = images * _information(signs, weights, chances, share, images, level)
    return paired_gain(PairedCounts(effective * corrected, effective * broken, effective), level)


def _information(signs: Array, weights: Array, chances: Array, share: float, images: int, level: float) -> float:
    """The variance with all disagreements labelled, divided by the variance with these."""
    # One more of each sign (Agresti and Coull, 1998): a few labels that agree do not prove that all others do.
    every = np.concatenate([signs, [1.0, -1.0]])
    weight = np.concatenate([weights, np.full(2, weights.mean())])
    missing = np.concatenate([1 - chances, np.full(2, 1 - chances.mean())])
    mean = float(weight @ every) / float(weight.sum())
    squares = (every - mean) ** 2
    spread = float(weight @ squares) / float(weight.sum())
    full = (share * (spread + mean**2) - (share * mean) ** 2) / images
    unlabelled = share**2 * float(weight**2 * missing @ squares) / float(weight.sum()) ** 2
    few = student_quantile((1 + level) / 2, max(1, len(signs) - 1)) / NormalDist().inv_cdf((1 + level) / 2)
    return full / (full + few**2 * unlabelled)


# ---------------------------------------------------------------- any metric
def bootstrap_gain(
    gain: Callable[[Array], Array],
    images: int,
    groups: ArrayLike | None = None,
    level: float = LEVEL,
    draws: int = 2000,
    seed: int = 0,
) -> ConfidenceInterval:
    """The gain in any metric by a paired bootstrap over images, or over groups of images.

    The ends are those of the percentile interval and of the normal one, whichever is the wider, both with the quantile
    of Student's t (Hesterberg, 2015). In simulation that holds best; BCa does not hold with fewer than 500 images.

    Args:
        gain: the gain for each row of weights: `(draws, images)` -> `(draws,)`. A weight is how often an image counts.
        images: the number of images.
        groups: of each image, the group (patient, video, site) that is drawn as a whole.

    Example: accuracy is `lambda w: w @ (recipe.astype(float) - base) / w.sum(1)`.
    """
    names = np.arange(images) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
    if len(names) != images:
        raise ValueError(f"{len(names)} groups are given for {images} images, expected one for each.")
    count = int(names.max()) + 1
    if count < 2:
        raise ValueError("A bootstrap needs at least 2 groups.")
    estimate = float(gain(np.ones((1, images)))[0])
    values = _resampled(gain, names, count, draws, np.random.default_rng(seed))
    values = values[np.isfinite(values)]  # a metric may be undefined where a rare class is not drawn
    reach = student_quantile((1 + level) / 2, count - 1) * math.sqrt(count / (count - 1))
    tail = NormalDist().cdf(-reach)
    low, high = np.quantile(values, [tail, 1 - tail])
    arm = reach * float(values.std(ddof=1))
    return ConfidenceInterval(estimate, min(float(low), estimate - arm), max(float(high), estimate + arm), level)


def _resampled(
    gain: Callable[[Array], Array], names: NDArray[np.intp], count: int, draws: int, generator: np.random.Generator
) -> Array:
    step = max(1, 2**22 // len(names))  # 32 MB of weights at a time
    parts = []
    for start in range(0, draws, step):
        times = generator.multinomial(count, np.full(count, 1 / count), size=min(step, draws - start))
        parts.append(gain(times[:, names].astype(np.float64)))
    return np.concatenate(parts)


def student_quantile(probability: float, freedom: int) -> float:
    """A quantile of Student's t, by the expansion of Fisher and Cornish (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, start=1))
