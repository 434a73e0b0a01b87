"""Do printed intervals hold, and are they narrow? `python -m benchmarks.coverage_of_intervals [--draws 1000]`.

Everything is simulated, so the truth is known. Prints one table and writes it to benchmarks/coverage_of_intervals.csv.
Parts: `paired` (a fixed recipe), `chosen` (a recipe chosen on the same images by the rule of one standard error),
`labels` (some disagreements labelled), `metric` (bootstrap) and `budget` (the ceiling of a gate).
"""

import argparse
import csv
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unstride.evaluation.decisions import MARGIN, cost_interval, decide, one_standard_error, safe_share
from unstride.evaluation.intervals import (
    Array,
    ConfidenceInterval,
    PairedCounts,
    beta_quantile,
    bootstrap_gain,
    cross_validated,
    gain_from_labels,
    paired_gain,
    tango,
)

ROWS = Path(__file__).with_suffix(".csv")
IMAGES = (200, 500, 1000, 2500)
FOLDS = 5
POPULATION = 100_000


@dataclass(frozen=True)
class Row:
    """Shares are in per cent, gains and widths in points (metrics: in hundredths)."""

    part: str
    case: str
    images: int
    method: str
    draws: int
    holds: float  # how often the interval holds the truth
    above: float  # how often all of it is above the truth
    below: float
    width: float
    used: float | None = None  # how often a recipe that is not good enough is recommended
    note: str = ""


def summary(
    part: str, case: str, images: int, method: str, found: Sequence[tuple[ConfidenceInterval, float]], **more: object
) -> Row:
    low, high, truth = (np.array(v) for v in zip(*((i.low, i.high, t) for i, t in found), strict=True))
    above, below = 100 * float((low > truth).mean()), 100 * float((high < truth).mean())
    width = 100 * float((high - low).mean())
    return Row(part, case, images, method, len(found), 100 - above - below, above, below, width, **more)  # type: ignore[arg-type]


def clopper_pearson_product(counts: PairedCounts) -> ConfidenceInterval:
    """The interval before: two exact intervals, at half of the error each, and the product of their ends."""
    changed, error = counts.disagreements, 0.0125
    share = (
        beta_quantile(changed, counts.images - changed + 1, error),
        beta_quantile(changed + 1, counts.images - changed, 1 - error),
    )
    part = (
        beta_quantile(counts.corrected, counts.broken + 1, error),
        beta_quantile(counts.corrected + 1, counts.broken, 1 - error),
    )
    ends = [s * (2 * p - 1) for s in share for p in part]
    return ConfidenceInterval(counts.gain, min(ends), max(ends))


def bonett_price(counts: PairedCounts) -> ConfidenceInterval:
    """The adjusted Wald interval (Bonett and Price, 2012)."""
    corrected, broken = ((k + 1) / (counts.images + 2) for k in (counts.corrected, counts.broken))
    arm = 1.96 * math.sqrt((corrected + broken - (corrected - broken) ** 2) / (counts.images + 2))
    middle = corrected - broken
    return ConfidenceInterval(counts.gain, min(middle - arm, counts.gain), max(middle + arm, counts.gain))


cached = functools.lru_cache(maxsize=None)
METHODS = {
    "Fay-Lumbard mid-p (ours)": cached(paired_gain),
    "Tango": cached(tango),
    "Bonett-Price": cached(bonett_price),
    "two Clopper-Pearson (before)": cached(clopper_pearson_product),
}
OURS = METHODS["Fay-Lumbard mid-p (ours)"]
BEFORE = METHODS["two Clopper-Pearson (before)"]


# ---------------------------------------------------------------- a fixed recipe
def paired(draws: int) -> Iterator[Row]:
    generator = np.random.default_rng(0)
    for images, changed in itertools.product(IMAGES, (0.02, 0.05, 0.15)):
        for gain in (-changed / 2, -MARGIN, 0.0, changed / 2):
            shares = [(changed + gain) / 2, (changed - gain) / 2, 1 - changed]
            rows = generator.multinomial(images, shares, size=draws)
            counts = [PairedCounts(int(x), int(b), images) for x, b, _ in rows]
            case = f"{100 * changed:g} % change, gain {100 * gain:+.2f}"
            cost = 0.5 if gain == -MARGIN else 1.5
            for name, method in METHODS.items():
                intervals = [method(c) for c in counts]
                wrong = None
                if gain in (0.0, -MARGIN) and method is OURS:
                    wrong = 100 * use_rate(images, changed, gain, cost)
                found = [(i, gain) for i in intervals]
                yield summary("paired", case, images, name, found, used=wrong, note=f"{images * changed:.0f} expected")


