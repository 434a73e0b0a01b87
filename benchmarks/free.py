"""What looks take in time: `python -m benchmarks.free --assets DIR [--nets resnet50 ...]`, on a quiet machine.

Recipes over 32 images in batches, against the plain eager forward of the same batches, in turns: what is tuned for a
cost of 1.5 on all images of a network (the pools of `benchmarks.frontier`, `--cache`) in batches of 1, 8 and 32, the
other settings of the frontier in batches of 8. Beside them, what bounds them: a plain look by our engine without any
recipe around it, and the plain network's MACs at the rate of a large convolution, the fastest there is here. The 32
are spread evenly over how sure the plain network is, so that a gate lets as many through as of all images. Writes
benchmarks/free.csv, from which `python -m benchmarks.frontier_page` makes a section of docs/results-tune.md and the
columns of time.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.frontier import merge_rows, pooled
from benchmarks.frontier_page import FREE, LOOK, RATE, TIMED
from benchmarks.nets import REAL, THIRD, real
from unstride.engine.fused import FusedConv
from unstride.engine.packing import Packing
from unstride.enhanced import Enhanced, enhance
from unstride.evaluation.benching import interleaved
from unstride.recipe import Recipe, get
from unstride.tuning.candidates import Unit, usual
from unstride.tuning.choose import choose, laid, stages_of
from unstride.tuning.pool import Pool
from unstride.views.canvas import Canvas
from unstride.views.policies import IDENTITY

FIELDS = ("net", "images", "batch", "setting", "cost", "time", "what")
CEILINGS, IMAGES = (1.5, 4.0), 32


def recipes(pool: Pool, units: list[Unit]) -> dict[str, tuple[Recipe, str]]:
    """By the settings of the frontier, and their looks in words."""
    found = {"default": (get("default"), str(get("default").stages[1]))}
    for ceiling in CEILINGS:
        choice = choose(pool, units, ceiling)
        recipe = Recipe("tuned", stages=stages_of(choice, pool), merge=choice.merge)
        found[f"tuned for {ceiling:g}"] = recipe, str(choice)
    for name, some in usual(units).items():
        found[name] = Recipe(stages=laid(some)), ", ".join(map(str, some))
    return found


def spread(pool: Pool) -> list[int]:
    """Images from the least to the most sure one in even steps, in random order."""
    best = pool.plain.softmax(1).topk(2).values
    order = (best[:, 0] - best[:, 1]).argsort()
    mixed = torch.randperm(IMAGES, generator=torch.Generator().manual_seed(0))
    chosen: list[int] = order[((mixed + 0.5) * len(order) / IMAGES).long()].tolist()
    return chosen


def measure(assets: Path, net: str, cache: Path, batches: list[int], repeats: int) -> list[dict[str, object]]:
    name, pool, units, _ = pooled(assets, net, cache, None, "medium", 0)
    asked = recipes(pool, [u for u in units if u.view in pool.work])
    found = real(assets, net)
    some = spread(pool)
    canvas = Canvas(torch.cat([c.pixels for c, _ in found.batches])[some], crop=found.batches[0][0].crop)
    plain = enhance(found.model, canvas.rows([0]).see(IDENTITY), recipe="plain", task="classification")
    rows: list[dict[str, object]] = []
    for size in batches:
        parts = [canvas.rows(range(i, min(i + size, len(canvas)))) for i in range(0, len(canvas), size)]
        seen = [part.see(IDENTITY) for part in parts]

        def eager(seen: list[torch.Tensor] = seen) -> None:
            with torch.no_grad():
                for images in seen:
                    found.model(images)

        bounds = floors(plain, seen)
        timed = {
            s: plain.with_options(recipe=r) for s, (r, _) in asked.items() if size == TIMED or s == "tuned for 1.5"
        }
        calls = {s: call for s, (call, _) in bounds.items()} | {s: _all(b, parts) for s, b in timed.items()}
        _, times = interleaved(eager, calls, repeats)
        for setting, (_, scale) in bounds.items():
            numbers = (1.0, round(times[setting] * scale, 3))
            rows.append(dict(zip(FIELDS, (name, len(canvas), size, setting, *numbers, ""), strict=True)))
        for setting, better in timed.items():
            costs = [cost for part in parts for cost in better.looks(part)[1]]
            numbers = (round(sum(costs) / len(costs), 3), round(times[setting], 3))
            rows.append(dict(zip(FIELDS, (name, len(canvas), size, setting, *numbers, asked[setting][1]), strict=True)))
            print(rows[-1], flush=True)
    return rows


def floors(plain: Enhanced, seen: list[torch.Tensor]) -> dict[str, tuple[Callable[[], None], float]]:
    """What no plain forward of ours can be quicker than, and how many times the call must be counted for it."""
    _, plan, _ = plain.fitted(seen[0])
    engine = plan.engine_for(())

    def look() -> None:
        for images in seen:
            engine.start(images)

    large = FusedConv(Packing(torch.randn(256, 256, 3, 3)), None, (1, 1, 1, 1), ("none", []), tame=True)
    x = torch.randn(8, 256, 28, 28).to(memory_format=torch.channels_last)

    def convolve() -> None:
        large(x)

    work = plan.plain_macs * sum(map(len, seen)) / (len(x) * 256 * 256 * 9 * 28 * 28)
    return {LOOK: (look, 1.0), RATE: (convolve, work)}


def _all(better: Enhanced, parts: list[Canvas]) -> Callable[[], None]:
    def call() -> None:
        for part in parts:
            better(part)

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--nets", nargs="+", default=list(THIRD), choices=REAL)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, TIMED, 32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    for net in args.nets:
        merge_rows(FREE, FIELDS, measure(args.assets, net, args.cache, args.batch, args.repeats))


if __name__ == "__main__":
    main()
