"""What tuning found: the recipe, the frontier, and a table that a person understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.recipe import Recipe, write
from unstride.tuning.certificate import Certificate
from unstride.tuning.conformal import Conformal, conformal
from unstride.tuning.pixels import Pixels
from unstride.tuning.pool import Pool


@dataclass(frozen=True)
class Line:
    """A row of the table: what was done, how good it was on pictures that its choice did not see, what it cost."""

    name: str
    accuracy: float
    nll: float  # after one temperature, fitted on other pictures
    certificate: Certificate
    cost: float  # mean, in plain forwards
    what: str = ""
    time: float | None = None  # as a multiple of the user's plain forward

    def cells(self) -> tuple[str, ...]:
        c = self.certificate
        gain = "" if self.name == "plain" else f"{100 * c.gain:+.2f} [{100 * c.low:+.2f}, {100 * c.high:+.2f}]"
        changed = "" if self.name == "plain" else f"{c.corrected} / {c.corrupted}"
        time = "" if self.time is None else f"{self.time:.2f}x"
        return (
            self.name,
            f"{100 * self.accuracy:.2f}",
            f"{self.nll:.4f}",
            gain,
            changed,
            f"{self.cost:.2f}",
            time,
            self.what,
        )


HEAD = ("", "accuracy %", "NLL", "gain, 95 % interval", "corrected / corrupted", "cost", "time", "looks")


@dataclass(frozen=True, eq=False)
class Tuned:
    """`print(tuned)` is the table; `tuned.recipe` runs everywhere; `tuned.frontier` has the best at each cost."""

    recipe: Recipe
    cost: float
    frontier: Mapping[float, Recipe]
    lines: tuple[Line, ...]
    certificate: Certificate
    verdict: str
    better: Enhanced
    pool: Pool | Pixels
    notes: tuple[str, ...] = ()
    held_out: Tensor | None = field(default=None, repr=False)  # (N, K): each picture by a recipe that did not see it
    again: Callable[[Pool], Recipe] | None = field(default=None, repr=False)  # the same choice, by other pictures
    metric: str = "accuracy %"

    def conformal(self, alpha: float = 0.1, score: str = "lac") -> Conformal:
        """Sets of classes with the right one in at least 1 - alpha of them; see `unstride.tuning.conformal`.

        Example: `tuned.conformal(alpha=0.1).sets(images)`. The threshold is set by pictures that had no part in the
        choice of the recipe it goes with.
        """
        if self.again is None or not isinstance(self.pool, Pool):
            raise OptionError("sets of classes are for classification that was tuned with labels")
        return conformal(self.pool, self.again, self.better, alpha, score)

    @property
    def head(self) -> tuple[str, ...]:
        """Of the table."""
        return ("", self.metric, *HEAD[2:])

    def table(self) -> list[tuple[str, ...]]:
        return [self.head, *(line.cells() for line in self.lines)]

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(len(row[k]) for row in rows) for k in range(len(HEAD))]
        used = [k for k in range(len(HEAD)) if any(row[k] for row in rows[1:])]
        lines = [
            "  ".join(row[k].ljust(widths[k]) if k in (0, 7) else row[k].rjust(widths[k]) for k in used).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", self.verdict, str(self.recipe), *self.notes])

    def save(self, path: str | Path) -> Path:
        """The recipe in a file, with the network, the preprocessing and the figures it was chosen by."""
        c = self.certificate
        figures: dict[str, Any] = {
            "pictures": c.pictures,
            "gain": round(c.gain, 6),
            "low": round(c.low, 6),
            "high": round(c.high, 6),
            "corrected": c.corrected,
            "corrupted": c.corrupted,
            "cost": round(self.cost, 4),
            "verdict": self.verdict,
        }
        return write(path, self.recipe, self.better.model, self.better.preprocess, figures)