def use_rate(images: int, changed: float, gain: float, cost: float) -> float:
    """How often the verdict is "use": exact, a sum over the numbers of corrected and broken images."""
    share, part = 0.0, (changed + gain) / changed / 2
    spread = 4.5 * math.sqrt(images * changed)
    for count in range(max(0, int(images * changed - spread)), int(images * changed + spread) + 2):
        low, high = -1, count + 1  # the fewest corrected images that give "use"
        while high - low > 1:
            middle = (low + high) // 2
            used = decide(OURS(PairedCounts(middle, count - middle, images)), images, cost).verdict == "use"
            low, high = (low, middle) if used else (middle, high)
        tail = sum(binomial(k, count, part) for k in range(high, count + 1))
        share += binomial(count, images, changed) * tail
    return share


def binomial(hits: int, count: int, share: float) -> float:
    ways = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    return math.exp(ways + hits * math.log(share) + (count - hits) * math.log1p(-share))


# ---------------------------------------------------------------- a recipe chosen on the same images
@dataclass(frozen=True, eq=False)
class Pool:
    """NLL and correctness of each recipe on a large population, cost, and the true gain. Recipe 0 is the base."""

    nll: NDArray[np.float32]
    correct: NDArray[np.bool_]
    cost: Array
    truth: Array


@dataclass(frozen=True)
class World:
    """Images have a latent difficulty. Views share some of the base model's error and add their own."""

    shared: float = 0.7
    own: float = 0.5
    losses: tuple[float, ...] = (0.0, 0.05, 0.15, 0.3)  # what views lose on average; drawn for each view
    sharpness: float = 1.0  # above 1, the base model is overconfident
    calming: float | None = None  # averages lose confidence beyond this, and gain NLL without any accuracy
    second: bool = False  # a second network is in the pool
    cascade: bool = False  # the baseline is the second network, at twice the cost; recipes reach it through a gate


WORLDS = {
    "small gains": World(),
    "none is better": World(losses=(0.08, 0.1, 0.12), sharpness=4.0),
    "better NLL, not accuracy": World(losses=(0.06, 0.08, 0.09), sharpness=2.0, calming=1.5),
    "a second network": World(second=True),
    "a cheaper cascade": World(cascade=True),
}


@functools.lru_cache(maxsize=1)
def pool_of(world: World, seed: int = 1) -> Pool:
    generator = np.random.default_rng(seed)

    def noise(deviation: float) -> NDArray[np.float64]:
        return generator.normal(0, deviation, POPULATION)

    difficulty = 2 + noise(2.0)
    error = noise(world.shared)
    base = difficulty + error + noise(world.own)
    if world.cascade:
        return _cascade(base, difficulty + noise(0.6))
    views = [difficulty + error + noise(world.own) - generator.choice(world.losses) for _ in range(5)]
    costs = [1.0, 1.7, 0.6, 1.0, 1.3]
    if world.second:
        views.append(difficulty + noise(0.6) + 0.3)
        costs.append(2.0)
    sets = [(i,) for i in range(len(views))] + [(0, i) for i in range(1, len(views))] + [(0, 1, 2)]
    margins, cost = [base], [1.0]
    for some, share in itertools.product(sets, (0.1, 0.2, 0.3, 0.5, 1.0)):
        average = (base + sum(views[i] for i in some)) / (1 + len(some))
        if world.calming:
            average = world.calming * np.tanh(average / world.calming)
        margins.append(np.where(np.abs(base) <= np.quantile(np.abs(base), share), average, base))
        cost.append(1 + share * sum(costs[i] for i in some))
    return _measured(np.stack(margins, 1), cost, world.sharpness)


def _cascade(small: Array, large: Array) -> Pool:
    shares = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
    gated = [np.where(np.abs(small) <= np.quantile(np.abs(small), share), large, small) for share in shares]
    return _measured(np.stack([large, *gated], 1), [2.0, *(1 + 2 * share for share in shares)], 1.0)


def _measured(margins: Array, cost: Sequence[float], sharpness: float) -> Pool:
    correct = margins > 0
    nll = np.logaddexp(0, -sharpness * margins).astype(np.float32)
    return Pool(nll, correct, np.array(cost), correct.mean(0) - correct[:, 0].mean())


Result = tuple[ConfidenceInterval, float, float]  # and the true gain and the cost of the recipe


