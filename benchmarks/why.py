"""The table of docs/why.md, from the rows of two results pages: what each unused part is worth at its cost.

python -m benchmarks.why
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.claims import read_rows as read_claims
from benchmarks.claims_page import NAMES as CLAIMED
from benchmarks.networks import STUDIES, Row, read_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "why.md"
SHOWN = ("imagenet", "cifar")
STATES = "B = 4"  # the paper's smallest budget
MARKED = re.compile(r"(<!-- table: python -m benchmarks\.why -->\n).*?(<!-- end of table -->)", re.DOTALL)


class Worth(NamedTuple):
    """What was used beside one forward pass of the base model, its gain in points, and its cost in such passes."""

    used: str
    on: str
    images: int
    gain: float
    cost: float


def of_study(rows: Sequence[Row], title: str) -> Iterator[Worth]:
    """A flip, the best single network, several, and all together, at the ceiling nearest to the cost of a flip."""
    base = rows[0]
    named = {row.method: row for row in rows if not row.ceiling}
    ceilings = [row.ceiling for row in rows if row.ceiling]
    near = min(ceilings, key=lambda ceiling: abs(ceiling / base.gmacs - 2))
    at = {row.method: row for row in rows if row.ceiling == near}
    chosen = {
        "a flip": named[f"{base.method} + flip"],
        "the best single network": at["envelope"],
        "several networks, gated": at["plain passes"],
        "networks, views and states, tuned": at["tuned"],
    }
    for used, row in chosen.items():
        yield Worth(used, title, row.images, row.accuracy - base.accuracy, row.gmacs / base.gmacs)


def of_states() -> Iterator[Worth]:
    """The paper's search alone, for each network that was measured."""
    for row in read_claims():
        if (row.exhibit, row.recipe, row.against) == ("budget", STATES, "base model"):
            unclear = ", inconclusive" if row.low < 0 < row.high else ""
            used = f"states alone, the paper's search, {STATES}{unclear}"
            yield Worth(used, CLAIMED[row.network], row.images, row.gain, row.cost)


def table() -> str:
    rows = read_rows()
    found: list[Worth] = []
    for key in SHOWN:
        own = [row for row in rows if row.study == key]
        found += of_study(own, STUDIES[key].title) if own else []
    found += of_states()
    lines = ["| used | networks and images | gain, points | cost |", "| --- | --- | --- | --- |"]
    lines += [f"| {w.used} | {w.on}, {w.images:,} images | {w.gain:+.1f} | {w.cost:.1f}x |" for w in found]
    return "\n".join(lines)


def page() -> str:
    """The page with the table of the rows as they are now."""
    return MARKED.sub(lambda m: f"{m[1]}{table()}\n{m[2]}", PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
