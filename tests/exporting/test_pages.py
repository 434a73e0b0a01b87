"""The pages of exported files and of runtimes are made of their rows."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")

from benchmarks import exported, runtimes


@pytest.mark.parametrize("benchmark", [exported, runtimes])
def test_the_page_is_what_its_rows_give(benchmark) -> None:
    assert benchmark.ROWS.with_suffix(".md").read_text() == benchmark.page(benchmark.read())
