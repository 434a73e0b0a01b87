"""Which claims of the paper hold on public networks? `python -m benchmarks.claims --assets DIR [--nets ...]`

DIR: see benchmarks/nets.py. Each exhibit is a list of recipes that differ in one switch, measured on the same images; a claim is
a paired comparison of two of them. Runs are kept in `build/claims`, so that a killed one continues; without `--assets` only the
page is written again from docs/results/paper_claims.csv.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import unstride
from benchmarks import nets
from unstride.evaluation.rows import Row
from unstride.recipe import policies
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Search, Stage

ROWS = nets.ROOT / "docs/results/paper_claims.csv"
PAGE = ROWS.with_suffix(".md")
BUILD = nets.ROOT / "build/claims"
BUDGETS = (1, 4, 10, 15, 30)
IMAGES = {"resnet20": 1000, "resnet56": 1000, "mobilenetv2": 1000, "lite0": 1000, "resnet50": 500}
SEEDS = 5
TTA_PAIRS = ((10, 1), (10, 3), (30, 1), (15, 2), (15, 5))  # views, states inside each view


def paper(**changes: Any) -> Recipe:
    """The paper's recipe with one switch changed."""
    name = ", ".join(f"{k}={v}" for k, v in changes.items()) or "as printed"
    return unstride.Recipe((Stage(states=Search(10), aggregate="entropy"),), name=name).changed(**changes)


ABLATIONS: dict[str, list[dict[str, Any]]] = {
    "aggregation": [{"aggregate": "mean"}, {"aggregate": "max"}, {"aggregate": "entropy-unaligned"}],
    "criterion": [
        {"criterion": "displacement"},
        {"criterion": "random"},
        {"criterion": "random-per-image"},
        {"criterion": "entropy-unaligned"},
    ],
    "align": [{"align": "none"}, {"align": "nearest"}, {"border": "renormalise"}],
    "stop": [{"stop": "literal"}],
}


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and the rows that it compares: `better` is claimed to be better than `worse`."""

    text: str
    exhibit: str
    better: str
    worse: str


CLAIMS = (
    Claim("Searching 10 states improves accuracy over the network as it is.", "budget", "B = 10", "base model"),
    Claim("A larger budget is better: 30 states beat 4.", "budget", "B = 30", "B = 4"),
    Claim("Entropy weights beat the plain mean.", "aggregation", "as printed", "aggregate=mean"),
    Claim("Aggregating beats the maximum over states.", "aggregation", "as printed", "aggregate=max"),
    Claim("The entropy criterion beats a random order.", "criterion", "as printed", "criterion=random"),
    Claim("Aligning the maps beats not aligning them.", "align", "as printed", "align=none"),
    Claim("The search improves test-time augmentation.", "tta", "10 views x 3 states", "10 views x 1 states"),
    Claim(
        "At an equal number of passes, states inside views beat more views.",
        "tta",
        "10 views x 3 states",
        "30 views x 1 states",
    ),
)


@dataclass(frozen=True)
class ClaimRow:
    """A recipe on a network; `gain` is over the base model, in points with its 95 % interval."""

    network: str
    exhibit: str
    recipe: str
    images: int
    accuracy: float
    nll: float
    cost: float
    gain: float
    low: float
    high: float


# ---------------------------------------------------------------- measuring
def measure(assets: Path, name: str, limit: int | None) -> Iterator[ClaimRow]:
    model = nets.loaded(assets, name)
    data = nets.spread(nets.images_of(assets, name), limit or IMAGES[name])
    folder = BUILD / name

    def rows(
        exhibit: str, recipes: Sequence[Recipe], against: Recipe | None = None, **options: Any
    ) -> Iterator[ClaimRow]:
        found = unstride.evaluate(model, data, recipe=list(recipes), against=against, out=folder, **options)
        for row in found:
            yield claim_row(name, exhibit, row)

    yield from rows("budget", [paper()], budgets=BUDGETS)
    for exhibit, changes in ABLATIONS.items():
        yield from rows(exhibit, [paper(), *(paper(**c) for c in changes)])
    yield from rows("tta", [in_views(views, states) for views, states in TTA_PAIRS])


def in_views(views: int, states: int) -> Recipe:
    """The first views of the paper's standard policy, with a search inside each."""
    chosen = tuple(policies.standard().first(views))
    name = f"{views} views x {states} states"
    if states == 1:
        return Recipe((Stage(chosen),), name=name)
    return Recipe((Stage(chosen, Search(states), aggregate="entropy"),), name=name)


def claim_row(network: str, exhibit: str, row: Row) -> ClaimRow:
    gain = row.gain
    points = (0.0, 0.0, 0.0) if gain is None else (100 * gain.estimate, 100 * gain.low, 100 * gain.high)
    return ClaimRow(
        network,
        exhibit,
        "base model" if gain is None else row.name.removeprefix(f"{network} + ").replace(f"{network}, ", ""),
        row.images,
        100 * row.metrics["accuracy"],
        row.metrics["NLL"],
        row.cost.estimate,
        *points,
    )


# ---------------------------------------------------------------- page
def write_rows(rows: Sequence[ClaimRow]) -> None:
    with ROWS.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [f.name for f in fields(ClaimRow)], lineterminator="\n")
        table.writeheader()
        table.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in rows)


def read_rows() -> list[ClaimRow]:
    text = {"network", "exhibit", "recipe"}
    with ROWS.open(newline="", encoding="utf-8") as file:
        return [
            ClaimRow(**{k: v if k in text else int(v) if k == "images" else float(v) for k, v in row.items()})
            for row in csv.DictReader(file)
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--nets", nargs="+", choices=IMAGES, default=list(IMAGES))
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    rows = read_rows() if ROWS.exists() else []
    for name in args.nets if args.assets else ():
        rows = [r for r in rows if r.network != name]
        for row in measure(args.assets, name, args.limit):
            rows.append(row)
            print(row, flush=True)
        write_rows(rows)


if __name__ == "__main__":
    main()
