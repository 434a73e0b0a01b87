"""Rows go to a file and back, print as a table, and say what to do."""

import json

import pytest

from unstride.errors import ArtefactError
from unstride.evaluation.intervals import ConfidenceInterval
from unstride.evaluation.rows import Row, cells, decision_of, describe_cost, read_rows, table, write_rows

ONE = ConfidenceInterval(1.0, 1.0, 1.0)


def row(name="net", gain=None, cost=ONE, metric="accuracy", **changes):
    values = {"metrics": {metric: 0.9, "NLL": 0.3}, "macs": 2e9, "seconds": 0.01, "provenance": {"run": "a"}}
    interval = None if gain is None else ConfidenceInterval(*gain)
    baseline = "" if gain is None else "net"
    return Row(
        **{**values, "name": name, "images": 1000, "metric": metric, "cost": cost, **changes},
        gain=interval,
        baseline=baseline,
    )


def test_rows_go_to_a_file_and_back(tmp_path):
    rows = [row(), row("flip", (0.01, 0.002, 0.02), ConfidenceInterval(1.4, 1.3, 1.5), corrected=30, broken=20)]
    write_rows(tmp_path / "deep" / "rows.jsonl", rows)
    assert read_rows(tmp_path / "deep" / "rows.jsonl") == rows
    assert [Row.from_json(json.loads(json.dumps(r.to_json()))) for r in rows] == rows


@pytest.mark.parametrize("line", ["{", '{"run": "a"}', "[1]", '{"name": 3, "metric": "x", "metrics": {}}'])
def test_a_line_that_is_no_row_is_an_error(tmp_path, line):
    path = write_rows(tmp_path / "rows.jsonl", [row()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ArtefactError, match=r"rows\.jsonl: got a line that is no row"):
        read_rows(path)


def test_the_table_has_one_line_for_each_row():
    rows = [row(), row("flip", (0.01, 0.002, 0.02), ConfidenceInterval(1.4, 1.3, 1.5), seconds=0.03)]
    lines = table(rows).splitlines()
    assert len(lines) == 3
    assert lines[0].split() == ["accuracy", "gain", "corrected", "broken", "cost", "GMACs", "time", "ms", "NLL"]
    assert "+1.0 points (95 % CI +0.2 to +2.0)" in lines[2] and "1.40 (1.30 to 1.50)" in lines[2]
    assert "3.00" in lines[2].split()  # times the base model's
    assert describe_cost(ONE) == "1.00"


def test_a_cell_of_what_is_not_counted_is_empty():
    titles, (counted, uncounted) = cells([row(), row("net.onnx", (0.01, 0.002, 0.02), macs=0)])
    assert (counted[titles.index("GMACs")], uncounted[titles.index("GMACs")]) == ("2", "")


@pytest.mark.parametrize("width", [60, 80, 90])
def test_in_a_narrow_terminal_columns_are_left_out_and_named(width):
    rows = [row(), row("flip", (0.01, -0.01, 0.03))]
    whole, narrow = table(rows).splitlines(), table(rows, width).splitlines()
    assert all(len(line) <= max(width, 75) for line in narrow[:-1])  # name, value, gain and cost always stay
    there = set(narrow[0].split())
    assert there < set(whole[0].split()) and {"accuracy", "gain", "cost"} <= there
    named = narrow[-1].removeprefix("A wider terminal, or --json, also shows ").rstrip(".").split(", ")
    assert there | set(named) == set(whole[0].split())


def test_a_decision_is_of_a_row_and_its_baseline():
    rows = [row(), row("flip", (0.01, 0.002, 0.02), ConfidenceInterval(1.5, 1.4, 1.6))]
    assert str(decision_of(rows[1], rows)) == (
        "Use this recipe: +1.0 points (95 % CI +0.2 to +2.0) at 1.50 times the compute of net."
    )
    with pytest.raises(ValueError, match="baseline"):
        decision_of(rows[0], rows)


def test_a_margin_is_in_the_unit_of_the_metric():
    cheaper = ConfidenceInterval(0.5, 0.5, 0.5)
    points = [row(), row("small", (-0.001, -0.004, 0.002), cheaper)]
    assert decision_of(points[1], points, 0.5).verdict == "use"  # half a point
    assert decision_of(points[1], points, 0.3).verdict == "keep"
    errors = [row(metric="RMSE"), row("small", (-0.01, -0.02, 0.001), cheaper, metric="RMSE")]
    assert decision_of(errors[1], errors, 0.05).verdict == "use"
    assert "within the margin of 0.05 RMSE" in str(decision_of(errors[1], errors, 0.05))
    assert decision_of(errors[1], errors).verdict == "keep"  # 0.5 % of 0.9
