"""Scores of images, joined in their order."""

import numpy as np

from unstride.evaluation.shards import Shard


def test_images_come_in_order_whatever_order_they_were_made_in():
    values = {"nll": np.array([[0.1, 0.2]]), "top1": np.array([[True, False]])}
    images = [(7, {k: v[0] + 0 for k, v in values.items()}), (5, {k: v[0] * 0 for k, v in values.items()})]
    shard = Shard.of(images, errors={6: "six: broken"}, memory=9)
    assert shard.index.tolist() == [5, 7]
    assert shard.values["nll"].tolist() == [[0.0, 0.0], [0.1, 0.2]]
    whole = Shard.joined([shard, Shard.of([], errors={8: "eight: broken"}, memory=3)])
    assert (whole.index.tolist(), whole.errors, whole.memory) == ([5, 7], {6: "six: broken", 8: "eight: broken"}, 9)
