"""Several networks at equal cost: what `tune` chooses on one half of the images, measured on the other.

    python -m benchmarks.networks --assets DIR      # DIR: see benchmarks/nets.py
    python -m benchmarks.networks                   # the page, the plot and README's table again, from the rows

Every pass of every network is computed once and cached in `build/networks`, so that a killed run goes on. For each
random halving and each ceiling a recipe is chosen on one half and measured on the other, both ways. `envelope` is what
a user would do instead: the best single network, plain or flipped, chosen on the same half, at no more cost. `plain
passes` is the same tuner without views and states.
"""

from __future__ import annotations

import argparse
import csv
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import nets
from unstride.evaluation.intervals import PairedCounts, paired_gain
from unstride.evaluation.labelled import open_labelled, scoring_of
from unstride.evaluation.measuring import first_image
from unstride.models.weights import place
from unstride.recipe.recipe import Recipe
from unstride.storage.distributed import world
from unstride.tuning.candidates import Candidate, SearchSpace
from unstride.tuning.choose import Chooser, Rows
from unstride.tuning.evidence import Evidence
from unstride.tuning.objectives import Outcomes
from unstride.tuning.pool import Pool, PoolStore, gather_pool
from unstride.tuning.simulate import build, simulate
from unstride.tuning.tune import usable_passes

ROOT = nets.ROOT
ROWS = ROOT / "docs/results/networks.csv"
PAGE = ROWS.with_suffix(".md")
PLOT = ROOT / "docs/images/networks.svg"
HALVINGS = 3
GIGA = 1e9
AGAINST = "tuned, against"


@dataclass(frozen=True)
class Study:
    """Networks that are offered together, and the ceilings in GMACs. `against`: the large one that recipes replace."""

    title: str
    networks: tuple[str, ...]
    ceilings: tuple[float, ...]
    against: str = ""


STUDIES = {
    "imagenet": Study(
        "ImageNet, five networks",
        ("mobilenetv2", "lite0", "lite1", "lite2", "resnet50"),
        (0.5, 0.6, 0.7, 1, 1.66, 2, 3),
    ),
    "mobilenet-resnet": Study(
        "ImageNet, MobileNetV2 and ResNet-50", ("mobilenetv2", "resnet50"), (1.2, 1.6, 1.93), "resnet50"
    ),
    "cifar": Study(
        "CIFAR-10, ResNet-20 and ResNet-56", ("resnet20", "resnet56"), (0.0612, 0.0816, 0.1224, 0.1632), "resnet56"
    ),
}


@dataclass(frozen=True)
class Row:
    """Means over halvings; accuracies and gains in per cent.

    The gain is over the envelope, with its 95 % interval; of the method "tuned, against" over that network alone.
    """

    study: str
    ceiling: float  # GMACs
    method: str
    images: int
    accuracy: float
    gmacs: float
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    nll: float = 0.0
    recipe: str = ""


# ---------------------------------------------------------------- measuring
@dataclass(frozen=True, eq=False)
class Measured:
    """Of all images, each by what was chosen on the other half."""

    correct: np.ndarray
    costs: np.ndarray
    losses: np.ndarray


def pool_of(study: Study, assets: Path, limit: int | None) -> tuple[Evidence, float]:
    """Every pass of every network, and the GMACs of one forward pass of the first."""
    models = {name: nets.loaded(assets, name) for name in study.networks}
    dataset = nets.spread(nets.images_of(assets, study.networks[0]), limit)
    return evidence_of(models, dataset, max(study.ceilings))


def evidence_of(models: Any, data: Any, ceiling: float) -> tuple[Evidence, float]:
    """The same for any networks. `ceiling`: the most GMACs that are offered."""
    pipeline, images = open_labelled(models, data)
    folder = ROOT / "build/networks"
    first = first_image(images)[None].to(*place(pipeline.better.model))
    unit = pipeline.better.replace(Recipe()).run(first, details=True).record.base_macs / GIGA
    with world() as us:
        store = PoolStore(pipeline, images, folder, first, True)
        usable, _ = usable_passes(pipeline, images, ceiling / unit)
        pool = gather_pool(store, usable, us, None, True)
    return Evidence.of(pipeline, images, pool, scoring_of(pipeline, images, None), None, 0), unit


