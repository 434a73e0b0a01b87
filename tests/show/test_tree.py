"""The passes as a tree: every state follows from the one that was expanded to reach it, at the layer that changed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from unstride.execution.prediction import ForwardPass, Prediction
from unstride.geometry.states import State, StateSpace
from unstride.method.search import BestFirst, Expansion
from unstride.recipe.view import PLAIN, as_view
from unstride.show.tree import rows

RATES = st.lists(st.sampled_from([(1, 2), (2, 1), (2, 2), (3, 3)]), min_size=1, max_size=4)
NOTHING = torch.zeros(2)


def predicted(searched: list[tuple[str, list[State]]], expansions: list[Expansion]) -> Prediction:
    passes = [
        ForwardPass(0, "base", as_view(view), s, NOTHING, 1.0, 0.0, NOTHING, 1.0)
        for view, states in searched
        for s in states
    ]
    return Prediction(NOTHING, NOTHING, tuple(passes), 1.0, 1.0, NOTHING, "", expansions=tuple(expansions))


@given(RATES, st.integers(1, 25), st.integers(0, 99))
def test_a_search_inside_two_views_becomes_two_trees(rates: list[tuple[int, int]], budget: int, seed: int) -> None:
    space = StateSpace(tuple(rates), tuple((1.0, 1.0) for _ in rates))
    searches, came = [], []
    for view in ("plain", "flip"):
        search, reached = BestFirst(space, tuple(range(1, len(rates) + 1)), budget), {}
        while new := search.propose({s: hash((str(s), view, seed)) % 97 for s in search.visited}):
            reached |= dict.fromkeys(new, search.expansions[-1])
            search.observe(new)
        searches.append((view, search))
        came.append(reached)
    visited = [(view, search.visited) for view, search in searches]
    expansions = [step for _, search in searches for step in search.expansions]
    p = predicted(visited, expansions)
    nodes = rows(p)
    assert sorted(n.index for n in nodes) == list(range(len(p.passes)))
    by_index = {n.index: n for n in nodes}
    count = len(searches[0][1].visited)
    for n in nodes:
        if n.parent is None:
            assert n.depth == 0 and n.index in (0, count)
            continue
        step = came[n.index >= count][p.passes[n.index].state]
        assert (p.passes[n.parent].state, n.layer) == (step.state, step.layer)
        assert n.depth == by_index[n.parent].depth + 1
        assert (n.parent >= count) == (n.index >= count)


def test_families_stay_together() -> None:
    space = StateSpace(((2, 2), (2, 2)), ((1.0, 1.0), (2.0, 2.0)))
    search = BestFirst(space, (1, 2), 10)
    search.observe(search.propose({space.zero: 0.5}))
    scores = dict(zip(search.visited, (0.5, 0.1, 0.9, 0.9), strict=True))
    search.observe(search.propose(scores))  # state 1 is the best: its layer 1 leads nowhere new, so layer 2 is expanded
    nodes = rows(predicted([("plain", search.visited)], search.expansions))
    assert [(n.index, n.parent, n.layer) for n in nodes] == [
        (0, None, 0), (1, 0, 1), (4, 1, 2), (5, 1, 2), (6, 1, 2), (2, 0, 1), (3, 0, 1),
    ]  # fmt: skip


def test_a_list_of_states_follows_from_the_first() -> None:
    states = [State.zero(2), State(((0, 1), (1, 1))), State(((1, 0), (0, 0)))]
    nodes = rows(predicted([(str(PLAIN), states)], []))
    assert [(n.parent, n.layer, n.depth) for n in nodes] == [(None, 0, 0), (0, 0, 1), (0, 0, 1)]
