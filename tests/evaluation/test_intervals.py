import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.coverage_of_intervals import tango
from unstride.evaluation.intervals import (
    STRICTER,
    Array,
    ConfidenceInterval,
    PairedCounts,
    beta_quantile,
    bootstrap_gain,
    cross_validated,
    gain_from_labels,
    paired_gain,
    student_quantile,
)


# ---------------------------------------------------------------- values
def test_counts_come_from_two_arrays_of_correct_predictions() -> None:
    counts = PairedCounts.from_correct([1, 1, 0, 0, 0], [1, 0, 1, 1, 0])
    assert counts == PairedCounts(corrected=2, broken=1, images=5)
    assert counts.gain == pytest.approx(0.2) and counts.disagreements == 3
    with pytest.raises(ValueError, match="expected the same"):
        PairedCounts.from_correct([True], [True, False])
    with pytest.raises(ValueError, match="impossible"):
        PairedCounts(3, 3, 5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((0.026, 0.014, 0.038), "+2.6 points (95 % CI +1.4 to +3.8)"),
        ((-0.0024, -0.0109, 0.0048), "-0.24 points (95 % CI -1.09 to +0.48)"),
        ((0.0, -0.01, 0.01), "+0.0 points (95 % CI -1.0 to +1.0)"),
        ((0.01, 0.0002, 0.02), "+1.00 points (95 % CI +0.02 to +2.00)"),  # an end above zero is not printed as zero
        ((-0.0, 0.0, 0.0), "+0.00 points (95 % CI +0.00 to +0.00)"),
    ],
)
def test_an_interval_prints_with_as_many_decimals_as_it_needs(values: tuple[float, ...], text: str) -> None:
    assert str(ConfidenceInterval(*values)) == text


def test_an_interval_is_from_low_to_high() -> None:
    interval = ConfidenceInterval(1.0, 0.0, 3.0)
    assert interval.width == 3 and interval.contains(3.0) and not interval.contains(-0.1)
    assert interval.describe("mIoU", 1.0) == "+1.0 mIoU (95 % CI +0.0 to +3.0)"
    with pytest.raises(ValueError, match="low"):
        ConfidenceInterval(1.0, 2.0, 1.0)


# ---------------------------------------------------------------- paired proportions
PAIRS = [(x, b) for x in range(0, 25) for b in range(0, 25, 3)]


def one_sided_mid_p(corrected: int, broken: int) -> float:
    """P(more corrected) + P(as many) / 2, where each change is a fair coin."""
    count = corrected + broken
    ways = [math.comb(count, k) for k in range(corrected, count + 1)]
    return (sum(ways) - ways[0] / 2) / 2**count


def test_the_lower_end_agrees_with_the_mid_p_mcnemar_test() -> None:
    for corrected, broken in PAIRS:
        interval = paired_gain(PairedCounts(corrected, broken, 300))
        assert (interval.low > 0) == (one_sided_mid_p(corrected, broken) < 0.025 * STRICTER), (corrected, broken)
        swapped = paired_gain(PairedCounts(broken, corrected, 300))
        assert (swapped.low, swapped.high) == pytest.approx((-interval.high, -interval.low))
        assert interval.low <= interval.estimate <= interval.high


def test_the_ends_are_quantiles_of_the_product_of_two_beta_variables() -> None:
    generator, count = np.random.default_rng(0), 400_000
    for corrected, broken, images in ((30, 18, 1000), (2, 5, 200), (6, 0, 500)):
        changed = corrected + broken
        extra = generator.random(count) < 0.5  # the mid-p: one success more in half of the draws
        part = np.where(
            extra,
            generator.beta(corrected + 1, broken, count) if broken else 1.0,
            generator.beta(corrected, broken + 1, count),
        )
        fewer = generator.beta(changed, images - changed + 1, count)
        more = generator.beta(changed + 1, images - changed, count)
        drawn = np.where(part > 0.5, fewer, more) * (2 * part - 1)
        interval = paired_gain(PairedCounts(corrected, broken, images))
        assert interval.low == pytest.approx(np.quantile(drawn, 0.025 * STRICTER), abs=0.01 * interval.width)


def coverage(method: Callable[[PairedCounts], ConfidenceInterval], images: int, changed: float, gain: float) -> float:
    """How often the interval holds, in 2,000 draws."""
    shares = [(changed + gain) / 2, (changed - gain) / 2, 1 - changed]
    rows = np.random.default_rng(0).multinomial(images, shares, size=2000)
    counts, times = np.unique(rows[:, :2], axis=0, return_counts=True)
    holds = [method(PairedCounts(int(x), int(b), images)).contains(gain) for x, b in counts]
    return float(times @ np.array(holds)) / 2000


@pytest.mark.parametrize("gain", [-0.02, 0.0, 0.03])
@pytest.mark.parametrize("images", [500, 1000])
def test_the_interval_holds_in_about_95_percent(images: int, gain: float) -> None:
    assert 0.935 <= coverage(paired_gain, images, 0.06, gain) <= 0.975


