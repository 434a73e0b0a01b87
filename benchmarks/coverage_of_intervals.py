"""Do printed intervals hold, and are they narrow? `python -m benchmarks.coverage_of_intervals [--draws 1000]`.

Everything is simulated, so the truth is known. Writes docs/results/intervals.csv and the page beside it; rows of parts
that are not asked for stay. `--page` writes the page again from the rows.
Parts: `paired` (a fixed recipe), `chosen` (a recipe chosen on the same images by the rule of one standard error),
`labels` (some disagreements labelled), `metric` (bootstrap), `budget` (the ceiling of gates). On images drawn with
replacement from those of real networks, whose passes are computed once: `tuned` (all of `tune`) and `compared`
(`unstride compare`), by default of the embedded sample; other studies need `--assets DIR`.
"""

import argparse
import csv
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from unstride.evaluation import metrics
from unstride.evaluation.decisions import MARGIN, cost_interval, decide, one_standard_error, safe_shares
from unstride.evaluation.intervals import (
    LEVEL,
    Array,
    ConfidenceInterval,
    PairedCounts,
    beta_quantile,
    bootstrap_gain,
    cross_validated,
    crossing,
    gain_from_labels,
    paired_gain,
)
from unstride.evaluation.rows import decision_of
from unstride.tuning.candidates import SearchSpace
from unstride.tuning.choose import Chooser
from unstride.tuning.evidence import Evidence
from unstride.tuning.objectives import Outcomes
from unstride.tuning.simulate import build, simulate

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
    wrong: float | None = None  # how often a recipe that is not good enough is recommended
    over: float | None = None  # how often the mean cost of new images exceeds the ceiling
    kept: float | None = None  # how often the verdict is to keep the baseline
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


def tango(counts: PairedCounts, level: float = LEVEL) -> ConfidenceInterval:
    """The gain in accuracy with the score interval of Tango (Statistics in Medicine 17, 1998)."""
    corrected, broken, images = counts.corrected, counts.broken, counts.images

    def score(gain: float) -> float:
        """The score statistic, with the share of broken images that is most likely under this gain."""
        b = (2 * images - corrected + broken) * gain - corrected - broken
        c = -broken * gain * (1 - gain)
        share = (math.sqrt(max(0.0, b * b - 8 * images * c)) - b) / (4 * images)
        variance = images * (2 * share + gain * (1 - gain))
        difference = corrected - broken - images * gain
        return difference / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, difference)

    z = NormalDist().inv_cdf((1 + level) / 2)
    low = crossing(lambda g: z - score(g), -1.0, counts.gain)
    high = crossing(lambda g: -z - score(g), counts.gain, 1.0)
    return ConfidenceInterval(counts.gain, low, high, level)


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
                yield summary("paired", case, images, name, found, wrong=wrong, note=f"{images * changed:.0f} expected")


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
            yield summary("chosen", name, images, method, [r[:2] for r in results], wrong=100 * wrong / made, note=note)


# ---------------------------------------------------------------- some disagreements labelled
LABELLED = (15, 30, 60, None)
COMPARED = 2500  # images, unlabelled but for the disagreements


def labels(draws: int) -> Iterator[Row]:
    shares = {1: 0.03, -1: 0.018, 0: 0.012}
    population = np.repeat([*shares, 9], [round(POPULATION * s) for s in (*shares.values(), 1 - sum(shares.values()))])
    yield from label_rows("labels", "simulated", population, draws)


def compared(draws: int, assets: Path | None, studies: Sequence[str], limit: int | None) -> Iterator[Row]:
    """Two recipes on images drawn with replacement from those of real networks."""
    for study in studies:
        evidence = evidence_of(study, assets, limit)
        pool, names = evidence.pool, evidence.names
        usual = Chooser(Outcomes(pool, evidence.scoring), SearchSpace(pool.groups), evidence.clusters).usual
        before = simulate(pool, build(usual["base"], pool)).outputs.argmax(1)
        for name in list(usual)[1:3]:  # the first network with a flip, the second network
            after = simulate(pool, build(usual[name], pool)).outputs.argmax(1)
            signs = (after == pool.targets).int() - (before == pool.targets).int()
            signs[before == after] = 9
            case = f"{study}: {names['base']}, {name.replace('base', names['base'])}"
            yield from label_rows("compared", case, signs.numpy(), draws)


