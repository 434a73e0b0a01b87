"""Does the learned aggregation beat the learning-free one? Trains it on real networks and compares on images not seen.

    python -m benchmarks.fit --assets DIR --net cifar20                   # fitted on training images
    python -m benchmarks.fit --assets DIR --net cifar20 --held-out        # fitted on every second test image

Prints a JSON line per method and budget: accuracy, likelihood, images corrected and corrupted, bootstrap interval. A
network is nearly always right about the images that it was trained on, so that they teach little; `--held-out` fits on
half of the test images and measures on the other half.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

import unstride
from benchmarks.nets import Bench, cifar, imagenet
from unstride.evaluation.metrics import compare, score, summarise
from unstride.learning.fitting import fit
from unstride.learning.selecting import select_states

METHODS = {
    "entropy (learning-free)": {"aggregate": "entropy", "criterion": "entropy"},
    "mean": {"aggregate": "mean", "criterion": "entropy"},
    "attention, entropy criterion": {"aggregate": "attention", "criterion": "entropy"},
    "attention, learned criterion": {"aggregate": "attention", "criterion": "learned"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--net", default="cifar20", help="cifar20, cifar56, mobilenetv2, efficientnet-lite0")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--budgets", type=int, nargs="+", default=[10])
    parser.add_argument("--fit-budget", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, help="so many images of each set")
    parser.add_argument("--work", type=Path, help="folder to go on from after a kill")
    parser.add_argument("--fixed", type=int, nargs="*", default=[], help="also choose fixed sets of so many states")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bench = load(args.assets, args.net)
    (fx, fy), (x, y) = sets(bench, args.held_out, args.limit)
    better = unstride.enhance(bench.model, x[:1])
    held = torch.arange(len(fy)) % 5 == 0
    train, val = batches(fx[~held], fy[~held]), batches(fx[held], fy[held])
    options = {
        "epochs": args.epochs,
        "lr": args.lr,
        "budget": args.fit_budget,
        "seed": args.seed,
        "familiar": not args.held_out,
    }
    report = fit(better, train, val, **options, cache_dir=args.work)
    head = {"net": bench.name, "held_out": args.held_out, "lr": args.lr, "fit_budget": args.fit_budget}
    print(json.dumps({**head, **report.to_json()}), flush=True)
    with torch.no_grad():
        plain = score(torch.cat([bench.model(part) for part in x.split(250)]), y)
    show(head, "plain", 1, plain, plain)
    for name, change in METHODS.items():
        method = better.with_options(**change)
        parts = [method.curve(part, args.budgets) for part in x.split(250)]
        for b in args.budgets:
            show(head, name, b, plain, score(torch.cat([p[b] for p in parts]), y))
    for b in args.fixed:
        chosen = select_states(better, [*train, *val], b, by="likelihood", show=False)
        logits = torch.cat([chosen.better(part) for part in x.split(250)])
        show(head, f"fixed, {len(chosen.states)} states", b, plain, score(logits, y))


def load(assets: Path, net: str) -> Bench:
    return cifar(assets, int(net.removeprefix("cifar"))) if net.startswith("cifar") else imagenet(assets, net)


def sets(bench: Bench, held_out: bool, limit: int | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images to fit on and images to test on."""
    x, y = bench.test
    pairs = ((x[::2], y[::2]), (x[1::2], y[1::2])) if held_out else (bench.fit, bench.test)
    (fx, fy), (tx, ty) = pairs
    return (fx[:limit], fy[:limit]), (tx[:limit], ty[:limit])


def batches(x: Tensor, y: Tensor, size: int = 100) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), y.split(size), strict=True))


def show(head: dict[str, object], name: str, budget: int, plain, scores) -> None:  # type: ignore[no-untyped-def]
    s, g = summarise(scores), compare(plain, scores)
    row = {**head, "method": name, "budget": budget, "n": s.n, "top1": round(100 * s.top1, 2), "nll": round(s.nll, 4)}
    interval = [round(100 * g.low, 2), round(100 * g.high, 2)]
    row |= {"gain": round(100 * g.gain, 2), "interval": interval, "corrected": g.corrected, "corrupted": g.corrupted}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