def not_good_enough(result: Result, images: int) -> bool:
    """Whether a recipe is recommended that is no better, or that is cheaper and worse by the margin."""
    interval, truth, cost = result
    used = decide(interval, images, cost).verdict == "use"
    return used and truth <= (-MARGIN if cost < 1 else 0.0)


def widened(interval: ConfidenceInterval, variance: float) -> ConfidenceInterval:
    factor = math.sqrt(variance)
    low, high = (interval.estimate + factor * (end - interval.estimate) for end in (interval.low, interval.high))
    return ConfidenceInterval(interval.estimate, low, high)


def one_draw(pool: Pool, images: int, generator: np.random.Generator) -> dict[str, Result]:
    """Choose, cross-validate and estimate; the truth of each method is the gain of the recipe that it writes."""
    rows = generator.integers(0, POPULATION, images)
    nll, correct = pool.nll[rows], pool.correct[rows]
    base = correct[:, 0]

    def choose(used: NDArray[np.bool_]) -> int:
        return one_standard_error(nll[used], pool.cost)

    every = np.full(images, True)
    written = choose(every)
    fold = np.arange(images) % FOLDS
    answers = np.empty(images, dtype=bool)
    for k in range(FOLDS):
        answers[fold == k] = correct[fold == k, choose(fold != k)]
    own, crossed = (PairedCounts.from_correct(base, a) for a in (correct[:, written], answers))
    change = PairedCounts.from_correct(answers, correct[:, written]).standard_error
    truth = float(pool.truth[written])
    results = {}
    if written:
        results = {
            "cross-validated, and how unstable the choice is (ours)": cross_validated(OURS(crossed), change),
            "cross-validated answers": OURS(crossed),
            "answers of the written recipe": OURS(own),
            "cross-validated, variance x (1 + 1/(k-1))": widened(OURS(crossed), 1 + 1 / (FOLDS - 1)),
            "cross-validated, variance x (1 + k/(k-1)) (before)": widened(OURS(crossed), 1 + FOLDS / (FOLDS - 1)),
            "two Clopper-Pearson of cross-validated answers (before)": BEFORE(crossed),
        }
    cost = pool.cost / pool.cost[0]
    found = {name: (interval, truth, float(cost[written])) for name, interval in results.items()}
    held = np.arange(images) < images / 2
    if half := choose(~held):
        counts = PairedCounts.from_correct(base[held], correct[held, half])
        found["half of the images held back, its own recipe"] = OURS(counts), float(pool.truth[half]), float(cost[half])
    return found


def chosen(draws: int) -> Iterator[Row]:
    for (name, world), images in itertools.product(WORLDS.items(), IMAGES):
        pool = pool_of(world)
        generator = np.random.default_rng(images)
        every: dict[str, list[Result]] = {}
        made, counted = 0, 0
        while counted < draws and made < 3 * draws:  # draws that keep the base model are not counted
            made += 1
            found = one_draw(pool, images, generator)
            counted += len(found) > 1
            for method, result in found.items():
                every.setdefault(method, []).append(result)
        for method, results in every.items():
            wrong = sum(not_good_enough(r, images) for r in results)
            note = f"true gain {100 * np.mean([t for _, t, _ in results]):+.2f}, {len(results) / made:.0%} of draws"
            yield summary("chosen", name, images, method, [r[:2] for r in results], used=100 * wrong / made, note=note)


# ---------------------------------------------------------------- some disagreements labelled
def labels(draws: int) -> Iterator[Row]:
    images, shares = 2500, {1: 0.03, -1: 0.018, 0: 0.012}
    for count in (15, 30, 60, None):
        generator, found = np.random.default_rng(0), []
        for _ in range(draws):
            signs = generator.choice([*shares, 9], size=images, p=[*shares.values(), 1 - sum(shares.values())])
            signs = generator.permutation(signs[signs != 9])
            interval = gain_from_labels(signs[: count or len(signs)], len(signs), images)
            found.append((interval, shares[1] - shares[-1]))
        row = summary(
            "labels", "of about 150 disagreements of 2,500 images", images, f"{count or 'all'} labelled", found
        )
        corrected, broken = shares[1], shares[-1]
        equal = (2 * 1.96 * 100 / row.width) ** 2 * (corrected + broken - (corrected - broken) ** 2)
        yield Row(**{**asdict(row), "note": f"as wide as {equal:,.0f} labelled images drawn at random"})


# ---------------------------------------------------------------- any metric
Draw = Callable[[np.random.Generator, int], Array]
Gain = Callable[[Array, Array], Array]  # of per-image values and weights (draws, images)


