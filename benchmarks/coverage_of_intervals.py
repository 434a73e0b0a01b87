"""Do printed intervals hold, and are they narrow? `python -m benchmarks.coverage_of_intervals [--draws 1000]`.

Everything is simulated, so the truth is known. Writes docs/results/intervals.csv and the page beside it; rows of parts
that are not asked for stay. `--page` writes the page again from the rows.
Parts: `paired` (a fixed recipe), `chosen` (a recipe chosen on the same images by the rule of one standard error),
`labels` (some disagreements labelled), `metric` (bootstrap), `budget` (the ceiling of gates), and with `--assets DIR`
`tuned`: all of `tune` on images drawn with replacement from those of real networks, whose passes are computed once.
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

from unstride.evaluation import metrics
from unstride.evaluation.decisions import MARGIN, cost_interval, decide, one_standard_error, safe_shares
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
from unstride.tuning.candidates import SearchSpace
from unstride.tuning.choose import Chooser, build
from unstride.tuning.evidence import Evidence
from unstride.tuning.objectives import Outcomes
from unstride.tuning.simulate import simulate

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ROWS, PAGE = RESULTS / "intervals.csv", RESULTS / "intervals.md"
LOWEST, HIGHEST = 93.0, 97.5  # per cent of draws in which a 95 % interval should hold
FEW = 20  # expected disagreements, below which an interval may hold more often
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
    used: float | None = None  # how often a recipe that is not good enough is recommended, or a ceiling is exceeded
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


def one_draw(pool: Pool, images: int, generator: np.random.Generator, changes: list[float]) -> dict[str, Result]:
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
        changes.append(crossed.disagreements)
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
        changes: list[float] = []  # disagreements in each draw
        made, counted = 0, 0
        while counted < draws and made < 10 * draws:  # draws that keep the base model are not counted
            made += 1
            found = one_draw(pool, images, generator, changes)
            counted += len(found) > 1
            for method, result in found.items():
                every.setdefault(method, []).append(result)
        for method, results in every.items():
            wrong = sum(not_good_enough(r, images) for r in results)
            gain = f"true gain {100 * np.mean([t for _, t, _ in results]):+.2f}, {len(results) / made:.0%} of draws"
            note = f"{gain}, {np.mean(changes):.0f} expected"
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


def draw_labels(generator: np.random.Generator, images: int) -> Array:
    """Per image and label: 0 or 1, and the scores of two networks. (images, labels, 3)"""
    frequency = np.array([0.5, 0.3, 0.2, 0.15, 0.1, 0.08])
    target = (generator.random((images, len(frequency))) < frequency).astype(np.float64)
    before = 1.5 * target + generator.normal(0, 1, target.shape)
    after = before + 0.1 * target + generator.normal(0, 0.4, target.shape)
    return np.stack([target, before, after], -1)


def gain_precision(values: Array, weights: Array) -> Array:
    target, before, after = np.moveaxis(values, -1, 0)
    was, now = (metrics.mean_over_labels(metrics.average_precision, s, target, weights) for s in (before, after))
    return np.asarray(now - was)


METRICS: dict[str, tuple[Draw, Gain]] = {
    "mIoU, 8 classes": (draw_iou, gain_iou),
    "mean error, heavy tail": (draw_errors, gain_errors),
    "recall": (draw_recall, gain_recall),
    "mAP, 6 labels": (draw_labels, gain_precision),
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


# ---------------------------------------------------------------- the ceiling of gates
GATES: dict[str, tuple[Sequence[float], Sequence[float]]] = {
    "one gate": ([2.0], [1.0]),
    "two gates": ([1.0, 3.0], [1.0, 0.3]),
}
MANY = 20  # times as many draws: each is cheap


def budget(draws: int) -> Iterator[Row]:
    for (name, (extra, wanted)), images, new in itertools.product(GATES.items(), (200, 1000), (500, 5000)):
        generator = np.random.default_rng(0)
        shares = safe_shares(1.5, 1.0, extra, wanted, images, new)
        interval = cost_interval(1.0, extra, shares, images, new)
        found = []
        for _ in range(MANY * draws):
            known, fresh = np.sort(generator.random(images)), generator.random(new)
            passing = [float((fresh < known[round(share * images)]).mean()) for share in shares]
            found.append((interval, 1.0 + float(np.dot(extra, passing))))
        over = 100 * float(np.mean([cost > 1.5 for _, cost in found]))
        case = f"{name}: cost of {new:,} new images, ceiling 1.5"
        note = "shares " + ", ".join(f"{share:.3f}" for share in shares)
        yield summary("budget", case, images, "safe_shares", found, used=over, note=note)


# ---------------------------------------------------------------- all of tune, on real networks
CASES = {"cifar": (1.2, 1.5, 3.0), "imagenet": (1.5, 5.0)}  # ceilings, in forward passes of the first network
DRAWN = (500, 1000)  # images


def tuned(draws: int, assets: Path) -> Iterator[Row]:
    """The truth is what the written recipe gains on all images. Draws that keep the base model are counted apart."""
    from benchmarks import networks

    for name, ceilings in CASES.items():
        evidence, _ = networks.pool_of(networks.STUDIES[name], assets, None)
        for ceiling, images in itertools.product(ceilings, DRAWN):
            yield tuned_row(evidence, name, ceiling, images, draws)


def tuned_row(evidence: Evidence, name: str, ceiling: float, images: int, draws: int) -> Row:
    generator, every = np.random.default_rng(images), evidence.pool
    base = evidence.baseline(None, None, None)  # type: ignore[arg-type]  # a network alone needs no images
    found, kept, wrong, over, ran = [], 0, 0, 0, 0
    for seed in range(draws):
        pool = every.some(generator.integers(0, len(every), images))
        drawn = Evidence.of(evidence.pipeline, evidence.data, pool, evidence.scoring, None, seed)
        chooser = Chooser(Outcomes(pool, drawn.scoring), SearchSpace(pool.groups), drawn.clusters, seed=seed)
        written = build(chooser.choose(ceiling, np.arange(images)), pool)
        baseline = drawn.baseline(None, None, None)  # type: ignore[arg-type]
        test = drawn.test(chooser, written, ceiling, baseline)
        verdict = drawn.decide(test, baseline, None).verdict
        done = simulate(every, written)
        truth = evidence.scoring.gain(base.stats, evidence.stats(done.outputs)).estimate
        over += done.cost > ceiling
        ran += 1
        kept += verdict == "keep"
        wrong += verdict == "use" and truth <= (-MARGIN if done.cost < base.cost else 0.0)
        if written.stages != base.recipe.stages:
            found.append((test.gain, truth))
    note = f"keep in {kept / ran:.0%} of draws, over the ceiling in {100 * over / ran:.1f} %"
    return summary("tuned", f"{name}, ceiling {ceiling:g}", images, "tune", found, used=100 * wrong / ran, note=note)


# ---------------------------------------------------------------- the table
PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "paired": paired,
    "chosen": chosen,
    "labels": labels,
    "metric": metric,
    "budget": budget,
    "tuned": tuned,
}


def printed(row: Row) -> str:
    used = "" if row.used is None else f"{row.used:.1f}"
    numbers = (f"{v:.1f}" for v in (row.holds, row.above, row.below))
    cells = (row.part, row.case, f"{row.images:,}", row.method, str(row.draws), *numbers, f"{row.width:.2f}", used)
    return "| " + " | ".join((*cells, row.note)) + " |"


def read_rows(path: Path = ROWS) -> list[Row]:
    kinds: dict[str, Callable[[str], object]] = {f.name: str for f in fields(Row)}
    kinds |= {"images": int, "draws": int} | dict.fromkeys(("holds", "above", "below", "width"), float)
    kinds["used"] = lambda text: float(text) if text else None
    with path.open(newline="") as file:
        lines = [{k: kinds[k](v) for k, v in line.items()} for line in csv.DictReader(file)]
    return [Row(**line) for line in lines]  # type: ignore[arg-type]


def write_rows(rows: Sequence[Row], path: Path = ROWS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 3) if isinstance(v, float) else v for k, v in asdict(r).items()} for r in rows)


# ---------------------------------------------------------------- the page
def ours(row: Row) -> bool:
    """Whether it is the interval that unstride prints."""
    return "(ours)" in row.method or row.part in ("labels", "metric")


def few(row: Row) -> bool:
    """Whether so few disagreements are expected that the interval may hold more often."""
    words = row.note.split()
    return "expected" in words and float(words[words.index("expected") - 1]) < FEW


def good(row: Row) -> bool:
    return row.holds >= LOWEST and (row.holds <= HIGHEST or few(row))


def narrowing(rows: Sequence[Row], row: Row) -> float | None:
    """The width as a part of the narrowest interval before, in per cent."""
    case = (row.part, row.case, row.images)
    before = [r.width for r in rows if (r.part, r.case, r.images) == case and "(before)" in r.method]
    return 100 * row.width / min(before) if before else None


def mean_of(values: Sequence[float | None], form: str = ".0f") -> str:
    known = [v for v in values if v is not None]
    return format(float(np.mean(known)), form) if known else ""


def page(rows: Sequence[Row]) -> str:
    printed_rows = [row for row in rows if ours(row)]
    within = [row for row in printed_rows if LOWEST <= row.holds <= HIGHEST]
    allowed = [row for row in printed_rows if row.holds > HIGHEST and few(row)]
    wide = [row for row in printed_rows if row.holds > HIGHEST and not few(row)]
    narrow = [row for row in printed_rows if row.holds < LOWEST]
    wrong = max((row.used for row in printed_rows if row.used is not None), default=0.0)
    parts = [v for row in printed_rows if (v := narrowing(rows, row)) is not None]
    lines = [
        "# Do the intervals hold?",
        "",
        f"**The 95 % interval holds in {LOWEST:g} to {HIGHEST:g} % of draws in {len(within)} of {len(printed_rows)} "
        f"simulated cases.** In {len(allowed)} more it holds more often, with fewer than {FEW} expected disagreements. "
        f"In {len(wide)} it is too wide, in {len(narrow)} too narrow. Its width is {mean_of(parts)} % of the interval "
        f"before, in the mean. A recipe that is not good enough is recommended in at most {wrong:.1f} % of draws.",
        "",
        "Command: `python -m benchmarks.coverage_of_intervals`. The truth is known, because everything is simulated: "
        f"{max(row.draws for row in printed_rows):,} draws of 100 to 2,500 images in each case. *Wrong*: the recipe is "
        "recommended although it is no better, or cheaper and worse by more than half a point. All rows: "
        "[intervals.csv](intervals.csv).",
        "",
        "| interval of | cases | as they should be | lowest, % | highest, % | width, % of before | wrong, % |",
        "|---|---|---|---|---|---|---|",
    ]
    names = {"paired": "a fixed recipe", "chosen": "a chosen recipe", "labels": "some labels", "metric": "a metric"}
    groups: dict[str, list[Row]] = {}
    for row in printed_rows:
        detail = f"{row.images:,} images" if row.part == "paired" else row.method if row.part == "labels" else row.case
        groups.setdefault(f"{names[row.part]}: {detail}", []).append(row)
    for name, own in groups.items():
        holds = [row.holds for row in own]
        used = [row.used for row in own if row.used is not None]
        cells = (
            name,
            str(len(own)),
            str(sum(map(good, own))),
            f"{min(holds):.1f}",
            f"{max(holds):.1f}",
            mean_of([narrowing(rows, row) for row in own]),
            f"{max(used):.1f}" if used else "",
        )
        lines.append("| " + " | ".join(cells) + " |")
    over = [row.used for row in rows if row.part == "budget" and row.used is not None]
    if over:
        ceiling = f"it is exceeded in at most {max(over):.1f} % of draws, in {len(over)} cases"
        lines += ["", f"A ceiling on the mean cost: {ceiling} (the part `budget` of the CSV)."]
    if whole := [row for row in rows if row.part == "tuned"]:
        lines += ["", *tuned_table(whole)]
    return "\n".join(lines) + "\n"


def tuned_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "The whole of `tune` on real networks: images drawn with replacement from the development images, copies in "
        "one fold. The truth is what the written recipe gains on all images. Command: the same with `--parts tuned "
        "--assets DIR`.",
        "",
        "| networks, ceiling | images | draws | holds, % | wrong, % | verdicts and cost |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = (row.case, f"{row.images:,}", f"{row.draws:,}", f"{row.holds:.1f}", f"{row.used or 0:.1f}", row.note)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="by default all that need no --assets")
    parser.add_argument("--assets", type=Path, help="folder with weights and images, for the part `tuned`")
    parser.add_argument("--page", action="store_true", help="only write the page, from the rows that are there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of intervals.csv and intervals.md")
    args = parser.parse_args()
    if "tuned" in (args.parts or ()) and args.assets is None:
        parser.error("--parts tuned needs --assets DIR")
    path = args.out / ROWS.name
    rows = read_rows(path) if path.is_file() else []
    if not args.page:
        names = [f.name for f in fields(Row)]
        print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for part in args.parts or [part for part in PARTS if part != "tuned"]:
            fresh = []
            for row in PARTS[part](args.draws, *([args.assets] if part == "tuned" else [])):
                fresh.append(row)
                print(printed(row), flush=True)
            rows = sorted([*(r for r in rows if r.part != part), *fresh], key=lambda r: list(PARTS).index(r.part))
            write_rows(rows, path)
    (args.out / PAGE.name).write_text(page(read_rows(path)))


if __name__ == "__main__":
    main()
