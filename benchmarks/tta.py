"""Learned test-time augmentation on real networks, alone and around the procedure, in the shape of the paper's tables.

    python -m benchmarks.tta --assets DIR --out docs/results-tta.md

The logits of every view (and of every budget inside it) are computed once, batch by batch, into `--cache`: a killed run
goes on where it was, and all methods are fitted and judged on the same logits.
"""

import argparse
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unstride
from benchmarks.frontier_page import beside
from benchmarks.nets import HALF, IMAGENET, Bench, cifar, give, imagenet, warm
from unstride.evaluation.metrics import Scores, compare, score
from unstride.procedure.temperature import nll
from unstride.tta import TTA, BudgetPair, fitting, methods
from unstride.tta.cache import Rows

BATCH = 50
ALONE = 30  # states of the procedure without views, or as many as the network has
POOL = 30  # views that GPS chooses from, whatever the total: the paper's is the same at every total, too
METHODS = ("gps-shanmugam", "gps", "classtta", "augtta", "mean", "max")
TITLES = {"gps-shanmugam": "GPS, 3 views", "gps": "GPS, original", "classtta": "ClassTTA", "augtta": "AugTTA"}
TITLES |= {"mean": "Mean", "max": "Max"}


@dataclass(frozen=True)
class Case:
    """A network, its policy, the totals without ours, and the pairs (views, states in each) with ours."""

    load: Callable[[Path], Bench]
    stats: tuple[tuple[float, ...], tuple[float, ...]]
    policy: str
    totals: tuple[int, ...]
    pairs: tuple[BudgetPair, ...]
    test: int
    fit: int
    crop: int | None = None

    @property
    def inner(self) -> int:
        """Views that ours runs in."""
        return max(pair.tta for pair in self.pairs)

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(sorted({1, *(pair.ours for pair in self.pairs)}))


def _pairs(*pairs: tuple[int, int]) -> tuple[BudgetPair, ...]:
    return tuple(BudgetPair(*pair) for pair in pairs)


CASES = {
    "cifar20": Case(
        lambda a: cifar(a, 20), IMAGENET, "expanded", (30, 100, 150), _pairs((10, 3), (10, 10), (10, 15)), 2000, 500
    ),
    "cifar56": Case(lambda a: cifar(a, 56), IMAGENET, "expanded", (30, 100), _pairs((10, 3), (10, 10)), 600, 0),
    "mobilenetv2": Case(
        lambda a: imagenet(a, "mobilenetv2", side=256), HALF, "standard", (30,), _pairs((15, 2), (10, 3)), 300, 0, 224
    ),
}


@dataclass(frozen=True, eq=False)
class Seen:
    """Logits of N images: of V views (V, N, K), of the first views by states inside each, with cost, and of no view."""

    labels: Tensor
    views: Tensor
    inside: dict[int, Tensor]
    cost: dict[int, Tensor]
    alone: Tensor
    alone_cost: Tensor

    def source(self, budget: int, views: int) -> tuple[Tensor, Tensor]:
        """Logits (V, N, K) and mean cost (V,) of the first views with so many states in each."""
        if budget == 1:
            return self.views[:views], torch.ones(views)
        return self.inside[budget][:views], self.cost[budget][:views].mean(1)


# ------------------------------------------------------------------------------------------------------------ logits


def see(case: Case, name: str, bench: Bench, images: tuple[Tensor, Tensor], part: str, cache: Path) -> Seen:
    x, y = images
    count = case.test if part == "test" else case.fit
    rows = torch.linspace(0, len(x) - 1, min(count, len(x))).long()  # evenly over the file, so that all classes stay
    x, y = x[rows], y[rows]
    tta = around(case, bench)
    better = unstride.enhance(bench.model, tta.see(x[:1], tta.views[0]), budget=max(case.budgets))
    about = [name, part, case.policy, case.totals, case.pairs, better.signature, len(x), ALONE]
    folder = cache / f"{name}-{part}-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Tensor]] = {}
    for i in range(0, len(x), BATCH):
        file = folder / f"{i:06d}.safetensors"
        if not file.exists():
            start = time.process_time()
            save_file(_batch(case, tta, better, x[i : i + BATCH]), file.with_suffix(".tmp"))
            file.with_suffix(".tmp").rename(file)
            done = f"{min(i + BATCH, len(x))} of {len(x)} images"
            print(f"{name} {part}: {done}, {time.process_time() - start:.0f} s of CPU", flush=True)
        for key, value in load_file(file).items():
            parts.setdefault(key, []).append(value)
    whole = {key: torch.cat(value, 0 if key.startswith("alone") else 1) for key, value in parts.items()}
    more = [b for b in case.budgets if b > 1]
    return Seen(
        y,
        whole["views"],
        {b: whole[f"inside{b}"] for b in more},
        {b: whole[f"cost{b}"] for b in more},
        whole["alone"],
        whole["alone_cost"],
    )


