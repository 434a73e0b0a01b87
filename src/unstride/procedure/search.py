"""Best-first search over states (Algorithm 1), one image at a time: told scores, it asks for states. No tensors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace
from unstride.procedure.meaning import TASKS

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
        self._open: dict[int, list[int]] = {}  # which visited state -> its layers that were not expanded yet
        self._seen: set[State] = set()
        self._visit(self.space.zero)

    def _visit(self, state: State) -> None:
        self._open[len(self.visited)] = list(self.layers)
        self.visited.append(state)
        self._seen.add(state)

    def next(self, scores: Sequence[float]) -> list[State]:
        """`scores[i]` is the current criterion of `visited[i]`, lower is better; ties go in visited order."""
        if len(scores) != len(self.visited):
            raise OptionError(f"scores: got {len(scores)}, wanted one for each of {len(self.visited)} visited states")
        while len(self.visited) < self.budget and self._open:
            i, layer = self._pop(scores)
            self._open[i].remove(layer)
            if not self._open[i]:
                del self._open[i]
            state = self.visited[i]
            new = [s for s in self.space.neighbours(state, layer) if s not in self._seen]
            new = new[: self.budget - len(self.visited)]
            if new:
                self.expansions.append(Expansion(state, layer))
                for s in new:
                    self._visit(s)
                return new
        return []

    def ahead(self, scores: Sequence[float]) -> list[tuple[State, int]]:
        """(state, layer) of the expansions still open, the best states first; `scores` may lack the newest states."""
        known = sorted((i for i in self._open if i < len(scores)), key=lambda i: (scores[i], i))
        return [(self.visited[i], layer) for i in known for layer in self._open[i]]

    def _pop(self, scores: Sequence[float]) -> tuple[int, int]:
        def rank(i: int) -> tuple[float, int]:
            return scores[i], i

        if self.order == "paper":
            i = min(self._open, key=rank)
            return i, self._open[i][0]
        ordered = sorted(self._open, key=rank)
        cheapest = [min(self._open[i], key=lambda layer: self.costs[layer - 1]) for i in ordered]
        weighed = [self.costs[c - 1] * (1 + k / len(ordered)) for k, c in enumerate(cheapest)]
        k = weighed.index(min(weighed))
        return ordered[k], cheapest[k]


def random_score(state: State, seed: int) -> float:
    """A criterion that knows nothing, the same for every image and every batch."""
    return random.Random(f"{seed} {state}").random()


def default_layers(space: StateSpace, task: str) -> tuple[int, ...]:
    """The paper's search space: all layers for maps (segmentation) and for nets with fewer than four; otherwise the
    last is left out, and the first unless its rate is 4 or more.
    """
    count = len(space.rates)
    everything = tuple(range(1, count + 1))
    if TASKS[task].maps or count < 4:
        return everything
    first = 1 if max(space.rates[0]) >= 4 else 2
    return tuple(range(first, count))
