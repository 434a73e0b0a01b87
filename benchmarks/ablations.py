"""Choices of the paper's procedure, one at a time: `python -m benchmarks.ablations --assets DIR` makes the page.

Which states, weighed how, merged where, aligned or not, learned or not, at equal budgets, on the same images; beside
them a mirror image. Writes benchmarks/ablations.csv, a row per network and setting as soon as it is measured (what is
there already is not measured again), and docs/results-ablations.md; `--page` makes only the page.
"""

import argparse
import csv
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

import unstride
from benchmarks.frontier_page import Row, beside, rows
from benchmarks.nets import Bench, cifar, imagenet, warm
from unstride.enhanced import Enhanced
from unstride.evaluation.benching import interleaved
from unstride.evaluation.metrics import bootstrap
from unstride.learning.fitting import fit
from unstride.procedure.gates import Stage
from unstride.procedure.temperature import nll
from unstride.recipe import Recipe, get
from unstride.views.policies import parse_view

ROWS = Path(__file__).with_suffix(".csv")
PAGE = ROWS.parent.parent / "docs" / "results-ablations.md"
FIELDS = ("net", "images", "table", "setting", "cost", "accuracy", "gain", "low", "high", "nll", "warm")
FIELDS += ("likelier", "likelier_low", "likelier_high", "time")
BUDGET, BUDGETS = 6, (2, 4, 10, 15)
TOGETHER, TIMED = 50, 8  # images of a batch, and of one that is timed
FIRST, WEIGHED, PLACED, LAYERS, LEARNED, COUNT = (
    "Which states first", "How they are weighed, and where they are merged", "Align and border",
    "Layers that are searched", "Learned aggregation", "How many states",
)  # fmt: skip
NETS = {"cifar20": "CIFAR-10 ResNet-20", "cifar56": "CIFAR-10 ResNet-56", "mobilenetv2": "ImageNet MobileNetV2"}
ATTENTION = {f"attention, {criterion} criterion": criterion for criterion in ("entropy", "learned")}
FIT = {"cifar20": 2000, "cifar56": 1000, "mobilenetv2": 200}  # training images that the attention is fitted on


def bench(assets: Path, net: str, limit: int) -> Bench:
    found = cifar(assets, int(net[5:])) if net.startswith("cifar") else imagenet(assets, net)
    some = torch.linspace(0, len(found.test[1]) - 1, min(limit, len(found.test[1]))).long()
    return Bench(found.name, found.model, (found.test[0][some], found.test[1][some]), found.fit)


def settings(better: Enhanced, images: Tensor) -> Iterator[tuple[str, str, Recipe]]:
    """Every table's rows; the nearest states are as many as cost no more than the paper's search."""
    paper = get("paper").changed(budget=BUDGET)
    count = near_count(better, paper, images)
    near = paper.changed(
        budget=count,
        states=tuple(s.selections for s in better.prepare(images[:1]).found.space.nearest(count)),
    )
    yield FIRST, "mirror, no states", Recipe(stages=(Stage(), Stage((parse_view("mirror"),))))
    yield FIRST, "the paper's: low entropy first", paper
    yield FIRST, "random", paper.changed(criterion="random")
    yield FIRST, "smallest displacement first", paper.changed(criterion="displacement")
    yield FIRST, "cheapest layers first", paper.changed(order="cost")
    yield FIRST, f"the nearest {count}, the same for all", near
    yield FIRST, f"the nearest {count}, edges held, as looks are", Recipe(stages=(Stage(states=f"near:{count}"),))
    for which, own in (("paper's order", paper), (f"nearest {count}", near)):
        for weights in ("entropy", "mean", "max"):
            for merged in ("features", "logits"):
                if merged == "features" or weights != "max":
                    yield WEIGHED, f"{which}: {weights} of {merged}", own.changed(aggregate=weights, space=merged)
    yield PLACED, "Align, border renormalised", paper
    yield PLACED, "Align, border of zeros", paper.changed(border="zeros")
    yield PLACED, "no Align", paper.changed(align=False)
    last = len(better.prepare(images[:1]).found.layers)
    for span in ((1, last), (1, last - 1), (2, last), (2, last - 1)):
        if span[0] <= span[1]:
            yield LAYERS, f"{span[0]} to {span[1]} of {last}", paper.changed(layers=tuple(range(span[0], span[1] + 1)))
    for budget in BUDGETS:
        yield COUNT, f"B = {budget}", paper.changed(budget=budget)


def near_count(better: Enhanced, paper: Recipe, images: Tensor) -> int:
    spent = fmean(better.with_options(recipe=paper).looks(images[:TOGETHER])[1])
    count = BUDGET
    while count < 4 * BUDGET:
        more = Recipe(stages=(Stage(states=f"near:{count + 1}"),))
        if fmean(better.with_options(recipe=more).looks(images[:1])[1]) > spent:
            break
        count += 1
    return count


