"""The page of the intervals says what its rows say."""

from dataclasses import replace

import pytest

from benchmarks.coverage_of_intervals import PAGE, Row, page, read_rows, write_rows


def test_the_page_is_made_of_its_rows() -> None:
    assert PAGE.read_text() == page(read_rows())


def test_rows_go_to_a_file_and_back(tmp_path) -> None:
    rows = read_rows()
    write_rows(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows


@pytest.mark.parametrize(
    ("holds", "note", "words"),
    [
        (95.0, "50 expected", "in 1 of 1 simulated cases"),
        (98.0, "4 expected", "In 1 more it holds more often"),
        (98.0, "40 expected", "In 1 it is too wide"),
        (92.0, "4 expected", "in 1 too narrow"),
    ],
)
def test_the_answer_follows_from_the_rows(holds: float, note: str, words: str) -> None:
    row = Row("paired", "2 % change", 200, "a (ours)", 1000, holds, 2.0, 3.0, 4.0, wrong=1.5, note=note)
    before = replace(row, method="b (before)", width=8.0)
    text = page([row, before])
    assert words in text and "Its width is 50 % of the interval before" in text
    assert "at most 1.5 % of draws" in text
