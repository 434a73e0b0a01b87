"""What tuning found: the recipe, the frontier, and a table that a person understands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.recipe import Recipe, get, write
from unstride.tuning.certificate import Certificate, Saved, verdict
from unstride.tuning.conformal import Conformal, conformal
from unstride.tuning.pixels import Pixels
from unstride.tuning.pool import Pool


@dataclass(frozen=True)
class Line:
    """A row of the table: what was done, how good it was on images that its choice did not see, what it cost."""

    name: str
    value: float  # of the metric that the table names: accuracy, mIoU, RMSE, ...
    beside: float  # a second figure, by default the NLL after one temperature, fitted on other images
    certificate: Certificate
    cost: float  # mean, in plain forwards
    what: str = ""
    time: float | None = None  # as a multiple of the user's plain forward

    @property
    def shown(self) -> str:
        """The value; a share in per cent."""
        return f"{self.value:.4g}" if isinstance(self.certificate, Saved) else f"{100 * self.value:.2f}"

    def to_json(self, metric: str, beside: str) -> dict[str, Any]:
        """In numbers: shares as they are, not in per cent; plain has no gain."""
        c, plain = self.certificate, self.name == "plain"
        gained = {"gain": c.gain, "low": c.low, "high": c.high, "corrected": c.corrected, "corrupted": c.corrupted}
        shown = {"name": self.name, metric: self.value, beside: self.beside}
        return shown | dict.fromkeys(gained) | ({} if plain else gained) | {
            "cost": self.cost, "time": self.time, "looks": self.what
        }  # fmt: skip

    def cells(self) -> tuple[str, ...]:
        c = self.certificate
        gain = "" if self.name == "plain" else f"{100 * c.gain:+.2f} [{100 * c.low:+.2f}, {100 * c.high:+.2f}]"
        changed = "" if self.name == "plain" else f"{c.corrected} / {c.corrupted}"
        time = "" if self.time is None else f"{self.time:.2f}x"
        return (
            self.name,
            self.shown,
            f"{self.beside:.4f}",
            gain,
            changed,
            f"{self.cost:.2f}",
            time,
            self.what,
        )


HEAD = ("", "accuracy %", "NLL", "gain, 95 % interval", "corrected / corrupted", "cost", "time", "looks")


def settled(
    lines: Sequence[Line], frontier: Mapping[float, Recipe], asked: float, guard: float | None, by: str = ""
) -> tuple[Recipe, Certificate, str]:
    """The recipe of the asked ceiling, its certificate, and what to do, in words. The recipe is plain where it surely
    lost on images that it was not chosen by, or where the guard refuses it. What was merely no better there is kept:
    to answer plain instead gave gains away on real networks and spared no loss (by `benchmarks.promises`).

    `lines`: plain first; those of the ceilings, the cheapest first, come last. Dearer ones than was asked for prove
    nothing of it.
    """
    ceilings = [ceiling for ceiling in frontier if ceiling <= asked][::-1]
    first = len(lines) - len(frontier)
    proofs = [line.certificate for line in lines[first : first + len(ceilings)]][::-1]
    proof, recipe = proofs[0], frontier[asked]
    chosen, plain = lines[first + len(ceilings) - 1], lines[0]
    if len(recipe.stages) < 2:
        words = verdict(proofs, ceilings, guard, None)
        warmed = f"; its temperature was set to {recipe.temperature:.3g}" if recipe.temperature != 1 else ""
        return recipe, proof.of_plain(), words + warmed
    beside = ""
    if by == "likelihood":
        likelier = "was" if chosen.beside < plain.beside else "was not"
        beside = f"; it {likelier} likelier there (NLL {chosen.beside:.4f} against {plain.beside:.4f})"
    words = verdict(proofs, ceilings, guard, beside)
    if proof.worse:
        return get("plain", recipe.task), proof.of_plain(), words
    if guard is not None and 100 * proof.low < -guard:
        return get("plain", recipe.task).changed(name="guarded"), proof.of_plain(), words
    return recipe, proof, words


@dataclass(frozen=True, eq=False)
class Tuned:
    """`print(tuned)` is the table; `tuned.recipe` runs everywhere; `tuned.frontier` has the best at each cost."""

    recipe: Recipe
    asked: float  # the ceiling that the recipe is for
    cost: float
    frontier: Mapping[float, Recipe]
    lines: tuple[Line, ...]
    certificate: Certificate
    verdict: str
    better: Enhanced
    pool: Pool | Pixels
    notes: tuple[str, ...] = ()
    held_out: Tensor | None = field(default=None, repr=False)  # (N, K): each image by a recipe that did not see it
    again: Callable[[Pool], Recipe] | None = field(default=None, repr=False)  # the same choice, by other images
    metric: str = "accuracy %"
    beside: str = "NLL"
    data: str = ""  # the name of the data, where it has one

    def conformal(self, alpha: float = 0.1, score: str = "lac") -> Conformal:
        """Sets of classes with the right one in at least 1 - alpha of them; see `unstride.tuning.conformal`.

        Example: `tuned.conformal(alpha=0.1).sets(images)`. The threshold is set by images that had no part in the
        choice of the recipe it goes with.
        """
        if self.again is None or not isinstance(self.pool, Pool):
            raise OptionError("sets of classes are for classification that was tuned with labels")
        return conformal(self.pool, self.again, self.better, alpha, score)

    @property
    def at(self) -> int:
        """Which of the lines is of the asked ceiling."""
        return len(self.lines) - len(self.frontier) + list(self.frontier).index(self.asked)

    @property
    def head(self) -> tuple[str, ...]:
        """Of the table."""
        share = "saved %, 95 % interval" if isinstance(self.certificate, Saved) else HEAD[3]
        return ("", self.metric, self.beside, share, *HEAD[4:])

    @property
    def reading(self) -> str:
        """How the table is read."""
        return (
            "figures and cost are of recipes that were chosen without each image, time and looks are of the recipe "
            "that was chosen by all"
        )

    def table(self) -> list[tuple[str, ...]]:
        return [self.head, *(line.cells() for line in self.lines)]

    def to_json(self) -> dict[str, Any]:
        """The table in numbers, the verdict, and the mean cost of the recipe."""
        rows = [line.to_json(self.metric.removesuffix(" %"), self.beside) for line in self.lines]
        return {"rows": rows, "verdict": self.verdict, "asked": self.asked, "cost": self.cost}

    def __str__(self) -> str:
        rows = self.table()
        widths = [max(len(row[k]) for row in rows) for k in range(len(HEAD))]
        used = [k for k in range(len(HEAD)) if any(row[k] for row in rows[1:])]
        lines = [
            "  ".join(row[k].ljust(widths[k]) if k in (0, 7) else row[k].rjust(widths[k]) for k in used).rstrip()
            for row in rows
        ]
        spent = [] if self.recipe.plain else [f"  costs {self.cost:.2f} on these images"]
        return "\n".join([*lines, "", self.verdict, str(self.recipe), *spent, f"table: {self.reading}", *self.notes])

    def save(self, path: str | Path) -> Path:
        """The recipe in a file, with the network, the preprocessing and the figures it was chosen by."""
        c = self.certificate
        figures: dict[str, Any] = {
            "images": c.images,
            "gain": round(c.gain, 6),
            "low": round(c.low, 6),
            "high": round(c.high, 6),
            "corrected": c.corrected,
            "corrupted": c.corrupted,
            "cost": round(self.cost, 4),
            "proved": c.better or len(self.recipe.stages) < 2,
            "verdict": self.verdict,
            **({"data": self.data} if self.data else {}),
        }
        return write(path, self.recipe, self.better.model, self.better.preprocess, figures)
