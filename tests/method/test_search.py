"""Algorithm 1 against the reference written from the paper, and by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference.paper import search as paper_search

from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace
from unstride.method.search import BestFirst, default_layers

SPACE = StateSpace(((2, 2), (2, 2), (3, 1)), ((1, 1), (2, 2), (4, 4)))


def run(search: BestFirst, criterion) -> BestFirst:
    """Drive a search with the criterion of a state and the number of visited states."""
    while new := search.propose({s: criterion(s, len(search.visited)) for s in search.visited}):
        search.observe(new)
    return search


def square(rates: list[int]) -> StateSpace:
    strides = [float(math.prod(rates[:k])) for k in range(len(rates))]
    return StateSpace(tuple((r, r) for r in rates), tuple((t, t) for t in strides))


def test_first_steps_by_hand() -> None:
    """(0,1) at layer 1 is the best: it is expanded second; its layer 1 has nothing new, so layer 2 follows."""
    search, zero = BestFirst(SPACE, (1, 2), 9), SPACE.zero
    best = zero.at(1, (0, 1))
    first = search.propose({zero: 0.5})
    assert first == [zero.at(1, (0, 1)), zero.at(1, (1, 0)), zero.at(1, (1, 1))]
    search.observe(first)
    second = search.propose({s: {zero: 0.5, best: 0.1}.get(s, 0.9) for s in search.visited})
    assert second == [best.at(2, (0, 1)), best.at(2, (1, 0)), best.at(2, (1, 1))]
    search.observe(second)
    third = search.propose({s: 0.0 if s == zero else 1.0 for s in search.visited})  # the budget leaves two
    assert third == [zero.at(2, (0, 1)), zero.at(2, (1, 0))]
    search.observe(third)
    assert search.propose(dict.fromkeys(search.visited, 0.0)) == []
    assert [(e.state, e.layer) for e in search.expansions] == [(zero, 1), (best, 2), (zero, 2)]


@given(
    rates=st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4),
    chosen=st.data(),
    budget=st.integers(1, 40),
    stop=st.sampled_from(["exact", "literal"]),
    values=st.integers(1, 5),
    seed=st.integers(0, 1000),
    moving=st.booleans(),
)
def test_the_same_states_in_the_same_order_as_the_reference(
    rates: list[int], chosen: st.DataObject, budget: int, stop: str, values: int, seed: int, moving: bool
) -> None:
    """Few different `values` make many ties; a `moving` criterion depends on how many states there are."""
    first = chosen.draw(st.integers(1, len(rates)))
    layers = tuple(range(first, chosen.draw(st.integers(first, len(rates))) + 1))
    space = square(rates)

    def criterion(selections: tuple[tuple[int, int], ...], count: int) -> float:
        return hash((selections, seed, count if moving else 0)) % values

    states, expansions = paper_search(rates, layers, lambda S: [criterion(s, len(S)) for s in S], budget, stop)
    search = run(BestFirst(space, layers, budget, stop), lambda s, count: criterion(s.selections, count))
    assert [s.selections for s in search.visited] == states
    assert [(e.state.selections, e.layer) for e in search.expansions] == expansions


@given(st.integers(1, 60), st.lists(st.floats(0, 1), min_size=48, max_size=48))
def test_exactly_the_budget_without_repeats(budget: int, values: list[float]) -> None:
    rank = dict(zip(SPACE.states(), values, strict=True))
    visited = run(BestFirst(SPACE, (1, 2, 3), budget), lambda s, count: rank[s]).visited
    assert visited[0] == SPACE.zero
    assert len(visited) == len(set(visited)) == min(budget, len(SPACE))


@given(st.integers(1, 47), st.lists(st.floats(0, 1), min_size=48, max_size=48))
def test_the_literal_stop_ends_after_the_expansion_that_exceeds_the_budget(budget: int, values: list[float]) -> None:
    rank = dict(zip(SPACE.states(), values, strict=True))
    exact, literal = (
        run(BestFirst(SPACE, (1, 2, 3), budget, stop), lambda s, count: rank[s]).visited
        for stop in ("exact", "literal")
    )
    assert budget < len(literal) <= budget + 3
    assert literal[:budget] == exact


def test_a_state_that_is_given_back_unevaluated_is_proposed_once() -> None:
    search = BestFirst(SPACE, (3,), 10)
    assert search.propose({SPACE.zero: 0.0}) == [SPACE.zero.at(3, (1, 0)), SPACE.zero.at(3, (2, 0))]
    assert search.propose({SPACE.zero: 0.0}) == []


def test_nothing_to_search() -> None:
    assert BestFirst(SPACE, (), 10).propose({SPACE.zero: 0.0}) == []
    assert BestFirst(SPACE, (1,), 1).propose({SPACE.zero: 0.0}) == []
    assert BestFirst(StateSpace((), ()), (), 5).visited == [State(())]


def test_an_unknown_stop_is_an_error() -> None:
    with pytest.raises(OptionError, match="expected one of 'exact', 'literal'"):
        BestFirst(SPACE, (1,), 4, stop="soft")


def test_default_layers_by_hand() -> None:
    assert default_layers(square([2] * 5), maps=False) == (2, 3, 4)
    assert default_layers(square([4, 2, 2, 2]), maps=False) == (1, 2, 3)
    assert default_layers(square([2] * 3), maps=False) == (1, 2, 3)
    assert default_layers(square([2] * 4), maps=False) == (2, 3)
    assert default_layers(square([16]), maps=False) == (1,)  # ViT: one patch embedding
    assert default_layers(square([2] * 5), maps=True) == (1, 2, 3, 4, 5)