def label_rows(part: str, case: str, population: NDArray[np.int64], draws: int) -> Iterator[Row]:
    """`population`: 1 corrected, -1 broken, 0 both wrong, 9 the same answer."""
    truth = float((population == 1).mean() - (population == -1).mean())
    variance = float((np.abs(population) == 1).mean()) - truth**2
    for count in LABELLED:
        generator, found, differ = np.random.default_rng(0), [], 0
        for _ in range(draws):
            signs = generator.choice(population, COMPARED)
            signs = signs[signs != 9]
            differ += len(signs)
            found.append((gain_from_labels(signs[: count or len(signs)], len(signs), COMPARED), truth))
        row = summary(part, case, COMPARED, f"{count or 'all'} labelled", found)
        equal = (2 * 1.96 * 100 / row.width) ** 2 * variance
        note = f"of {differ / draws:.0f} disagreements: as wide as {equal:.0f} labelled images drawn at random"
        yield replace(row, note=note)


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
CHEAP = 200  # times as many draws: each is cheap


def budget(draws: int) -> Iterator[Row]:
    for (name, (extra, wanted)), images, new in itertools.product(GATES.items(), (200, 1000), (500, 5000)):
        generator = np.random.default_rng(0)
        shares = safe_shares(1.5, 1.0, extra, wanted, images, new)
        interval = cost_interval(1.0, extra, shares, images, new)
        counts = [round(share * images) for share in (1.0, *shares)]
        # Thresholds are order statistics of the known images: the shares between them are Dirichlet distributed.
        between = [after - before for before, after in itertools.pairwise((-1, *sorted(counts)))]
        parts = generator.dirichlet(between, CHEAP * draws)
        passing = np.cumsum(generator.multinomial(new, parts), 1)[:, -2::-1] / new
        costs = 1.0 + passing @ np.array(extra)
        over = 100 * float((costs > 1.5 + 1e-9).mean())
        case = f"{name}: cost of {new:,} new images, ceiling 1.5"
        note = "shares " + ", ".join(f"{share:.3f}" for share in shares)
        yield summary("budget", case, images, "safe_shares", [(interval, c) for c in costs], over=over, note=note)


# ---------------------------------------------------------------- all of tune, on real networks
CEILINGS = {"sample": (1.5, 3.0), "cifar": (1.5, 3.0), "imagenet": (1.5, 5.0)}  # in passes of the first network
DRAWN = (500, 1000)  # images


def evidence_of(study: str, assets: Path | None, limit: int | None) -> Evidence:
    """Every pass of every network, computed once."""
    from benchmarks import networks

    if study == "sample":
        return networks.evidence_of("sample", "sample", math.inf)[0]
    if assets is None:
        raise SystemExit(f"--studies {study} needs --assets DIR")
    return networks.pool_of(networks.STUDIES[study], assets, limit)[0]


def tuned(draws: int, assets: Path | None, studies: Sequence[str], limit: int | None) -> Iterator[Row]:
    """The truth is what the written recipe gains on all images."""
    for name in studies:
        evidence = evidence_of(name, assets, limit)
        for ceiling, images in itertools.product(CEILINGS[name], DRAWN):
            yield from tuned_rows(evidence, name, ceiling, images, draws)


def tuned_rows(evidence: Evidence, name: str, ceiling: float, images: int, draws: int) -> Iterator[Row]:
    """The interval of `tune` and the one before. Draws that write the baseline have no interval."""
    generator, every = np.random.default_rng(images), evidence.pool
    base = evidence.baseline(None, None, None)  # type: ignore[arg-type]  # a network alone needs no images
    verdicts, wrong, over = [], 0, 0
    ours: list[tuple[ConfidenceInterval, float]] = []
    before: list[tuple[ConfidenceInterval, float]] = []
    for seed in range(draws):
        pool = every.some(generator.integers(0, len(every), images))
        drawn = Evidence.of(evidence.pipeline, evidence.data, pool, evidence.scoring, None, seed)
        chooser = Chooser(Outcomes(pool, drawn.scoring), SearchSpace(pool.groups), drawn.clusters, seed=seed)
        written = build(chooser.choose(ceiling, np.arange(images)), pool)
        baseline = drawn.baseline(None, None, None)  # type: ignore[arg-type]
        row, stats = drawn.test(chooser, written, ceiling, baseline)
        own = drawn.rows(chooser, baseline)[0]
        verdicts.append(decision_of(row, own).verdict)
        done = simulate(every, written)
        truth = evidence.scoring.gain(base.stats, evidence.stats(done.outputs)).estimate
        over += done.cost > ceiling
        wrong += verdicts[-1] == "use" and truth <= (-MARGIN if done.cost < base.cost else 0.0)
        if written.stages != base.recipe.stages:
            assert row.gain is not None
            ours.append((row.gain, truth))
            counts = PairedCounts.from_correct(*(drawn.scoring.correct(s) for s in (baseline.stats, stats)))
            before.append((BEFORE(counts), truth))
    gain = 100 * float(np.mean([truth for _, truth in ours])) if ours else 0.0
    rates = {f: 100 * n / draws for f, n in (("wrong", wrong), ("over", over), ("kept", verdicts.count("keep")))}
    case, note = f"{name}: ceiling {ceiling:g}", f"use in {verdicts.count('use') / draws:.0%}, true gain {gain:+.2f}"
    if ours:
        yield summary("tuned", case, images, "tune (ours)", ours, **rates, note=note)
        yield summary("tuned", case, images, "two Clopper-Pearson of cross-validated answers (before)", before)