def chosen_and_measured(
    chooser: Chooser, candidates: Iterable[Candidate] | None, ceiling: float, a: Rows, b: Rows
) -> tuple[Measured, Candidate]:
    """What is chosen on the images `a`, measured on the images `b`. `candidates`: choose among these by accuracy."""
    pool = chooser.outcomes.pool
    if candidates is None:
        candidate = chooser.choose(ceiling, a)
    else:
        fitting = [c for c in candidates if chooser.cost(c) <= ceiling + 1e-9]
        candidate = max(fitting, key=lambda c: chooser.quality(c, a))
    recipe = build(candidate, pool.some(a))
    held = pool.some(b)
    done = simulate(held, recipe)
    return measured(done.outputs, done.costs, held), candidate


def both_ways(
    chooser: Chooser, candidates: Sequence[Candidate] | None, ceiling: float, a: Rows, b: Rows
) -> tuple[Measured, Candidate]:
    count = len(a) + len(b)
    whole = Measured(np.zeros(count, bool), np.zeros(count), np.zeros(count))
    chosen = []
    for fit, held in ((a, b), (b, a)):
        part, candidate = chosen_and_measured(chooser, candidates, ceiling, fit, held)
        whole.correct[held], whole.costs[held], whole.losses[held] = part.correct, part.costs, part.losses
        chosen.append(candidate)
    return whole, chosen[0]


def measure(key: str, study: Study, assets: Path, limit: int | None, halvings: int) -> Iterator[Row]:
    evidence, unit = pool_of(study, assets, limit)
    pool = evidence.pool
    outcomes = Outcomes(pool, evidence.scoring, "nll")
    choosers = {
        "tuned": Chooser(outcomes, SearchSpace(pool.groups), evidence.clusters),
        "plain passes": Chooser(outcomes, SearchSpace(tuple(g for g in pool.groups if g.plain)), evidence.clusters),
    }
    full = choosers["tuned"]
    single = [c for c in full.usual.values() if len(c.networks) == 1 and len(c.groups) < 3]
    for name, candidate in full.usual.items():
        done = on_all(pool, candidate)
        first, plus, rest = name.partition(" + ")
        shown = (study.networks[0] if first == "base" else first) + plus + rest
        yield summary(key, 0.0, shown, [done], [done], unit, "")
    for ceiling in study.ceilings:
        found: dict[str, list[Measured]] = {"envelope": [], **{name: [] for name in choosers}}
        names: dict[str, str] = {}
        for seed in range(halvings):
            a, b = (np.asarray(half) for half in halves(len(pool), seed))
            for name in found:
                chooser = choosers.get(name, full)
                part, chosen = both_ways(chooser, None if name in choosers else single, ceiling / unit, a, b)
                names[name] = described(chosen, study.networks[0])
                found[name].append(part)
        for name, several in found.items():
            yield summary(key, ceiling, name, several, found["envelope"], unit, names[name])
        if study.against:
            alone = on_all(pool, full.usual[study.against])
            several = found["tuned"]
            yield summary(key, ceiling, AGAINST, several, [alone] * len(several), unit, study.against)


def halves(count: int, seed: int) -> tuple[list[int], list[int]]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[: count // 2]), sorted(order[count // 2 :])


def on_all(pool: Pool, candidate: Candidate) -> Measured:
    """What people do, on all images: nothing is chosen but temperatures."""
    done = simulate(pool, build(candidate, pool))
    return measured(done.outputs, done.costs, pool)


def measured(outputs: Tensor, costs: Tensor, pool: Pool) -> Measured:
    labels = pool.targets.long()
    losses = torch.nn.functional.cross_entropy(outputs, labels, reduction="none")
    return Measured((outputs.argmax(1) == labels).numpy(), costs.numpy(), losses.numpy())


def described(candidate: Candidate, first: str) -> str:
    """Such as `lite0 > 30 %: lite2 + lite2 flip, replaces > 5 %: resnet50`."""
    steps = []
    for step in candidate.steps:
        passes = []
        for group in step.groups:
            name = first if group.network == "base" else group.network
            passes.append(name + (f" {group.view}" if str(group.view) != "plain" else ""))
            passes[-1] += "" if group.states is None else f" in {group.states}"
        text = " and ".join(passes) + (", replaces" if step.join == "replace" else "")
        text += "" if step.weight == 1 else f", weight {step.weight:g}"
        steps.append(text if step.share == 1 else f"{step.share:.0%}: {text}")
    return " > ".join(steps)


def summary(
    key: str,
    ceiling: float,
    method: str,
    several: Sequence[Measured],
    envelope: Sequence[Measured],
    unit: float,
    recipe: str,
) -> Row:
    gains = [
        paired_gain(PairedCounts.from_correct(base.correct, own.correct))
        for base, own in zip(envelope, several, strict=True)
    ]
    return Row(
        key,
        ceiling,
        method,
        len(several[0].correct),
        100 * mean(float(m.correct.mean()) for m in several),
        unit * mean(float(m.costs.mean()) for m in several),
        100 * mean(g.estimate for g in gains),
        100 * mean(g.low for g in gains),
        100 * mean(g.high for g in gains),
        mean(float(m.losses.mean()) for m in several),
        recipe,
    )


# ---------------------------------------------------------------- rows, page, plot
def write_rows(rows: Sequence[Row]) -> None:
    with ROWS.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in rows)


