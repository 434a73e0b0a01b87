"""The nouns: a Run is what gives a number, a Cell is a number of the paper, an Exhibit is a table or figure of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from unstride.errors import OptionError

SEGMENTATION = ("cityscapes", "ade20k")
PERCENT = ("top1", "miou", "aacc", "macc")
TITLES = {
    "top1": "top-1 %", "miou": "mIoU %", "aacc": "aAcc %", "macc": "mAcc %",
    "gmacs": "GMACs", "macs": "MACs, x plain", "latency": "time, x plain",
}  # fmt: skip
LEARNED = ("gps-shanmugam", "augtta", "classtta")


@dataclass(frozen=True)
class Run:
    """One configuration of a model (by the paper's name) on a data set.

    budget   B_ours, states per view; learned: with the fitted attention and its criterion
    views    B_tta; 1 is no augmentation
    span     searched layers as (first, how many are left out at the end); None: the usual range
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
    align: bool = True

    @property
    def task(self) -> str:
        return "segmentation" if self.data in SEGMENTATION else "classification"

    @property
    def options(self) -> dict[str, Any]:
        """What `enhance` is asked for, but for the layers, whose number only the network knows."""
        base = "attention" if self.learned else "entropy"
        criterion = "learned" if self.learned else "entropy"
        return {
            "aggregate": self.aggregate or base,
            "criterion": self.criterion or criterion,
            "align": self.align,
        }


@dataclass(frozen=True)
class Cell:
    """A place in a table, what gives its number, and the paper's own (None: the paper prints none)."""

    row: tuple[str, ...]
    column: str
    run: Run
    measure: str
    paper: float | None = None


@dataclass(frozen=True)
class Value:
    """A cell with its number. Accuracies are in per cent; `ours` is None where it was not measured."""

    row: tuple[str, ...]
    column: str
    ours: float | str | None
    paper: float | str | None = None
    low: float | None = None  # of the gain over the plain network, per cent
    high: float | None = None
    images: int | None = None


@dataclass(frozen=True)
class Exhibit:
    """A table or figure. Either `cells`, or `make` for those that need no data: it returns the values itself.

    shape: "table", or for figures "lines" (columns are x, rows are lines) or "scatter" (columns are what is plotted)
    """

    name: str
    where: str
    title: str
    labels: tuple[str, ...]
    cells: tuple[Cell, ...] = ()
    make: Callable[[], list[Value]] | None = None
    shape: str = "table"
    x: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.cells) == (self.make is not None):
            raise OptionError(f"exhibit {self.name}: wanted either cells or make")
        for cell in self.cells:
            if len(cell.row) != len(self.labels):
                raise OptionError(f"exhibit {self.name}: row {cell.row} for labels {self.labels}")

    @property
    def needs(self) -> tuple[tuple[str, str], ...]:
        """The (model, data) pairs of its runs, each once."""
        return tuple(dict.fromkeys((cell.run.model, cell.run.data) for cell in self.cells))
