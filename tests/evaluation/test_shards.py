"""A shard is whole, or it does not count."""

import numpy as np

from unstride.evaluation.shards import Shard


def test_a_shard_is_whole_or_nothing(tmp_path):
    path = tmp_path / "000000.safetensors"
    values = {"nll": np.array([[0.1, 0.2]]), "top1": np.array([[True, False]])}
    images = [(7, {k: v[0] + 0 for k, v in values.items()}), (5, {k: v[0] * 0 for k, v in values.items()})]
    shard = Shard.of(images, errors={6: "six: broken"}, seconds=[1.0, 2.0], timed_images=2, memory=9)
    shard.save(path, "run")
    back = Shard.load(path, "run", range(5, 8))
    assert back.index.tolist() == [5, 7]
    assert back.values["nll"].tolist() == [[0.0, 0.0], [0.1, 0.2]]
    assert (back.errors, back.seconds, back.timed_images, back.memory) == ({6: "six: broken"}, [1.0, 2.0], 2, 9)
    assert Shard.load(path, "another run", range(5, 8)) is None
    assert Shard.load(path, "run", range(5, 9)) is None
    assert Shard.load(tmp_path / "none", "run", range(5, 8)) is None
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    assert Shard.load(path, "run", range(5, 8)) is None
