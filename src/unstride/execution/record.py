"""What becomes of a batch while a recipe runs: the combined outputs, in the model's own form, and how they were made.

`Combine` is the one place where passes are averaged. `Record` holds gates, passes and cost, and why each image ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from unstride.errors import InputError, OptionError
from unstride.execution.prediction import COST_UNIT, TIME_UNIT, ForwardPass, Prediction, with_shares
from unstride.execution.tiles import tile_means
from unstride.geometry.states import State
from unstride.method.search import Expansion, Selector
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Stage
from unstride.recipe.view import View
from unstride.tasks.tasks import TASKS, Task

if TYPE_CHECKING:
    from unstride.execution.aggregation import StateOutputs
    from unstride.execution.executors import Part, Passes
    from unstride.execution.graph_executor import GraphPasses


class Combine:
    """The combined outputs of `count` images.

    Args:
        how: "logits", "probabilities", "values", "directions" (means), "median", or "max", the largest logit.
    """

    def __init__(self, how: str, task: Task, count: int) -> None:
        self.how, self.task, self.count = how, task, count
        self.total: Tensor | None = None
        self.weight: Tensor | None = None
        self.outputs: dict[int, list[Tensor]] = {}  # of each image, every pass: only for the median

    def add(self, rows: Sequence[int], output: Tensor, weight: float | Tensor, where: Tensor | None = None) -> None:
        """Outputs (R, ...) of these images. `where` (R, 1, H, W): only there."""
        output = output if output.dtype == torch.float64 else output.float()
        if self.how == "median":
            for row, value in zip(rows, output, strict=True):
                self.outputs.setdefault(row, []).append(value)
            return
        encoded = self.task.encode(output, self.how)
        weight = weight if where is None else weight * where
        if self.total is None or self.weight is None:
            empty = -torch.inf if self.how == "max" else 0.0
            self.total = encoded.new_full((self.count, *encoded.shape[1:]), empty)
            self.weight = encoded.new_zeros((self.count, *[1] * (encoded.ndim - 1)))
        if isinstance(weight, Tensor) and weight.shape[1:] != self.weight.shape[1:]:
            self.weight = self.weight.expand(self.count, *weight.shape[1:]).clone()
        at = self._index(rows)
        if self.how == "max":
            known = encoded if where is None else encoded.masked_fill(where == 0, -torch.inf)
            self.total = _put(self.total, at, torch.maximum(_taken(self.total, at), known))
        else:
            self.total = _put(self.total, at, _weighted_sum(_taken(self.total, at), weight, encoded))
        self.weight = _put(self.weight, at, _taken(self.weight, at) + weight)

    def value(self, rows: Sequence[int] | None = None) -> Tensor:
        """The combined output of these images, all by default."""
        chosen = range(self.count) if rows is None else rows
        if self.how == "median":
            return torch.stack([median(self.outputs[row]) for row in chosen])
        assert self.total is not None and self.weight is not None
        at = self._index(chosen)
        if self.how == "max":
            return _taken(self.total, at).clone()
        return self.task.decode(_taken(self.total, at) / _taken(self.weight, at), self.how)

    def replace(self, rows: Sequence[int], other: Combine) -> None:
        """Take these images' passes from `other`, where it has any, and forget those so far."""
        if self.how == "median":
            self.outputs |= {row: other.outputs[row] for row in rows}
            return
        assert self.total is not None and self.weight is not None
        assert other.total is not None and other.weight is not None
        at = self._index(rows)
        if other.weight.shape != self.weight.shape:
            self.weight = self.weight.expand(torch.broadcast_shapes(self.weight.shape, other.weight.shape)).clone()
        theirs = _taken(other.weight, at)
        new = theirs > 0  # of tiles, the pixels that they decide
        self.total = _put(self.total, at, torch.where(new, _taken(other.total, at), _taken(self.total, at)))
        self.weight = _put(self.weight, at, torch.where(new, theirs, _taken(self.weight, at)))

    def _index(self, rows: Sequence[int]) -> Tensor | None:
        """Where the rows are, on the device of the sums; None for all of them, which is faster."""
        assert self.total is not None
        return None if len(rows) == self.count else torch.tensor(list(rows), device=self.total.device)