def around(case: Case, bench: Bench) -> TTA:
    mean, std = case.stats
    return TTA(bench.model, case.policy, "mean", max(case.totals), mean=mean, std=std, crop=case.crop)


def _batch(case: Case, tta: TTA, better: unstride.Enhanced, x: Tensor) -> dict[str, Tensor]:
    """All logits of some images; those of a view alone and with states inside it come from one search."""
    plain: list[Tensor] = []
    inside: dict[int, list[Tensor]] = {b: [] for b in case.budgets if b > 1}
    cost: dict[int, list[Tensor]] = {b: [] for b in inside}
    out: dict[str, Tensor] = {}
    for k, view in enumerate(tta.views):
        seen = tta.see(x, view)
        budgets = case.budgets if k < case.inner else (1,)
        found = better.costs(seen, (*budgets, ALONE) if k == 0 else budgets)
        plain.append(found[1][0])
        for b in inside if k < case.inner else ():
            inside[b].append(found[b][0])
            cost[b].append(torch.tensor(found[b][1]))
        if k == 0:
            out["alone"], out["alone_cost"] = found[ALONE][0].contiguous(), torch.tensor(found[ALONE][1])
    out["views"] = torch.stack(plain)
    out |= {f"inside{b}": torch.stack(v) for b, v in inside.items()}
    return out | {f"cost{b}": torch.stack(v) for b, v in cost.items()}


# ---------------------------------------------------------------------------------------------------- fit and judge


@dataclass(frozen=True, eq=False)
class Kept:
    """A block of logits in memory, as `Rows` wants it."""

    labels: Tensor
    logits: Tensor

    def load(self) -> Tensor:
        return self.logits


@dataclass(frozen=True)
class Result:
    """Merged logits (N, K), how many views were run, and the cost in plain forwards."""

    logits: Tensor
    views: float
    cost: float


def weights_of(method: str, logits: Tensor, labels: Tensor) -> Tensor | None:
    """Fitted as `TTA.fit` does: one image in five validates, the defaults for all else."""
    chosen = methods.get(method)
    if not chosen.learned:
        return None
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: len(labels) // 5]] = True

    def rows(mine: Tensor) -> Rows:
        at = mine.nonzero()[:, 0].split(BATCH)
        blocks = [Kept(labels[i], logits[:, i]) for i in at]
        return Rows(blocks, [None] * len(blocks), len(logits))

    return fitting.fit(chosen, rows(~held), rows(held), 30, 0.01, 0, lambda note: None).weights


def apply(method: str, weights: Tensor | None, seen: Seen, budget: int, views: int, at: Tensor) -> Result:
    """A method with the weights of `weights_of` on the images `at`."""
    logits, cost = seen.source(budget, views)
    runs = torch.ones(views, dtype=torch.bool) if weights is None else (weights.reshape(views, -1) > 0).any(1)
    return Result(methods.merge(logits[:, at], method, weights), int(runs.sum()), float(cost[runs].sum()))


def measured(method: str, budget: int, views: int, test: Seen, fit: Seen | None) -> Result:
    """Fitted on `fit`; without it on one half of the test images for the other half, and the other way round."""
    views = min(views, POOL) if method.startswith("gps") else views
    everything = torch.arange(len(test.labels))
    if fit is not None or not methods.get(method).learned:
        weights = None if fit is None else weights_of(method, fit.source(budget, views)[0], fit.labels)
        return apply(method, weights, test, budget, views, everything)
    halves = everything[0::2], everything[1::2]
    logits = test.source(budget, views)[0]
    results = []
    for mine, other in (halves, halves[::-1]):
        results.append(
            apply(method, weights_of(method, logits[:, other], test.labels[other]), test, budget, views, mine)
        )
    merged = torch.empty(len(everything), test.views.shape[-1])
    merged[halves[0]], merged[halves[1]] = results[0].logits, results[1].logits
    return Result(merged, sum(r.views for r in results) / 2, sum(r.cost for r in results) / 2)


