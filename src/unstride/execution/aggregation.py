"""What the states of one view become: an output of their own each, or one output of their aggregate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from unstride.engine.engine import Request
from unstride.errors import OptionError
from unstride.execution.executors import Passes
from unstride.execution.graph_executor import GraphPasses
from unstride.execution.padding import cropped_output
from unstride.geometry.states import State
from unstride.method.aggregate import LEAST, Maximum, WeightedMean, aligned, entropy_weight
from unstride.method.align import Offset
from unstride.method.attention import Attended, Attention
from unstride.method.criteria import (
    displacement_criterion,
    image_digest,
    random_criterion,
    random_criterion_per_image,
)
from unstride.method.split import Target
from unstride.method.stitch import Stitched
from unstride.recipe.stage import Gate, Search, Stage
from unstride.tasks.tasks import Task, in_pieces

AGREEMENT_LEAST = 4  # passes before their agreement can end a search


@dataclass(eq=False)
class StateRecord:
    """One image in one state: what a prediction reports of it."""

    state: State
    weight: float = 1.0
    criterion: float | None = None
    output: Tensor | None = None  # only with details
    running: Tensor | None = None  # the aggregate so far, only with details


class StateOutputs(Protocol):
    """Takes the values of states as they are computed."""

    criterion: dict[int, dict[State, float]]  # of each image, of all its states
    records: list[list[StateRecord]]  # of each image, in order

    def add(self, requests: Sequence[Request], values: Sequence[Tensor]) -> None: ...
    def stopped(self) -> list[tuple[int, str]]:
        """Images whose search may end now, and why."""
        ...

    def outputs(self) -> Iterator[tuple[list[Tensor], float]]:
        """(an output for each target, its weight), for all images."""
        ...

    def describe(self, k: int, output: Tensor, running: Tensor, over_base: Callable[[Tensor], Tensor]) -> None:
        """For details: the k-th of `outputs` brought back over the base view, and the combined answer after it."""
        ...


class SeparateOutputs:
    """Every state's output is combined as a pass of its own."""

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.criterion: dict[int, dict[State, float]] = {}
        self.records: list[list[StateRecord]] = [[] for _ in passes.images]
        self.results: list[list[Tensor]] = []

    def add(self, requests: Sequence[Request], values: Sequence[Tensor]) -> None:
        count = len(self.passes.images)
        for start in range(0, len(requests), count):  # state by state, each for all images
            state = requests[start][1]
            rows = [v if len(v) == count else v.narrow(0, start, count) for v in values]
            self.results.append([self.passes.output(state, v, k) for k, v in enumerate(rows)])
            for record in self.records:
                record.append(StateRecord(state))

    def stopped(self) -> list[tuple[int, str]]:
        return []

    def outputs(self) -> Iterator[tuple[list[Tensor], float]]:
        for outputs in self.results:
            yield outputs, 1.0

    def describe(self, k: int, output: Tensor, running: Tensor, over_base: Callable[[Tensor], Tensor]) -> None:
        for i in range(len(output)):  # of the windows of one image, the first stands for all
            self.records[i][k].output, self.records[i][k].running = output[i], running[i]


