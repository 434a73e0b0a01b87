"""Algorithm 1 (section 4.2): best-first search over selection states, top-down through the layers. No tensors.

Where the printed algorithm is silent: a state stays in the queue until all its layers are expanded, states that were
visited before are skipped, ties go to the state visited first, and state 0 belongs to the result. The printed test
`|S| <= B` can return more than B states; `stop="exact"` returns min(B, |S|), `stop="literal"` follows the print.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Protocol

from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace

STOPS = ("exact", "literal")
Criterion = Mapping[int, Mapping[State, float]]  # of each image, of every visited state
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


def searched_layers(layers: tuple[int, ...] | None, space: StateSpace, maps: bool) -> tuple[int, ...]:
    """The layers that were asked for, or the paper's choice; an OptionError for one that is not there."""
    chosen = layers if layers is not None else default_layers(space, maps)
    if chosen and chosen[-1] > len(space.rates):
        raise OptionError(f"search: layers: got {chosen}, but the network has layers 1 to {len(space.rates)}.")
    return chosen


# ------------------------------------------------------------------------------------------ the images of a batch


class Selector(Protocol):
    levels: Sequence[int]  # of the prefixes that later requests continue from
    reasons: dict[int, str]  # of each image that has ended, why

    @property
    def expansions(self) -> Mapping[int, Sequence[Expansion]]:
        """The steps of each image's search."""
        ...

    def propose(self, criterion: Criterion) -> list[tuple[int, State]]:
        """(image, state) to evaluate next; [] ends the view."""
        ...

    def observe(self, requests: Sequence[tuple[int, State]]) -> None:
        """These were evaluated."""
        ...

    def stop(self, image: int, reason: str) -> None:
        """Propose nothing more for this image."""
        ...


class StateList:
    """The same states for every image, all at once."""

    def __init__(self, states: Sequence[State], images: int) -> None:
        self.open = [(i, state) for state in states for i in range(images)]
        self.levels: Sequence[int] = ()
        self.reasons: dict[int, str] = {}

    @property
    def expansions(self) -> Mapping[int, Sequence[Expansion]]:
        return {}

    def propose(self, criterion: Criterion) -> list[tuple[int, State]]:
        return self.open

    def observe(self, requests: Sequence[tuple[int, State]]) -> None:
        done = set(requests)
        self.open = [r for r in self.open if r not in done]

    def stop(self, image: int, reason: str) -> None:
        self.open = [r for r in self.open if r[0] != image]


class Searches:
    """Algorithm 1 for each image: they advance together, and no image's search depends on another's."""

    def __init__(self, space: StateSpace, layers: tuple[int, ...], budget: int, stop: str, images: int) -> None:
        self.searches = {i: BestFirst(space, layers, budget, stop) for i in range(images)}
        self.budget, self.space, self.started = budget, space, False
        self.levels: Sequence[int] = [layer - 1 for layer in layers]
        self.reasons: dict[int, str] = {}

    @property
    def expansions(self) -> Mapping[int, Sequence[Expansion]]:
        return {i: search.expansions for i, search in self.searches.items()}

    def propose(self, criterion: Criterion) -> list[tuple[int, State]]:
        if not self.started:
            return [(i, self.space.zero) for i in self.searches]
        proposed: dict[int, list[State]] = {}
        for i, search in self.searches.items():
            if i not in self.reasons:
                proposed[i] = search.propose(criterion[i])
                if not proposed[i]:
                    self.reasons[i] = "budget" if len(search.visited) >= self.budget else "no states left"
        return by_state(proposed)

    def observe(self, requests: Sequence[tuple[int, State]]) -> None:
        if not self.started:
            self.started = True  # state 0 is visited from the start
            return
        visited: dict[int, list[State]] = {}
        for i, state in requests:
            visited.setdefault(i, []).append(state)
        for i, states in visited.items():
            self.searches[i].observe(states)

    def stop(self, image: int, reason: str) -> None:
        self.reasons.setdefault(image, reason)


def by_state(proposed: Mapping[int, Sequence[State]]) -> list[tuple[int, State]]:
    """Requests state by state, as the engine computes them; an image's own states stay in order."""
    turns = zip_longest(*([(i, s) for s in states] for i, states in proposed.items()))
    requests = [r for turn in turns for r in turn if r is not None]
    in_order = all(list(states) == sorted(states, key=lambda s: s.selections) for states in proposed.values())
    return sorted(requests, key=lambda r: (r[1].selections, r[0])) if in_order else requests
