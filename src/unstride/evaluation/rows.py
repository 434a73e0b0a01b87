"""A row of results: what a recipe reaches on a set of images, what it costs, and its gain over a baseline.

print(table(rows))
rows = read_rows("results/rows.jsonl")
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from unstride.errors import ArtefactError
from unstride.evaluation.decisions import Decision, decide
from unstride.evaluation.intervals import ConfidenceInterval
from unstride.evaluation.metric_names import margin_of, shown, unit_of
from unstride.storage import strict_json
from unstride.storage.artefacts import write_file

COST_UNIT = "forward passes of the base model"
_INTERVALS = ("cost", "gain")
_TEXT = ("name", "metric", "baseline", "cost_unit")


@dataclass(frozen=True)
class Row:
    """What one recipe reaches on these images.

    Args:
        name: of the recipe, such as "resnet50 + flip".
        images: how many were measured.
        metric: the one that is compared; a key of `metrics`.
        metrics: values by name; shares are in 0..1.
        cost: of an image, in `cost_unit`.
        gain: of `metric` over the baseline, positive where the result is better; None: this is the baseline.
        baseline: name of the row that the gain is over.
        corrected, broken: images whose own result is better, or worse, than the baseline's.
        macs: multiply-accumulates of an image; 0 where they cannot be counted.
        seconds: of an image, where it was measured.
        recipe: as in a recipe file.
        provenance: what it takes to measure it again: data, model, command, versions, threads and processor.
    """

    name: str
    images: int
    metric: str
    metrics: Mapping[str, float]
    cost: ConfidenceInterval
    gain: ConfidenceInterval | None = None
    baseline: str = ""
    corrected: int = 0
    broken: int = 0
    macs: float = 0.0
    seconds: float | None = None
    cost_unit: str = COST_UNIT
    recipe: Mapping[str, Any] = field(default_factory=dict, hash=False)
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def value(self) -> float:
        """Of the metric that is compared."""
        return self.metrics[self.metric]

    def describe_gain(self) -> str:
        """`+2.6 points (95 % CI +1.4 to +3.8)`; empty for the baseline."""
        unit, scale = unit_of(self.metric)
        return "" if self.gain is None else self.gain.describe(unit, scale)

    def to_json(self) -> dict[str, Any]:
        """Plain values. `Row.from_json` is the inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Row:
        """The inverse of `to_json`; a ValueError says which field is wrong."""
        known = {f.name for f in fields(cls)}
        if not isinstance(stored, Mapping) or set(stored) - known or not {"name", "metric", "metrics"} <= set(stored):
            raise ValueError(f"a row has the fields {', '.join(sorted(known))}")
        values = dict(stored)
        for name in _INTERVALS:
            if values.get(name) is not None:
                values[name] = ConfidenceInterval(**values[name])
        if not all(isinstance(values.get(name, ""), str) for name in _TEXT) or not isinstance(
            values["metrics"], Mapping
        ):
            raise ValueError("a field of the row has another type")
        return cls(**values)

    def __str__(self) -> str:
        gain = f", {self.describe_gain()} over {self.baseline}" if self.gain is not None else ""
        return f"{self.name}: {self.metric} {shown(self.metric, self.value)}{gain}, cost {self.cost.estimate:.2f}"


def decision_of(row: Row, rows: Sequence[Row], margin: float | None = None) -> Decision:
    """Whether to use the recipe of a row instead of its baseline, which is one of the rows.

    Args:
        margin: the loss that is acceptable where the recipe is cheaper, in the metric's unit (0.5: half a point).
    """
    if row.gain is None:
        raise ValueError(f"{row.name} is the baseline.")
    baseline = next(other for other in rows if other.name == row.baseline and other.gain is None)
    unit, scale = unit_of(row.metric)
    allowed = margin_of(row.metric, margin, baseline.value)
    ratio = row.cost.estimate / baseline.cost.estimate
    return decide(row.gain, row.images, ratio, allowed, baseline.name, unit, scale)


def describe_cost(cost: ConfidenceInterval) -> str:
    """`1.25 (1.21 to 1.29)`, or `2.00` where every image costs the same."""
    if cost.width == 0:
        return f"{cost.estimate:.2f}"
    return f"{cost.estimate:.2f} ({cost.low:.2f} to {cost.high:.2f})"


def cells(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Titles and texts of a table: one line for each row, at most one number in each cell but for intervals."""
    first = rows[0]
    others = [name for name in first.metrics if name != first.metric]
    timed = any(row.seconds is not None for row in rows)
    usual = next((row.seconds for row in rows if row.gain is None), None)
    counted = any(row.macs for row in rows)
    titles = ["", first.metric, "gain", "corrected", "broken", "cost", *["GMACs"] * counted]
    titles += [*["time"] * timed, *["ms"] * timed, *others]
    lines = []
    for row in rows:
        changed = ["", ""] if row.gain is None else [f"{row.corrected:,}", f"{row.broken:,}"]
        line = [row.name, shown(row.metric, row.value), row.describe_gain() or "baseline", *changed]
        line += [describe_cost(row.cost), *[f"{row.macs / 1e9:.3g}" if row.macs else ""] * counted]
        line += [f"{row.seconds / usual:.2f}" if row.seconds and usual else ""] * timed
        line += [f"{1e3 * row.seconds:.1f}" if row.seconds is not None else ""] * timed
        lines.append(line + [shown(name, row.metrics[name]) for name in others])
    return titles, lines


def table(rows: Sequence[Row], width: int | None = None) -> str:
    """The rows as lines of text, aligned. In less `width`, metrics and then counts are left out and named below."""
    if not rows:
        return "no rows"
    titles, lines = cells(rows)
    widths = [max(len(line[k]) for line in (titles, *lines)) for k in range(len(titles))]
    name, value, gain, cost = 0, 1, 2, 5
    there = list(range(len(titles)))
    while width is not None and sum(widths[k] + 2 for k in there) - 2 > width and len(there) > 4:
        there.remove(max(set(there) - {name, value, gain, cost}))
    aligned = [
        "  ".join(line[k].ljust(widths[k]) if k in (name, gain, cost) else line[k].rjust(widths[k]) for k in there)
        for line in (titles, *lines)
    ]
    left_out = [title for k, title in enumerate(titles) if k not in there]
    note = [f"A wider terminal, or --json, also shows {', '.join(left_out)}."] if left_out else []
    return "\n".join([*(line.rstrip() for line in aligned), *note])


def write_rows(path: str | Path, rows: Iterable[Row]) -> Path:
    """One JSON object in each line, in a file that is there whole or not at all."""
    return write_file(Path(path), "".join(strict_json.dumps(row.to_json()) + "\n" for row in rows).encode())


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a file, in its order."""
    path = Path(path)
    try:
        return [Row.from_json(strict_json.loads(line)) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise ArtefactError(f"{path}: cannot be read ({error.strerror or error}).") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ArtefactError(f"{path}: got a line that is no row ({error}), expected what `evaluate` wrote.") from error
