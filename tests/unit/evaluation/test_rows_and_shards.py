"""Rows are appended once and survive a torn write; shards are whole, or they do not count."""

import dataclasses
import json

import numpy as np
import pytest

from unstride.errors import ArtefactError
from unstride.proof import Row, append_rows, read_rows
from unstride.proof.metrics import Gain
from unstride.proof.runner import Setting
from unstride.proof.shards import Shard
from unstride.proof.summary import recommend, summarise

BLANK = {
    **{field.name: "" for field in dataclasses.fields(Row)},
    **{"task": "classification", "images": 3, "views": 1, "seed": 0, "batch_size": 2, "peak_memory": 1, "errors": 1},
    **{
        "options": {"layers": [1, 2]},
        "preprocess": {},
        "metrics": {"top1": 0.5},
        "gain": {"gain": 0.1},
        "versions": {},
    },
    **{"macs": 2.5, "plain_macs": 1e6, "latency": None, "plain_ms": None, "error_names": ("x: broken",)},
    **{"recommended": True, "created": "now"},
}


def row(run="a", budget=4, **changes):
    return Row(**{**BLANK, "run": run, "budget": budget, **changes})


def test_rows_round_trip_and_are_appended_once(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    assert read_rows(path) == []
    append_rows(path, [row(budget=1), row(budget=4)])
    kept = append_rows(path, [row(budget=4, created="later"), row(budget=10)])
    assert [r.created for r in kept] == ["now", "now"]  # what the file has, not what came the second time
    assert read_rows(path) == [row(budget=1), row(budget=4), row(budget=10)]
    append_rows(path, [row(run="b")])
    assert [r.run for r in read_rows(path)] == ["a", "a", "a", "b"]


def test_a_torn_last_line_is_written_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [row(budget=1), row(budget=4)])
    whole = path.read_bytes()
    for cut in (1, 40, len(whole.splitlines()[1])):
        path.write_bytes(whole[:-cut])
        assert read_rows(path) == [row(budget=1)]
        append_rows(path, [row(budget=1), row(budget=4)])
        assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{", '{"run": "a"}', "[1]"])
def test_a_foreign_line_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row().to_json()) + "\n" + line + "\n")
    with pytest.raises(ArtefactError, match=r"rows\.jsonl, line 2"):
        read_rows(path)


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


def test_the_advice_is_the_cheapest_that_is_not_measurably_below_the_best():
    def compare_by(margin):
        return lambda a, b: Gain(q[b] - q[a], q[b] - q[a] - margin, q[b] - q[a] + margin, 0, 0, 10)

    q, cost = [0.70, 0.74, 0.75, 0.75], [1.0, 3.0, 6.0, 8.0]
    assert recommend(q, cost, compare_by(0.001)) == 2
    assert recommend(q, cost, compare_by(0.02)) == 1
    assert recommend(q, cost, compare_by(0.10)) == 0  # nothing is certain: leave it off
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
