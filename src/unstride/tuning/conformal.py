"""Prediction sets: all the classes that it may well be, with the right one among them as often as was promised.

    sets = tuned.conformal(alpha=0.1)
    sets.sets(images)                       # [(3,), (3, 5), ...]: the right class is in 90 % of such sets

Split conformal prediction (Vovk et al., 2005; Lei et al., 2018): of n labelled images that the recipe has not seen,
the ceil((n + 1) (1 - alpha))-th smallest score of the right class is the threshold, and a new image's set has all
classes that score no more. For images that come from where those came from, the right class is inside with
probability at least 1 - alpha, whatever the network; over draws of the n images the coverage is Beta distributed.
The tuned recipe itself is chosen by all images, so none is left to set a threshold by: here it is chosen again by one
half, and the other half sets the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import DataError, OptionError
from unstride.tasks.confidence import two_class
from unstride.procedure.gates import Stage
from unstride.tasks.temperature import fit_temperature
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import parse_view
from unstride.tuning.certificate import LEVEL, clopper_pearson
from unstride.tuning.pool import Pool
from unstride.tuning.simulate import simulate

SCORES = ("lac", "aps", "raps")
_FREE, _PENALTY = 5, 0.01  # raps: classes beyond the fifth cost that much each (Angelopoulos et al., 2021)


def scores(logits: Tensor, by: str = "lac") -> Tensor:
    """How strange each class would be, (N, K) -> (N, K): small where it fits.

    `lac` (Sadinle et al., 2019): what its probability lacks to 1; the smallest sets. `aps` (Romano et al., 2020,
    without their random part): the probability of all likelier classes; sets that grow where an image is hard. `raps`
    the same with a price on long sets. What is not finite fits nothing.
    """
    if by not in SCORES:
        raise OptionError(f"score: got {by!r}, wanted one of {', '.join(SCORES)}")
    p = two_class(logits.double()).softmax(1)
    if by != "lac":
        ordered, order = p.sort(1, descending=True)
        down = ordered.cumsum(1) - ordered
        if by == "raps":
            down = down + _PENALTY * (torch.arange(1, p.shape[1] + 1) - _FREE).clamp(min=0)
        return torch.empty_like(p).scatter(1, order, down).nan_to_num(nan=math.inf)
    return (1 - p).nan_to_num(nan=math.inf)


def rank(count: int, alpha: float) -> int:
    """Which of `count` scores, from the smallest, is the threshold."""
    if not isinstance(alpha, int | float) or not 0 < alpha < 1:
        raise OptionError(f"alpha: got {alpha!r}, wanted the share of sets that may miss the right class, such as 0.1")
    k = math.ceil((count + 1) * (1 - alpha) - 1e-9)
    if k > count:
        least = math.ceil((1 - alpha) / alpha - 1e-9)
        raise DataError(f"{count} images cannot promise {1 - alpha:.4g}: it takes at least {least} beside the choice")
    return k


def threshold(right: Tensor, alpha: float) -> float:
    """From the scores (N,) of the right classes."""
    return float(right.sort().values[rank(len(right), alpha) - 1])


def coverage_bounds(count: int, alpha: float, level: float = LEVEL) -> tuple[float, float]:
    """Where the coverage of a threshold from `count` images lies, over draws of them: Beta(k, count + 1 - k)."""
    k, error = rank(count, alpha), 1 - level
    return clopper_pearson(k, count, error)[0], clopper_pearson(k - 1, count, error)[1]


def members(strange: Tensor, below: float) -> Tensor:
    """(N, K) bool. Never empty: the likeliest class is always there, and it is all classes where nothing fits."""
    inside = strange <= below
    inside |= strange <= strange.min(1, keepdim=True).values  # nothing finite: everything is as strange
    return inside


@dataclass(frozen=True)
class Sized:
    """What the sets of a recipe are like: measured with thresholds from images that it does not measure."""

    name: str
    coverage: float
    size: float


@dataclass(frozen=True, eq=False)
class Conformal:
    """`sets(images)` gives classes; `print` says what is promised, and how large the sets of other recipes are."""

    alpha: float
    score: str
    threshold: float
    images: int  # that set the threshold
    better: Enhanced
    sized: tuple[Sized, ...]

    @property
    def coverage(self) -> tuple[float, float]:
        """Where this threshold's own coverage lies with 95 % confidence; its mean over draws is at least 1 - alpha."""
        return coverage_bounds(self.images, self.alpha)

    def sets(self, images: Any) -> list[tuple[int, ...]]:
        """The classes of each image, the likeliest first. `images`: what `better` takes."""
        strange = scores(self.better.looks(images)[0].cpu(), self.score)
        inside = members(strange, self.threshold)
        order = strange.argsort(1)
        return [tuple(k for k in row if inside[i, k]) for i, row in enumerate(order.tolist())]

    def __str__(self) -> str:
        low, high = self.coverage
        lines = [
            f"sets with the right class in at least {1 - self.alpha:.4g} of images like these; from {self.images} "
            f"images, this threshold's coverage is {low:.3f} to {high:.3f} with 95 % confidence",
            *(f"  {s.name:8} coverage {s.coverage:.3f}, {s.size:.2f} classes" for s in self.sized),
        ]
        return "\n".join(lines)


def conformal(
    pool: Pool, choose: Callable[[Pool], Recipe], better: Enhanced, alpha: float = 0.1, score: str = "lac"
) -> Conformal:
    """A recipe chosen by one half of the pool, a threshold from the other."""
    half = torch.randperm(len(pool), generator=torch.Generator().manual_seed(0))
    chosen_by, other = pool.rows(half[: len(pool) // 2]), pool.rows(half[len(pool) // 2 :])
    recipe = choose(chosen_by)
    if not recipe.stages:
        recipe = recipe.changed(stages=(Stage(),))
    labels = other.labels
    assert labels is not None
    strange = scores(warmed(other, recipe), score)
    below = threshold(_right(strange, labels), alpha)
    compared = {**usual_recipes(chosen_by), "tuned": recipe}
    sized = tuple(Sized(n, *crossed(scores(warmed(other, r), score), labels, alpha)) for n, r in compared.items())
    return Conformal(alpha, score, below, len(other), better.with_options(recipe=recipe), sized)


def usual_recipes(pool: Pool) -> Mapping[str, Recipe]:
    """Plain and flip, with a temperature from this pool."""
    mirror = parse_view("flip")
    stages: dict[str, tuple[Stage, ...]] = {"plain": (Stage(),)}
    if mirror in pool.work:
        stages["flip"] = (Stage(), Stage((mirror,)))
    assert pool.labels is not None
    return {n: Recipe(n, stages=s, temperature=fit_temperature(simulate(pool, s).logits, pool.labels))
            for n, s in stages.items()}  # fmt: skip


def warmed(pool: Pool, recipe: Recipe) -> Tensor:
    """A recipe's logits (N, K) on a pool, at its temperature."""
    return simulate(pool, recipe.stages, recipe.merge).logits / recipe.temperature


def crossed(strange: Tensor, labels: Tensor, alpha: float) -> tuple[float, float]:
    """Coverage and mean size where each half of the images is measured with the other's threshold."""
    hit, size = [], []
    for k in (0, 1):
        below = threshold(_right(strange[k::2], labels[k::2]), alpha)
        inside = members(strange[1 - k :: 2], below)
        hit.append(_right(inside, labels[1 - k :: 2]).double())
        size.append(inside.sum(1).double())
    return float(torch.cat(hit).mean()), float(torch.cat(size).mean())


def _right(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(1, labels[:, None])[:, 0]
