"""What happened to each image while a recipe ran: gates, passes, cost, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unstride.errors import InputError
from unstride.execution.aggregation import StateOutputs
from unstride.execution.combine import Combine
from unstride.execution.executors import ModelOutput, Passes
from unstride.execution.graph_executor import GraphPasses
from unstride.execution.parts import Frame, Part
from unstride.execution.prediction import COST_UNIT, TIME_UNIT, ForwardPass, Prediction, with_shares
from unstride.execution.selectors import Selector
from unstride.execution.tiles import tile_means
from unstride.geometry.states import State
from unstride.method.search import Expansion
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Stage
from unstride.recipe.view import View
from unstride.tasks.tasks import TASKS, Task


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

    def values(self) -> list[Tensor]:
        return [part.value() for part in self.parts]

    def replace(self, rows: Sequence[int], other: Outputs) -> None:
        for part, new in zip(self.parts, other.parts, strict=False):
            part.replace(rows, new)


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
    def begun(self, part: Part, passes: Passes, outputs: Sequence[Tensor]) -> None:
        """The first view of the first stage, to which all others are brought back."""
        self.structure.append(passes.result())
        if self.task.maps:
            self.frame = Frame.of(part.images, outputs, passes.padded)

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

    def keep(self, index: int, executor: object, part: Part, passes: Passes) -> bool:
        """Keep passes that a later stage continues; their prefixes are shared."""
        stage = self.recipe.stages[index]
        later = [s for s in self.recipe.stages[index + 1 :] if s.network == stage.network and s.states is not None]
        wanted = isinstance(passes, GraphPasses) and any(part.view in s.views for s in later) and not part.windows
        if wanted and part.passes is None:
            assert isinstance(passes, GraphPasses)
            self.opened.setdefault((id(executor), part.view), []).append((part.rows, passes))
        return wanted

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
