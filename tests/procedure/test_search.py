"""Algorithm 1: best-first, current scores, exactly B states."""

from hypothesis import given
from hypothesis import strategies as st

from unstride.geometry.states import State, StateSpace
from unstride.procedure.search import Search, default_layers

SPACE = StateSpace(((2, 2), (2, 2), (3, 1)), ((1, 1), (2, 2), (4, 4)))


def drive(search: Search, score) -> list[State]:
    while search.next([score(s) for s in search.visited]):
        pass
    return search.visited


def test_first_steps_by_hand() -> None:
    """(0,1) at layer 1 is the best: it is popped second; its layer 1 has nothing new, so layer 2 follows."""
    search = Search(SPACE, (1, 2), budget=9)
    zero = SPACE.zero
    best = zero.at(1, (0, 1))
    scores = {zero: 0.5, best: 0.1}
    first = search.next([0.5])
    assert first == [zero.at(1, (0, 1)), zero.at(1, (1, 0)), zero.at(1, (1, 1))]
    second = search.next([scores.get(s, 0.9) for s in search.visited])
    assert second == [best.at(2, (0, 1)), best.at(2, (1, 0)), best.at(2, (1, 1))]
    # now the plain state is best again: its first unexpanded layer is 2; the budget leaves room for two
    third = search.next([0.0 if s == zero else 1.0 for s in search.visited])
    assert third == [zero.at(2, (0, 1)), zero.at(2, (1, 0))]
    assert search.next([0.0] * 9) == []
    assert [e.layer for e in search.expansions] == [1, 2, 2]


@given(st.integers(1, 60), st.lists(st.floats(0, 1), min_size=48, max_size=48), st.sampled_from(["paper", "cost"]))
def test_exactly_the_budget_without_repeats(budget: int, values: list[float], order: str) -> None:
    rank = dict(zip(SPACE.states(), values, strict=True))
    search = Search(SPACE, (1, 2, 3), budget, order, costs=(1.0, 0.6, 0.2))
    visited = drive(search, rank.__getitem__)
    assert visited[0] == SPACE.zero
    assert len(visited) == len(set(visited)) == min(budget, len(SPACE))


@given(st.integers(2, 40), st.integers(1, 39), st.lists(st.floats(0, 1), min_size=48, max_size=48))
def test_a_longer_search_has_visited_the_shorter(large: int, small: int, values: list[float]) -> None:
    small = min(small, large)
    rank = dict(zip(SPACE.states(), values, strict=True))
    long = drive(Search(SPACE, (1, 2, 3), large), rank.__getitem__)
    short = drive(Search(SPACE, (1, 2, 3), small), rank.__getitem__)
    assert long[: len(short)] == short


def test_unsearched_layers_stay_zero() -> None:
    visited = drive(Search(SPACE, (2,), 50), lambda s: 0.0)
    assert len(visited) == 4
    assert all(s.selections[0] == (0, 0) and s.selections[2] == (0, 0) for s in visited)


def test_cost_order_begins_with_the_cheapest_layer() -> None:
    search = Search(SPACE, (1, 2, 3), 10, "cost", costs=(1.0, 0.6, 0.2))
    assert search.next([0.3]) == [SPACE.zero.at(3, (1, 0)), SPACE.zero.at(3, (2, 0))]


def test_default_layers_follow_the_paper() -> None:
    def space(*rates: int) -> StateSpace:
        return StateSpace(tuple((r, r) for r in rates), tuple((1, 1) for _ in rates))

    assert default_layers(space(2, 2, 2, 2, 2), "classification") == (2, 3, 4)
    assert default_layers(space(4, 2, 2, 2), "classification") == (1, 2, 3)
    assert default_layers(space(2, 2, 2), "classification") == (1, 2, 3)
    assert default_layers(space(2, 2, 2, 2), "segmentation") == (1, 2, 3, 4)
