"""The choice: a cascade where one helps, nothing where nothing does, and never one that a single network beats."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from made_pools import accuracy, chooser, made_pool

from unstride.errors import OptionError
from unstride.tuning.candidates import Candidate, PassGroup, Step
from unstride.tuning.choose import fold_of
from unstride.tuning.simulate import build, simulate

PAIR = {"base": (1.0, 1.7), "net2": (4.0, 0.8)}


def run(pool, ceiling, **options):
    candidate = chooser(pool, **options).choose(ceiling, np.arange(len(pool)))
    recipe = build(candidate, pool)
    return candidate, recipe, simulate(pool, recipe)


def test_a_cascade_is_found_where_a_second_network_is_better():
    pool, fresh = made_pool(800, 0, PAIR), made_pool(8000, 1, PAIR)
    candidate, recipe, _ = run(pool, 1.5)
    done = simulate(fresh, recipe)
    assert candidate.networks == ("base", "net2") and candidate.gated
    assert done.cost <= 1.5
    assert accuracy(fresh, done.outputs) > accuracy(fresh, fresh.passes(PassGroup("base"))[0]) + 0.03


@pytest.mark.parametrize("ceiling", [0.6, 0.9])
def test_a_ceiling_may_be_below_the_first_network(ceiling):
    networks = {"base": (1.0, 1.2), "net2": (0.3, 1.8)}
    candidate, recipe, done = run(made_pool(600, 0, networks), ceiling)
    assert done.cost <= ceiling and candidate.groups[0] == PassGroup("net2")
    assert recipe.stages[0].network == "net2"


def test_a_ceiling_below_every_network_is_an_error():
    with pytest.raises(OptionError, match=r"cheapest network costs 0\.3"):
        run(made_pool(100, 0, {"base": (1.0, 1.2), "net2": (0.3, 1.8)}), 0.2)


def test_where_nothing_helps_the_base_model_is_kept():
    """A flip that says the same, and a second network that only adds noise."""
    pool = made_pool(500, 0, {"base": (1.0, 1.5), "net2": (1.0, 9.0)}, flip=0.0)
    candidate, recipe, _ = run(pool, 3.0)
    assert candidate.groups == (PassGroup("base"),) and recipe.plain


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("objective", ["nll", "accuracy"])
def test_no_single_network_beats_the_choice_at_no_more_cost(seed, objective):
    """Networks made so that the cheap one is nearly as good as the expensive one, or better."""
    generator = np.random.default_rng(seed)
    noises = generator.uniform(1.2, 1.6, 3)
    networks = {f: (c, n) for f, c, n in zip(("base", "net2", "net3"), (1.0, 0.7, 2.0), noises, strict=True)}
    pool = made_pool(300, seed, networks)
    for ceiling in (0.9, 2.0):
        choice = chooser(pool, objective)
        chosen = choice.choose(ceiling, np.arange(len(pool)))
        rows = np.arange(len(pool))
        own = choice.quality(chosen, rows)
        for name, other in choice.usual.items():
            if "ensemble" in name or len(other.groups) > 2 or other == chosen:
                continue
            if choice.cost(other) <= choice.cost(chosen):
                assert choice.quality(other, rows) <= own, name


def test_of_equals_the_cheaper_is_taken():
    """The full ceiling is spent only where that is significantly better."""
    candidate, _, done = run(made_pool(400, 3, PAIR), 40.0)
    assert done.cost < 12 and candidate.networks


@pytest.mark.parametrize("ceiling", [1.3, 2.0])
def test_as_many_new_images_exceed_the_ceiling_in_at_most_five_percent_of_draws(ceiling):
    draws, fresh, generator = 100, made_pool(8000, 999, PAIR), np.random.default_rng(0)
    groups = (PassGroup("base"),), (PassGroup("net2"),)
    wanted = Candidate(tuple(map(Step, groups)), "probabilities")
    costs = []
    for seed in range(draws):
        pool = made_pool(150, seed, PAIR)
        shares = chooser(pool).safe(wanted, ceiling, len(pool))
        done = simulate(fresh, build(wanted.with_shares(shares), pool))
        costs.append(float(done.costs[generator.integers(0, 8000, len(pool))].mean()))
    assert sum(cost > ceiling for cost in costs) <= 0.05 * draws + 5  # two deviations of a binomial
    assert np.mean(costs) > 1 + 0.25 * (ceiling - 1)


def test_each_network_is_brought_to_one_temperature():
    """The second network's logits are ten times too large; without a temperature its answers would drown all others."""
    networks = {"base": (1.0, 1.2), "net2": (1.0, 1.2)}
    pool = made_pool(600, 0, networks, sharper={"net2": 10.0})
    candidate, recipe, done = run(pool, 2.0)
    assert set(candidate.networks) == {"base", "net2"}
    (first,), (second,) = (stage.temperatures for stage in recipe.stages[:2])
    assert second / first == pytest.approx(10, rel=0.3)
    calm = made_pool(600, 0, networks)
    _, _, same = run(calm, 2.0)
    assert accuracy(pool, done.outputs) == pytest.approx(accuracy(calm, same.outputs), abs=0.01)


def test_time_is_bounded_beside_cost():
    pool = made_pool(600, 0, PAIR)
    slow = torch.tensor([1e-3, 1e-3, 40e-3, 40e-3], dtype=torch.float64)
    pool = replace(pool, seconds=slow)
    candidate = chooser(pool, time_ratio=2.0).choose(3.0, np.arange(len(pool)))
    spent = sum(
        share * sum(pool.times(g) for g in step.groups)
        for step, share in zip(candidate.steps, (1.0, *candidate.shares), strict=True)
    )
    assert spent <= 2.0 and chooser(pool).choose(3.0, np.arange(len(pool))) != candidate


def test_folds_keep_clusters_together_and_are_about_equal():
    clusters = np.repeat(np.arange(40), 5)
    folds = fold_of(clusters, 5, 0)
    assert all(len(set(folds[clusters == c])) == 1 for c in range(40))
    assert np.bincount(folds).tolist() == [40] * 5
    assert (fold_of(clusters, 5, 0) == folds).all() and (fold_of(clusters, 5, 1) != folds).any()
