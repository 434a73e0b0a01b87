"""What a table or figure of the paper consists of.

A Run is one configuration that is measured, a Cell is a number of the paper with the run that gives ours, an Exhibit is
a table or figure of cells. Nothing here knows how a run is carried out.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from unstride.errors import OptionError
from unstride.recipe import policies
from unstride.recipe.presets import get as preset
from unstride.recipe.recipe import Recipe

SEGMENTATION = ("cityscapes", "ade20k")
LEARNED_TTA = ("gps-shanmugam", "augtta", "classtta")
ACCURACIES = {"top1": "accuracy", "miou": "mIoU", "aacc": "pixel accuracy", "macc": "mean accuracy"}  # of a row
PRINTED = "printed"  # the measure of a number of the paper that nothing here is comparable with


@dataclass(frozen=True)
class Run:
    """One configuration of a network (by the paper's name) on a data set.

    Args:
        budget: B_ours, states in each view. 1: no search.
        learned: with the learned aggregation and criterion.
        views: B_tta, the first views of `policy`. 1: no augmentation.
        method: how views are combined: mean, max, or one of `LEARNED_TTA`.
        span: searched layers as (first, how many are left out at the end). None: the paper's choice.
    """

    model: str
    data: str
    budget: int = 1
    learned: bool = False
    views: int = 1
    policy: str = ""
    method: str = ""
    span: tuple[int, int] | None = None
    criterion: str | None = None
    aggregate: str | None = None
    align: str = "average"

    @property
    def task(self) -> str:
        return "segmentation" if self.data in SEGMENTATION else "classification"

    @property
    def attention(self) -> bool:
        """Whether the learned attention takes part."""
        return self.learned and self.aggregate is None and self.budget > 1

    @property
    def random(self) -> bool:
        """Whether another seed gives another number."""
        return self.attention or self.method in LEARNED_TTA or str(self.criterion).startswith("random")

    def recipe(self, layers: int, seed: int = 0) -> Recipe:
        """What is run, but for what is fitted. `layers`: how many subsampling layers the network has."""
        made = preset("plain", self.task)
        if self.budget > 1:
            changes: dict[str, Any] = {"budget": self.budget, "align": self.align}
            if self.span is not None:
                changes["layers"] = tuple(range(self.span[0], layers + 1 - self.span[1])) or (1,)
            if self.criterion is not None:
                changes |= {"criterion": self.criterion, "seed": seed if self.random else 0}
            if self.aggregate is not None:
                changes["aggregate"] = self.aggregate
            made = preset("paper-learned" if self.attention else "paper", self.task).changed(**changes)
        if self.views == 1:
            return made
        return made.changed(stages=(replace(made.stages[0], views=self._views()),), combine=self._combine())

    def _views(self) -> tuple[Any, ...]:
        if self.policy == "flip":
            return preset("flip", self.task).stages[0].views
        return policies.get(self.policy).first(self.views)

    def _combine(self) -> str:
        if self.method == "max":
            return "max"
        return preset("flip", self.task).combine if self.policy == "flip" else ""

    @property
    def plain(self) -> Run:
        """The network alone."""
        return Run(self.model, self.data)


@dataclass(frozen=True)
class Cell:
    """A place in an exhibit, the run that gives our number, and the paper's (None: it prints none)."""

    row: tuple[str, ...]
    group: str
    column: str
    run: Run
    measure: str
    paper: float | None = None


@dataclass(frozen=True)
class Value:
    """A cell with our number. Accuracies are in per cent; `ours` is None where it was not measured.

    Args:
        low, high: 95 % interval of the gain over the network alone, in points.
        spread: standard deviation over the seeds.
    """

    row: tuple[str, ...]
    group: str
    column: str
    ours: float | str | None
    paper: float | str | None = None
    low: float | None = None
    high: float | None = None
    images: int | None = None
    spread: float | None = None
    seeds: int | None = None


@dataclass(frozen=True)
class Exhibit:
    """A table or figure: `cells` to be measured, or `make`, which needs no data and returns the values itself.

    Args:
        where: in the paper, such as "Table 1" or "Figure A3".
        labels: titles of the row labels.
        shape: "table"; or, of figures, "lines" (columns are x, rows are lines) or "scatter" (a point for each state).
        compare: which cells are compared, the best in bold: "ours" (rows with and without), "group" (the columns of a
            row), "column"; "" for none.
    """

    name: str
    where: str
    title: str
    labels: tuple[str, ...]
    cells: tuple[Cell, ...] = ()
    make: Callable[[], list[Value]] | None = None
    shape: str = "table"
    x: str = ""
    compare: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.cells) == (self.make is not None):
            raise OptionError(f"exhibit {self.name}: expected either cells or make.")
        for cell in self.cells:
            if len(cell.row) != len(self.labels):
                raise OptionError(f"exhibit {self.name}: row {cell.row} for labels {self.labels}.")

    @property
    def needs(self) -> tuple[tuple[str, str], ...]:
        """The (network, data set) pairs of its runs, each once."""
        return tuple(dict.fromkeys((cell.run.model, cell.run.data) for cell in self.cells))


def only(exhibit: Exhibit, model: str) -> Exhibit:
    """The part of an exhibit about one network, by the paper's name."""
    names = list(dict.fromkeys(cell.group or cell.run.model for cell in exhibit.cells))
    wanted = model.lower()
    chosen = tuple(c for c in exhibit.cells if wanted in (c.group.lower(), c.run.model.lower()))
    if not chosen:
        close = difflib.get_close_matches(model, names, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = ", ".join(names) or "none: it needs no network"
        raise OptionError(f"--network: got {model[:60]!r}, which {exhibit.name} does not have.{hint} It has {known}.")
    return replace(exhibit, cells=chosen)
