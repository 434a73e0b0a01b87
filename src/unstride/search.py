"""Best-first search over states (Algorithm 1), one image at a time: told scores, it asks for states. No tensors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from unstride.states import State, StateSpace

ORDERS = ("paper", "cost")
CRITERIA = ("entropy", "learned", "displacement", "random")


@dataclass(frozen=True)
class Expansion:
    """One step of the search: the state that was expanded and the layer that was changed."""

    state: State
    layer: int


@dataclass(eq=False)
class Search:
    """`next(scores)` gives the next states to evaluate, at most up to the budget; an empty list ends the search.

    `layers` is the search space (from 1). Order "paper": pop the best state, expand its first unexpanded layer. Order
    "cost": weigh every (state, unexpanded layer) by what an expansion there costs, so that cheap late layers lead.
    """

    space: StateSpace
    layers: Sequence[int]
    budget: int
    order: str = "paper"
    costs: Sequence[float] = ()  # of one more state at each layer (from layer 1), as a fraction of a plain forward
    visited: list[State] = field(default_factory=list)
    expansions: list[Expansion] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open: dict[State, list[int]] = {}
        self._seen: set[State] = set()
        self._visit(self.space.zero)

    def _visit(self, state: State) -> None:
        self.visited.append(state)
        self._seen.add(state)
        self._open[state] = list(self.layers)

    def next(self, scores: Sequence[float]) -> list[State]:
        """`scores[i]` is the current criterion of `visited[i]`, lower is better; ties go in visited order."""
        while len(self.visited) < self.budget and self._open:
            ranks = {s: (score, i) for i, (s, score) in enumerate(zip(self.visited, scores, strict=True))}
            state, layer = self._pop(ranks)
            self._open[state].remove(layer)
            if not self._open[state]:
                del self._open[state]
            new = [s for s in self.space.neighbours(state, layer) if s not in self._seen]
            new = new[: self.budget - len(self.visited)]
            if new:
                self.expansions.append(Expansion(state, layer))
                for s in new:
                    self._visit(s)
                return new
        return []

    def _pop(self, ranks: dict[State, tuple[float, int]]) -> tuple[State, int]:
        if self.order == "paper":
            state = min(self._open, key=ranks.__getitem__)
            return state, self._open[state][0]
        ordered = sorted(self._open, key=ranks.__getitem__)
        place = {state: 1 + i / len(ordered) for i, state in enumerate(ordered)}
        return min(
            ((state, layer) for state in ordered for layer in self._open[state]),
            key=lambda pair: (self.costs[pair[1] - 1] * place[pair[0]], ranks[pair[0]]),
        )


def random_score(state: State, seed: int) -> float:
    """A criterion that knows nothing, the same for every image and every batch."""
    return random.Random(f"{seed} {state}").random()


def default_layers(space: StateSpace, task: str) -> tuple[int, ...]:
    """The paper's search space: all layers for segmentation and for nets with fewer than four; otherwise the last is
    left out, and the first unless its rate is 4 or more.
    """
    count = len(space.rates)
    everything = tuple(range(1, count + 1))
    if task == "segmentation" or count < 4:
        return everything
    first = 1 if max(space.rates[0]) >= 4 else 2
    return tuple(range(first, count))
