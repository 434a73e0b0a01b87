"""Which states of a view are evaluated next: a fixed list for all images, or a search of its own for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

from unstride.engine.engine import Request
from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace
from unstride.method.search import BestFirst, Expansion, default_layers
from unstride.recipe.stage import Search, Stage

Criterion = Mapping[int, Mapping[State, float]]  # of each image, of every visited state


class Selector(Protocol):
    levels: Sequence[int]  # of the prefixes that later requests continue from
    reasons: dict[int, str]  # of each image that has ended, why

    @property
    def expansions(self) -> Mapping[int, Sequence[Expansion]]:
        """The steps of each image's search."""
        ...

    def propose(self, criterion: Criterion) -> list[Request]:
        """(image, state) to evaluate next; [] ends the view."""
        ...

    def observe(self, requests: Sequence[Request]) -> None:
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

    def propose(self, criterion: Criterion) -> list[Request]:
        return self.open

    def observe(self, requests: Sequence[Request]) -> None:
        done = set(requests)
        self.open = [r for r in self.open if r not in done]

    def stop(self, image: int, reason: str) -> None:
        self.open = [r for r in self.open if r[0] != image]


class Searches:
    """Algorithm 1 for each image: they advance together, and no image's search depends on another's."""

    def __init__(self, search: Search, space: StateSpace, maps: bool, images: int) -> None:
        layers = searched_layers(search, space, maps)
        self.searches = {i: BestFirst(space, layers, search.budget, search.stop) for i in range(images)}
        self.budget, self.space, self.started = search.budget, space, False
        self.levels: Sequence[int] = [layer - 1 for layer in layers]
        self.reasons: dict[int, str] = {}

    @property
    def expansions(self) -> Mapping[int, Sequence[Expansion]]:
        return {i: search.expansions for i, search in self.searches.items()}

    def propose(self, criterion: Criterion) -> list[Request]:
        if not self.started:
            return [(i, self.space.zero) for i in self.searches]
        proposed: dict[int, list[State]] = {}
        for i, search in self.searches.items():
            if i not in self.reasons:
                proposed[i] = search.propose(criterion[i])
                if not proposed[i]:
                    self.reasons[i] = "budget" if len(search.visited) >= self.budget else "no states left"
        return by_state(proposed)

    def observe(self, requests: Sequence[Request]) -> None:
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


def searched_layers(search: Search, space: StateSpace, maps: bool) -> tuple[int, ...]:
    """The layers that a search moves: its own, or the paper's choice; an OptionError for one that is not there."""
    layers = search.layers if search.layers is not None else default_layers(space, maps)
    if layers and layers[-1] > len(space.rates):
        raise OptionError(f"search: layers: got {layers}, but the network has layers 1 to {len(space.rates)}.")
    return layers


def selector_for(stage: Stage, space: StateSpace, maps: bool, images: int, taken: Iterable[State] = ()) -> Selector:
    """`taken`: states of this view that an earlier stage has evaluated; a list does not evaluate them again."""
    if isinstance(stage.states, Search):
        return Searches(stage.states, space, maps, images)
    done = set(taken)
    return StateList([s for s in stage.listed(space) if s not in done], images)


def by_state(proposed: Mapping[int, Sequence[State]]) -> list[Request]:
    """Requests state by state, as the engine computes them; an image's own states stay in order."""
    turns = zip_longest(*([(i, s) for s in states] for i, states in proposed.items()))
    requests = [r for turn in turns for r in turn if r is not None]
    in_order = all(list(states) == sorted(states, key=lambda s: s.selections) for states in proposed.values())
    return sorted(requests, key=lambda r: (r[1].selections, r[0])) if in_order else requests
