import math

import numpy as np
import pytest

from unstride.evaluation.decisions import (
    cost_interval,
    decide,
    images_to_settle,
    one_standard_error,
    safe_shares,
)
from unstride.evaluation.intervals import ConfidenceInterval, PairedCounts, paired_gain

DRAWS = 1000


def interval(estimate: float, low: float, high: float) -> ConfidenceInterval:
    return ConfidenceInterval(estimate / 100, low / 100, high / 100)


# ---------------------------------------------------------------- the sentences
def test_a_significant_gain_is_used() -> None:
    decision = decide(interval(2.6, 1.4, 3.8), 1000, 0.45, baseline="resnet50")
    assert decision.verdict == "use" and decision.more_images is None
    assert str(decision) == (
        "Use this recipe: +2.6 points (95 % CI +1.4 to +3.8) at 0.45 times the compute of resnet50."
    )


def test_a_cheaper_recipe_within_the_margin_is_used() -> None:
    gain = interval(0.1, -0.4, 0.6)
    assert str(decide(gain, 1000, 0.45)) == (
        "Use this recipe: +0.10 points (95 % CI -0.40 to +0.60) at 0.45 times the compute of the base model, "
        "within the margin of 0.5 points."
    )
    assert decide(gain, 1000, 1.0).verdict == "inconclusive"
    assert decide(gain, 1000, 0.45, margin=0.004).verdict == "inconclusive"  # the end must be above it


def test_a_gain_that_is_not_significant_is_inconclusive() -> None:
    decision = decide(interval(0.4, -0.5, 1.3), 200, 1.5)
    assert decision.verdict == "inconclusive"
    assert str(decision) == (
        "Inconclusive: +0.4 points (95 % CI -0.5 to +1.3). About 1,900 more labelled images would settle it."
    )
    assert "More than 100,000" in str(decide(interval(0.01, -0.5, 0.6), 1000))


@pytest.mark.parametrize("cost", [0.5, 1.0, 2.0])
def test_no_gain_keeps_the_baseline(cost: float) -> None:
    decision = decide(interval(-0.24, -1.09, 0.48), 500, cost)
    assert str(decision) == "Keep the base model: -0.24 points (95 % CI -1.09 to +0.48)."
    assert decide(interval(0.0, -1.0, 1.0), 500, cost).verdict == "keep"


# ---------------------------------------------------------------- error rates
def use_rate(corrected: float, broken: float, images: int, cost: float) -> float:
    """How often the verdict is "use", in 2,000 draws. Equal counts are decided once."""
    shares = [corrected, broken, 1 - corrected - broken]
    rows = np.random.default_rng(0).multinomial(images, shares, size=2 * DRAWS)
    counts, times = np.unique(rows[:, :2], axis=0, return_counts=True)
    used = [decide(paired_gain(PairedCounts(int(x), int(b), images)), images, cost).verdict == "use" for x, b in counts]
    return float(times @ np.array(used)) / len(rows)


@pytest.mark.parametrize("images", [200, 1000])
@pytest.mark.parametrize(("gain", "cost"), [(0.0, 1.5), (-0.005, 0.5)])
def test_a_recipe_that_is_not_good_enough_is_rarely_used(images: int, gain: float, cost: float) -> None:
    changed = 0.05
    rate = use_rate((changed + gain) / 2, (changed - gain) / 2, images, cost)
    assert rate <= 0.025 + 2 * math.sqrt(0.025 / (2 * DRAWS))  # and what sampling adds


def test_the_images_that_would_settle_it_settle_it_in_four_of_five_cases() -> None:
    shown = paired_gain(PairedCounts(25, 18, 500))
    more = images_to_settle(shown, 500)
    assert 0.75 < use_rate(25 / 500, 18 / 500, 500 + more, 1.0) < 0.85


# ---------------------------------------------------------------- the choice of a recipe
def test_the_simplest_within_one_standard_error_is_chosen() -> None:
    generator = np.random.default_rng(0)
    base = generator.gamma(1.0, 1.0, (400, 1))
    gaps = np.array([0.0, -0.10, -0.099, -0.05, -0.11])
    nll = base + gaps + generator.normal(0, 0.05, (400, 5))
    nll -= nll.mean(0) - (base.mean() + gaps)  # exact means
    error = (nll[:, 1] - nll[:, 4]).std(ddof=1) / 20
    assert error < 0.01
    costs = [1, 2, 1.5, 1.2, 3]
    assert one_standard_error(nll, [1, 2, 2, 1, 3], costs) == 4  # no other one is within it
    nll[:, 2] -= 0.010
    assert one_standard_error(nll, [1, 2, 2, 1, 3], costs) == 2
    assert one_standard_error(nll, [1, 2, 3, 1, 3], costs) == 4  # as simple: the lower NLL
    equal = [1, 2, 3.0, 1.2, 3]
    assert one_standard_error(nll, [1, 2, 3, 1, 3], equal, standard=[2]) == 2  # or the standard one at the same cost
    assert one_standard_error(nll, [1, 2, 3, 1, 3], costs, standard=[0, 2]) == 4


