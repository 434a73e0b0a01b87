"""The search as a tree: every state hangs from the state that was expanded to reach it, at the layer that changed."""

from hypothesis import given
from hypothesis import strategies as st

from unstride.geometry.states import State, StateSpace
from unstride.procedure.search import ORDERS, Search
from unstride.show.tree import arrange

RATES = st.lists(st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 3)]), min_size=1, max_size=4)


@given(RATES, st.integers(1, 25), st.sampled_from(ORDERS), st.integers(0, 99))
def test_every_search_becomes_its_own_tree(rates: list[tuple[int, int]], budget: int, order: str, seed: int) -> None:
    space = StateSpace(tuple(rates), tuple((1.0, 1.0) for _ in rates))
    search = Search(space, range(1, len(rates) + 1), budget, order, [1.0 - 0.1 * k for k in range(len(rates))])
    came: dict[State, tuple[State, int]] = {}
    while True:
        scores = [hash((str(s), seed)) % 97 for s in search.visited]
        new = search.next(scores)
        if not new:
            break
        came |= dict.fromkeys(new, (search.expansions[-1].state, search.expansions[-1].layer))
    nodes = arrange(search.visited, search.expansions)
    assert sorted(n.index for n in nodes) == list(range(len(search.visited)))
    depth = {n.index: n.depth for n in nodes}
    for n in nodes:
        if n.parent is None:
            assert n.index == n.depth == 0
            continue
        assert came[search.visited[n.index]] == (search.visited[n.parent], n.layer)
        assert n.depth == depth[n.parent] + 1
    assert [n.parent for n in nodes].count(None) == 1


def test_rows_keep_families_together() -> None:
    space = StateSpace(((2, 2), (2, 2)), ((1.0, 1.0), (2.0, 2.0)))
    search = Search(space, (1, 2), 10)
    search.next([0.5])
    search.next([0.5, 0.1, 0.9, 0.9])  # state 1 is the best: its layer 1 leads nowhere new, so layer 2 is expanded
    nodes = arrange(search.visited, search.expansions)
    assert [(n.index, n.parent, n.layer) for n in nodes] == [
        (0, None, 0), (1, 0, 1), (4, 1, 2), (5, 1, 2), (6, 1, 2), (2, 0, 1), (3, 0, 1),
    ]  # fmt: skip


def test_given_states_hang_from_the_first() -> None:
    states = [State.zero(2), State(((0, 1), (1, 1))), State(((1, 0), (0, 0)))]
    assert [(n.parent, n.layer, n.depth) for n in arrange(states, ())] == [(None, 0, 0), (0, 0, 1), (0, 0, 1)]
