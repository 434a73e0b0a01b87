"""Better answers for free? `python -m benchmarks.free --assets DIR [--nets resnet50 ...]`, on a quiet machine.

The recipe that is tuned for a cost of 1.5 on all pictures of a network (the pools of `benchmarks.frontier`, `--cache`),
over 32 of them in batches, against the plain eager forward of the same batches, in turns. `settled`: inside
`with better.unchanged()`, where not every call looks for changes of the model. Writes benchmarks/free.csv, from which
`python -m benchmarks.frontier_page` makes a section of docs/results-tune.md.
"""

import argparse
import contextlib
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.frontier import merge_rows, pooled
from benchmarks.frontier_page import FREE
from benchmarks.nets import REAL, real
from unstride.enhanced import Enhanced, enhance
from unstride.proof.benching import interleaved
from unstride.recipe import Recipe
from unstride.tuning.choose import choose, stages_of
from unstride.views.canvas import Canvas
from unstride.views.policies import IDENTITY

FIELDS = ("net", "pictures", "batch", "cost", "time", "settled", "what")
CEILING, PICTURES = 1.5, 32


def measure(assets: Path, net: str, cache: Path, batches: list[int], repeats: int) -> list[dict[str, object]]:
    name, pool, units, _ = pooled(assets, net, cache, None, "medium", 0)
    choice = choose(pool, [u for u in units if u.view in pool.work], CEILING)
    recipe = Recipe("tuned", stages=stages_of(choice, pool), merge=choice.merge)
    found = real(assets, net, PICTURES)
    canvas = Canvas(torch.cat([c.pixels for c, _ in found.batches]), crop=found.batches[0][0].crop)
    better = enhance(found.model, canvas.rows([0]).see(IDENTITY), recipe=recipe, task="classification")
    rows: list[dict[str, object]] = []
    for size in batches:
        parts = [canvas.rows(range(i, min(i + size, len(canvas)))) for i in range(0, len(canvas), size)]
        seen = [part.see(IDENTITY) for part in parts]

        def eager(seen: list[torch.Tensor] = seen) -> None:
            with torch.no_grad():
                for images in seen:
                    found.model(images)

        calls = {"time": _all(better, parts, False), "settled": _all(better, parts, True)}
        _, times = interleaved(eager, calls, repeats)
        costs = [cost for part in parts for cost in better.looks(part)[1]]
        values = (name, len(canvas), size, sum(costs) / len(costs), *times.values(), str(choice))
        told = (v if isinstance(v, str | int) else round(v, 3) for v in values)
        rows.append(dict(zip(FIELDS, told, strict=True)))
        print(rows[-1], flush=True)
    return rows


def _all(better: Enhanced, parts: list[Canvas], settled: bool) -> Callable[[], None]:
    def call() -> None:
        with better.unchanged() if settled else contextlib.nullcontext():
            for part in parts:
                better(part)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--nets", nargs="+", default=["resnet50", "efficientnet-lite0", "mobilenetv2"], choices=REAL)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for net in args.nets:
        merge_rows(FREE, FIELDS, measure(args.assets, net, args.cache, args.batch, args.repeats))


if __name__ == "__main__":
    main()