def test_identical_recipes_choose_the_cheaper_one() -> None:
    assert one_standard_error(np.ones((10, 3)), [1, 1, 1], [3, 1, 2]) == 1


# ---------------------------------------------------------------- gates
def mean_costs(
    shares: tuple[float, ...], costs: list[float], images: int, new: int, independent: bool, count: int = DRAWS
) -> np.ndarray:
    """Thresholds set on calibration images as ranks of a confidence, and the mean cost of new images."""
    generator = np.random.default_rng(1)
    means = []
    for _ in range(count):
        old, fresh = generator.random((images, len(costs))), generator.random((new, len(costs)))
        if not independent:
            old[:], fresh[:] = old[:, :1], fresh[:, :1]
        cost, here, there = 1.0, np.full(images, True), np.full(new, True)
        for stage, (share, extra) in enumerate(zip(shares, costs, strict=True)):
            passing = round(share * images)
            values = np.sort(old[here, stage])
            below = values[passing] if passing < len(values) else np.inf
            here, there = here & (old[:, stage] < below), there & (fresh[:, stage] < below)
            assert here.sum() == passing
            cost += extra * there.mean()
        means.append(cost)
    return np.array(means)


@pytest.mark.parametrize(("images", "new"), [(100, 200), (500, 500), (500, 5000)])
def test_the_ceiling_holds_on_new_images(images: int, new: int) -> None:
    shares = safe_shares(1.5, 1.0, [2.0], [1.0], images, new)
    means = mean_costs(shares, [2.0], images, new, False)
    assert (means > 1.5).mean() <= 0.065  # 5 %, and what sampling adds in 1,000 draws
    assert means.mean() > 1.5 - 3 * means.std()  # and it is not wasteful


@pytest.mark.parametrize("independent", [False, True])
def test_the_ceiling_holds_with_several_stages(independent: bool) -> None:
    costs, images, new = [1.0, 4.0], 300, 600
    shares = safe_shares(1.6, 1.0, costs, [0.4, 0.2], images, new)
    assert shares[1] == pytest.approx(shares[0] / 2, abs=1 / images)
    means = mean_costs(shares, costs, images, new, independent)
    assert 0.02 < (means > 1.6).mean() <= 0.065
    interval = cost_interval(1.0, costs, shares, images, new)
    inside = ((means >= interval.low) & (means <= interval.high)).mean()
    assert 0.93 < inside < 0.985
    assert interval.estimate == pytest.approx(means.mean(), rel=0.01)


def test_a_ceiling_that_holds_anyway_asks_for_no_gate() -> None:
    assert safe_shares(2.0, 1.0, [1.0], [1.0], 100) == (1.0,)
    assert safe_shares(1.0, 1.0, [1.0], [1.0], 100) == (0.0,)
    assert cost_interval(1.0, [1.0], [1.0], 100) == ConfidenceInterval(2.0, 2.0, 2.0)


def test_more_images_allow_a_larger_share() -> None:
    shares = [safe_shares(1.5, 1.0, [1.0], [1.0], n)[0] for n in (50, 200, 1000, 10_000)]
    assert shares == sorted(shares) and shares[-1] > 0.49 and shares[-1] < 0.5


def test_the_share_of_one_gate_is_the_exact_order_statistic() -> None:
    stats = pytest.importorskip("scipy.stats")
    for images in (60, 200, 1000):
        (share,) = safe_shares(1.4, 1.0, [1.0], [1.0], images)
        k = round(share * images)
        assert stats.beta.sf(0.4, k + 1, images - k) <= 0.0501
        assert stats.beta.sf(0.4, k + 2, images - k - 1) > 0.0499


def test_impossible_settings_are_errors() -> None:
    with pytest.raises(ValueError, match="more than the ceiling"):
        safe_shares(0.9, 1.0, [1.0], [1.0], 100)
    with pytest.raises(ValueError, match="each at most the one before"):
        safe_shares(2.0, 1.0, [1.0, 1.0], [0.2, 0.4], 100)
    with pytest.raises(ValueError, match="margin"):
        decide(interval(1, 0, 2), 100, margin=-1)
    with pytest.raises(ValueError, match="expected more than the bound"):
        images_to_settle(interval(-1, -2, 0), 100)
    with pytest.raises(ValueError, match="recipes"):
        one_standard_error(np.ones(3), [1], [1.0])
