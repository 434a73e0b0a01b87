"""Fixed sets of states are chosen as brute force would."""

import itertools
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

import unstride
from unstride.errors import DataError, InputError, OptionError
from unstride.geometry.states import State
from unstride.learning.selecting import fixed, select_states


# -- choosing
@pytest.fixture(scope="module")
def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    body = OrderedDict(
        a=nn.Conv2d(3, 8, 3, 2, 1), r=nn.ReLU(), b=nn.Conv2d(8, 8, 3, 2, 1), s=nn.ReLU(),
        p=nn.AdaptiveAvgPool2d(1), f=nn.Flatten(), h=nn.Linear(8, 3),
    )  # fmt: skip
    x = torch.randn(40, 3, 16, 16)
    return nn.Sequential(body).eval(), x, torch.randint(3, (40,))


@pytest.mark.parametrize("by", ["accuracy", "likelihood"])
@pytest.mark.parametrize("aggregate", ["entropy", "mean"])
def test_greedy_choice_is_that_of_brute_force(problem, by, aggregate):
    model, x, y = problem
    better = unstride.enhance(model, x[:1], aggregate=aggregate)
    loader = [(x[:25], y[:25]), (x[25:], y[25:])]
    chosen = select_states(better, loader, 4, by=by, show=False)

    def score(states: list[State]) -> tuple[float, float]:
        logits = better.with_options(states=tuple(states))(x)
        right = float((logits.argmax(1) == y).float().mean())
        likelihood = -float(nn.functional.cross_entropy(logits, y))
        return (right, likelihood) if by == "accuracy" else (likelihood, right)

    space = better.prepare(x).found.space
    taken = [space.zero]
    for step in chosen.history[1:]:
        best = max(score([*taken, s]) for s in space.states() if s not in taken)
        mine = score([*taken, step.state])
        assert mine[0] >= best[0] - 1e-4 and mine[1] >= best[1] - 1e-3
        taken.append(step.state)
    ends = [score(taken[: i + 1])[0] for i in range(len(taken))]
    assert score(list(chosen.states))[0] >= max(ends) - 1e-4
    assert chosen.candidates == len(space) and chosen.images == 40
    assert torch.allclose(chosen.module()(x), chosen.better(x), atol=2e-5)
    assert len(chosen.to_json()["states"]) == len(chosen.states) <= 4


def test_given_candidates_and_files(problem, tmp_path):
    model, x, y = problem
    some = [(0, 1), (2, 0), (3, 3)]
    first = select_states(model, [(x, y)], 3, candidates=some, cache_dir=tmp_path, show=False)
    assert set(first.states) <= {State(((0, 0), (0, 0))), *(State((divmod(a, 2), divmod(b, 2))) for a, b in some)}
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}
    again = select_states(model, [(x, y)], 3, candidates=some, cache_dir=tmp_path, show=False)
    assert again.history == first.history
    assert files and files == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.safetensors")}


def test_many_states_are_bounded_to_the_least_moved():
    torch.manual_seed(0)
    layers = list(itertools.chain(*[(nn.Conv2d(3, 3, 3, 2, 1), nn.ReLU()) for _ in range(4)]))
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    x = torch.randn(2, 3, 32, 32)
    better = unstride.enhance(model, x, layers=(1, 2, 3, 4))
    chosen = select_states(better, [(x, torch.tensor([0, 1]))], 2, show=False)
    assert chosen.candidates == 64


def test_bad_requests_are_refused(problem):
    model, x, y = problem
    with pytest.raises(OptionError, match="by"):
        select_states(model, [(x, y)], 3, by="luck")
    with pytest.raises(OptionError, match="budget"):
        select_states(model, [(x, y)], 0)
    with pytest.raises(DataError, match="loader, image 0: its label is 9"):
        select_states(model, [(x, torch.full_like(y, 9))], 2, show=False)
    with pytest.raises(InputError, match="once only"):
        select_states(model, iter([(x, y)]), 2)
    with pytest.raises(OptionError, match="aggregate"):
        select_states(unstride.enhance(model, x, aggregate="max"), [(x, y)], 2)
    with pytest.raises(OptionError, match="selections"):
        fixed(model, x, [(0, 0, 0)])
