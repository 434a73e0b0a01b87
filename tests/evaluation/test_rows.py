"""Rows are appended once and survive a torn write."""

import dataclasses
import json

import pytest

from unstride.errors import ArtefactError
from unstride.evaluation import Row, append_rows, read_rows

BLANK = {
    **{field.name: "" for field in dataclasses.fields(Row)},
    **{"task": "classification", "images": 3, "views": 1, "seed": 0, "batch_size": 2, "peak_memory": 1, "errors": 1},
    "threads": 2,
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
