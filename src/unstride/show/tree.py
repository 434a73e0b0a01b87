"""Where each visited state came from, and a row for each of them: the search as a list that reads like a tree."""

from collections.abc import Sequence
from dataclasses import dataclass

from unstride.geometry.states import State
from unstride.execution.prediction import Prediction
from unstride.procedure.search import Expansion


@dataclass(frozen=True)
class Node:
    """State number `index` (in visited order) on its row; `layer` was changed in `parent` to reach it (0: unknown)."""

    index: int
    parent: int | None
    layer: int
    depth: int


def rows(prediction: Prediction) -> tuple[Node, ...]:
    """The visited states from top to bottom: each parent directly above its descendants, siblings in visited order.

    Example: `[n.depth for n in rows(better.explain(image)[0])]`
    """
    return arrange([v.state for v in prediction.states], prediction.expansions)


def arrange(visited: Sequence[State], expansions: Sequence[Expansion]) -> tuple[Node, ...]:
    """`rows` from states alone. States that no expansion explains (given ones) hang from the first."""
    origin = _origins(visited, expansions)
    children: dict[int, list[int]] = {}
    for index, (parent, _) in origin.items():
        children.setdefault(parent, []).append(index)
    out: list[Node] = []
    stack = [(0, 0)]
    while stack:
        index, depth = stack.pop()
        came = origin.get(index)
        out.append(Node(index, None, 0, depth) if came is None else Node(index, *came, depth))
        stack += [(child, depth + 1) for child in reversed(children.get(index, []))]
    return tuple(out)


def _origins(visited: Sequence[State], expansions: Sequence[Expansion]) -> dict[int, tuple[int, int]]:
    """Visited order tells it: an expansion's states follow each other and differ from its own at its layer only."""
    origin: dict[int, tuple[int, int]] = {}
    place = {state: i for i, state in enumerate(visited)}
    at = 1
    for e in expansions:
        while at < len(visited) and _differ(visited[at], e.state) == [e.layer]:
            origin[at] = (place[e.state], e.layer)
            at += 1
    for index in range(at, len(visited)):
        origin[index] = (0, 0)
    return origin


def _differ(a: State, b: State) -> list[int]:
    return [k for k, (x, y) in enumerate(zip(a.selections, b.selections, strict=True), 1) if x != y]
