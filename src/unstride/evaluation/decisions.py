"""Decisions from labelled images: which recipe to take, whether to use it, and how large a share a gate may pass.

Pure functions over arrays and intervals. `python -m benchmarks.coverage_of_intervals` measures their error rates.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from unstride.evaluation.intervals import LEVEL, Array, ConfidenceInterval, beta_quantile

MARGIN = 0.005  # half a point
POWER = 0.8  # how often the images that would settle a decision do so, if the estimate is the truth
MOST_IMAGES = 100_000
SAME_COST = 0.01  # costs that differ by less than this share are a tie
OVERRUN = 0.05  # how often the mean cost on new images may exceed the ceiling
SEVERAL = 0.9  # of that, for several gates, which are approximated

Verdict = Literal["use", "inconclusive", "keep"]


@dataclass(frozen=True)
class Decision:
    """Whether to use a recipe, and why. `str()` is the sentence to print."""

    verdict: Verdict
    gain: ConfidenceInterval
    cost: float  # relative to the baseline
    baseline: str
    margin: float
    more_images: int | None  # where the verdict is "inconclusive"
    unit: str = "points"
    scale: float = 100.0  # what a gain is multiplied by for its unit

    def __str__(self) -> str:
        gain = self.gain.describe(self.unit, self.scale)
        if self.verdict == "keep":
            return f"Keep {self.baseline}: {gain}."
        if self.verdict == "inconclusive":
            return f"Inconclusive: {gain}. {_images_needed(self.more_images or 0)}"
        sentence = f"Use this recipe: {gain} at {self.cost:.2f} times the compute of {self.baseline}"
        if self.gain.low <= 0:
            margin = f"{self.scale * self.margin:.3g}"
            unit = "point" if (margin, self.unit) == ("1", "points") else self.unit
            sentence += f", within the margin of {margin} {unit}"
        return sentence + "."


def _images_needed(count: int) -> str:
    if count > MOST_IMAGES:
        return f"More than {MOST_IMAGES:,} labelled images would be needed to settle it."
    step = 10 ** max(0, len(str(count)) - 2)
    rounded = math.ceil(count / step) * step
    return f"About {rounded:,} more labelled image{'' if rounded == 1 else 's'} would settle it."


def decide(
    gain: ConfidenceInterval,
    images: int,
    cost: float = 1.0,
    margin: float = MARGIN,
    baseline: str = "the base model",
    unit: str = "points",
    scale: float = 100.0,
) -> Decision:
    """Use a recipe, keep the baseline, or neither yet.

    "use": the gain is significant (its lower end is above zero), or the recipe is cheaper than the baseline and
    significantly not worse by more than the margin. "inconclusive": neither, and the estimate is above zero.
    "keep": otherwise. The error rates hold for one decision; labelling until the answer is "use" raises them.

    Args:
        gain: the gain over the baseline, with its interval.
        images: the number of labelled images that the interval comes from.
        cost: the cost of the recipe, relative to the baseline.
        margin: the loss that is acceptable where the recipe is cheaper, as a difference of values (0.005: 0.5 points).
        unit, scale: of the metric, to print the gain; see `metric_names.unit_of`.
    """
    if margin < 0:
        raise ValueError(f"margin is {margin:g}, expected 0 or more.")
    bound = -margin if cost < 1 else 0.0
    if gain.low > bound:
        return Decision("use", gain, cost, baseline, margin, None, unit, scale)
    if gain.estimate <= 0:
        return Decision("keep", gain, cost, baseline, margin, None, unit, scale)
    more = images_to_settle(gain, images, bound)
    return Decision("inconclusive", gain, cost, baseline, margin, more, unit, scale)


def images_to_settle(gain: ConfidenceInterval, images: int, bound: float = 0.0) -> int:
    """How many more labelled images put the lower end above the bound, in 80 % of cases, if the estimate is the truth.

    The lower arm of the interval comes from the observed disagreement and shrinks with the root of the images.
    """
    distance = gain.estimate - bound
    if distance <= 0:
        raise ValueError(f"The estimate is {gain.estimate:g}, expected more than the bound {bound:g}.")
    quantile = NormalDist().inv_cdf((1 + gain.level) / 2)
    factor = (quantile + NormalDist().inv_cdf(POWER)) / quantile
    wanted = images * (factor * (gain.estimate - gain.low) / distance) ** 2
    return max(1, math.ceil(wanted - images))


def one_standard_error(nll: ArrayLike, passes: Sequence[int], cost: ArrayLike, standard: Collection[int] = ()) -> int:
    """The simplest recipe whose NLL is within one standard error of the best (Breiman et al., 1984).

    The simplest has the fewest passes; of several, the one with the lowest NLL. The standard error is that of the
    paired difference, image by image. Where a standard recipe is as simple and costs the same, that is taken.

    Args:
        nll: cross-validated NLL, (images, recipes).
        passes: of each recipe.
        cost: of each recipe.
        standard: indices of the recipes that people use anyway, such as a flip of every image.
    """
    losses, costs, sizes = np.asarray(nll, dtype=np.float64), np.asarray(cost, dtype=np.float64), np.asarray(passes)
    if losses.ndim != 2 or losses.shape[1] != len(costs) or len(losses) < 2:
        raise ValueError(f"nll has the shape {losses.shape}, expected (2 or more images, {len(costs)} recipes).")
    mean = losses.mean(0)
    best = int(mean.argmin())
    error = (losses - losses[:, [best]]).std(0, ddof=1) / math.sqrt(len(losses))
    eligible = np.flatnonzero(mean - mean[best] <= error)
    simple = [int(index) for index in eligible if sizes[index] == sizes[eligible].min()]
    chosen = min(simple, key=lambda index: (float(mean[index]), float(costs[index])))
    tied = [i for i in simple if i in standard and abs(costs[i] - costs[chosen]) <= SAME_COST * costs[chosen]]
    return min(tied, key=lambda index: float(mean[index]), default=chosen)


# ---------------------------------------------------------------- gates within a budget
def safe_shares(
    ceiling: float,
    base_cost: float,
    extra_costs: Sequence[float],
    shares: Sequence[float],
    images: int,
    new_images: int | None = None,
) -> tuple[float, ...]:
    """The shares of all images that reach each stage, times the largest common factor that is safe.

    Safe: thresholds set on `images` calibration images exceed the ceiling on new images in at most 5 % of draws.

    Args:
        ceiling: what the mean cost must not exceed.
        base_cost: of the first stage, which every image passes.
        extra_costs: of each further stage.
        shares: of all images, the part that should reach each further stage. Each is at most the one before.
        images: the number of calibration images.
        new_images: the number of new images whose mean cost counts. Without: very many.
    """
    _check_stages(extra_costs, shares)
    if base_cost > ceiling:
        raise ValueError(f"The first stage alone costs {base_cost:g}, more than the ceiling {ceiling:g}.")

    def scaled(step: int) -> tuple[float, ...]:
        return tuple(math.floor(share * step + 1e-9) / images for share in shares)

    overrun = OVERRUN if len(shares) == 1 else SEVERAL * OVERRUN
    low, high = 0, images + 1  # of `images` steps, the largest that is safe
    while high - low > 1:
        middle = (low + high) // 2
        cost = base_cost + _extra_quantile(extra_costs, scaled(middle), images, new_images, 1 - overrun)
        low, high = (middle, high) if cost <= ceiling + 1e-9 else (low, middle)
    return scaled(low)


def cost_interval(
    base_cost: float,
    extra_costs: Sequence[float],
    shares: Sequence[float],
    images: int,
    new_images: int | None = None,
    level: float = LEVEL,
) -> ConfidenceInterval:
    """The expected mean cost on new images, with the interval that holds it. Arguments as in `safe_shares`."""
    _check_stages(extra_costs, shares)
    passed = _expected_shares(shares, images)
    expected = float(np.asarray(extra_costs) @ passed)
    low, high = (_extra_quantile(extra_costs, shares, images, new_images, (1 + sign * level) / 2) for sign in (-1, 1))
    return ConfidenceInterval(
        base_cost + expected, base_cost + min(low, expected), base_cost + max(high, expected), level
    )


def _check_stages(extra_costs: Sequence[float], shares: Sequence[float]) -> None:
    if len(extra_costs) != len(shares) or not shares or min(extra_costs) <= 0:
        raise ValueError("Each stage needs a share and a cost above 0.")
    if not all(0 <= after <= before <= 1 for before, after in zip((1.0, *shares), shares, strict=False)):
        raise ValueError(f"shares are {list(shares)}, expected from 1 down to 0, each at most the one before.")


def _expected_shares(shares: Sequence[float], images: int) -> Array:
    """Of new images, who is below a threshold that lies at the first calibration image that must not pass."""
    counts = [math.floor(share * images + 1e-9) for share in shares]
    return np.array([(k + 1) / (images + 1) if 0 < k < images else k / images for k in counts])


def _extra_quantile(
    costs: Sequence[float], shares: Sequence[float], images: int, new_images: int | None, probability: float
) -> float:
    """A quantile of the mean extra cost on new images.

    A threshold is an order statistic of the calibration images, so the share that passes it is Beta distributed; with
    one stage and very many new images this is exact. Several stages and further sampling keep mean and variance right.
    """
    passed = _expected_shares(shares, images)
    parts = np.asarray(costs, dtype=np.float64) / sum(costs)
    mean = float(parts @ passed)
    both = np.minimum(passed[:, None], passed[None, :])  # who reaches the later stage reached the earlier one
    spread = float(parts @ (both - np.outer(passed, passed)) @ parts)
    variance = spread * (1 / (images + 2) + (1 / new_images if new_images else 0.0))
    if variance <= 0:
        return mean * sum(costs)
    strength = mean * (1 - mean) / variance - 1
    return sum(costs) * beta_quantile(mean * strength, (1 - mean) * strength, probability)
