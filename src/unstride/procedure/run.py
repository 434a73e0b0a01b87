"""The procedure for a batch of images: search, align, aggregate. Images advance together; each has its own search."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from unstride.engine.engine import Request, Run
from unstride.engine.store import Key
from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.procedure.aggregate import (
    LEAST,
    Accumulator,
    Attended,
    Maximum,
    WeightedMean,
    agreement,
    entropy,
    in_pieces,
    top_class,
    two_class,
)
from unstride.procedure.options import Options
from unstride.procedure.search import Search, random_score
from unstride.procedure.stitch import Stitched
from unstride.procedure.stopping import Progress
from unstride.procedure.tasks import Plan, Target


@dataclass(eq=False)
class ImageRun:
    """One image under way."""

    search: Search
    scores: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    tops: list[Tensor] = field(default_factory=list)  # each state's own class, for agreement
    logits: list[Tensor] = field(default_factory=list)  # each state's own logits, only when explaining
    at: dict[int, Tensor] = field(default_factory=dict)  # aggregate of the main output at the asked budgets
    stopped: str = ""

    @property
    def done(self) -> bool:
        return bool(self.stopped)


@dataclass(frozen=True, eq=False)
class Outcome:
    """Per image what happened and its MACs; for all images the aggregate of each target, and the plain network's other
    outputs.
    """

    runs: list[ImageRun]
    macs: list[int]
    sums: list[Accumulator]
    others: dict[int, Tensor]


def run_procedure(
    plan: Plan, images: Tensor, options: Options, budgets: Sequence[int] = (), explain: bool = False
) -> Outcome:
    """Search and aggregate. `budgets`: also keep the aggregate as it stood at these numbers of states."""
    run = plan.engine.start(images)
    head_macs = sum(t.head.macs for t in plan.targets if t.head is not None)
    costs = [layer.cost for layer in plan.found.layers]
    runs = [ImageRun(Search(plan.found.space, options.layers, options.budget, options.order, costs)) for _ in images]
    zero = plan.found.space.zero
    sums = [_accumulator(plan, t, options, len(images)) for t in plan.targets]
    step = _Step(plan, options, runs, sums, frozenset(budgets), explain)
    step.begin(run, [(i, zero) for i in range(len(runs))])
    if options.states is None:
        levels = [layer - 1 for layer in options.layers]
        run.keep(levels)
        ask: Callable[[ImageRun], list[State]] = lambda image: image.search.next(image.scores)  # noqa: E731
    else:
        levels = list(range(plan.engine.depth))
        rest = [s for s in options.states if s != zero]
        ask = lambda image: rest if len(image.scores) == 1 else []  # noqa: E731
    while True:
        asked: dict[int, list[State]] = {}
        last = True
        for i, image in enumerate(runs):
            if image.done:
                continue
            new = ask(image)
            if not new:
                image.stopped = "budget" if len(image.scores) >= options.budget else "no states left"
                if options.states is not None:
                    image.stopped = "all given states"
            asked[i] = new
            last &= len(image.search.visited) >= options.budget
        requests = _by_state(asked)
        if not requests:
            break
        ahead = _ahead(runs) if plan.engine.bounded and not last else []
        parts = plan.engine.parts(requests)
        for part in parts:
            keep = () if last and part is parts[-1] else levels
            values = dict(zip(plan.engine.taps, run.add(part, keep, ahead), strict=True))
            step.take(part, [values[t.tap] for t in plan.targets])  # two outputs may come from one tap
            del values  # not beside the next ones
        step.end(requests)
    macs = [m + head_macs * len(r.scores) for m, r in zip(run.macs, runs, strict=True)]
    others = {i: run.plain[leaf] for i, leaf in enumerate(plan.graph.leaves) if leaf in run.plain}
    return Outcome(runs, macs, sums, others)


def _by_state(asked: dict[int, list[State]]) -> list[Request]:
    """What the images ask for, state by state, as the engine computes it; an image's own states stay in order."""
    turns = zip_longest(*([(i, s) for s in states] for i, states in asked.items()))
    requests = [r for turn in turns for r in turn if r is not None]
    in_order = all(states == sorted(states, key=lambda s: s.selections) for states in asked.values())
    return sorted(requests, key=lambda r: (r[1].selections, r[0])) if in_order else requests


def _ahead(runs: list[ImageRun]) -> list[Key]:
    """Prefixes that the searches will start from, by how soon each image comes to them."""
    per_image = [
        [(i, state.selections[: layer - 1]) for state, layer in image.search.ahead(image.scores)]
        for i, image in enumerate(runs)
        if not image.done
    ]
    return list(dict.fromkeys(key for turn in zip_longest(*per_image) for key in turn if key is not None))


def _accumulator(plan: Plan, target: Target, options: Options, count: int) -> Accumulator:
    if options.align == "stitch" and target.grid is not None:
        if plan.also:
            raise OptionError(
                "align='stitch': this model also returns values made from its coarse logit map (such as a mask), and a "
                "stitched map is finer; use align=True, or a model that returns the logits alone"
            )
        out = plan.found.trace.shapes[target.leaf]
        return Stitched(target, tuple(out[-len(target.grid.size) :]), count)  # maps may come without channels
    if options.aggregate == "attention" and target is plan.targets[0]:
        assert options.attention is not None
        return Attended(options.attention, count, options.border)
    return (Maximum if options.aggregate == "max" else WeightedMean)(count, options.border)