def read_rows() -> list[Row]:
    text = {"study", "method", "recipe"}
    with ROWS.open(newline="", encoding="utf-8") as file:
        return [
            Row(**{k: v if k in text else int(v) if k == "images" else float(v) for k, v in row.items()})
            for row in csv.DictReader(file)
        ]


def page(rows: Sequence[Row]) -> str:
    tuned = [r for r in rows if r.study == "imagenet" and r.method == "tuned"]
    worst = min(tuned, key=lambda r: r.gain)
    significant = sum(r.low > 0 for r in tuned)
    lines = [
        "# Several networks at equal cost",
        "",
        f"**Recipes of five public ImageNet networks are {mean(r.gain for r in tuned):+.2f} points on average ahead of "
        f"the best single network at no more cost, flips included.** At {significant} of {len(tuned)} ceilings that is "
        f"significant; the least is {worst.gain:+.2f} (95 % CI {worst.low:+.2f} to {worst.high:+.2f}) at "
        f"{worst.ceiling:g} GMACs.",
        "",
        *views_add(rows),
        "",
        "![Accuracy over compute](../images/networks.svg)",
        "",
        "Commands: `python -m benchmarks.networks --assets DIR --studies imagenet mobilenet-resnet --limit "
        f"{tuned[0].images}` and `--studies cifar` measure, `python -m benchmarks.networks` writes this page. Each "
        "recipe is chosen on one random half of the images and measured on the other, both ways; means over "
        f"{HALVINGS} halvings. *Envelope*: the best single network, plain or flipped, chosen on the same half, at no "
        "more cost. Gain: tuned minus envelope, points, with the mean 95 % interval. *Plain passes*: the same tuner "
        "without views and states. All rows: [networks.csv](networks.csv).",
    ]
    for key, study in STUDIES.items():
        own = [r for r in rows if r.study == key]
        if own:
            lines += ["", f"## {study.title}", "", f"{own[0].images:,} images.", "", *table(own)]
    return "\n".join(lines) + "\n"


def views_add(rows: Sequence[Row]) -> list[str]:
    """What views and states add to the same tuner without them, in each study."""
    lines = ["Views and states add to the same tuner without them, on average over the ceilings:", ""]
    for key, study in STUDIES.items():
        own = {name: [r for r in rows if r.study == key and r.method == name] for name in ("tuned", "plain passes")}
        if own["tuned"]:
            more = mean(r.gain for r in own["tuned"]) - mean(r.gain for r in own["plain passes"])
            half = own["tuned"][0].images // 2
            lines.append(f"- {study.title}: {more:+.2f} points, chosen by {half:,} images.")
    return [*lines, "", "They make many more candidates to choose among, so that they need more images."]


def table(rows: Sequence[Row]) -> list[str]:
    lines = ["| GMACs at most | envelope | tuned | gain | 95 % CI | tuned, plain passes |", "|---|---|---|---|---|---|"]
    for ceiling in dict.fromkeys(r.ceiling for r in rows if r.ceiling):
        own = {r.method: r for r in rows if r.ceiling == ceiling}
        best, tuned, plain = own["envelope"], own["tuned"], own["plain passes"]
        interval = f"{tuned.low:+.2f} to {tuned.high:+.2f}"
        cells = f"{ceiling:g} | {best.accuracy:.2f} | {tuned.accuracy:.2f} | {tuned.gain:+.2f} | {interval}"
        lines.append(f"| {cells} | {plain.accuracy:.2f} |")
    against = [r for r in rows if r.method == AGAINST]
    if against:
        lines += ["", f"| GMACs at most | tuned minus {against[0].recipe} alone | 95 % CI |", "|---|---|---|"]
        lines += [f"| {r.ceiling:g} | {r.gain:+.2f} | {r.low:+.2f} to {r.high:+.2f} |" for r in against]
    lines += ["", "| what people do | accuracy | GMACs |", "|---|---|---|"]
    lines += [f"| {r.method} | {r.accuracy:.2f} | {r.gmacs:.3g} |" for r in rows if not r.ceiling]
    return lines