def learned(better: Enhanced, net: str, found: Bench) -> Iterator[tuple[str, str, Callable[[], Enhanced]]]:
    """The attention of the paper, fitted on training images of the network."""
    fitted: list[Enhanced] = []

    def attention(criterion: str) -> Enhanced:
        if not fitted:
            x, y = (t[: FIT[net]] for t in found.fit)
            own = better.with_options(recipe=get("paper").changed(budget=BUDGET))
            held = torch.arange(len(y)) % 5 == 0
            train, val = ([*zip(x[rows].split(100), y[rows].split(100), strict=True)] for rows in (~held, held))
            fit(own, train, val, epochs=10, show=False)
            fitted.append(own)
        return fitted[0].with_options(aggregate="attention", criterion=criterion)

    for setting, criterion in ATTENTION.items():
        yield LEARNED, setting, lambda criterion=criterion: attention(criterion)


def measure(found: Bench, net: str) -> None:
    """The rows that are not there yet."""
    images, labels = found.test
    better = unstride.enhance(found.model, images[:1], recipe="plain", task="classification")
    with torch.no_grad():
        plain = torch.cat([found.model(part) for part in images.split(TOGETHER)])
    was, cold = plain.argmax(1) == labels, warm(plain, labels)
    done: dict[Recipe, tuple[Tensor, float]] = {}

    def put(table: str, setting: str, logits: Tensor, cost: float) -> None:
        right, warmed = logits.argmax(1) == labels, warm(logits, labels)
        change, likelier = (right.double() - was.double()).numpy(), (cold - warmed).numpy()
        values = (found.name, len(labels), table, setting, cost, float(right.double().mean()), change.mean())
        values += (*bootstrap(change), float(nll(logits, labels).mean()), float(warmed.mean()), likelier.mean())
        add({k: str(v if isinstance(v, str | int) else round(float(v), 5)) for k, v in zip(
            FIELDS, (*values, *bootstrap(likelier), "1.0" if setting == "plain" else ""), strict=True)})  # fmt: skip

    def run(one: Enhanced) -> tuple[Tensor, float]:
        parts = [one.looks(part) for part in images.split(TOGETHER)]
        return torch.cat([x for x, _ in parts]), fmean([c for _, costs in parts for c in costs])

    have = {
        (r["table"], r["setting"]) for r in rows(ROWS) if r["net"] == found.name and int(r["images"]) == len(labels)
    }
    if ("", "plain") not in have:
        put("", "plain", plain, 1.0)
    for table, setting, recipe in settings(better, images):
        if (table, setting) not in have:
            done[recipe] = done.get(recipe) or run(better.with_options(recipe=recipe))
            put(table, setting, *done[recipe])
    for table, setting, made in learned(better, net, found):
        if (table, setting) not in have:
            put(table, setting, *run(made()))
    clock(found, better)


def clock(found: Bench, better: Enhanced) -> None:
    """The time of every row that has none, over the plain eager forward, in turns; learning does not change it."""
    few = found.test[0][:TIMED]
    asked = {(t, s): better.with_options(recipe=recipe) for t, s, recipe in settings(better, few)}
    paper = better.with_options(recipe=get("paper").changed(budget=BUDGET))
    asked |= {(LEARNED, s): paper.with_options(aggregate="attention", criterion=c) for s, c in ATTENTION.items()}
    without = [r for r in rows(ROWS) if r["net"] == found.name and r["setting"] != "plain" and not r.get("time")]
    calls = {f"{r['table']}, {r['setting']}": partial(asked[r["table"], r["setting"]], few) for r in without}
    with torch.no_grad():
        times = interleaved(partial(found.model, few), calls, 3)[1] if calls else {}
    for r in without:
        add(r | {"time": str(round(times[f"{r['table']}, {r['setting']}"], 3))})


def add(row: Row) -> None:
    """In the place of an older row of the same setting."""
    have, key = rows(ROWS), tuple(row[k] for k in ("net", "table", "setting"))
    at = next((i for i, r in enumerate(have) if (r["net"], r["table"], r["setting"]) == key), len(have))
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows([*have[:at], row, *have[at + 1 :]])
    print(row, flush=True)


# ---------------------------------------------------------------------------------------------------------------- page


