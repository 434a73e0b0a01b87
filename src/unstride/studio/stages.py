"""A recipe with stages of looks, one look after the other: what the page's slider moves through."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from unstride.enhanced import Enhanced
from unstride.procedure.gates import Stage, sureness
from unstride.procedure.prediction import Prediction, Visited
from unstride.views.canvas import Source


def look_by_look(better: Enhanced, source: Source) -> tuple[Prediction, list[Tensor], list[float]]:
    """What became of one picture, and its answer and cost with the first look, the first two, and so on."""
    p = better.explain(source)[0]
    taken = [_alone(better, look) for look in p.states]
    answers, costs = [], []
    for count in range(1, len(taken)):
        some = better.with_options(recipe=better.recipe.changed(stages=tuple(taken[:count])))
        logits, spent = some.looks(source)
        answers.append(logits[0])
        costs.append(spent[0])
    return _shown(better, p), [*answers, p.logits], [*costs, p.cost]


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