def _taken(values: Tensor, at: Tensor | None) -> Tensor:
    return values if at is None else values.index_select(0, at)


def _weighted_sum(total: Tensor, weight: float | Tensor, more: Tensor) -> Tensor:
    """`total + weight * more`, in the memory of `total`."""
    return total.addcmul_(weight, more) if isinstance(weight, Tensor) else total.add_(more, alpha=weight)


def _put(values: Tensor, at: Tensor | None, new: Tensor) -> Tensor:
    return new if at is None else values.index_copy_(0, at, new)


def median(passes: Sequence[Tensor]) -> Tensor:
    """Number by number; of an even number of passes, the mean of the two in the middle."""
    ordered = torch.stack(list(passes)).sort(0).values
    return (ordered[(len(passes) - 1) // 2] + ordered[len(passes) // 2]) / 2


@dataclass(eq=False)
class Outputs:
    """The combined outputs of a batch: one Combine for each output of the model that is combined."""

    how: str
    task: Task
    count: int
    parts: list[Combine] = field(default_factory=list)

    def add(
        self, rows: Sequence[int], outputs: Sequence[Tensor], weight: float | Tensor = 1.0, where: Tensor | None = None
    ) -> None:
        while len(self.parts) < len(outputs):
            self.parts.append(Combine(self.how, self.task, self.count))
        for part, output in zip(self.parts, outputs, strict=False):
            part.add(rows, output, weight, where)

    def value(self, rows: Sequence[int] | None = None) -> Tensor:
        """Of the main output."""
        return self.parts[0].value(rows)

    def replace(self, rows: Sequence[int], other: Outputs) -> None:
        for part, new in zip(self.parts, other.parts, strict=False):
            part.replace(rows, new)


@dataclass(frozen=True, eq=False)
class ModelOutput:
    """What a model returned for some images: its leaves, which of them are combined, how it is put together."""

    leaves: list[Any]
    targets: tuple[int, ...]
    spec: pytree.TreeSpec
    count: int
    as_leaf: Callable[[int, Tensor, Tensor], Tensor]  # (target, combined output, the base leaf) -> the leaf's layout

    @classmethod
    def joined(cls, parts: Sequence[ModelOutput]) -> ModelOutput:
        """Outputs of neighbouring images as one; what does not depend on the images is taken from the first."""
        if len(parts) == 1:
            return parts[0]
        leaves = [_joined(values, [p.count for p in parts]) for values in zip(*(p.leaves for p in parts), strict=True)]
        first = parts[0]
        return ModelOutput(leaves, first.targets, first.spec, sum(p.count for p in parts), first.as_leaf)

    def replaced(self, values: Sequence[Tensor], also: Mapping[int, Tensor] | None = None) -> Any:
        """The model's own kind of output with other values of the combined leaves, and of those in `also`."""
        if not self.targets:
            raise OptionError(
                "this model returns no features, they are inside it. Take better.run(images).output, or give the part "
                "of the model that returns them (timm: features_only=True)."
            )
        leaves = list(self.leaves)
        for k, (index, value) in enumerate(zip(self.targets, values, strict=False)):
            old = self.leaves[index]
            new = self.as_leaf(k, value, old).to(old.dtype)
            leaves = [new if leaf is old else leaf for leaf in leaves]
        for index, value in (also or {}).items():
            leaves[index] = value
        return pytree.tree_unflatten(leaves, self.spec)


def joined_outputs(outputs: Sequence[Any], rows: int) -> Any:
    """What a model returned for neighbouring images, as if they had run at once."""
    flat = [pytree.tree_flatten(output) for output in outputs]
    counts = [next((len(v) for v in leaves if isinstance(v, Tensor) and v.ndim), rows) for leaves, _ in flat]
    leaves = [_joined(values, counts) for values in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _joined(values: Sequence[Any], counts: Sequence[int]) -> Any:
    rows = all(isinstance(v, Tensor) and v.ndim > 0 and len(v) == n for v, n in zip(values, counts, strict=True))
    return torch.cat(list(values)) if rows else values[0]


def reshaped(k: int, value: Tensor, leaf: Tensor) -> Tensor:
    """A combined output in the shape of the model's: vectors (B, C) as (B, C, 1, 1) where the model has them so."""
    return value if value.numel() != leaf.numel() else value.reshape(leaf.shape)


@dataclass(frozen=True)
class Frame:
    """The base view that maps are brought back to: its size in pixels, and that of each output map."""

    size: tuple[int, ...]
    out_sizes: tuple[tuple[int, ...], ...]
    padded: bool = False


@dataclass(eq=False)
class Record:
    """Filled by `runner.run`.

    Args:
        recipe, count: what runs, for how many images.
        details: keep every pass, for `predictions`.
        costs: count MACs. A model that is called directly runs once more for each input size to count them.
        open_gates: let every image pass every gate, and keep the confidences, as calibration needs it.
        budgets: of a recipe that is one Search, also the outputs and costs at these numbers of states.
        batch_size: images that run together; None: all.
    """

    recipe: Recipe
    count: int
    details: bool = False
    costs: bool = False
    open_gates: bool = False
    budgets: tuple[int, ...] = ()
    batch_size: int | None = None
    frame: Frame | None = None
    base_work: float = 0.0  # of a forward pass of the base model: cost 1.0
    timed: bool = False  # work is measured nanoseconds, because MACs cannot be counted; else MACs
    confidences: list[Tensor] = field(default_factory=list)  # before each gate, with open gates
    passed_gates: list[list[int]] = field(default_factory=list)  # the images that passed each gate
    structure: list[ModelOutput] = field(default_factory=list)  # what the model returns, from the first view
    also: dict[int, list[Tensor]] = field(default_factory=dict)
    shape: tuple[str, View, torch.Size] | None = None  # which pass was first, and the shape of its output

    def __post_init__(self) -> None:
        n = self.count
        self.task = TASKS[self.recipe.task]
        self.pass_counts, self.stopped = [0] * n, [""] * n
        self.work = [0.0] * n  # of each image
        self.stage_work = [[0.0] * n for _ in self.recipe.stages]
        self.answers: list[list[Tensor]] = [[] for _ in range(n)]
        self.passes: list[list[ForwardPass]] = [[] for _ in range(n)]
        self.expansions: list[list[Expansion]] = [[] for _ in range(n)]
        self.at_budget = {b: Outputs(self.recipe.combine, self.task, n) for b in self.budgets}
        self.macs_at_budget = {b: [0] * n for b in self.budgets}
        self.taken: dict[tuple[str, View], set[State]] = {}
        self.opened: dict[tuple[int, View], list[tuple[list[int], GraphPasses]]] = {}
        self.by_agreement = any(s.gate is not None and s.gate.by == "agreement" for s in self.recipe.stages)

    @property
    def base_macs(self) -> int:
        """MACs of one forward pass of the base model; 0 where they cannot be counted."""
        return 0 if self.timed else round(self.base_work)

    @property
    def macs(self) -> list[int]:
        """Of each image; 0 where they cannot be counted."""
        return [0 if self.timed else round(work) for work in self.work]

    @property
    def cost_unit(self) -> str:
        return TIME_UNIT if self.timed else COST_UNIT

    # -- gates
    def gate(
        self, gate: Gate, combined: Outputs, rows: list[int], tiles: dict[int, Tensor] | None
    ) -> tuple[list[int], dict[int, Tensor] | None]:
        """The images, or their tiles, that pass. Confidences are read from the device once."""
        answers = [torch.stack(of) for of in zip(*(self.answers[i] for i in rows), strict=True)]
        confidence = self.task.confidence(combined.value(rows), gate.by, answers)
        if gate.tile is not None:
            assert self.frame is not None
            confidence = tile_means(confidence, self.frame.size, gate.tile)
        elif confidence.ndim > 1:
            confidence = confidence.flatten(1).mean(1)
        confidence = confidence.cpu()
        if self.open_gates:
            self.confidences.append(confidence)
            return rows, None
        passing = dict(zip(rows, gate.passes(confidence), strict=True))
        if tiles is not None:
            passing = {i: now & tiles[i] for i, now in passing.items()}
        going = [i for i in rows if passing[i].any()]
        for i, value in zip(rows, confidence, strict=True):
            if not passing[i].any():
                self.stopped[i] = f"{gate.by} {float(value.min()):.3f} >= {gate.below:.3g}"
        self.passed_gates.append(going)
        return going, {i: passing[i] for i in going} if gate.tile is not None else None

    # -- passes
    def check_shape(self, network: str, view: View, output: Tensor) -> None:
        """An InputError that lists the shapes, where passes cannot be combined."""
        now = (network, view, output.shape[1:])
        self.shape = self.shape or now
        if now[2] != self.shape[2]:
            both = [f"{n} ({v}): ({', '.join(map(str, ('B', *s)))})" for n, v, s in (self.shape, now)]
            raise InputError(
                f"the passes of this recipe return different shapes, {both[0]} and {both[1]}. Networks of one recipe "
                "predict the same classes, at every size that its views have."
            )

    def forget_answers(self, rows: Sequence[int]) -> None:
        """A stage replaces the answer so far, and its passes with it."""
        for i in rows:
            self.answers[i] = []

    def answered(self, rows: Sequence[int], output: Tensor) -> None:
        """The answer of one pass, for gates by agreement."""
        if self.by_agreement:
            for i, answer in zip(rows, self.task.answer(output), strict=True):
                self.answers[i].append(answer)

    def finished(
        self,
        index: int,
        stage: Stage,
        part: Part,
        passes: Passes,
        states: StateOutputs,
        selector: Selector,
        work_per_mac: float = 1.0,
    ) -> None:
        """A view of a stage is done for these images."""
        counts = [len(records) for records in states.records]
        for row, records in zip(part.rows, states.records, strict=False):
            self.pass_counts[row] += len(records)
        for k, row in enumerate(part.rows):
            self.expansions[row] += selector.expansions.get(k, [])
            if k in selector.reasons:
                self.stopped[row] = selector.reasons[k]
        if self.costs:
            macs = passes.macs(counts)
            for row, m in zip(part.rows, [sum(macs)] if part.windows else macs, strict=True):
                self.work[row] += m * work_per_mac
                self.stage_work[index][row] += m * work_per_mac
        if self.details:
            self._describe(index, stage, part, passes, states, work_per_mac)

    def _describe(
        self, index: int, stage: Stage, part: Part, passes: Passes, states: StateOutputs, work_per_mac: float
    ) -> None:
        for k, row in enumerate(part.rows):
            records = states.records[k]
            costs = passes.state_macs([r.state for r in records])
            for r, macs in zip(records, costs, strict=True):
                assert r.output is not None and r.running is not None
                windows = len(part.windows) or 1
                self.passes[row].append(
                    ForwardPass(
                        stage=index,
                        network=stage.network,
                        view=part.view,
                        state=r.state,
                        output=r.output,
                        weight=r.weight * stage.weight(part.view),
                        criterion=r.criterion,
                        running=r.running,
                        cost=macs * work_per_mac * windows / max(1, self.base_work),
                    )
                )

    # -- results
    def predictions(self, final: Tensor, assumed: str = "") -> list[Prediction]:
        """One for each image; needs `details` and `costs`."""
        found = []
        for i, passes in enumerate(self.passes):
            shared = with_shares(passes)
            agreement, spread = self.task.compare([p.output for p in shared], final[i])
            found.append(
                Prediction(
                    output=final[i],
                    base=shared[0].output,
                    passes=shared,
                    cost=self.work[i] / max(1, self.base_work),
                    cost_unit=self.cost_unit,
                    agreement=agreement,
                    spread=spread,
                    stopped=self.stopped[i] or "all passes",
                    task=self.recipe.task,
                    expansions=tuple(self.expansions[i]),
                    assumed=assumed,
                )
            )
        return found