@dataclass(eq=False)
class AggregatedOutputs:
    """The states' maps are aligned and aggregated, and the network's own head makes one output.

    Args:
        budgets: also keep the aggregate as it was at these numbers of states.
    """

    stage: Stage
    passes: GraphPasses
    task: Task
    attention: Attention | None = None
    details: bool = False
    budgets: frozenset[int] = frozenset()
    criterion: dict[int, dict[State, float]] = field(default_factory=dict)
    records: list[list[StateRecord]] = field(default_factory=list)
    at: dict[int, dict[int, Tensor]] = field(default_factory=dict)  # by budget, by image: the aggregated map

    def __post_init__(self) -> None:
        count = len(self.passes.images)
        self.records = [[] for _ in range(count)]
        self.criterion = {i: {} for i in range(count)}
        self.at = {b: {} for b in self.budgets}
        self.search = self.stage.states if isinstance(self.stage.states, Search) else None
        self.by = self.search.criterion if self.search is not None else ""
        self.until: Gate | None = None if self.search is None else self.search.until
        self.answers: list[list[Tensor]] = [[] for _ in range(count)]
        self.touched: list[int] = []
        self.split = self.passes.split
        self.sums = [self._accumulator(k, target, count) for k, target in enumerate(self.split.targets)]
        self.digests = [image_digest(x) for x in self.passes.images] if self.by == "random-per-image" else []
        self.like: Tensor | None = None

    def _accumulator(self, k: int, target: Target, count: int) -> WeightedMean | Maximum | Stitched | Attended:
        stage = self.stage
        if stage.align == "stitch" and target.grid is not None:
            if self.split.also:
                raise OptionError(
                    "align='stitch': this model also returns values that follow from its coarse logit map (such as a "
                    "mask), and a stitched map is finer. Use align='average', or a model that returns the logits alone."
                )
            shape = self.split.found.trace.shapes[target.leaf]
            return Stitched(target, tuple(shape[-len(target.grid.size) :]), count)
        if stage.aggregation == "learned" and k == 0:
            if self.attention is None:
                raise OptionError(
                    "aggregate='learned' needs a fitted attention. Fit one with `unstride fit`, and pass the recipe "
                    "file that it writes."
                )
            self.attention.check(self.split.channels)
            return Attended(self.attention, count)
        return (Maximum if stage.aggregation == "max" else WeightedMean)(count, stage.at_border)

    # -- one step
    def add(self, requests: Sequence[Request], values: Sequence[Tensor]) -> None:
        unaligned = self._unaligned(values[0])
        maps = [self.split.maps(v, t) for v, t in zip(values, self.split.targets, strict=True)]
        self.touched = list(dict.fromkeys(i for i, _ in requests))
        self.like = torch.empty_like(values[0][:1], device="meta")
        answers = self._answers(values[0])
        for state, images, rows in together(requests):
            like = torch.empty_like(values[0][rows], device="meta")
            on_grid = self._aligned_uncertainty(state, maps[0][rows], like)
            weights = self._weights(unaligned, on_grid, rows, len(maps[0][rows]), maps[0].device)
            for k, (target, sums) in enumerate(zip(self.split.targets, self.sums, strict=True)):
                offset = self._offset(state, target)
                if isinstance(sums, Attended):
                    sums.add(images, aligned(maps[k][rows].float(), offset, self.stage.at_border))
                elif self.task.maps and self.stage.aggregation == "entropy" and not isinstance(sums, Maximum):
                    added = sums.add_by_entropy(images, maps[k][rows], offset).flatten(1).mean(1)
                    weights = added if k == 0 else weights
                elif self.task.maps and self.stage.aggregation == "entropy-unaligned":
                    own = in_pieces(entropy_weight, maps[k][rows].float())
                    sums.add(images, maps[k][rows], own, offset)
                    weights = own.flatten(1).mean(1) if k == 0 else weights
                else:
                    sums.add(images, maps[k][rows], weights, offset)
            outputs = self.passes.output(state, values[0][rows]) if self.details else None
            running = self._finish(0, self.sums[0].value(images)) if self.details else None
            scores = self._scores(state, images, unaligned, on_grid, rows)
            read = weights.tolist() if self.details else [1.0] * len(scores)  # an accelerator waits for it
            for j, (number, weight) in enumerate(zip(range(images.start, images.stop), read, strict=True)):
                record = StateRecord(state, weight, None if self.search is None else scores[j])
                if outputs is not None and running is not None:
                    record.output, record.running = outputs[j], running[j]
                self.records[number].append(record)
                self.criterion[number][state] = scores[j]
                if answers is not None:
                    self.answers[number].append(answers[rows.start + j])
                done = len(self.records[number])
                if done in self.at:
                    self.at[done][number] = self.sums[0].value([number])[0]
        self._learned_scores()

    def _offset(self, state: State, target: Target) -> Offset | None:
        if self.stage.align == "none":
            return None
        offset = self.split.offset(state, target)
        return offset.nearest() if offset is not None and self.stage.align == "nearest" else offset

    def _unaligned(self, values: Tensor) -> Tensor | None:
        """How uncertain each row's own prediction is."""
        if self.by != "entropy-unaligned" and self.stage.aggregation != "entropy-unaligned":
            return None
        return self.task.uncertainty(values if self.task.maps else self.split.targets[0].finish(values))

    def _aligned_uncertainty(self, state: State, maps: Tensor, like: Tensor) -> Tensor | None:
        """How uncertain the prediction from the aligned map is."""
        if self.by != "entropy" and (self.stage.aggregation != "entropy" or self.task.maps):
            return None
        target = self.split.targets[0]
        offset = self._offset(state, target)
        on_grid = aligned(maps.float(), offset, self.stage.at_border)
        if self.task.maps:
            return self.task.uncertainty(on_grid)
        return self.task.uncertainty(target.finish(self.split.unmap(on_grid, like, target)))

    def _weights(
        self, unaligned: Tensor | None, on_grid: Tensor | None, rows: slice, count: int, device: torch.device
    ) -> Tensor:
        if self.stage.aggregation == "entropy" and on_grid is not None:
            return (1.0 - on_grid).clamp(min=LEAST)
        if self.stage.aggregation == "entropy-unaligned" and unaligned is not None:
            return (1.0 - unaligned[rows]).clamp(min=LEAST)
        return torch.ones(count, device=device)

    def _scores(
        self, state: State, images: slice, unaligned: Tensor | None, on_grid: Tensor | None, rows: slice
    ) -> list[float]:
        """The criterion of each of these images in this state; 0 without a search."""
        count, search = images.stop - images.start, self.search
        if search is None or self.by == "learned":
            return [0.0] * count
        if self.by == "displacement":
            return [displacement_criterion(self.split.found.space, state)] * count
        if self.by == "random":
            return [random_criterion(state, search.seed)] * count
        if self.by == "random-per-image":
            return [random_criterion_per_image(state, search.seed, d) for d in self.digests[images]]
        measured = on_grid if self.by == "entropy" else None if unaligned is None else unaligned[rows]
        assert measured is not None
        scores: list[float] = measured.tolist()
        return scores

    def _learned_scores(self) -> None:
        """The learned criterion of all states changes with every state."""
        if self.by != "learned":
            return
        attended = self.sums[0]
        assert isinstance(attended, Attended)
        for i, scores in zip(self.touched, attended.criteria(self.touched), strict=True):
            for record, score in zip(self.records[i], scores, strict=True):
                record.criterion = score
                self.criterion[i][record.state] = score

    def _answers(self, values: Tensor) -> Tensor | None:
        if self.until is None or self.until.by != "agreement":
            return None
        return self.task.answer(self.split.targets[0].finish(values))

    # -- results
    def stopped(self) -> list[tuple[int, str]]:
        if self.until is None or self.until.below is None:
            return []
        combined = self._finish(0, self.sums[0].value(self.touched))
        stopped = []
        for k, i in enumerate(self.touched):
            if self.until.by == "agreement" and len(self.answers[i]) < AGREEMENT_LEAST:
                continue
            answers = [a[None] for a in self.answers[i]]
            value = float(self.task.confidence(combined[k : k + 1], self.until.by, answers).float().mean())
            if value >= self.until.below:
                stopped.append((i, f"{self.until.by} {value:.3f} >= {self.until.below:g}"))
        return stopped

    def outputs(self) -> Iterator[tuple[list[Tensor], float]]:
        if any(self.records):
            weight = 1.0 if self.search is not None else float(len(self.records[0]))  # a search is one pass of its view
            yield [self._finish(k, sums.value()) for k, sums in enumerate(self.sums)], weight

    def describe(self, k: int, output: Tensor, running: Tensor, over_base: Callable[[Tensor], Tensor]) -> None:
        """Each state's own output and the aggregate so far; of windows, all of them as one."""
        if len(output) < len(self.records):
            for record in self.records[0]:
                record.output, record.running = output[0], running[0]
            return
        for j in range(max(map(len, self.records))):
            rows = [i for i, records in enumerate(self.records) if j < len(records)]
            for name in ("output", "running"):
                placed = over_base(torch.stack([getattr(self.records[i][j], name) for i in rows]))
                for i, value in zip(rows, placed, strict=True):
                    setattr(self.records[i][j], name, value)

    def output_at(self, budget: int, final: Tensor) -> Tensor:
        """The main output with the first `budget` states; an image that stopped earlier keeps its final one."""
        kept = self.at[budget]
        out = final.clone()
        if kept:
            rows = sorted(kept)
            out[rows] = self._finish(0, torch.stack([kept[i] for i in rows]))
        return out

    def also(self) -> dict[int, Tensor]:
        """Other output leaves of the model that follow from the aggregated map."""
        if not self.split.also:
            return {}
        maps = self.sums[0].value()
        tap = self.split.unmap(maps, self._like(len(maps)), self.split.targets[0])
        values = [
            cropped_output(segment.module(len(tap), (), tap)[0], self.passes.crop) for _, segment in self.split.also
        ]
        return dict(zip(self.passes.also, values, strict=True))

    def _like(self, rows: int) -> Tensor:
        assert self.like is not None
        return torch.empty((rows, *self.like.shape[1:]), dtype=self.like.dtype, device="meta")

    def _finish(self, k: int, maps: Tensor) -> Tensor:
        target, sums = self.split.targets[k], self.sums[k]
        shape = self.split.found.trace.shapes[target.tap]
        assert self.like is not None
        like = torch.empty((len(maps), *shape[1:]), dtype=self.like.dtype, device="meta")
        if isinstance(sums, Stitched):  # has the resolution of the output already
            bare = like.ndim == 1 + len(sums.size)  # (B, H, W), one number at each pixel
            return self.passes.cropped((maps.squeeze(1) if bare else maps).to(like.dtype))
        return self.passes.finish(maps, like, target)


def together(requests: Sequence[Request]) -> Iterator[tuple[State, slice, slice]]:
    """Neighbouring rows of neighbouring images in one state: (state, images, rows)."""
    start = 0
    for end in range(1, len(requests) + 1):
        image, state = requests[end - 1]
        if end == len(requests) or requests[end] != (image + 1, state):
            yield state, slice(requests[start][0], image + 1), slice(start, end)
            start = end


def outputs_for(
    stage: Stage,
    passes: Passes,
    task: Task,
    attention: Attention | None,
    details: bool = False,
    budgets: frozenset[int] = frozenset(),
) -> StateOutputs:
    """States in a list are combined as passes of their own where that is possible, others are aggregated."""
    separate = stage.aggregation == "mean" and stage.state_space == "logits" and not (task.maps and task.classes)
    if (
        not isinstance(passes, GraphPasses)
        or stage.states is None
        or (separate and not isinstance(stage.states, Search))
    ):
        return SeparateOutputs(passes)
    return AggregatedOutputs(stage, passes, task, attention, details, budgets)
