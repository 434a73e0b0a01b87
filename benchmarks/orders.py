"""Which states first, weighed how, merged where? `python -m benchmarks.orders --assets DIR` -> docs/results-orders.md.

The nearest states, the same for all pictures, against the paper's entropy search, a random one and the cheapest first,
at about equal MACs; with equal and entropy weights; merged as features, logits or probabilities; after one temperature
that was fitted on the other half of the pictures.
"""

import argparse
import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

import unstride
from benchmarks.nets import real
from unstride.enhanced import Enhanced
from unstride.procedure.gates import Stage
from unstride.procedure.temperature import fit_temperature, nll
from unstride.proof.metrics import bootstrap
from unstride.recipe import Recipe, get
from unstride.views.policies import IDENTITY

ROWS = Path(__file__).with_suffix(".csv")
PAGE = ROWS.parent.parent / "docs" / "results-orders.md"
FIELDS = ("net", "pictures", "order", "weights", "merged", "cost", "accuracy", "gain", "low", "high", "warm")
FIELDS += ("likelier", "likelier_low", "likelier_high")
BUDGET = 6
TOGETHER = 50
SEARCHES = {"entropy": {}, "random": {"criterion": "random"}, "cheapest": {"order": "cost"}}


def settings(better: Enhanced, images: Tensor) -> Iterator[tuple[str, str, str, Recipe]]:
    """Every order, weight and merge; the nearest are as many as cost no more than the paper's search."""
    paper = get("paper").changed(budget=BUDGET)
    spent = mean(better.with_options(recipe=paper).looks(images[:TOGETHER])[1])
    space = better.with_options(recipe=paper).prepare(images[:1]).found.space
    count = BUDGET
    while count < 4 * BUDGET:
        more = Recipe(stages=(Stage(states=f"near:{count + 1}"),))
        if mean(better.with_options(recipe=more).looks(images[:1])[1]) > spent:
            break
        count += 1
    near = tuple(s.selections for s in space.nearest(count))
    for weights in ("mean", "entropy"):
        for merged in ("features", "logits"):
            own = paper.changed(aggregate=weights, space=merged)
            for order, changes in SEARCHES.items():
                yield order, weights, merged, own.changed(**changes)
            yield f"nearest {count}", weights, merged, own.changed(states=near, budget=count)
    yield (
        f"nearest {count}",
        "mean",
        "probabilities",
        Recipe(stages=(Stage(states=f"near:{count}"),), merge="probabilities"),
    )


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def warm(logits: Tensor, labels: Tensor) -> Tensor:
    out = torch.empty(len(logits), dtype=torch.float64)
    halves = [torch.arange(k, len(logits), 2) for k in (0, 1)]
    for one, other in (halves, halves[::-1]):
        out[other] = nll(logits[other], labels[other], fit_temperature(logits[one], labels[one]))
    return out


def measure(assets: Path, net: str, limit: int) -> list[dict[str, object]]:
    limit *= 5 if net.startswith("cifar") else 1  # they are small
    found = real(assets, net, limit)
    images = torch.cat([canvas.see(IDENTITY) for canvas, _ in found.batches])[:limit]
    labels = torch.cat([torch.as_tensor(y) for _, y in found.batches])[:limit]
    better = unstride.enhance(found.model, images[:1], recipe="plain", task="classification")
    with torch.no_grad():
        plain = torch.cat([found.model(part) for part in images.split(TOGETHER)])
    was, cold, rows = plain.argmax(1) == labels, warm(plain, labels), []
    for order, weights, merged, recipe in settings(better, images):
        parts = [better.with_options(recipe=recipe).looks(part) for part in images.split(TOGETHER)]
        logits, cost = torch.cat([x for x, _ in parts]), mean([c for _, costs in parts for c in costs])
        right, warmed = logits.argmax(1) == labels, warm(logits, labels)
        change, likelier = (right.double() - was.double()).numpy(), (cold - warmed).numpy()
        values = (found.name, len(labels), order, weights, merged, cost, float(right.double().mean()), change.mean())
        values += (*bootstrap(change), float(warmed.mean()), likelier.mean(), *bootstrap(likelier))
        rows.append(
            dict(zip(FIELDS, (v if isinstance(v, str | int) else round(float(v), 5) for v in values), strict=True))
        )
        print(rows[-1], flush=True)
    return rows


def page(rows: Sequence[dict[str, str]]) -> str:
    out = [
        "# Which states first?",
        "",
        verdict(rows)
        + " So the stages of a recipe take the nearest states (`near:N`), the same for all pictures, in one "
        'batch; the paper\'s search is `recipe="paper"`.',
        "",
        "Gains over plain on the same pictures, with 95 % intervals: accuracy in points, and NLL after one temperature "
        "fitted on the other half (lower is better, so a gain is how much it falls). Made by "
        "`python -m benchmarks.orders --assets DIR`; rows in `benchmarks/orders.csv`.",
    ]
    for net in dict.fromkeys(r["net"] for r in rows):
        mine = [r for r in rows if r["net"] == net]
        out += ["", f"## {net}, {int(mine[0]['pictures']):,} pictures", ""]
        out += ["| states | weights | merged | cost | accuracy % | gain | NLL | NLL falls by |", "|---" * 8 + "|"]
        for r in sorted(mine, key=lambda r: float(r["warm"])):
            gain = " ".join(
                (f"{100 * float(r['gain']):+.2f}", f"[{100 * float(r['low']):+.2f}, {100 * float(r['high']):+.2f}]")
            )
            falls = f"{float(r['likelier']):+.4f} [{float(r['likelier_low']):+.4f}, {float(r['likelier_high']):+.4f}]"
            cells = (
                r["order"],
                r["weights"],
                r["merged"],
                f"{float(r['cost']):.2f}",
                f"{100 * float(r['accuracy']):.2f}",
            )
            out.append("| " + " | ".join((*cells, gain, f"{float(r['warm']):.4f}", falls)) + " |")
    return "\n".join(out) + "\n"


def verdict(rows: Sequence[dict[str, str]]) -> str:
    """Nearest against the paper's search, with the same weights and merge."""
    ahead = better = pairs = 0
    for r in rows:
        twin = [x for x in rows if x["order"] == "entropy" and all(x[k] == r[k] for k in ("net", "weights", "merged"))]
        if r["order"].startswith("nearest") and twin:
            pairs += 1
            ahead += float(r["warm"]) < float(twin[0]["warm"])
            better += float(r["accuracy"]) >= float(twin[0]["accuracy"])
    return (
        f"With the same weights and merge, at no more MACs, the nearest states are likelier than the paper's search in "
        f"{ahead} of {pairs} comparisons, and at least as accurate in {better}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--nets", nargs="+", default=["cifar20", "mobilenetv2"])
    parser.add_argument("--limit", type=int, default=200)
    args = parser.parse_args()
    rows = [row for net in args.nets for row in measure(args.assets, net, args.limit)]
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    PAGE.write_text(page([{k: str(v) for k, v in r.items()} for r in rows]), encoding="utf-8")


if __name__ == "__main__":
    main()