def readme_table(rows: Sequence[Row]) -> str:
    """At most six rows, one number in each cell."""
    own = [r for r in rows if r.study == "imagenet"]
    images = own[0].images
    wide = mean((r.high - r.low) / 2 for r in own if r.method == "tuned")
    lines = [
        f"Accuracy in % at equal compute on {images:,} ImageNet images, five public networks. Each recipe is chosen on",
        "one half of the images and measured on the other. *Best single network*: plain or flipped, chosen in the same",
        f"way, at no more cost. The 95 % intervals of the gains are about +-{wide:.1f} points: smaller gains can be",
        "chance.",
        "",
        "| compute, GMACs | best single network | networks tuned together | gain, points |",
        "|---|---|---|---|",
    ]
    for ceiling in (0.5, 0.7, 1.0, 1.66, 3.0):
        at = {r.method: r for r in own if r.ceiling == ceiling}
        if at:
            best, tuned = at["envelope"], at["tuned"]
            lines.append(f"| {ceiling:g} | {best.accuracy:.1f} | {tuned.accuracy:.1f} | {tuned.gain:+.1f} |")
    lines += [
        "",
        "![Accuracy over compute: single networks, flips, ensembles and tuned recipes](docs/images/networks.svg)",
        "",
        f"`python -m benchmarks.networks --assets DIR --limit {images}`; intervals and all rows: "
        "[docs/results/networks.md](docs/results/networks.md).",
    ]
    return "\n".join(lines)


def with_table(text: str, rows: Sequence[Row]) -> str:
    pattern = r"(<!-- table: python -m benchmarks.networks -->\n).*?(<!-- end of table -->)"
    return re.sub(pattern, lambda m: f"{m[1]}{readme_table(rows)}\n{m[2]}", text, flags=re.DOTALL)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy over GMACs: single networks, flips, ensembles and tuned recipes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    own = [r for r in rows if r.study == "imagenet"]
    usual = [r for r in own if not r.ceiling]
    kinds = {
        "single network": [r for r in usual if "+" not in r.method and "ensemble" not in r.method],
        "with a flip": [r for r in usual if re.fullmatch(r"\w+ \+ flip", r.method)],
        "ensemble of all": [r for r in usual if r.method.startswith("ensemble")],
    }
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for marker, (name, some) in zip("os^", kinds.items(), strict=True):
        axes.scatter([r.gmacs for r in some], [r.accuracy for r in some], marker=marker, label=name, s=28)
    tuned = [r for r in own if r.method == "tuned"]
    axes.plot([r.gmacs for r in tuned], [r.accuracy for r in tuned], "k.-", label="tuned recipes (held-out half)")
    axes.set(xlabel="GMACs for an image", ylabel="accuracy, %", xscale="log")
    axes.set_xticks([0.3, 0.5, 1, 2, 4, 8], ["0.3", "0.5", "1", "2", "4", "8"])
    axes.legend(frameon=False, fontsize=8)
    axes.grid(alpha=0.3)
    matplotlib.rcParams["svg.hashsalt"] = "unstride"
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--assets", type=Path, help="folder with weights and images; without it only the page is written"
    )
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--limit", type=int)
    parser.add_argument("--halvings", type=int, default=HALVINGS)
    args = parser.parse_args()
    rows = read_rows() if ROWS.exists() else []
    for key in args.studies if args.assets else ():
        rows = [r for r in rows if r.study != key]
        for row in measure(key, STUDIES[key], args.assets, args.limit, args.halvings):
            rows.append(row)
            print(time.strftime("%H:%M:%S"), row, flush=True)
        write_rows(rows)
    PAGE.write_text(page(rows), encoding="utf-8")
    draw(rows, PLOT)
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
