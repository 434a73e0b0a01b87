"""Algorithm 1 (section 4.2): best-first search over selection states, top-down through the layers. No tensors.

Where the printed algorithm is silent: a state stays in the queue until all its layers are expanded, states that were
visited before are skipped, ties go to the state visited first, and state 0 belongs to the result. The printed test
`|S| <= B` can return more than B states; `stop="exact"` returns min(B, |S|), `stop="literal"` follows the print.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace

STOPS = ("exact", "literal")
Choose = Callable[[Sequence[State], Mapping[State, float]], State]


@dataclass(frozen=True)
class Expansion:
    """One step of the search: the state that was expanded and the layer that was changed."""

    state: State
    layer: int


def lowest(queue: Sequence[State], criterion: Mapping[State, float]) -> State:
    """The state with the lowest criterion; of equal ones, the one visited first."""
    return min(queue, key=criterion.__getitem__)


@dataclass(eq=False)
class BestFirst:
    """Visits up to `budget` states of one image, the most promising first. State 0 is visited already.

    `propose` returns the states to evaluate next, given the current criterion of every visited state (lower is better).
    An empty list ends the search. `observe` records that they were evaluated, so that they can be expanded in turn.

    Args:
        space: All states of the network.
        layers: The layers that are searched, from 1, in the order in which a state is expanded.
        budget: The number of states, state 0 included.
        stop: "exact" returns min(budget, states that can be reached); "literal" tests `|S| <= budget` before each
            expansion, as printed, and may return more.
        choose: Which state of the queue is expanded. Training draws one instead of the best.
    """

    space: StateSpace
    layers: tuple[int, ...]
    budget: int
    stop: str = "exact"
    choose: Choose = lowest
    visited: list[State] = field(init=False, default_factory=list)
    expansions: list[Expansion] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        if self.stop not in STOPS:
            raise OptionError(f"stop: got {self.stop!r}, expected one of {', '.join(map(repr, STOPS))}")
        self._unexpanded: dict[State, list[int]] = {}  # Q and E: queued states and their unexpanded layers
        self._known: set[State] = set()
        self.observe([self.space.zero])  # lines 2 to 5

    def propose(self, criterion: Mapping[State, float]) -> list[State]:
        """The states to evaluate next, in index order."""
        while self._unexpanded and self._may_expand():  # line 6
            state = self.choose(list(self._unexpanded), criterion)  # line 7
            layer = self._unexpanded[state].pop(0)  # lines 8 and 9, top-down
            if not self._unexpanded[state]:
                del self._unexpanded[state]
            new = [s for s in self.space.neighbours(state, layer) if s not in self._known]  # line 10
            if self.stop == "exact":
                new = new[: self.budget - len(self.visited)]
            if new:
                self.expansions.append(Expansion(state, layer))
                return new
        return []

    def observe(self, states: Iterable[State]) -> None:
        """Record that these states were evaluated."""
        for state in states:  # lines 12 and 13
            if self.layers:
                self._unexpanded[state] = list(self.layers)
            self._known.add(state)
            self.visited.append(state)

    def _may_expand(self) -> bool:
        return len(self.visited) <= self.budget if self.stop == "literal" else len(self.visited) < self.budget


def default_layers(space: StateSpace, maps: bool) -> tuple[int, ...]:
    """The layers that the paper searches (section 5.1, Table 3, and the appendix, "Searching procedure").

    All of them where the output is a map (segmentation) or the network has fewer than four. Otherwise the last is left
    out, and the first unless its rate is 4 or more.
    """
    count = len(space.rates)
    if maps or count < 4:
        return tuple(range(1, count + 1))
    first = 1 if max(space.rates[0]) >= 4 else 2
    return tuple(range(first, count))
