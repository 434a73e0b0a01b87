"""Prediction sets hold the right class as often as they promise, whatever the network."""

import math

import pytest
import torch

import unstride
from tests.tuning.test_tune import UNITS, made_up
from unstride.errors import DataError, OptionError
from unstride.tuning.choose import choose, stages_of
from unstride.tuning.conformal import SCORES, coverage_bounds, crossed, members, rank, scores, threshold
from unstride.tuning.simulate import simulate


@pytest.mark.parametrize("by", SCORES)
def test_coverage_is_what_theory_says(by):
    """Over many draws of 199 images the coverage on others has the mean and the spread of its Beta distribution."""
    pool = made_up(6000, 0, 0.4, noise=3.0)
    strange = scores(simulate(pool, stages_of(choose(pool.rows(range(400)), UNITS, 2.0), pool)).logits[400:], by)
    labels = pool.labels[400:]
    right = strange.gather(1, labels[:, None])[:, 0]
    n, alpha, draws, covered = 199, 0.1, 300, []
    for seed in range(draws):
        order = torch.randperm(len(right), generator=torch.Generator().manual_seed(seed))
        below = threshold(right[order[:n]], alpha)
        covered.append(float((right[order[n:]] <= below).double().mean()))
        if seed == 0:
            sets = members(strange[order[n:]], below)
            assert float(sets.gather(1, labels[order[n:], None]).double().mean()) >= covered[0] and sets.any(1).all()
    k = rank(n, alpha)
    mean, deviation = k / (n + 1), math.sqrt(k * (n + 1 - k) / ((n + 1) ** 2 * (n + 2)))
    assert abs(sum(covered) / draws - mean) < 4 * deviation / math.sqrt(draws) + 0.002
    low, high = coverage_bounds(n, alpha)
    inside = sum(low <= c <= high for c in covered) / draws
    assert low < 1 - alpha < high and 0.90 <= inside <= 0.99


def test_the_bounds_are_quantiles_of_the_beta_distribution():
    low, high = coverage_bounds(199, 0.1)
    drawn = torch.distributions.Beta(torch.tensor(180.0), torch.tensor(20.0)).sample((200_000,))
    assert (low, high) == pytest.approx([float(drawn.quantile(q)) for q in (0.025, 0.975)], abs=2e-3)


def test_scores_by_hand():
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    torch.testing.assert_close(scores(logits, "lac"), torch.tensor([[0.4, 0.7, 0.9]]).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(scores(logits, "aps"), torch.tensor([[0.0, 0.6, 0.9]]).double(), atol=1e-6, rtol=0)
    assert scores(torch.zeros(1, 8), "raps").max() == pytest.approx(7 / 8 + 3 * 0.01)
    assert scores(torch.zeros(1, 1)).shape == (1, 2)  # one logit is that of the second of two classes
    lost = members(scores(torch.tensor([[math.nan, 1.0, 2.0]])), 0.5)
    assert lost.all()  # who knows nothing excludes nothing


def test_more_looks_give_smaller_sets():
    pool = made_up(4000, 3, 1.0, noise=2.0)
    (plain_hit, plain_size), (hit, size) = (
        crossed(scores(z), pool.labels, 0.1) for z in (pool.plain, pool.logits.mean(0))
    )
    assert size < plain_size and abs(hit - 0.9) < 0.02 and abs(plain_hit - 0.9) < 0.02


def test_the_whole_way_on_the_sample(tmp_path):
    tuned = unstride.tune(
        "sample", "sample", cost=1.5, pool="small", limit=120, paper=False, frontier=False, cache_dir=tmp_path
    )
    sets = tuned.conformal(alpha=0.2)
    assert sets.images == 60 and sets.coverage[0] < 0.8 < sets.coverage[1]
    assert [s.name for s in sets.sized] == ["plain", "flip", "tuned"] and "0.8" in str(sets)
    loaded = unstride.models.load("sample")
    data = unstride.data.load("sample", loaded.preprocess, limit=200)
    images = torch.stack([data.tensors(i)[0] for i in range(120, 200)])
    found = sets.sets(images)
    logits, _ = sets.better.looks(images)
    assert all(s and s[0] == top for s, top in zip(found, logits.argmax(1).tolist(), strict=True))
    labels = [int(data.tensors(i)[1]) for i in range(120, 200)]
    assert sum(y in s for y, s in zip(labels, found, strict=True)) / 80 > 0.6


def test_bad_questions():
    with pytest.raises(DataError, match="at least 19"):
        rank(15, 0.05)
    with pytest.raises(OptionError, match="alpha"):
        rank(15, 0.0)
    with pytest.raises(OptionError, match="lac"):
        scores(torch.zeros(1, 3), "fame")
