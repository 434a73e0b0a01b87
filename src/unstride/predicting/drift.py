"""Whether new images pass the gates of a recipe as often as the images that it was tuned on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from unstride.pipeline import Pipeline
from unstride.recipe.stage import Gate

DEVIATIONS = 3.3  # standard errors: sampling alone exceeds them in 1 of 1,000 runs
_FEWEST = 30  # images


def drifted_gates(pipeline: Pipeline, passed: Sequence[int], images: int) -> Iterator[str]:
    """A sentence for each gate whose share differs by more than sampling explains.

    The expected shares are in the recipe; `figures.images` of its file is the number of images they come from.
    """
    stored = pipeline.stored
    tuned_on = stored.figures.get("images") if stored is not None else None
    gates = [stage.gate for stage in pipeline.better.recipe.stages if stage.gate is not None]
    for number, (gate, count) in enumerate(zip(gates, passed, strict=True), 1):
        if gate.share is None or gate.tile is not None or images < _FEWEST:
            continue
        if drifts(count, images, gate.share, tuned_on if isinstance(tuned_on, int) else None):
            yield _sentence(number, len(gates), gate, gate.share, count / images)


def drifts(passed: int, images: int, share: float, tuned_on: int | None = None) -> bool:
    """True if the share of images differs from the expected one by more than sampling explains.

    Args:
        tuned_on: the number of images that the expected share comes from; None: it is taken as exact.
    """
    weight = tuned_on or 0
    pooled = (passed + share * weight) / (images + weight)
    pooled = min(max(pooled, 0.5 / images), 1 - 0.5 / images)  # no share is certain
    variance = pooled * (1 - pooled) * (1 / images + (1 / weight if weight else 0.0))
    if not weight:
        variance = max(share * (1 - share), 0.5 / images) / images
    return abs(passed / images - share) > DEVIATIONS * math.sqrt(variance)


def _sentence(number: int, count: int, gate: Gate, share: float, measured: float) -> str:
    which = "the gate" if count == 1 else f"gate {number}"
    return (
        f"{measured:.1%} of the images pass {which} ({gate.by} below {gate.below:.3g}), but the recipe was tuned for "
        f"{share:.1%}: more than sampling explains. Cost and accuracy may differ from what was measured. Calibrate the "
        "gates on these images (better.calibrate), or tune again."
    )
