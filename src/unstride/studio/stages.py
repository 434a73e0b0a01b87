"""An image's way through a recipe with stages, told: which gates opened, what each look saw, what it had cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image
from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.procedure.aggregate import top_class
from unstride.procedure.gates import Gate, Stage, sureness
from unstride.execution.prediction import Prediction, Visited
from unstride.show.style import as_image
from unstride.views.images import Preprocess
from unstride.views.source import Source

SIDE = 160  # of the small images


@dataclass(frozen=True, eq=False)
class Way:
    """What became of one image; `answers` and `costs` with the first look, the first two, and so on."""

    prediction: Prediction
    answers: list[Tensor]
    costs: list[float]
    stages: list[dict[str, Any]]  # of the recipe, also those that were not reached


def look_by_look(better: Enhanced, source: Source) -> Way:
    p = better.explain(source)[0]
    taken = [_alone(better, look) for look in p.states]
    answers, costs = [], []
    for count in range(1, len(taken)):
        some = better.with_options(recipe=better.recipe.changed(stages=tuple(taken[:count])))
        logits, spent = some.looks(source)
        answers.append(logits[0])
        costs.append(spent[0])
    answers, costs = [*answers, p.logits], [*costs, p.cost]
    return Way(_shown(better, p), answers, costs, list(_told(better, source, p, answers, costs)))


def seen_by(preprocess: Preprocess, x: Tensor) -> Image.Image:
    """What a view (1, C, h, w) shows the network, as a small image."""
    image = as_image(preprocess, preprocess.denormalise(x[0].detach().float().cpu()).clamp(0, 1))
    image.thumbnail((SIDE, SIDE))
    return image


def _told(
    better: Enhanced, source: Source, p: Prediction, answers: Sequence[Tensor], costs: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Stage by stage: its gate, the places of its looks in `p.states`, and the cost so far, or what it would be."""
    space, at, reached = better.plan.found.space, 0, True
    full = better.stage_costs(source.render(p.states[0].view))
    for stage, would in zip(better.recipe.stages, full, strict=True):
        first, chosen = at, stage.chosen(space)
        # A look belongs to the first stage that has it: what is taken already is not taken again.
        while at < len(p.states) and p.states[at].view in stage.views and p.states[at].state in chosen:
            at += 1
        gate = None
        if stage.gate is not None and reached:
            before = [v.logits for v in p.states[:first]]
            gate = _gate(stage.gate, answers[first - 1] * better.recipe.temperature, before, at > first)
            reached = gate["open"]
        yield {
            "what": str(replace(stage, gate=None)),
            "asks": None if stage.gate is None else str(stage.gate),
            "gate": gate,
            "reached": reached,
            "looks": list(range(first, at)),
            "cost": round(costs[at - 1] if reached else would, 3),
        }


def _gate(gate: Gate, merged: Tensor, own: Sequence[Tensor], again: bool) -> dict[str, Any]:
    """The gate as this image came to it; where looks follow, it did open."""
    sure = sureness(merged[None], gate.by, [top_class(logits[None]) for logits in own])
    opens = again or bool(gate.opens(sure))
    return {"by": gate.by, "value": round(float(sure), 4), "below": gate.below, "open": opens}


def _alone(better: Enhanced, look: Visited) -> Stage:
    """A stage with this look only, as its own stage counts it. A map is the mean over all states of its view."""
    space = better.plan.found.space
    of = next(s for s in better.recipe.stages if look.view in s.views and look.state in s.chosen(space))
    states = of.states if better.task == "segmentation" else (look.state.selections,)
    return Stage((look.view,), states, None, (of.weight(look.view),), (of.temperature(look.view),))


def _shown(better: Enhanced, p: Prediction) -> Prediction:
    """Each look with how unsure it is by itself; their maps lie on the plain one already, as if nothing had moved."""
    zero = better.plan.found.space.zero

    def shown(look: Visited) -> Visited:
        unsure = 1.0 - float(sureness(look.logits[None], "entropy").mean())
        return replace(look, criterion=unsure, state=zero if better.task == "segmentation" else look.state)

    return replace(p, states=tuple(shown(look) for look in p.states))
