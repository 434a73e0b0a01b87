"""The forward passes of a recipe as a flat list, with what the exported file must know of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.errors import OptionError
from unstride.execution.runner import executors_for
from unstride.geometry.states import State
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Search, Stage
from unstride.recipe.view import View
from unstride.tasks.tasks import TASKS
from unstride.views.source import Source, for_network

INSTEAD = "Near states and gates on whole images can be exported: Stage(states=Near(4)), Gate(below=0.5)"


@dataclass(frozen=True, eq=False)
class ExportPass:
    """One call of a network: a view of the rows that are still uncertain, in one state or several.

    Attributes:
        gate: the gate before it, of the first pass of a gated stage.
        starts: it starts the answer anew: the first pass, and that of a stage that replaces the answer so far.
        states: () calls the network as it is.
        outputs: that it adds to the answer: one for each state, or one aggregate of them.
        weight: of each output; a number for each class where they differ.
        cost: in forward passes of the base model.
    """

    stage: Stage
    view: View
    states: tuple[State, ...]
    outputs: int
    weight: tuple[float, ...]
    starts: bool
    gate: Gate | None = None
    cost: float = 0.0

    @property
    def network(self) -> str:
        return self.stage.network

    @property
    def count(self) -> int:
        """Forward passes that it counts as."""
        return max(1, len(self.states))


def separate(stage: Stage, recipe: Recipe) -> bool:
    """True if each state's output is combined as a pass of its own."""
    task = TASKS[recipe.task]
    return stage.aggregation == "mean" and stage.state_space == "logits" and not (task.maps and task.classes)


def check_exportable(recipe: Recipe) -> None:
    """An OptionError where one fixed graph cannot do what the recipe does."""
    for stage in recipe.stages:
        if isinstance(stage.states, Search):
            raise OptionError(
                "export: this recipe has a Search, which chooses the states of each image step by step. No graph can "
                f"hold that. {INSTEAD}."
            )
        if stage.gate is not None and stage.gate.tile is not None:
            raise OptionError(f"export: this recipe has a gate on tiles, which no graph can hold. {INSTEAD}.")
        if stage.gate is not None and stage.gate.below is None:
            raise OptionError(f"export: the gate {stage.gate} has no threshold. Call better.calibrate(images) first.")
        if stage.aggregation == "learned" or stage.align == "stitch":
            raise OptionError(
                "export: learned aggregation and stitched maps cannot be exported. Choose another aggregate and align."
            )
    if recipe.precision is not None:
        raise OptionError(
            f"export: precision={recipe.precision!r} casts while it runs, and a file has the precision of its weights. "
            "Use better.replace(precision=None)."
        )
    if recipe.task == "features":
        raise OptionError("export: task='features' is not supported. Export the network itself with torch.onnx.export.")
    again = any(stage.gate is not None or stage.join == "replace" for stage in recipe.stages)
    if recipe.combine == "median" and again:
        raise OptionError("export: combine='median' is exported only without gates and without join='replace'.")


def listed_passes(better: Enhanced, source: Source) -> list[ExportPass]:
    """Every pass of the recipe, in order, as `run` takes them. `source`: one image."""
    recipe = better.recipe
    costs = stage_costs(better, source)
    taken: dict[tuple[str, View], set[State]] = {}
    passes: list[ExportPass] = []
    for index, (stage, executor) in enumerate(zip(recipe.stages, executors_for(recipe, better.networks), strict=True)):
        first = len(passes)
        if stage.join == "replace":
            taken = {}
        prepared = for_network(source, better.networks[stage.network].preprocess)
        for view in stage.views:
            done = taken.setdefault((stage.network, view), set())
            space = executor.space(prepared.render(view))
            states = tuple(s for s in stage.listed(space) if s not in done)
            done |= set(states)
            if states:
                passes.append(_pass(stage, view, states, better, starts=len(passes) == first))
        if len(passes) == first:
            raise OptionError(
                f"export: stage {index + 1} ({stage}) takes no pass that was not taken before. Remove it."
            )
        passes[-1] = replace(passes[-1], cost=costs[index])  # images stop between stages
    return passes


def _pass(stage: Stage, view: View, states: tuple[State, ...], better: Enhanced, starts: bool) -> ExportPass:
    own = stage.states is None
    each = own or separate(stage, better.recipe)
    weights = better.view_weights
    weight = (stage.weight(view),) if weights is None else tuple(map(float, weights[stage.views.index(view)]))
    if not each:
        weight = tuple(w * len(states) for w in weight)
    anew = starts and (stage.join == "replace" or stage is better.recipe.stages[0])
    gate = stage.gate if starts else None
    return ExportPass(stage, view, () if own else states, len(states) if each else 1, weight, anew, gate)


def stage_costs(better: Enhanced, source: Source) -> list[float]:
    """The cost of each stage for one image that takes it."""
    record = better.run(source, open_gates=True).record
    return [work[0] / max(1, record.base_work) for work in record.stage_work]


def total_weights(passes: Sequence[ExportPass]) -> Tensor:
    """(P + 1, 1 or K): the weight of the answer after so many passes."""
    totals = [torch.zeros(max(len(p.weight) for p in passes))]
    for p in passes:
        before = torch.zeros_like(totals[0]) if p.starts else totals[-1]
        totals.append(before + torch.tensor(p.weight) * p.outputs)
    totals[0] = torch.ones_like(totals[0])  # of no pass: never read
    return torch.stack(totals)


def total_outputs(passes: Sequence[ExportPass]) -> list[int]:
    """How many outputs the answer is made of after so many passes."""
    totals = [0]
    for p in passes:
        totals.append((0 if p.starts else totals[-1]) + p.outputs)
    return totals


__all__ = ["ExportPass", "check_exportable", "listed_passes"]
