"""Does tuning keep its promises? `python -m benchmarks.promises --assets DIR --cache DIR [--draws 100]`.

Over many draws of a few labelled images: tune on them, then measure the recipe on all the others. Writes
benchmarks/promises.csv and docs/results-promises.md. Pools are those of `python -m benchmarks.frontier`.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import torch

import unstride  # noqa: F401  (before torchvision)
from benchmarks.frontier import merge_rows, pooled
from benchmarks.nets import REAL, real
from unstride.enhanced import enhance
from unstride.tuning.certificate import certify
from unstride.tuning.gather import Gathered
from unstride.tuning.simulate import simulate
from unstride.tuning.tune import Tuning
from unstride.views.policies import IDENTITY

ROWS = Path(__file__).with_suffix(".csv")
PAGE = ROWS.parent.parent / "docs" / "results-promises.md"
FIELDS = ("net", "tuned_on", "measured_on", "draws", "kept", "worse", "plain", "promised", "measured", "cost")


def draws(assets: Path, net: str, cache: Path, few: int, count: int, cost: float) -> dict[str, object]:
    """Of `count` draws: how often the promised interval holds the gain on the rest, and how often that is a loss."""
    name, pool, units, _ = pooled(assets, net, cache, None, "medium", 0)
    found = real(assets, net, 1)
    better = enhance(found.model, found.batches[0][0].see(IDENTITY), recipe="plain", task="classification")
    kept = worse = alone = 0
    promised, measured, spent = [], [], []
    assert pool.labels is not None
    for seed in range(count):
        order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed))
        mine, rest = pool.rows(order[:few]), pool.rows(order[few:])
        assert rest.labels is not None
        units_here = [u for u in units if u.view in pool.work]
        tuned = Tuning(Gathered(mine, None, (), 0.0), units_here, better, "likelihood", seed, {}).tuned(
            [cost], cost, None
        )
        done = simulate(rest, tuned.recipe.stages, tuned.recipe.merge)
        right, was = done.logits.argmax(1) == rest.labels, rest.plain.argmax(1) == rest.labels
        proof = certify(int((right & ~was).sum()), int((~right & was).sum()), len(rest))
        kept += tuned.certificate.low <= proof.gain <= tuned.certificate.high
        worse += proof.high < 0
        alone += len(tuned.recipe.stages) < 2
        promised.append(tuned.certificate.gain)
        measured.append(proof.gain)
        spent.append(done.cost)
    means = [sum(v) / count for v in (promised, measured, spent)]
    values = (name, few, len(pool) - few, count, kept, worse, alone, *(round(v, 5) for v in means))
    return dict(zip(FIELDS, values, strict=True))


def page(rows: Sequence[dict[str, str]]) -> str:
    total = sum(int(r["draws"]) for r in rows)
    kept, worse = (sum(int(r[k]) for r in rows) for k in ("kept", "worse"))
    out = [
        "# Does tuning keep its promises?",
        "",
        f"In {total:,} draws of a few hundred labelled images, the promised 95 % interval held the gain that was "
        f"then measured on all other images in {kept / total:.1%}. The tuned recipe was measurably worse than plain "
        f"on the others in {worse / total:.1%}. How often tuning answered plain is in the table.",
        "",
        "Gains are in points. The recipe was tuned for a mean cost of 1.5. Made by "
        f"`python -m benchmarks.promises --assets DIR --cache DIR --draws {max(int(r['draws']) for r in rows)}`.",
        "",
        "| network | tuned on | measured on | draws | promise kept | measurably worse | answered plain "
        "| promised gain | measured gain | cost |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        n = int(r["draws"])
        shares = [f"{int(r[k]) / n:.0%}" for k in ("kept", "worse", "plain")]
        gains = [f"{100 * float(r[k]):+.2f}" for k in ("promised", "measured")]
        cells = [r["net"], r["tuned_on"], r["measured_on"], r["draws"], *shares, *gains, f"{float(r['cost']):.2f}"]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--nets", nargs="+", default=list(REAL), choices=REAL)
    parser.add_argument("--few", nargs="+", type=int, default=[200, 500])
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--cost", type=float, default=1.5)
    args = parser.parse_args()
    for net in args.nets:
        merge_rows(ROWS, FIELDS, [draws(args.assets, net, args.cache, n, args.draws, args.cost) for n in args.few])
        with ROWS.open(newline="") as file:
            PAGE.write_text(page(list(csv.DictReader(file))), encoding="utf-8")


if __name__ == "__main__":
    main()
