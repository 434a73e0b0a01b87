"""A tuned recipe as a page, and as a plot: gain against cost beside everything people do instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unstride.evaluation.plots import gain_against_cost
from unstride.evaluation.report import check_report, write_report

if TYPE_CHECKING:
    from unstride.tuning.result import Tuned


class GainPlot:
    """An SVG image of gain against cost. Notebooks show it; `save` writes it."""

    def __init__(self, svg: bytes) -> None:
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg.decode()

    def save(self, path: str | Path) -> Path:
        """Write the image (.svg)."""
        from unstride.storage.artefacts import write_file
        from unstride.storage.files import check_file

        check_file(path, "plot", (".svg",))
        return write_file(Path(path), self.svg)


def plot(tuned: Tuned) -> GainPlot:
    """Every row named beside its point."""
    return GainPlot(gain_against_cost(tuned.rows, {tuned.row.name}))


def write_page(tuned: Tuned, path: str | Path) -> Path:
    """The decision, gain against cost, examples that changed, reliability, classes."""
    check_report(path)
    title = f"{tuned.pipeline.spec}, tuned for a cost of {tuned.ceiling:g}"
    return write_report(
        path,
        tuned.rows,
        tuned.stats,
        tuned.data,
        tuned.scoring,
        tuned.indices,
        decision=" ".join([str(tuned.decision), *tuned.notes]),
        chosen=tuned.row.name,
        title=title,
    )
