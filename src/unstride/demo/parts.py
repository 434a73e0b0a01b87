"""What the parts of the demo share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unstride.evaluation.rows import Row
from unstride.show.html import Block, Table

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoSize:
    """How many images each part takes. All parts together need at most 90 seconds on two cores."""

    classifiers: int = 1000
    scenes: int = 60
    states: int = 300
    fitting: int = 150


@dataclass(frozen=True)
class DemoPart:
    """One part: what was measured (`figures`), how it is shown (`blocks`), or why it could not run (`skipped`)."""

    name: str
    title: str
    figures: Any = None
    blocks: tuple[Block, ...] = ()
    skipped: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class NamedRow:
    """A row of a table of the demo, under the name that it has there."""

    name: str
    row: Row

    def to_json(self) -> dict[str, Any]:
        row = self.row
        gain = {} if row.gain is None else {"gain": row.gain.estimate, "low": row.gain.low, "high": row.gain.high}
        return {"name": self.name, row.metric: row.value, "cost": row.cost.estimate, **gain}


def rows_table(rows: Sequence[NamedRow], caption: str, strong: int | None = None) -> Table:
    """A line for each row: its metric, its gain over the baseline, its cost."""
    metric = rows[0].row.metric
    lines = tuple(
        (named.name, f"{100 * named.row.value:.2f} %", named.row.describe_gain() or "baseline", _cost(named.row))
        for named in rows
    )
    columns = ("", metric, "gain (95 % CI)", "cost")
    return Table(columns, lines, caption, frozenset() if strong is None else frozenset({strong}))


def _cost(row: Row) -> str:
    return f"{row.cost.estimate:.2f}x"


def row_named(rows: Sequence[Row], name: str) -> Row:
    return next(row for row in rows if row.name == name)