def page(found: Sequence[Row]) -> str:
    nets = list(dict.fromkeys(r["net"] for r in found))
    taken = {net: int(next(r["images"] for r in found if r["net"] == net)) for net in nets}
    counts = ", ".join(f"{net} ({count:,})" for net, count in taken.items())
    limits = {k: taken[t] * 2 // 5 if k.startswith("cifar") else taken[t] for k, t in NETS.items() if t in nets}
    made = [
        f"`python -m benchmarks.ablations --assets DIR --nets {' '.join(k for k in limits if limits[k] == n)} "
        f"--limit {n}`"
        for n in dict.fromkeys(limits.values())
    ]
    out = ["# Results: ablations", "", verdict(found), ""]
    out += [
        f"Images: {counts}. {BUDGET} states unless said otherwise, the paper's procedure but for what a row says.",
        "Gains are over plain on the same images, with 95 % intervals; NLL, warm is after one temperature that was",
        "fitted on the other half. Cost is in plain forwards, time over the plain eager forward of eight images, in",
        "turns. The attention was fitted on training images",
        "("
        + ", ".join(f"{FIT[k]:,} of {title}" for k, title in NETS.items() if title in nets)
        + "), as `unstride fit` does",
        f"it. Made by {' and '.join(made)}; rows in `benchmarks/ablations.csv`.",
        "",
        beside("results-ablations.md"),
    ]
    for table in (FIRST, WEIGHED, PLACED, LAYERS, LEARNED, COUNT):
        out += [
            "",
            f"## {table}",
            "",
            "| network | | cost | time | accuracy % | gain | NLL | NLL, warm | warm NLL falls by |",
        ]
        out.append("|---" * 9 + "|")
        for net in nets:
            mine = [r for r in found if r["net"] == net and r["table"] in ("", table)]
            first = {s: k for k, s in enumerate(dict.fromkeys(r["setting"] for r in mine))}
            out += [line(r) for r in sorted(mine, key=lambda r: (r["table"] != "", first[r["setting"]]))]
    return "\n".join(out) + "\n"


def line(r: Row) -> str:
    gain = f"{100 * float(r['gain']):+.2f} [{100 * float(r['low']):+.2f}, {100 * float(r['high']):+.2f}]"
    falls = f"{float(r['likelier']):+.4f} [{float(r['likelier_low']):+.4f}, {float(r['likelier_high']):+.4f}]"
    gain, falls = ("", "") if r["setting"] == "plain" else (gain, falls)
    time = f"{float(r['time']):.2f}" if r.get("time") else ""
    cells = (r["net"], r["setting"], f"{float(r['cost']):.2f}", time, f"{100 * float(r['accuracy']):.2f}", gain)
    return "| " + " | ".join((*cells, f"{float(r['nll']):.4f}", f"{float(r['warm']):.4f}", falls)) + " |"


def verdict(found: Sequence[Row]) -> str:
    """The answer, from the rows."""
    paper, mirror = "the paper's: low entropy first", "mirror, no states"
    chosen = [r for r in found if r["table"] not in ("", COUNT, LAYERS) and r["setting"] != mirror]
    states = {tuple(r[k] for k in ("net", "cost", "accuracy", "nll", "warm")): r for r in chosen}.values()  # each once
    sure = sum(float(r["low"]) > 0 for r in states)
    nearest = {r["setting"] for r in found if r["setting"].startswith("the nearest") and "held" not in r["setting"]}
    kinds = {r["setting"].partition(": ")[0] for r in found if r["table"] == WEIGHED}
    weights = [(f"{kind}: mean of {m}", f"{kind}: entropy of {m}") for kind in kinds for m in ("features", "logits")]
    return (
        f"Of {len(states)} choices of {BUDGET} states or as many as cost no more, {sure} are measurably more accurate "
        f"than plain, and a mirror image, which costs less, is likelier than the paper's search on "
        f"{won(found, FIRST, [(mirror, paper)])} networks. After one temperature the nearest states, the same for all "
        f"images, are likelier than the paper's order on {won(found, FIRST, [(n, paper) for n in nearest])}, equal "
        f"weights likelier than entropy's in {won(found, WEIGHED, weights)} pairs, and Align likelier than none on "
        f"{won(found, PLACED, [('Align, border renormalised', 'no Align')])}. So the stages of a recipe take the "
        'nearest states with equal weights (`near:N`); the paper\'s search is `recipe="paper"`.'
    )


def won(found: Sequence[Row], table: str, pairs: Sequence[tuple[str, str]]) -> str:
    """In how many pairs of settings of one network the first is likelier than the second, after one temperature."""
    by = {(r["net"], r["setting"]): float(r["warm"]) for r in found if r["table"] == table}
    both = [(by[net, a], by[net, b]) for net in {n for n, _ in by} for a, b in pairs if {(net, a), (net, b)} <= {*by}]
    return f"{sum(a < b for a, b in both)} of {len(both)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--limit", type=int, default=1000, help="images; of CIFAR two and a half times as many")
    parser.add_argument("--page", action="store_true", help="only the page, from the rows that are there")
    args = parser.parse_args()
    if not args.page:
        if args.assets is None:
            parser.error("--assets DIR: the folder with networks and images")
        for net in args.nets:
            measure(bench(args.assets, net, args.limit * 5 // 2 if net.startswith("cifar") else args.limit), net)
    PAGE.write_text(page(rows(ROWS)), encoding="utf-8")


if __name__ == "__main__":
    main()