def test_few_disagreements_make_it_wider_never_narrower() -> None:
    for gain in (-0.01, 0.0, 0.015):
        assert coverage(paired_gain, 200, 0.02, gain) >= 0.94


def test_no_disagreement_still_leaves_an_interval() -> None:
    interval = paired_gain(PairedCounts(0, 0, 1000))
    assert interval.low == pytest.approx(-interval.high) and 0.001 < interval.high < 0.004
    everything = paired_gain(PairedCounts(7, 0, 7))
    assert 0 < everything.low < everything.high == 1.0


def test_a_higher_level_is_wider() -> None:
    widths = [paired_gain(PairedCounts(30, 20, 1000), level).width for level in (0.8, 0.9, 0.95, 0.99)]
    assert widths == sorted(widths)


def test_tango_against_a_published_example() -> None:
    """Airway hyper-responsiveness before and after transplantation (Fagerland, Lydersen and Laake, 2014)."""
    interval = tango(PairedCounts(1, 7, 21))
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((-0.286, -0.517, -0.026), abs=5e-4)


@pytest.mark.parametrize(("corrected", "broken", "images"), [(9, 3, 50), (0, 4, 80), (30, 31, 400)])
def test_tango_against_the_likelihood(corrected: int, broken: int, images: int) -> None:
    """At each end the score statistic is 1.96, with the restricted maximum of the likelihood found on a grid."""
    interval = tango(PairedCounts(corrected, broken, images))
    for end in (interval.low, interval.high):
        share = np.linspace(max(0.0, -end), (1 - end) / 2, 2_000_001)[1:-1]
        likelihood = (images - corrected - broken) * np.log(1 - 2 * share - end)
        likelihood += corrected * np.log(share + end) + broken * np.log(share)
        best = float(share[likelihood.argmax()])
        variance = images * (2 * best + end - end**2)
        assert abs(corrected - broken - images * end) / math.sqrt(variance) == pytest.approx(1.96, abs=2e-3)


def test_both_methods_agree_where_there_are_many_disagreements() -> None:
    counts = PairedCounts(260, 200, 4000)
    ours, score = paired_gain(counts), tango(counts)
    assert (ours.low, ours.high) == pytest.approx((score.low, score.high), abs=4e-4)


def test_quantiles_against_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for a, b in ((1, 200), (20, 181), (3, 1), (1000, 1500), (1, 1)):
        for p in (0.025, 0.5, 0.95):
            assert beta_quantile(a, b, p) == pytest.approx(stats.beta.ppf(p, a, b), abs=2e-3 / (a + b) ** 0.5)
    for freedom in (4, 9, 30, 1000):
        assert student_quantile(0.975, freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=2e-3)


def test_a_cross_validated_interval_is_as_wide_as_the_choice_is_unstable() -> None:
    counts = PairedCounts(30, 20, 1000)
    gain = paired_gain(counts)
    assert cross_validated(gain, 0.0) == gain
    wider = cross_validated(gain, gain.width / 3.92)
    assert wider.estimate == gain.estimate and wider.width == pytest.approx(math.sqrt(1.5) * gain.width, rel=1e-4)
    nothing = ConfidenceInterval(0.0, 0.0, 0.0)
    assert cross_validated(nothing, 0.01) == nothing


def test_the_standard_error_is_that_of_the_differences() -> None:
    differences = np.array([1.0] * 30 + [-1.0] * 20 + [0.0] * 950)
    assert PairedCounts(30, 20, 1000).standard_error == pytest.approx(differences.std() / math.sqrt(1000))


# ---------------------------------------------------------------- partly labelled disagreements
def test_all_disagreements_labelled_give_the_interval_of_all_images() -> None:
    signs = [1] * 20 + [-1] * 11 + [0] * 9
    expected = paired_gain(PairedCounts(20, 11, 1000))
    for probabilities in (None, np.ones(40)):
        interval = gain_from_labels(signs, 40, 1000, probabilities)
        assert (interval.estimate, interval.low, interval.high) == pytest.approx(
            (expected.estimate, expected.low, expected.high)
        )
    assert gain_from_labels([], 0, 1000) == paired_gain(PairedCounts(0, 0, 1000))


def test_fewer_labels_give_a_wider_interval() -> None:
    widths = [gain_from_labels([1, 1, -1, 0] * k, 80, 1500).width for k in (3, 5, 10, 20)]
    assert widths == sorted(widths, reverse=True)
    same = [gain_from_labels([1] * k, 80, 1500).low for k in (3, 10, 80)]
    assert same == sorted(same)  # a few labels that agree do not prove that all do


