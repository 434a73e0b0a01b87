"""Invariants 1, 3, 4 and 6 on random small networks: residual, concatenating, gated, attending, U-shaped, odd sizes."""

from collections import Counter

import pytest
import torch
from checks import Net, check_all, some_states
from hypothesis import HealthCheck, Phase, given, seed, settings
from networks import Plan, build, plans

SHARDS, EACH = 8, 40  # 320 networks in an ordinary run
MANY = 625  # 8 x 625 = 5,000 networks in the slow one: `pytest -m slow tests/invariants/test_random_networks.py`
OTHER = {1: 30, 3: 30}  # 4 x 30 of signals and of volumes in an ordinary run, 4 x 250 in the slow one


def invariants_hold(plan: Plan) -> None:
    model = build(plan)
    images = torch.randn(2, 3, *plan.size, dtype=torch.float64, generator=torch.Generator().manual_seed(plan.seed))
    net = Net.of(model, images[:1])
    assert not net.found.unknown, net.found.unknown
    if net.found.layers:
        check_all(net, images, some_states(net.found, 4, plan.seed)[1:], tol=1e-9)


def sweep(number: int, count: int, axes: int = 2) -> None:
    seen: Counter[int] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(plans(axes))
    def check(plan: Plan) -> None:
        seen[hash(plan)] += 1
        invariants_hold(plan)

    check()
    assert len(seen) > 0.9 * count, f"only {len(seen)} different networks"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_networks(shard: int) -> None:
    sweep(shard, EACH)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_random_networks(shard: int) -> None:
    sweep(1000 + shard, MANY)


@pytest.mark.parametrize("axes", OTHER)
@pytest.mark.parametrize("shard", range(4))
def test_random_networks_of_other_axes(shard: int, axes: int) -> None:
    sweep(2000 + shard, OTHER[axes], axes)


@pytest.mark.slow
@pytest.mark.parametrize("axes", OTHER)
@pytest.mark.parametrize("shard", range(4))
def test_many_random_networks_of_other_axes(shard: int, axes: int) -> None:
    sweep(3000 + shard, 250, axes)