# ------------------------------------------------------------------------------------------------------------ timing


def clock(case: Case, name: str, bench: Bench, cache: Path) -> dict[tuple[int, int], float]:
    """CPU seconds of one thread by (views, states), as a multiple of the plain forward's; making views is included."""
    file = cache / f"{name}-time.json"
    settings = [*((v, 1) for v in case.totals), *case.pairs, (1, ALONE)]
    if not file.exists():
        x = bench.test[0][: 8 if case.crop else BATCH]
        seen = around(case, bench).see(x, around(case, bench).views[0])
        better = unstride.enhance(bench.model, seen[:1], budget=2)
        better(seen)
        plain = _seconds(bench.model, seen)  # once to warm up
        found = []
        for views, budget in settings:
            model = bench.model if budget == 1 else better.with_options(budget=budget)
            mean, std = case.stats
            whole = TTA(model, case.policy, "mean", views, mean=mean, std=std, crop=case.crop)
            plain = _seconds(bench.model, seen)
            found.append(_seconds(whole, x) / ((plain + _seconds(bench.model, seen)) / 2))
        file.write_text(json.dumps(found))
    return dict(zip(map(tuple, settings), json.loads(file.read_text()), strict=True))


def _seconds(run: Callable[[Tensor], object], x: Tensor) -> float:
    with torch.no_grad():
        start = time.process_time()
        run(x)
        return time.process_time() - start


# -------------------------------------------------------------------------------------------------------------- page

HEAD = (
    "| method | with ours | B_total | views x states | top-1 % | gain over plain, 95 % interval | verdict "
    "| gain over the same total without ours | NLL | NLL, warm | views run | MACs / plain |\n" + "|---" * 12 + "|"
)


def table(case: Case, test: Seen, fit: Seen | None, chosen: Sequence[str]) -> list[str]:
    plain = score(test.views[0], test.labels)

    def interval(reference: Scores, found: Scores) -> tuple[str, str]:
        gain = compare(reference, found)
        return f"{100 * gain.gain:+.2f} [{100 * gain.low:+.2f}, {100 * gain.high:+.2f}]", gain.verdict

    def row(title: str, ours: str, pair: BudgetPair, result: Result, reference: Scores | None = None) -> str:
        found = score(result.logits, test.labels)
        cells = [title, ours, str(pair.total), f"{pair.tta} x {pair.ours}", f"{100 * found.top1.mean():.2f}"]
        cells += [*interval(plain, found), "" if reference is None else interval(reference, found)[0]]
        cells += [*likely(result.logits), f"{result.views:g}", f"{result.cost:.1f}"]
        return "| " + " | ".join(cells) + " |"

    def likely(logits: Tensor) -> list[str]:
        return [f"{nll(logits, test.labels).mean():.4f}", f"{warm(logits, test.labels).mean():.4f}"]

    out = [HEAD]
    told = " | ".join(likely(test.views[0]))
    out.append(f"| plain | no | 1 | 1 x 1 | {100 * plain.top1.mean():.2f} | | | | {told} | 1 | 1.0 |")
    out.append(row("no views", "yes", BudgetPair(1, ALONE), Result(test.alone, 1, float(test.alone_cost.mean()))))
    for method in chosen:
        without: dict[int, Scores] = {}
        for total in case.totals:
            if method.startswith("gps") and total > POOL:
                without[total] = without[POOL]
                continue
            result = measured(method, 1, total, test, fit)
            without[total] = score(result.logits, test.labels)
            out.append(row(TITLES[method], "no", BudgetPair(total, 1), result))
        for pair in case.pairs:
            result = measured(method, pair.ours, pair.tta, test, fit)
            out.append(row(TITLES[method], "yes", pair, result, without[pair.total]))
    return out


def costs(case: Case, test: Seen, times: dict[tuple[int, int], float]) -> list[str]:
    out = ["| views x states | MACs / plain | CPU time / plain |", "|---|---|---|"]
    for (views, budget), ratio in times.items():
        alone = (views, budget) == (1, ALONE)
        macs = float(test.alone_cost.mean()) if alone else float(test.source(budget, views)[1].sum())
        out.append(f"| {views} x {budget} | {macs:.1f} | {ratio:.1f} |")
    return out