@pytest.mark.parametrize("design", ["equal", "unequal", "one fifth"])
def test_the_gain_over_all_images_from_some_labels(design: str) -> None:
    generator, images, draws = np.random.default_rng(0), 2000, 500
    shares = {1: 0.03, -1: 0.02, 0: 0.01}
    truth = shares[1] - shares[-1]
    intervals = []
    for _ in range(draws):
        signs = generator.choice([1, -1, 0, 9], size=images, p=[*shares.values(), 1 - sum(shares.values())])
        signs = signs[signs != 9]  # the disagreements
        if design == "unequal":  # those that are likely to be corrected are labelled more often
            chance = np.where(generator.random(len(signs)) < np.where(signs == 1, 0.7, 0.3), 0.8, 0.3)
            drawn = generator.random(len(signs)) < chance
            interval = gain_from_labels(signs[drawn], len(signs), images, chance[drawn])
        else:
            count = len(signs) // (2 if design == "equal" else 5)
            interval = gain_from_labels(generator.permutation(signs)[:count], len(signs), images)
        intervals.append(interval)
    assert np.mean([i.estimate for i in intervals]) == pytest.approx(truth, abs=0.0008)
    assert 0.93 <= np.mean([i.contains(truth) for i in intervals]) <= 0.985


def test_impossible_labels_are_errors() -> None:
    for arguments, message in (
        (([2], 3, 10), "outcomes"),
        (([1, 1], 1, 10), "impossible"),
        (([], 3, 10), "No disagreement"),
        (([1], 3, 10, [0.0]), "probabilities"),
        (([1], 3, 10, [0.5, 0.5]), "probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            gain_from_labels(*arguments)


# ---------------------------------------------------------------- any metric
def mean_gain(values: Array) -> Callable[[Array], Array]:
    return lambda weights: weights @ values / weights.sum(1)


def test_the_bootstrap_of_accuracy_agrees_with_the_paired_interval() -> None:
    values = np.array([1.0] * 60 + [-1.0] * 40 + [0.0] * 1900)
    drawn, counted = bootstrap_gain(mean_gain(values), 2000), paired_gain(PairedCounts(60, 40, 2000))
    assert drawn.estimate == pytest.approx(counted.estimate)
    assert (drawn.low, drawn.high) == pytest.approx((counted.low, counted.high), abs=0.001)


def test_the_bootstrap_of_a_mean_has_the_width_of_students_t() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).normal(0.3, 1.0, 40)
    low, high = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    interval = bootstrap_gain(mean_gain(values), 40, draws=20_000)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=0.02)


def test_weights_count_images_and_groups_are_drawn_as_a_whole() -> None:
    rows = []
    groups = np.array([0, 0, 1, 2, 2, 2])

    def gain(weights: Array) -> Array:
        rows.append(weights)
        return weights[:, 0]

    bootstrap_gain(gain, 6, groups=["a", "a", "b", "c", "c", "c"], draws=50)
    weights = np.concatenate(rows[1:])
    assert weights.shape == (50, 6)
    np.testing.assert_array_equal(rows[0], np.ones((1, 6)))
    for group in range(3):
        assert (np.ptp(weights[:, groups == group], axis=1) == 0).all()
    np.testing.assert_array_equal(weights[:, [0, 2, 3]].sum(1), 3)


def test_each_image_as_its_own_group_changes_nothing() -> None:
    values = np.random.default_rng(0).normal(size=50)
    alone = bootstrap_gain(mean_gain(values), 50)
    assert bootstrap_gain(mean_gain(values), 50, groups=np.arange(50)) == alone
    assert bootstrap_gain(mean_gain(values), 50, seed=1) != alone


def test_images_of_a_group_that_are_alike_make_the_interval_wider() -> None:
    effects = np.random.default_rng(0).normal(size=12)
    values = np.repeat(effects, 10)
    wide = bootstrap_gain(mean_gain(values), 120, groups=np.repeat(np.arange(12), 10))
    one_each = bootstrap_gain(mean_gain(effects), 12)
    assert (wide.low, wide.high) == pytest.approx((one_each.low, one_each.high))
    assert wide.width > 2.5 * bootstrap_gain(mean_gain(values), 120).width


@pytest.mark.parametrize("groups", [10, 30])
def test_the_grouped_interval_holds_in_about_95_percent(groups: int) -> None:
    generator, truth, holds = np.random.default_rng(0), 0.01, []
    for _ in range(500):
        names = np.repeat(np.arange(groups), generator.poisson(6, groups) + 1)
        values = generator.normal(truth + generator.normal(0, 0.05, groups)[names], 0.2)
        interval = bootstrap_gain(mean_gain(values), len(values), groups=names, draws=500)
        holds.append(interval.contains(truth))
    assert 0.92 <= np.mean(holds) <= 0.98


def test_a_metric_that_is_undefined_in_some_draws_is_measured_in_the_others() -> None:
    values = np.zeros(30)
    values[0] = 1.0  # one rare image: a third of the draws does not have it

    def gain(weights: Array) -> Array:
        with np.errstate(invalid="ignore"):
            return weights @ values / (weights @ values)

    assert bootstrap_gain(gain, 30) == ConfidenceInterval(1.0, 1.0, 1.0)


def test_a_bootstrap_needs_groups() -> None:
    with pytest.raises(ValueError, match="at least 2 groups"):
        bootstrap_gain(mean_gain(np.ones(3)), 3, groups=["a"] * 3)
    with pytest.raises(ValueError, match="expected one for each"):
        bootstrap_gain(mean_gain(np.ones(3)), 3, groups=["a"] * 2)
