"""Measure the procedure on real third-party networks: `python -m benchmarks.results --assets DIR` makes a page.

Every pass is cached batch by batch under `--cache`, so a killed run goes on where it was. `--only NET ...` shows
some of them only.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unstride
from benchmarks.nets import Bench, cifar, give, imagenet
from benchmarks.results_page import Pass, render
from unstride.evaluation.benching import measure

BATCH = 50
TIMED = 8  # images of a batch that is timed


NETS: dict[str, Callable[[Path], Bench]] = {
    "cifar20": lambda a: cifar(a, 20),
    "cifar56": lambda a: cifar(a, 56),
    "mobilenetv2": lambda a: imagenet(a, "mobilenetv2"),
    "efficientnet-lite0": lambda a: imagenet(a, "efficientnet-lite0"),
    "resnet50": lambda a: imagenet(a, "resnet50"),
}
CIFAR_BUDGETS = (1, 4, 7, 10, 13, 15)  # where a search stands after each expansion
IMAGENET_BUDGETS = (1, 4, 7, 10)


def run_pass(net: str, assets: Path, cache: Path, limit: int | None) -> Pass:
    bench = NETS[net](assets)
    x, y = bench.test
    if limit is not None and limit < len(x):  # evenly over the file, so that all classes stay
        rows = torch.linspace(0, len(x) - 1, limit).long()
        x, y = x[rows], y[rows]
    budgets = CIFAR_BUDGETS if net.startswith("cifar") else IMAGENET_BUDGETS
    better = unstride.enhance(bench.model, x[:1], budget=max(budgets))
    key = hashlib.sha256(json.dumps([net, budgets, better.signature, len(x)]).encode()).hexdigest()[:12]
    folder = cache / f"{net}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Tensor]] = {}
    for i in range(0, len(x), BATCH):
        file = folder / f"{i:06d}.safetensors"
        if not file.exists():
            _, logits, explained, costs = better.run(x[i : i + BATCH], budgets, explain=True)
            tensors = {f"logits{b}": v.contiguous() for b, v in logits.items()}
            tensors |= {f"cost{b}": torch.tensor(v) for b, v in costs.items()}
            tensors["tops"] = torch.tensor([[int(s.logits.argmax()) for s in p.states] for p in explained])
            save_file(tensors, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)
            print(f"{net}: {min(i + BATCH, len(x))} of {len(x)} images", flush=True)
        for name, value in load_file(file).items():
            parts.setdefault(name, []).append(value)
    return Pass(
        bench.name,
        {b: torch.cat(parts[f"logits{b}"]) for b in budgets},
        {b: torch.cat(parts[f"cost{b}"]) for b in budgets},
        torch.cat(parts["tops"]),
        y,
        _times(better, x[:TIMED], budgets, folder / "times.json"),
    )


def _times(better: unstride.Enhanced, x: Tensor, budgets: Sequence[int], file: Path) -> dict[int, float]:
    """Of each budget over the plain eager forward, in turns."""
    if not file.exists():
        rows = measure(better, x, [b for b in budgets if b > 1], tta=False, memory=False, repeats=3)
        file.write_text(json.dumps({row.budget: row.time for row in rows}), encoding="utf-8")
    return {int(b): t for b, t in json.loads(file.read_text(encoding="utf-8")).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/results"))
    parser.add_argument("--limit", type=int, default=None, help="test images of each network (default: all)")
    parser.add_argument(
        "--only",
        nargs="*",
        default=None,
        help="networks such as cifar20, or cifar20:1000 on so many images (default: all)",
    )
    parser.add_argument("--out", type=Path, default=None, help="where to write the page (default: print it)")
    args = parser.parse_args()
    found = []
    for name in args.only or NETS:
        net, *some = name.split(":")
        found.append(run_pass(net, args.assets, args.cache, int(some[0]) if some else args.limit))
    chosen = (f" --limit {args.limit}" if args.limit else "") + (f" --only {' '.join(args.only)}" if args.only else "")
    page = render(found, f"python -m benchmarks.results --assets DIR{chosen}")
    give(page, args.out)


if __name__ == "__main__":
    main()
