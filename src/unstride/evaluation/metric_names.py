"""What each metric is called in a sentence: its unit, how it is printed, which direction is better."""

from __future__ import annotations

from unstride.evaluation.decisions import MARGIN

PERCENT = (
    *("accuracy", "top-5", "mIoU", "Dice", "pixel accuracy", "mean accuracy", "mAP", "AUROC", "exact match"),
    *("k-NN accuracy", "recall@1", "recall@5", "within 1.25", "ECE"),
)
LOWER = ("NLL", "ECE", "Brier", "RMSE", "MAE", "AbsRel")  # is better


def is_percent(metric: str) -> bool:
    """Whether a metric is a share, printed in per cent."""
    return metric in PERCENT


def lower_is_better(metric: str) -> bool:
    return metric in LOWER


def unit_of(metric: str) -> tuple[str, float]:
    """The unit of a gain, and what a gain is multiplied by: ("points", 100), or ("RMSE", 1)."""
    return ("points", 100.0) if is_percent(metric) else (metric, 1.0)


def shown(metric: str, value: float) -> str:
    """`93.60 %`, or `0.2417`."""
    return f"{100 * value:.2f} %" if is_percent(metric) else f"{value:.4g}"


def margin_of(metric: str, margin: float | None, baseline: float) -> float:
    """A margin that was given in the metric's unit, as a difference of values.

    Without one: half a point, or 0.5 % of the baseline's value for a metric that is no share.
    """
    if margin is None:
        return MARGIN if is_percent(metric) else MARGIN * abs(baseline)
    return margin / unit_of(metric)[1]