@dataclass(eq=False)
class _Step:
    """Takes freshly computed rows into the images' sums, scores and records."""

    plan: Plan
    options: Options
    runs: list[ImageRun]
    sums: list[Accumulator]
    budgets: frozenset[int]
    explain: bool

    def begin(self, run: Run, requests: list[Request]) -> None:
        """Every image in the plain state, which `run` has computed; what is not returned as it is need not stay."""
        self.take(requests, [run.plain[t.tap] for t in self.plan.targets])
        for tap in {t.tap for t in self.plan.targets}.difference(self.plan.engine.plain):
            del run.plain[tap]
        self.end(requests)

    def take(self, requests: list[Request], values: list[Tensor]) -> None:
        plan, options = self.plan, self.options
        lead = plan.targets[0]
        task = plan.meaning
        per_pixel = task.maps
        need_logits = not per_pixel or self.explain or options.stop is not None
        logits = lead.finish(values[0]) if need_logits else None
        confidence = task.unsure(values[0] if per_pixel else logits)  # type: ignore[arg-type]
        sure = (1.0 - confidence).clamp(min=LEAST) if options.aggregate == "entropy" else torch.ones_like(confidence)
        overall = confidence.tolist()
        maps = [plan.maps(v, t) for v, t in zip(values, plan.targets, strict=True)]
        told = options.stop is not None or self.explain
        tops = task.own(values[0] if per_pixel else logits) if told else None  # type: ignore[arg-type]
        scattered = all(isinstance(sums, Attended) for sums in self.sums)
        groups: Iterable[tuple[State, slice | list[int], slice]]
        groups = _by_rows(requests) if scattered else _together(requests)
        for state, images, rows in groups:
            weights = sure[rows]
            for k, (target, sums) in enumerate(zip(plan.targets, self.sums, strict=True)):
                offset = plan.offset(state, target) if options.align else None
                if isinstance(sums, Attended):
                    sums.add(images, maps[k][rows], weights, offset)
                    continue
                assert isinstance(images, slice)
                if options.aggregate == "entropy" and per_pixel:
                    assert isinstance(sums, WeightedMean | Stitched)
                    given = sums.add_by_entropy(images, maps[k][rows], offset).flatten(1).mean(1)
                    weights = given if k == 0 else weights
                else:
                    sums.add(images, maps[k][rows], weights, offset)
            each = range(len(requests))[rows]
            numbers = range(len(self.runs))[images] if isinstance(images, slice) else images
            for row, number, weight in zip(each, numbers, weights.tolist(), strict=True):
                image = self.runs[number]
                image.weights.append(weight)
                image.scores.append(self._score(state, overall[row]))
                if tops is not None:
                    image.tops.append(tops[row])
                if self.explain and logits is not None:
                    image.logits.append(logits[row])
                if len(image.scores) in self.budgets:
                    image.at[len(image.scores)] = self.sums[0].value([number])[0]
        self.like = torch.empty_like(values[0][:1], device="meta")

    def end(self, requests: list[Request]) -> None:
        """After all that was asked for together: scores that depend on the whole set, and whether to stop."""
        touched = list(dict.fromkeys(i for i, _ in requests))
        if self.options.criterion == "learned":
            lead = self.sums[0]
            assert isinstance(lead, Attended)
            for i, scores in zip(touched, lead.criteria(touched), strict=True):
                self.runs[i].scores = scores
        if self.options.stop is not None:
            self._maybe_stop(touched)

    def _score(self, state: State, own: float) -> float:
        match self.options.criterion:
            case "displacement":
                return sum(map(abs, self.plan.found.space.displacement(state)))
            case "random":
                return random_score(state, self.options.seed)
            case _:
                return own

    def _maybe_stop(self, touched: list[int]) -> None:
        assert self.options.stop is not None
        lead, sums = self.plan.targets[0], self.sums[0]
        logits = two_class(finish(self.plan, lead, sums, sums.value(touched), self.like).float())
        p = logits.softmax(1)
        top2 = p.topk(2, 1).values.flatten(2).mean(2) if p.ndim > 2 else p.topk(2, 1).values
        h = in_pieces(entropy, logits).flatten(1).mean(1) if p.ndim > 2 else entropy(logits)
        classes = top_class(logits)
        for row, i in enumerate(touched):
            image = self.runs[i]
            own = torch.stack(image.tops)
            final = classes[row] if classes.ndim == 1 or classes[row].shape == own.shape[1:] else own[0]
            now = Progress(
                states=len(image.scores),
                top=float(top2[row, 0]),
                margin=float(top2[row, 0] - top2[row, 1]),
                entropy=float(h[row]),
                agreement=float(agreement(own, final).mean()),
            )
            image.stopped = self.options.stop.reason(now) or ""


def _by_rows(requests: list[Request]) -> Iterator[tuple[State, list[int], slice]]:
    """Neighbouring rows in one state, of any images: (state, images, rows)."""
    start = 0
    for end in range(1, len(requests) + 1):
        if end == len(requests) or requests[end][1] != requests[start][1]:
            yield requests[start][1], [i for i, _ in requests[start:end]], slice(start, end)
            start = end


def _together(requests: list[Request]) -> Iterator[tuple[State, slice, slice]]:
    """Neighbouring rows of neighbouring images in one state: (state, images, rows)."""
    start = 0
    for end in range(1, len(requests) + 1):
        image, state = requests[end - 1]
        if end == len(requests) or requests[end] != (image + 1, state):
            yield state, slice(requests[start][0], image + 1), slice(start, end)
            start = end


def finish(plan: Plan, target: Target, sums: Accumulator, maps: Tensor, like: Tensor) -> Tensor:
    """Aggregated maps (R, ...) -> the output; stitched maps have its resolution already."""
    if isinstance(sums, Stitched):
        bare = like.ndim == 1 + len(sums.size)  # (B, H, W), one number at each pixel
        return (maps.squeeze(1) if bare else maps).to(like.dtype)
    return target.finish(plan.unmap(maps, like, target))