# ---------------------------------------------------------------- the table
PARTS: dict[str, Callable[..., Iterator[Row]]] = {
    "paired": paired,
    "chosen": chosen,
    "labels": labels,
    "metric": metric,
    "budget": budget,
    "tuned": tuned,
    "compared": compared,
}
REAL = ("tuned", "compared")  # parts on real networks


def printed(row: Row) -> str:
    rates = ("" if v is None else f"{v:.1f}" for v in (row.wrong, row.over, row.kept))
    numbers = (f"{v:.1f}" for v in (row.holds, row.above, row.below))
    cells = (row.part, row.case, f"{row.images:,}", row.method, str(row.draws), *numbers, f"{row.width:.2f}", *rates)
    return "| " + " | ".join((*cells, row.note)) + " |"


def read_rows(path: Path = ROWS) -> list[Row]:
    kinds: dict[str, Callable[[str], object]] = {f.name: str for f in fields(Row)}
    kinds |= {"images": int, "draws": int} | dict.fromkeys(("holds", "above", "below", "width"), float)
    kinds |= dict.fromkeys(("wrong", "over", "kept"), lambda text: float(text) if text else None)
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
    return "(ours)" in row.method or row.part in ("labels", "metric", "compared")


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


def listed(rows: Sequence[Row]) -> str:
    """The cases, with the 95 % interval of what 1,000 draws can tell."""
    shown = []
    for row in rows:
        arm = 196 * math.sqrt(row.holds * (100 - row.holds) / row.draws) / 100
        shown.append(f"{row.case}, {row.images:,} images: {row.holds:.1f} % of draws, +-{arm:.1f}")
    return f" ({'; '.join(shown)})" if shown else ""


def highest(values: Iterable[float | None]) -> str:
    known = [v for v in values if v is not None]
    return f"{max(known):.1f}" if known else ""


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *lines)]


def page(rows: Sequence[Row]) -> str:
    shown = [row for row in rows if ours(row)]
    simulated = [row for row in shown if row.part not in REAL]
    within = [row for row in simulated if LOWEST <= row.holds <= HIGHEST]
    allowed = [row for row in simulated if row.holds > HIGHEST and few(row)]
    wide = [row for row in simulated if row.holds > HIGHEST and not few(row)]
    narrow = [row for row in simulated if row.holds < LOWEST]
    parts = [narrowing(rows, row) for row in simulated]
    draws = max((row.draws for row in simulated), default=0)
    lines = [
        "# Do the intervals hold?",
        "",
        f"**The 95 % interval holds in {LOWEST:g} to {HIGHEST:g} % of draws in {len(within)} of {len(simulated)} "
        f"simulated cases.** In {len(allowed)} more it holds more often, with fewer than {FEW} expected disagreements. "
        f"In {len(wide)} it is too wide{listed(wide)}, in {len(narrow)} too narrow{listed(narrow)}. Its width is "
        f"{mean_of(parts)} % of the interval before, in the mean. A recipe that is not good enough is recommended in "
        f"at most {highest(row.wrong for row in simulated)} % of draws.",
        "",
        "Command: `python -m benchmarks.coverage_of_intervals`. The truth is known, because everything is simulated: "
        f"{draws:,} draws of 100 to 2,500 images in each case. *Wrong*: the recipe is recommended "
        "although it is no better, or cheaper and worse by half a point. *Before*: two Clopper-Pearson intervals, or "
        "the variance of folds after Nadeau and Bengio, whichever is narrower. All rows: "
        "[intervals.csv](intervals.csv).",
        "",
    ]
    names = {"paired": "a fixed recipe", "chosen": "a chosen recipe", "labels": "some labels", "metric": "a metric"}
    groups: dict[str, list[Row]] = {}
    for row in simulated:
        detail = f"{row.images:,} images" if row.part == "paired" else row.method if row.part == "labels" else row.case
        groups.setdefault(f"{names[row.part]}: {detail}", []).append(row)
    head = ("interval of", "cases", "as they should be", "lowest, %", "highest, %", "width, % of before", "wrong, %")
    lines += table(head, (summed_up(rows, name, own) for name, own in groups.items()))
    if budget_rows := [row for row in rows if row.part == "budget"]:
        lines += [
            "",
            f"A ceiling on the mean cost is exceeded in at most {highest(row.over for row in budget_rows)} % of "
            f"{budget_rows[0].draws:,} draws, in {len(budget_rows)} cases (the part `budget` of the CSV).",
        ]
    for part, words in (("tuned", tuned_section), ("compared", compared_section)):
        if own := [row for row in shown if row.part == part]:
            lines += ["", *words(rows, own)]
    return "\n".join(lines) + "\n"


