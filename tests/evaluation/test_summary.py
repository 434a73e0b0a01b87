"""What many images add up to: the advice, the cost, the time."""

import numpy as np
import pytest

from unstride.evaluation.metrics import Gain
from unstride.evaluation.runner import Setting
from unstride.evaluation.shards import Shard
from unstride.evaluation.summary import recommend, summarise


def test_the_advice_is_the_cheapest_that_is_not_measurably_below_the_best():
    def compare_by(margin):
        return lambda a, b: Gain(q[b] - q[a], q[b] - q[a] - margin, q[b] - q[a] + margin, 0, 0, 10)

    q, cost = [0.70, 0.74, 0.75, 0.75], [1.0, 3.0, 6.0, 8.0]
    assert recommend(q, cost, compare_by(0.001)) == 2
    assert recommend(q, cost, compare_by(0.02)) == 1
    assert recommend(q, cost, compare_by(0.10)) == 0  # nothing is certain: leave it off
    q = [0.90, 0.92, 0.94, 0.94]  # the second is not measurably below the best, nor above plain
    assert recommend(q, cost, compare_by(0.03)) == 2
    q = [0.75, 0.70, 0.60, 0.60]
    assert recommend(q, cost, compare_by(0.001)) == 0


def test_cost_is_weighed_by_size_and_time_is_a_ratio_within_a_batch():
    def image(index, macs, plain_macs):
        scores = {"top1": [True, True], "top5": [True, True], "nll": [0.1, 0.1], "brier": [0.0, 0.0]}
        values = {**scores, "confidence": [0.9, 0.9], "macs": [1.0, macs], "plain_macs": plain_macs}
        return index, {name: np.array(value) for name, value in values.items()}

    shards = [
        Shard.of([image(0, 2.0, 100)], seconds=[0.5, 1.5], timed_images=10),  # 3 times as long as the plain forward
        Shard.of([image(1, 6.0, 300)], seconds=[2.0, 8.0], timed_images=10),  # 4 times, on a slower moment
        Shard.of([image(2, 6.0, 300)]),
    ]
    settings = [Setting(1, 1), Setting(1, 4)]
    plain, better = summarise(Shard.joined(shards), shards, settings, "classification", (), 0, 10)
    assert (plain["latency"], better["latency"]) == (1.0, 3.5)
    assert plain["plain_ms"] == pytest.approx((50 + 200) / 2)
    assert better["macs"] == pytest.approx((2 * 100 + 6 * 300 + 6 * 300) / 700)
    assert (better["verdict"], better["recommended"], plain["recommended"]) == ("no measurable effect", False, True)
