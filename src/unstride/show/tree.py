"""Where each pass of a prediction comes from: the paper's search, in rows that read like a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from unstride.execution.prediction import Prediction
from unstride.geometry.states import State
from unstride.method.search import Expansion


@dataclass(frozen=True)
class Node:
    """Pass number `index`; the search reached it from pass `parent` by changing `layer` (0: no search)."""

    index: int
    parent: int | None = None
    layer: int = 0
    depth: int = 0


def rows(prediction: Prediction) -> tuple[Node, ...]:
    """The passes from top to bottom: each parent above its descendants, siblings in the order they were visited.

    Example: `[node.depth for node in rows(better.explain(image)[0])]`
    """
    out: list[Node] = []
    expansions = list(prediction.expansions)
    for _, group in groupby(prediction.passes, lambda p: (p.stage, p.network, p.view)):
        visited = [p.state for p in group]
        reached = dict(_reached(visited, expansions))
        del expansions[: len({(parent, layer) for parent, layer in reached.values() if layer})]
        out += _arranged(len(visited), reached, first=len(out))
    return tuple(out)


def _reached(visited: Sequence[State], expansions: Sequence[Expansion]) -> Iterator[tuple[int, tuple[int, int]]]:
    """(place, (its parent's place, the layer that was changed)) of all but the first state.

    The states of one expansion follow each other, and differ from its state at its layer only. States that no expansion
    explains belong to a list, and follow from the first.
    """
    place = {state: k for k, state in enumerate(visited)}
    k = 1
    for step in expansions:
        while k < len(visited) and step.state in place and _changed_layers(visited[k], step.state) == [step.layer]:
            yield k, (place[step.state], step.layer)
            k += 1
    for rest in range(k, len(visited)):
        yield rest, (0, 0)


def _arranged(count: int, reached: dict[int, tuple[int, int]], first: int) -> Iterator[Node]:
    children: dict[int, list[int]] = {k: [] for k in range(count)}
    for k, (parent, _) in reached.items():
        children[parent].append(k)
    stack = [(0, 0)]
    while stack:
        k, depth = stack.pop()
        if k in reached:
            yield Node(first + k, first + reached[k][0], reached[k][1], depth)
        else:
            yield Node(first + k)
        stack += [(child, depth + 1) for child in reversed(children[k])]


def _changed_layers(a: State, b: State) -> list[int]:
    return [layer for layer, (x, y) in enumerate(zip(a.selections, b.selections, strict=True), 1) if x != y]