def summed_up(rows: Sequence[Row], name: str, own: Sequence[Row]) -> tuple[str, ...]:
    holds = [row.holds for row in own]
    return (
        name,
        str(len(own)),
        str(sum(map(good, own))),
        f"{min(holds):.1f}",
        f"{max(holds):.1f}",
        mean_of([narrowing(rows, row) for row in own]),
        highest(row.wrong for row in own),
    )


def tuned_section(rows: Sequence[Row], own: Sequence[Row]) -> list[str]:
    head = ("networks, ceiling", "images", "draws", "holds, %", "width, % of before", "wrong, %", "keep, %", "over, %")
    cells = (
        (
            row.case,
            f"{row.images:,}",
            f"{row.draws:,}",
            f"{row.holds:.1f}",
            mean_of([narrowing(rows, row)]),
            *(highest([rate]) for rate in (row.wrong, row.kept, row.over)),
        )
        for row in own
    )
    return [
        "## All of `tune`, on real networks",
        "",
        "Images are drawn with replacement from the development images, and copies are in one fold. The truth is what "
        "the written recipe gains on all images. *Draws* wrote a recipe; of all, *keep* is the share of verdicts to "
        "keep the base model, *over* that of recipes whose mean cost on all images exceeds the ceiling. Command: the "
        "same with `--parts tuned compared`, and for other networks than the sample `--assets DIR --studies`.",
        "",
        *table(head, cells),
    ]


def compared_section(rows: Sequence[Row], own: Sequence[Row]) -> list[str]:
    head = ("base, new", "labelled", "holds, %", "width, points", "note")
    cells = ((r.case, r.method.split()[0], f"{r.holds:.1f}", f"{r.width:.2f}", r.note) for r in own)
    return [
        "## Labels where two recipes disagree",
        "",
        f"`unstride compare` on {COMPARED:,} unlabelled images of real networks. Only disagreements are labelled.",
        "",
        *table(head, cells),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="by default those that are simulated")
    parser.add_argument("--assets", type=Path, help="folder with weights and images of other studies than `sample`")
    parser.add_argument(
        "--studies", nargs="+", choices=CEILINGS, default=["sample"], help="networks of `tuned` and `compared`"
    )
    parser.add_argument("--limit", type=int, help="images of these parts")
    parser.add_argument("--page", action="store_true", help="only write the page, from the rows that are there")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of intervals.csv and intervals.md")
    args = parser.parse_args()
    path = args.out / ROWS.name
    rows = read_rows(path) if path.is_file() else []
    if not args.page:
        names = [f.name for f in fields(Row)]
        print("| " + " | ".join(names) + " |\n|" + "---|" * len(names))
        for part in args.parts or [part for part in PARTS if part not in REAL]:
            asked = args.studies if part in REAL else [""]
            rows = [r for r in rows if r.part != part or (part in REAL and r.case.partition(":")[0] not in asked)]
            for row in PARTS[part](args.draws, *([args.assets, args.studies, args.limit] if part in REAL else [])):
                print(printed(row), flush=True)
                rows = sorted([*rows, row], key=lambda r: list(PARTS).index(r.part))
                write_rows(rows, path)
    (args.out / PAGE.name).write_text(page(read_rows(path)))


if __name__ == "__main__":
    main()
