"""How large sets with a promised coverage are: `python -m benchmarks.conformal --assets DIR [--nets resnet50 ...]`.

From the pools of benchmarks.frontier (`--cache`). Over many random splits of the images into three: a third chooses
the recipe and its temperature, a third sets the threshold, a third measures. Writes docs/results-conformal.md.
"""

import argparse
import textwrap
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.frontier import pooled
from benchmarks.nets import REAL, give
from unstride.procedure.temperature import fit_temperature
from unstride.recipe import Recipe
from unstride.tuning.candidates import Unit
from unstride.tuning.choose import choose, stages_of
from unstride.tuning.conformal import members, scores, threshold, usual_recipes, warmed
from unstride.tuning.pool import Pool
from unstride.tuning.simulate import simulate

ALPHAS = (0.1, 0.05, 0.01)
CEILINGS = (1.5, 4.0)
SCORES = ("lac", "aps")
Key = tuple[float, str, str]  # alpha, score, recipe

HEAD = """# Prediction sets

{answer}

How many classes a set has that must hold the right one in 90, 95 or 99 % of images (`tuned.conformal(alpha=0.1)`, see
[tuning](tuning.md)). Made by `python -m benchmarks.conformal --assets DIR` from the pools of
[the frontier](results-frontier.md). Means over {splits} random splits of the images: a third chooses the recipe and
its temperature, a third sets the threshold, a third measures; every row has the same three. `lac` makes the smallest
sets, `aps` lets them grow where an image is hard. A set is never empty, so where a network is right more often than
was promised its coverage is its accuracy, and its sets have one class.
"""


def recipes(pool: Pool, units: list[Unit]) -> dict[str, Recipe]:
    out = dict(usual_recipes(pool))
    assert pool.labels is not None
    for ceiling in CEILINGS:
        choice = choose(pool, units, ceiling)
        stages = stages_of(choice, pool)
        warm = fit_temperature(simulate(pool, stages, choice.merge).logits, pool.labels)
        out[f"tuned for {ceiling:g}"] = Recipe(stages=stages, merge=choice.merge, temperature=warm)
    return out


def measure(pool: Pool, units: list[Unit], splits: int) -> dict[Key, torch.Tensor]:
    """(splits, 4) for each key: coverage, mean size, cost, and the gain in size over plain."""
    found: dict[Key, list[tuple[float, ...]]] = defaultdict(list)
    for seed in range(splits):
        thirds = torch.randperm(len(pool), generator=torch.Generator().manual_seed(seed)).tensor_split(3)
        chosen, set_by, test = (pool.rows(t) for t in thirds)
        assert set_by.labels is not None and test.labels is not None
        for name, recipe in recipes(chosen, units).items():
            cost = simulate(test, recipe.stages, recipe.merge).cost
            for score in SCORES:
                known = scores(warmed(set_by, recipe), score).gather(1, set_by.labels[:, None])[:, 0]
                strange = scores(warmed(test, recipe), score)
                for alpha in ALPHAS:
                    inside = members(strange, threshold(known, alpha))
                    hit = inside.gather(1, test.labels[:, None]).double().mean()
                    size = float(inside.sum(1).double().mean())
                    plain = found[alpha, score, "plain"][seed][1] if name != "plain" else size
                    found[alpha, score, name].append((float(hit), size, cost, size - plain))
        print(f"split {seed + 1} of {splits}", flush=True)
    return {key: torch.tensor(rows) for key, rows in found.items()}


def section(name: str, images: int, found: dict[Key, torch.Tensor]) -> list[str]:
    out = ["", f"## {name}, {images:,} images", ""]
    out += [
        "| promised | score | | cost | coverage % | classes in a set | than plain |",
        "|---|---|---|---|---|---|---|",
    ]
    for (alpha, score, recipe), rows in sorted(
        found.items(), key=lambda item: (-item[0][0], -SCORES.index(item[0][1]))
    ):
        hit, size, cost, gain = rows.mean(0).tolist()
        told = "" if recipe == "plain" else f"{gain:+.3f} +- {float(rows[:, 3].std()):.3f}"
        out.append(f"| {1 - alpha:.0%} | {score} | {recipe} | {cost:.2f} | {100 * hit:.2f} | {size:.3f} | {told} |")
    return out


def answer(found: dict[str, dict[Key, torch.Tensor]]) -> str:
    """What the tables say, in three sentences."""
    every = [(1 - alpha, rows) for mine in found.values() for (alpha, _, _), rows in mine.items()]
    below = max(100 * (promised - float(rows[:, 0].mean())) for promised, rows in every)
    out = f"In the mean over splits no row's coverage is more than {max(below, 0):.1f} points below its promise. "
    for name in ("flip", *(f"tuned for {c:g}" for c in CEILINGS)):
        sizes = [(mine[ALPHAS[1], "lac", name], mine[ALPHAS[1], "lac", "plain"]) for mine in found.values()]
        less = [100 * (1 - float(own[:, 1].mean() / plain[:, 1].mean())) for own, plain in sizes]
        smaller = sum(bool(own[:, 3].mean() + own[:, 3].std() < 0) for own, _ in sizes)
        out += f"{name[0].upper()}{name[1:]}, sets that promise {1 - ALPHAS[1]:.0%} are {min(less):+.0f} to "
        out += f"{max(less):+.0f} % smaller than plain's (smaller by more than splits differ on {smaller} of "
        out += f"{len(found)} networks). "
    return out.rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True, help="folder with the networks and images")
    parser.add_argument("--cache", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--nets", nargs="+", default=list(REAL), choices=REAL)
    parser.add_argument("--pool", default="medium")
    parser.add_argument("--limit", type=int, help="so many images instead of all")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/results-conformal.md"))
    args = parser.parse_args()
    lines: list[str] = []
    every: dict[str, dict[Key, torch.Tensor]] = {}
    for net in args.nets:
        name, pool, units, _ = pooled(args.assets, net, args.cache, args.limit, args.pool, 0)
        units = [u for u in units if u.view in pool.work]
        every[name] = measure(pool, units, args.splits)
        lines += section(name, len(pool), every[name])
        head = HEAD.format(answer=textwrap.fill(answer(every), 120), splits=args.splits).rstrip()
        give("\n".join([head, *lines]) + "\n", args.out)


if __name__ == "__main__":
    main()
