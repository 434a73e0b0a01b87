"""What was computed -> what the user gets: the model's own kind of output, logits at budgets, predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from unstride.errors import OptionError
from unstride.procedure.looks import Looked
from unstride.procedure.options import Options
from unstride.procedure.prediction import Prediction, Visited, cropped, cropped_output, moved
from unstride.procedure.run import ImageRun, Outcome, finish, run_procedure
from unstride.procedure.tasks import Plan, Target

Crop = tuple[float, ...] | None


Found = tuple[list[Any], dict[int, Tensor], list[Prediction], dict[int, list[float]]]


def searched(
    plan: Plan,
    parts: Sequence[Tensor],
    options: Options,
    budgets: tuple[int, ...],
    explain: bool,
    warm: Callable[[Tensor], Tensor],
) -> Found:
    """The search of some images, part by part: leaves, logits at each budget, predictions, costs at each budget."""
    leaves: list[list[Any]] = []
    at: dict[int, list[Tensor]] = {b: [] for b in budgets}
    macs_at: dict[int, list[float]] = {b: [] for b in budgets}
    predictions: list[Prediction] = []
    main_leaf = plan.graph.index(plan.targets[0].leaf)
    with torch.no_grad():
        for part in parts:
            outcome = run_procedure(plan, part, options, budgets, explain)
            leaves.append(searched_leaves(plan, outcome, part))
            main = leaves[-1][main_leaf]
            for b in budgets:
                at[b].append(warm(at_budget(plan, outcome, b, main)))
                macs_at[b] += [cost_at(plan, options, r, b) for r in outcome.runs]
            leaves[-1][main_leaf] = main = warm(main)
            if explain:
                predictions += [
                    searched_prediction(plan, options, r, m, main[k])
                    for k, (r, m) in enumerate(zip(outcome.runs, outcome.macs, strict=True))
                ]
    joined = [torch.cat(found) if isinstance(found[0], Tensor) else found[0] for found in zip(*leaves, strict=True)]
    return joined, {b: torch.cat(logits) for b, logits in at.items()}, predictions, macs_at


def searched_leaves(plan: Plan, outcome: Outcome, part: Tensor) -> list[Any]:
    """Output leaves after a search: the aggregates and what follows from them; the rest as the plain network has it."""
    leaves: list[Any] = list(plan.graph.leaves)
    for i, value in outcome.others.items():
        leaves[i] = value
    for k, (target, sums) in enumerate(zip(plan.targets, outcome.sums, strict=True)):
        like = tap_like(plan, target, len(part), part.dtype)
        maps = sums.value()
        leaves[plan.graph.index(target.leaf)] = finish(plan, target, sums, maps, like)
        if k == 0:
            for leaf, segment in plan.also:
                tap = plan.unmap(maps, like, target)
                leaves[plan.graph.index(leaf)] = segment(len(part), (), [tap])[0]
    return _shared(plan, leaves)


def looked_leaves(plan: Plan, looked: Looked, main: Tensor) -> list[Any]:
    """Output leaves after stages of looks: what was merged, everything else as the plain look has it."""
    if plan.targets[0].leaf not in plan.graph.leaf_nodes:
        raise OptionError(
            "this model returns no features, they are inside of it: ask better.features(images), or give the part that "
            "returns them (timm: features_only=True)"
        )
    leaves: list[Any] = list(plan.graph.leaves)
    batches = [b for b in looked.plain if b.plan is plan]

    def rows(node: Node) -> Tensor:
        return torch.cat([b.run.plain[node][b.places(b.views[0], b.rows)] for b in batches])

    for i, leaf in enumerate(plan.graph.leaves):
        if isinstance(leaf, Node) and leaf in batches[0].run.plain:
            leaves[i] = rows(leaf)
    for k, target in enumerate(plan.targets[1:], 1):
        found = looked.beside.get(k)
        value = target.finish(rows(target.tap)) if found is None else _as_leaf(plan, target, found.logits(), rows)
        leaves[plan.graph.index(target.leaf)] = value
    for leaf, segment in plan.also:
        tap = rows(plan.targets[0].tap)
        leaves[plan.graph.index(leaf)] = segment(len(tap), (), [tap])[0]
    leaves[plan.graph.index(plan.targets[0].leaf)] = _as_leaf(plan, plan.targets[0], main, rows)
    return _shared(plan, leaves)


def main_output(plan: Plan, merged: Tensor) -> Tensor:
    """What was merged of the main output, in the model's type, and a vector in the model's own form."""
    found = merged.to(plan.graph.dtype)
    vector = plan.found.trace.shapes[plan.targets[0].leaf]
    return found if plan.meaning.maps else found.reshape(len(found), *vector[1:])


def _as_leaf(plan: Plan, target: Target, merged: Tensor, rows: Callable[[Node], Tensor]) -> Tensor:
    """What was merged, as the model lays it out: features are merged as maps, whatever they were."""
    if plan.task != "features":
        return merged.to(plan.graph.dtype)
    return plan.unmap(merged, rows(target.tap), target)


def _shared(plan: Plan, leaves: list[Any]) -> list[Any]:
    """A node that stands in the output twice has one value."""
    done = enumerate(plan.graph.leaves)
    seen = {leaf: i for i, leaf in done if isinstance(leaf, Node) and not isinstance(leaves[i], Node)}
    return [leaves[seen[leaf]] if isinstance(leaf, Node) and leaf in seen else leaf for leaf in leaves]


def returned(plan: Plan, leaves: list[Any], crop: Crop, count: int, merged: bool = False) -> Any:
    """Output leaves of `count` images -> what the model returns: maps without padding, beside them what no image
    changes. `merged` main logits are in the image's own coordinates already.
    """
    beside, main = plan.graph.beside(count), plan.graph.index(plan.targets[0].leaf)
    done = [beside[x] if isinstance(x, Node) else cropped_output(x, crop) for x in leaves]
    return plan.graph.rebuild([x if merged and i == main else done[i] for i, x in enumerate(leaves)])


def at_budget(plan: Plan, outcome: Outcome, budget: int, main: Tensor) -> Tensor:
    """Main output with the first `budget` states; an image that stopped earlier keeps its final answer."""
    target, runs = plan.targets[0], outcome.runs
    rows = [i for i, r in enumerate(runs) if budget in r.at]
    out = main.clone()
    if rows:
        like = tap_like(plan, target, len(rows), main.dtype)
        maps = torch.stack([runs[i].at[budget] for i in rows])
        out[rows] = finish(plan, target, outcome.sums[0], maps, like)
    return out


def tap_like(plan: Plan, target: Target, rows: int, dtype: torch.dtype) -> Tensor:
    """What the target's tap looks like for so many images."""
    return torch.empty((rows, *plan.found.trace.shapes[target.tap][1:]), dtype=dtype, device="meta")