INTRO = """# Results: test-time augmentation, alone and around the procedure

{answer}

Made by `{command}`:
weights and images are third parties' and not part of this project.

The shape is that of the paper's tables: the same total budget spent on views alone ("no"), or on fewer views with a
search inside each ("yes", learning-free, default options). Gains are paired over the same images, with bootstrap
intervals; MACs are multiples of one plain forward and count only the views that a fitted method gives a weight ("views
run"); NLL, warm is after one temperature that was fitted on the other half. No row was tuned on the images that it is
measured on.

- GPS chooses from the first {pool} views whatever the total, so it has one row without ours.
- "no views": the search alone, {alone} states, or all 16 where a network has no more (the CIFAR nets).
- **Fitted on training images** is the paper's protocol. A network knows its own training images by heart (the plain
  CIFAR net gets {known} of those right), so that they say little about which views help.
- **Cross-fitted**: fitted on every second test image, measured on the others, and the other way round. No image is
  measured with weights that saw it; the network saw none of them. Views and MACs are means of the two fits.
"""


def answer(sections: Mapping[str, str]) -> str:
    """The page in three sentences, from its rows: does a search inside each view gain over as many views alone?"""
    trained, unseen = Counter[str](), Counter[str]()
    for title, text in (part.split("\n", 1) for s in sections.values() for part in s.split("\n### ")[1:]):
        for line in text.splitlines():
            ends = re.match(r"[^\[]+\[.+?\][^\[]+\[(\S+), (\S+)\]", line)  # the second interval: over views alone
            if ends is not None:
                low, high = map(float, ends.groups())
                verdict = "better" if low > 0 else "worse" if high < 0 else "neither"
                (trained if title.startswith("Fitted on") else unseen)[verdict] += 1

    def told(found: Counter[str]) -> str:
        return f"measurably better in {found['better']} of {found.total()} rows and worse in {found['worse']}"

    return (
        "Chosen on images that the network did not learn from, fewer views with a search inside each are "
        f"{told(unseen)} than as many views alone.\nWith views fitted on training images, as the paper does it, they "
        f"are {told(trained)}. "
        "A mirror, at 2 forwards or behind a gate, stands beside them in the first table."
    )


def kept(page: Path | None) -> tuple[dict[str, str], str]:
    """Sections of networks that are on the page already, by their names, and what its words say of training images."""
    text = page.read_text(encoding="utf-8") if page is not None and page.exists() else ""
    parts = [f"## {part}".strip() for part in text.split("\n## ")[1:] if " policy (n = " in part.splitlines()[0]]
    known = re.search(r"net gets (.+?) of those right", text)
    return {part[3:].split(",")[0]: part for part in parts}, known[1] if known else "?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/tta"))
    parser.add_argument("--nets", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--out", type=Path, default=None, help="the page; sections of other networks on it stay")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    sections, known = kept(args.out)
    for name in args.nets:
        case = CASES[name]
        bench = case.load(args.assets)
        fit = see(case, name, bench, bench.fit, "fit", args.cache) if case.fit else None
        test = see(case, name, bench, bench.test, "test", args.cache)
        body = [f"## {bench.name}, `{case.policy}` policy (n = {len(test.labels)})"]
        learned = [m for m in METHODS if methods.get(m).learned]
        if fit is not None:
            known = f"{100 * score(fit.views[0], fit.labels).top1.mean():.1f} %"
            body += ["", f"### Fitted on {len(fit.labels)} training images", "", *table(case, test, fit, METHODS)]
            body += ["", "### Cross-fitted on test images", "", *table(case, test, None, learned)]
        else:
            body += ["", "### Learned methods cross-fitted on test images", "", *table(case, test, None, METHODS)]
        body += ["", "### What it costs, all views run", "", *costs(case, test, clock(case, name, bench, args.cache))]
        sections[bench.name] = "\n".join(body)
    command = "python -m benchmarks.tta --assets DIR"
    page = INTRO.format(answer=answer(sections), command=command, pool=POOL, alone=ALONE, known=known)
    page += "\n" + "\n\n".join([beside("results-tta.md"), *sections.values()]) + "\n"
    give(page, args.out)


if __name__ == "__main__":
    main()