def draw_iou(generator: np.random.Generator, images: int) -> Array:
    """Per image and class: true positives, predicted and true area, of two networks. (images, classes, 5)"""
    frequency = np.array([0.4, 0.25, 0.15, 0.08, 0.05, 0.04, 0.02, 0.01])
    shape = (images, len(frequency))
    present = generator.random(shape) < np.clip(4 * frequency, 0.05, 1)
    area = np.where(present, frequency * generator.gamma(1.0, 1.0, shape), 0) + 1e-9
    area /= area.sum(1, keepdims=True)
    logit = 1.5 + generator.normal(0, 1, (images, 1)) + generator.normal(0, 0.7, shape)
    columns = [area]
    for shift in (0.0, 0.06 + generator.normal(0, 0.3, shape)):
        positives = area / (1 + np.exp(-(logit + shift)))
        spilled = (area - positives).sum(1, keepdims=True) * generator.dirichlet(np.full(len(frequency), 0.5), images)
        columns += [positives, positives + spilled]
    return np.stack(columns, -1)


def gain_iou(values: Array, weights: Array) -> Array:
    area, *rest = np.moveaxis(np.tensordot(weights, values, 1), -1, 0)
    before, after = (p / (area + q - p) for p, q in (rest[:2], rest[2:]))
    return (after - before).mean(-1)


def draw_errors(generator: np.random.Generator, images: int) -> Array:
    before = generator.lognormal(0, 1, images)
    return np.stack([before, before * np.exp(generator.normal(-0.07, 0.3, images))], 1)


def gain_errors(values: Array, weights: Array) -> Array:
    before, after = np.moveaxis(weights @ values, -1, 0)
    return 1 - after / before


def draw_recall(generator: np.random.Generator, images: int) -> Array:
    objects = generator.poisson(4, images) + 1
    before = generator.binomial(objects, generator.beta(8, 2, images))
    after = np.clip(before + generator.binomial(1, 0.08, images) - generator.binomial(1, 0.05, images), 0, objects)
    return np.stack([objects, before, after], 1).astype(np.float64)


def gain_recall(values: Array, weights: Array) -> Array:
    objects, before, after = np.moveaxis(weights @ values, -1, 0)
    return (after - before) / objects


METRICS: dict[str, tuple[Draw, Gain]] = {
    "mIoU, 8 classes": (draw_iou, gain_iou),
    "mean error, heavy tail": (draw_errors, gain_errors),
    "recall": (draw_recall, gain_recall),
}


def metric(draws: int) -> Iterator[Row]:
    for (name, (draw, gain)), images in itertools.product(METRICS.items(), (100, 200, 500)):
        generator, found = np.random.default_rng(0), []
        population = draw(generator, 200_000)
        truth = float(gain(population, np.ones((1, len(population))))[0])
        for _ in range(draws):
            values = draw(generator, images)
            interval = bootstrap_gain(functools.partial(gain, values), images, draws=400)
            found.append((interval, truth))
        yield summary("metric", name, images, "bootstrap", found)


# ---------------------------------------------------------------- the ceiling of a gate
def budget(draws: int) -> Iterator[Row]:
    for images, new in itertools.product((200, 1000), (500, 5000)):
        generator = np.random.default_rng(0)
        share = safe_share(1.5, 1.0, 2.0, images, new)
        interval = cost_interval(1.0, [2.0], [share], images, new)
        found, over = [], 0
        for _ in range(draws):
            threshold = np.sort(generator.random(images))[round(share * images)]
            cost = 1.0 + 2.0 * float((generator.random(new) < threshold).mean())
            over += cost > 1.5
            found.append((interval, cost))
        note = f"share {share:.3f} of .25, over the ceiling in {100 * over / draws:.1f} %"
        yield summary("budget", f"cost of {new:,} new images, ceiling 1.5", images, "safe_share", found, note=note)


# ---------------------------------------------------------------- the table
PARTS = {"paired": paired, "chosen": chosen, "labels": labels, "metric": metric, "budget": budget}


def printed(row: Row) -> str:
    used = "" if row.used is None else f"{row.used:.1f}"
    numbers = (f"{v:.1f}" for v in (row.holds, row.above, row.below))
    cells = (row.part, row.case, f"{row.images:,}", row.method, str(row.draws), *numbers, f"{row.width:.2f}", used)
    return "| " + " | ".join((*cells, row.note)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    names = [f.name for f in fields(Row)]
    print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
    rows = []
    for part in args.parts:
        for row in PARTS[part](args.draws):
            rows.append(row)
            print(printed(row), flush=True)
    with ROWS.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in rows)


if __name__ == "__main__":
    main()
