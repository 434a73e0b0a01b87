"""Measure the procedure on real third-party networks: `python -m benchmarks.results --assets DIR` makes a page.

Every pass (one network, one set of options) is cached batch by batch under `--cache`, so a killed run goes on where it
was. `--only NET:CONFIG ...` runs and shows some passes only.
"""

import argparse
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unstride
from benchmarks.nets import Bench, cifar, imagenet
from unstride.evaluation.metrics import compare, score, summarise

BATCH = 50


@dataclass(frozen=True)
class Pass:
    """Logits and cost at each budget, for one network and one set of options."""

    net: str
    options: dict[str, object]
    logits: dict[int, Tensor]
    cost: dict[int, Tensor]
    labels: Tensor

    def accuracy(self, budget: int) -> float:
        return 100 * summarise(score(self.logits[budget], self.labels)).top1

    def mean_cost(self, budget: int) -> float:
        return float(self.cost[budget].mean())


NETS: dict[str, Callable[[Path], Bench]] = {
    "cifar20": lambda a: cifar(a, 20),
    "cifar56": lambda a: cifar(a, 56),
    "mobilenetv2": lambda a: imagenet(a, "mobilenetv2"),
    "efficientnet-lite0": lambda a: imagenet(a, "efficientnet-lite0"),
}
BUDGETS = {"cifar20": (1, 4, 7, 10, 13, 15), "cifar56": (1, 4, 7, 10, 13, 15)}
IMAGENET_BUDGETS = (1, 4, 7, 10)
CONFIGS: dict[str, dict[str, object]] = {
    "default": {},
    "cost": {"order": "cost"},
    "zeros": {"border": "zeros"},
    "learned": {"aggregate": "attention", "criterion": "learned"},
}


def run_pass(net: str, config: str, assets: Path, cache: Path, limit: int | None) -> Pass:
    bench = NETS[net](assets)
    x, y = bench.test
    if limit is not None and limit < len(x):  # evenly over the file, so that all classes stay
        rows = torch.linspace(0, len(x) - 1, limit).long()
        x, y = x[rows], y[rows]
    budgets = BUDGETS.get(net, IMAGENET_BUDGETS)
    options = dict(CONFIGS[config])
    better = unstride.enhance(bench.model, x[:1], budget=max(budgets), **options)  # type: ignore[arg-type]
    key = hashlib.sha256(json.dumps([net, config, budgets, better.signature, len(x)]).encode()).hexdigest()[:12]
    folder = cache / f"{net}-{config}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    if config == "learned":
        _fit(better, bench, folder / "attention.safetensors")
    parts: dict[str, list[Tensor]] = {}
    for i in range(0, len(x), BATCH):
        file = folder / f"{i:06d}.safetensors"
        if not file.exists():
            found = better.costs(x[i : i + BATCH], budgets)
            tensors = {f"logits{b}": v[0].contiguous() for b, v in found.items()}
            tensors |= {f"cost{b}": torch.tensor(v[1]) for b, v in found.items()}
            save_file(tensors, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)
            print(f"{net} {config}: {min(i + BATCH, len(x))} of {len(x)} images", flush=True)
        for name, value in load_file(file).items():
            parts.setdefault(name, []).append(value)
    return Pass(
        bench.name,
        options,
        {b: torch.cat(parts[f"logits{b}"]) for b in budgets},
        {b: torch.cat(parts[f"cost{b}"]) for b in budgets},
        y,
    )