def head_macs(plan: Plan) -> int:
    return sum(t.head.macs for t in plan.targets if t.head is not None)


def cost_at(plan: Plan, options: Options, r: ImageRun, budget: int) -> float:
    """What an image's first `budget` states cost, in plain forwards."""
    visited = visited_states(plan, options, r)[: min(budget, len(r.scores))]
    return (plan.engine.trie_macs(visited) + head_macs(plan) * len(visited)) / plan.plain_macs


def visited_states(plan: Plan, options: Options, r: ImageRun) -> list[Any]:
    given = options.states
    return r.search.visited if given is None else list(dict.fromkeys([plan.found.space.zero, *given]))


def searched_prediction(plan: Plan, options: Options, r: ImageRun, macs: int, final: Tensor) -> Prediction:
    visited = visited_states(plan, options, r)
    shape = final.shape[-len(plan.graph.size) :] if plan.meaning.maps else ()
    shifts = [moved(plan, s, shape) for s in visited]
    agreement, mutual = plan.meaning.compare(r.logits, final, shifts)
    total = sum(r.weights) or 1.0
    states = tuple(
        Visited(s, c, w / total, logits) for s, c, w, logits in zip(visited, r.scores, r.weights, r.logits, strict=True)
    )
    told = (macs, plan.plain_macs, agreement, mutual, r.stopped, plan.task)
    return Prediction(final, r.logits[0], states, tuple(r.search.expansions), *told)


def looked_predictions(looked: Looked, final: Tensor) -> list[Prediction]:
    """One Prediction per image from stages of looks."""
    own: list[list[Visited]] = [[] for _ in final]
    for seen in looked.seen:
        for k, row in enumerate(seen.rows):
            look = seen.looks[0]
            own[row].append(Visited(look.state, float(len(own[row])), seen.weight, seen.logits[k], look.view))
    out = []
    for i, visited in enumerate(own):
        total = sum(v.weight for v in visited)
        shares = tuple(replace(v, weight=v.weight / total) for v in visited)
        plan = looked.plain[0].plan
        still = (0,) * len(plan.graph.size) if plan.meaning.maps else ()
        agreement, mutual = plan.meaning.compare([v.logits for v in visited], final[i], [still] * len(visited))
        told = (looked.macs[i], looked.plain_macs, agreement, mutual, looked.stopped[i], plan.task)
        out.append(Prediction(final[i], visited[0].logits, shares, (), *told))
    return out


def cropped_prediction(p: Prediction, crop: tuple[float, ...]) -> Prediction:
    states = tuple(replace(v, logits=cropped(v.logits, crop)) for v in p.states)
    maps = {name: cropped(getattr(p, name), crop) for name in ("logits", "plain", "spread")}
    return replace(p, states=states, **maps)
