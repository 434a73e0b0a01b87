"""What should be known beside the rows: recipes tuned on the same images, results of guessing, time above cost.

key_sample(keys)      # goes into a recipe file, so that its images are known again by their contents
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from unstride.errors import LeftOut, UnstrideWarning
from unstride.evaluation.measuring import Measurement
from unstride.evaluation.rows import COST_UNIT, Row
from unstride.evaluation.scoring import Scoring
from unstride.evaluation.timing import SLOWER
from unstride.pipeline import Pipeline

SAMPLE = 64  # keys that stand for a data set
KEY = 12  # characters of one
IMAGE_KEYS = "image_keys"  # in the figures of a recipe file
_FEWEST = 20  # images from which a result at chance says something
_NAMED = 3


def key_sample(keys: Sequence[str]) -> list[str]:
    """The lowest of the keys of a data set: a random sample that is the same for the same images."""
    return sorted(key[:KEY] for key in keys)[:SAMPLE]


def share_known(sample: Sequence[str], keys: Sequence[str]) -> float:
    """The share of the images that `sample` stands for that are among these."""
    known = {key[:KEY] for key in keys}
    return sum(key in known for key in sample) / len(sample) if sample else 0.0


def warn_of_run(pipeline: Pipeline, figures: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    """Warn about random weights, and about recipes that were tuned on these images."""
    if pipeline.untrained:
        _warn(f"{pipeline.spec} has random weights, so its accuracy is that of guessing. Give trained weights.")
    for own in figures:
        share = share_known(list(own.get(IMAGE_KEYS, ())), keys)
        if share > 0:
            _warn(
                f"the recipe was tuned on images of this evaluation (about {share:.0%} of them are here), by their "
                "labels, so its gain here is too high. Evaluate it on other images."
            )


def warn_of_rows(rows: Sequence[Row], pipeline: Pipeline, scoring: Scoring, first: Measurement) -> None:
    """Warn about images that were left out, about accuracy at chance, and about time that is more than the cost."""
    if first.errors:
        names = "; ".join(list(first.errors.values())[:_NAMED])
        more = f"; and {len(first.errors) - _NAMED} more" if len(first.errors) > _NAMED else ""
        plural = "" if len(first.errors) == 1 else "s"
        warnings.warn(
            LeftOut(f"{len(first.errors):,} image{plural} could not be measured: {names}{more}"), stacklevel=3
        )
    message = "" if pipeline.untrained else at_chance(rows[0], scoring)
    if message:
        _warn(message)
    for row in rows:
        if message := slower_than_cost(row, rows):
            _warn(message)


def at_chance(row: Row, scoring: Scoring) -> str:
    """Why a result that is no better than guessing is probably a mistake; else empty."""
    classes = len(scoring.classes)
    if scoring.metric != "accuracy" or classes < 2 or row.images < _FEWEST:
        return ""
    chance = 1 / classes
    if row.value > chance + 2 * math.sqrt(chance * (1 - chance) / row.images):
        return ""
    return (
        f"the accuracy of {row.name} is {100 * row.value:.2f} %, no better than guessing ({100 * chance:.2f} %). Usual "
        "causes: labels in another order than the model's classes; images prepared in another way than in training "
        "(size, mean and std, BGR for RGB); weights that were trained for something else."
    )


def slower_than_cost(row: Row, rows: Sequence[Row]) -> str:
    """A warning where the time is more than 1.25 times what the cost says; else empty."""
    base = next(other for other in rows if other.cost.estimate == 1 or other.gain is None)
    if row.cost_unit != COST_UNIT or not row.seconds or not base.seconds or row is base:
        return ""
    ratio, cost = row.seconds / base.seconds, row.cost.estimate / base.cost.estimate
    if ratio <= SLOWER * cost:
        return ""
    return (
        f"{row.name}: time {ratio:.2f}x, but cost {cost:.2f}x of {base.name}. Passes of few images and small networks "
        "leave the processor waiting. Larger batches help; `unstride bench` measures it."
    )


def _warn(message: str) -> None:
    warnings.warn(UnstrideWarning(message), stacklevel=4)