def _fit(better: unstride.Enhanced, bench: Bench, path: Path) -> None:
    """Fit the attention on the network's own training images (a fifth of them validates), once."""
    if path.exists():
        fitted = unstride.load(path, bench.model)
        better.attention = fitted.attention
        return
    x, y = bench.fit
    x, y = x[:2000], y[:2000]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    val, train = order[: len(x) // 5], order[len(x) // 5 :]

    def loader(rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [(x[rows[i : i + BATCH]], y[rows[i : i + BATCH]]) for i in range(0, len(rows), BATCH)]

    print(unstride.fit(better, loader(train), loader(val), cache_dir=path.parent / "fit"), flush=True)
    better.save(path)


# ---------------------------------------------------------------- the page
def row(p: Pass, plain: Pass, budget: int) -> str:
    reference, mine = score(plain.logits[1], plain.labels), score(p.logits[budget], p.labels)
    s, gain = summarise(mine), compare(reference, mine)
    cells = [
        f"{p.net} (n = {len(p.labels)})",
        str(budget),
        f"{100 * s.top1:.2f}",
        f"{s.nll:.4f}",
        f"{100 * s.ece:.2f}",
        f"{gain.corrected} / {gain.corrupted}",
        f"{100 * gain.gain:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]",
        gain.verdict if budget > 1 else "plain",
        f"{p.mean_cost(budget):.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


HEAD = (
    "| network | B | top-1 % | NLL | ECE % | corrected / corrupted | gain, 95 % interval | verdict | MACs / plain |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def stopped(p: Pass, threshold: float) -> tuple[float, float]:
    """Accuracy and mean cost with `Confident(p)`: an image ends at the first expansion that makes it sure enough."""
    budgets = sorted(p.logits)
    final, cost = p.logits[budgets[-1]].clone(), p.cost[budgets[-1]].clone()
    done = torch.zeros(len(final), dtype=torch.bool)
    for b in budgets:
        now = ~done & (p.logits[b].softmax(1).amax(1) >= threshold)
        final[now], cost[now] = p.logits[b][now], p.cost[b][now]
        done |= now
    return 100 * float((final.argmax(1) == p.labels).float().mean()), float(cost.mean())


def render(found: dict[tuple[str, str], Pass], limit: int | None) -> str:
    command = "python -m benchmarks.results --assets DIR" + (f" --limit {limit}" if limit else "")
    nets = [n for n in NETS if (n, "default") in found]
    out = [
        "# Results on real networks",
        "",
        "",
        "Nothing was tuned on the test images. Intervals are paired bootstrap intervals over images; MACs count every",
        "state, as a multiple of one plain forward.",
        "",
        "## Learning-free, default options",
        "",
        HEAD,
    ]
    out[2] = f"Made by `{command}`: weights and images are third parties' and not part of this project."
    for n in nets:
        p = found[n, "default"]
        out += [row(p, p, b) for b in sorted(p.logits) if b in (1, 4, 10, 15)]
    out += ["", "## Learned aggregation against learning-free, B = 10", "", HEAD]
    for n in nets:
        if (n, "learned") in found:
            out.append(row(found[n, "default"], found[n, "default"], 10))
            out.append(row(found[n, "learned"], found[n, "default"], 10).replace(" | 10 | ", ", learned | 10 | ", 1))
    out += ["", "## Order of the search: the paper's, and by cost", ""]
    out += [
        "| network | order | " + " | ".join(f"B = {b}" for b in IMAGENET_BUDGETS) + " |",
        "|---" * (2 + len(IMAGENET_BUDGETS)) + "|",
    ]
    for n in nets:
        for config, name in (("default", "paper"), ("cost", "cost")):
            if (n, config) in found:
                p = found[n, config]
                cells = [f"{p.accuracy(b):.2f} % at {p.mean_cost(b):.2f}x" for b in IMAGENET_BUDGETS]
                out.append(f"| {p.net} | {name} | " + " | ".join(cells) + " |")
    out += ["", "## Stopping early: `stop=unstride.Confident(p)`", ""]
    thresholds = (0.5, 0.7, 0.9, 0.97)
    out += [
        "| network | full budget | " + " | ".join(f"p = {t}" for t in thresholds) + " |",
        "|---" * (2 + len(thresholds)) + "|",
    ]
    for n in nets:
        p = found[n, "default"]
        top = max(p.logits)
        cells = [f"{a:.2f} % at {c:.2f}x" for a, c in (stopped(p, t) for t in thresholds)]
        out.append(
            f"| {p.net} | B = {top}: {p.accuracy(top):.2f} % at {p.mean_cost(top):.2f}x | " + " | ".join(cells) + " |"
        )
    out += [
        "",
        "## Border rule of Align at B = 10",
        "",
        "| network | renormalise: top-1 %, NLL | zeros (the paper): top-1 %, NLL |",
        "|---|---|---|",
    ]
    for n in nets:
        if (n, "zeros") in found:
            cells = []
            for config in ("default", "zeros"):
                s = summarise(score(found[n, config].logits[10], found[n, config].labels))
                cells.append(f"{100 * s.top1:.2f}, {s.nll:.4f}")
            out.append(f"| {found[n, 'default'].net} | " + " | ".join(cells) + " |")
    return "\n".join(_without_empty_tables(out)) + "\n"


def _without_empty_tables(lines: list[str]) -> list[str]:
    """A section whose passes were not run is left out, heading and all."""
    sections: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("## "):
            sections.append([])
        sections[-1].append(line)
    return [line for s in sections if not (s[0].startswith("## ") and s[-1].startswith("|---")) for line in s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/results"))
    parser.add_argument("--limit", type=int, default=None, help="test images of each network (default: all)")
    parser.add_argument("--only", nargs="*", default=None, help="passes such as cifar20:default (default: all)")
    parser.add_argument("--out", type=Path, default=None, help="where to write the page (default: print it)")
    args = parser.parse_args()
    wanted = args.only or [f"{n}:{c}" for n in NETS for c in CONFIGS]
    found = {}
    for name in wanted:
        net, config = name.split(":")
        found[net, config] = run_pass(net, config, args.assets, args.cache, args.limit)
    page = render(found, args.limit)
    if args.out is None:
        print(page)
    else:
        args.out.write_text(page)


if __name__ == "__main__":
    main()
