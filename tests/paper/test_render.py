"""Exhibits as text: networks as column groups, the better number in bold, the paper's beside ours."""

import csv
import io

import pytest

from unstride.paper.catalogue import get
from unstride.paper.exhibits import Cell, Exhibit, Run, Value
from unstride.paper.render import csv_text, grid_of, latex, markdown, plot, write
from unstride.paper.reproducing import Reproduction, reproduce


def table(compare="ours"):
    """Two rows (without and with ours) for two networks, one budget; ours is better on the first network only."""
    numbers = {
        ("no", "A"): (70.0, 69.0),
        ("yes", "A"): (71.0, 70.0),
        ("no", "B"): (80.0, 79.5),
        ("yes", "B"): (79.0, 80.1),
    }
    cells = tuple(Cell(("GPS", o), g, "B = 30", Run(g, "imagenet"), "top1", p) for (o, g), (_, p) in numbers.items())
    values = tuple(Value(c.row, c.group, c.column, numbers[c.row[1], c.group][0], c.paper) for c in cells)
    exhibit = Exhibit("t", "Table 9", "A 50 % title", ("TTA", "ours"), cells, compare=compare)
    return Reproduction(exhibit, values, ("a note",))


def test_markdown_has_both_rows_next_to_each_other_with_the_better_in_bold():
    lines = markdown(table()).splitlines()
    assert lines[0] == "## Table 9: A 50 % title"
    assert lines[2] == "| TTA | ours | A: B = 30 | B: B = 30 |"
    assert lines[4:6] == [
        "| GPS | no | 70.00 (69.00) | **80.00 (79.50)** |",
        "| GPS | yes | **71.00 (70.00)** | 79.00 (80.10) |",
    ]
    assert lines[-1] == "- a note"


def test_latex_has_networks_as_column_groups():
    text = latex(table())
    assert r" &  & \multicolumn{1}{c}{A} & \multicolumn{1}{c}{B} \\" in text
    assert r"GPS & yes & \textbf{71.00 (70.00)} & 79.00 (80.10) \\" in text
    assert r"\caption{A 50 \% title}" in text


@pytest.mark.parametrize(
    ("compare", "bold"), [("column", {"71.00 (70.00)", "80.00 (79.50)"}), ("group", set()), ("", set())]
)
def test_what_is_compared_is_the_exhibits_choice(compare, bold):
    cells = [cell for _, row in grid_of(table(compare)).rows for cell in row]
    assert {text for text, is_bold in cells if is_bold} == bold


def test_seeds_show_their_standard_deviation():
    value = Value(("x",), "", "top-1 %", 70.123, 70.5, spread=0.25, seeds=5, images=10)
    exhibit = Exhibit("t", "Table 9", "title", ("row",), (Cell(("x",), "", "top-1 %", Run("m", "imagenet"), "top1"),))
    result = Reproduction(exhibit, (value,), ())
    assert "| x | 70.12 ± 0.25 (70.50) |" in markdown(result)
    assert "over 5 seeds" in markdown(result)
    assert r"70.12 $\pm$ 0.25 (70.50)" in latex(result)
    row = next(csv.DictReader(io.StringIO(csv_text(result))))
    assert (row["unstride"], row["paper"], row["std"], row["seeds"]) == ("70.123", "70.5", "0.25", "5")


def test_formats_hold_the_same_numbers():
    result = reproduce("policy-expanded")
    rows = list(csv.DictReader(io.StringIO(csv_text(result))))
    counts = {r["augmentation"]: (float(r["unstride"]), float(r["paper"])) for r in rows if r["column"] == "values"}
    assert all(ours == paper for ours, paper in counts.values())
    assert sum(ours for name, (ours, _) in counts.items() if name != "all views") == 132
    assert counts["all views"] == (8778, 8778)
    assert r"PIL\_Blur & 1 (1) & --" in latex(result)
    assert "| Rotate | 10 (10) |" in markdown(result)


def test_a_table_is_written_in_all_formats(tmp_path):
    assert {p.name for p in write(table(), tmp_path)} == {"t.md", "t.csv", "t.tex"}


@pytest.mark.parametrize("shape", ["lines", "scatter"])
def test_a_figure_is_drawn(shape, tmp_path):
    pytest.importorskip("matplotlib")
    if shape == "lines":
        exhibit = get("figure5")
        values = tuple(Value(c.row, "", c.column, 70.0 + float(c.column), seeds=1) for c in exhibit.cells)
        result = Reproduction(exhibit, values, ())
    else:
        points = [((k, s), v) for k in ("learned", "entropy") for s, v in (("(0)", 1.0), ("(1)", 2.0))]
        values = tuple(Value(row, "", column, v) for row, v in points for column in ("mean value", "top-1 %"))
        result = Reproduction(get("figure6"), values, ())
    assert plot(result).get_axes()
    name = result.exhibit.name
    assert {p.name for p in write(result, tmp_path)} == {f"{name}{end}" for end in (".md", ".csv", ".tex", ".png")}
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
