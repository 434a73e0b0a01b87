"""What is measured: turns, medians, the most bytes alive; figures that can be checked without a clock."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from unstride.errors import OptionError
from unstride.evaluation.benching import bench, interleaved, peak_bytes
from unstride.recipe.recipe import Recipe


def test_peak_is_what_was_alive_at_once():
    def call():
        a = torch.empty(1 << 18)  # 1 MiB
        b = torch.empty(1 << 18)
        del a
        c = torch.empty(2 << 18)
        return b.numel() + c.numel()

    before = torch.empty(1 << 20)
    assert peak_bytes(call) == 3 << 20
    assert before.numel() == 1 << 20


def test_a_silent_profiler_gives_stderr_back(capfd):
    peak_bytes(lambda: torch.ones(3))
    import os

    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_calls_take_turns_and_the_first_call_does_not_count(monkeypatch):
    order = []
    clock = iter(range(1000))
    monkeypatch.setattr("unstride.evaluation.benching.time.perf_counter", lambda: float(next(clock)))
    calls = {"a": lambda: order.append("a"), "b": lambda: (order.append("b"), next(clock), next(clock))}
    plain, ratios = interleaved(lambda: order.append("plain"), calls, repeats=2)
    assert order == ["plain", "a", "b"] + ["plain", "a", "plain", "b"] * 2
    assert plain == 1.0
    assert ratios == {"a": 1.0, "b": 3.0}


def test_short_calls_are_repeated_in_a_row_and_long_ones_are_not(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr("unstride.evaluation.benching.time.perf_counter", lambda: now[0])

    def call(name, seconds):
        order.append(name)
        now[0] += seconds

    plain, ratios = interleaved(lambda: call("short", 0.06), {"long": lambda: call("long", 0.3)}, repeats=1)
    assert order == ["short", "long"] + ["short"] * 4 + ["long"]
    assert plain == pytest.approx(0.06)
    assert ratios["long"] == pytest.approx(5.0)


def test_each_round_is_held_against_its_own_plain(monkeypatch):
    spent = iter([1.0, 3.0, 2.0, 2.0, 4.0, 4.0])  # plain, call; slower and slower
    monkeypatch.setattr("unstride.evaluation.benching._seconds", lambda call, device: next(spent))
    plain, ratios = interleaved(lambda: None, {"call": lambda: None}, repeats=3)
    assert plain == 2.0
    assert ratios == {"call": 1.0}  # not 3 / 2, the ratio of the medians


def test_the_models_mode_and_weights_stay():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    bench(model, torch.randn(1, 3, 16, 16), (2,), (1,), repeats=1, growth=False)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_wrong_numbers_from_python():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(OptionError, match="budgets"):
        bench(model, torch.randn(1, 3, 16, 16), (0,))
    with pytest.raises(OptionError, match="repeats"):
        interleaved(lambda: None, {}, 0)


@pytest.mark.parametrize("asked", [{"budgets": (2, 3)}, {"budgets": (2,), "tta": False}, {"recipe": "flip"}])
def test_the_progress_ends_where_it_said(asked, monkeypatch):
    seen = []

    @contextmanager
    def line(label, total, show):
        seen.append([total, 0])

        def advance(count, note):
            seen[-1][1] += count

        yield advance

    monkeypatch.setattr("unstride.evaluation.benching.show_progress", line)
    monkeypatch.setattr("unstride.evaluation.benching.LEAST", 1e-9)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    bench(
        model, torch.zeros(1, 3, 16, 16), batches=(1, 2), repeats=2, memory=False, growth=False, progress=True, **asked
    )
    assert len(seen) == 1
    assert seen[0][0] == seen[0][1] > 0


def small(**asked):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    return bench(model, torch.zeros(1, 3, 16, 16), batches=(1,), repeats=1, memory=False, growth=False, **asked).rows


def test_a_recipe_is_measured_with_the_states_that_it_asks_for(monkeypatch):
    monkeypatch.setattr("unstride.evaluation.benching.LEAST", 1e-9)
    given = [((0, 0),), ((0, 1),), ((1, 0),)]
    for recipe, states in (("paper", [4, 10]), (Recipe("three", budget=3), [3]), (Recipe(states=given), [3])):
        assert [row.budget for row in small(recipe=recipe)] == states
    assert [(row.budget, row.macs) for row in small(recipe="plain")] == [(1, 1.0)]


@pytest.mark.parametrize("task", ["embedding", "regression", "multilabel"])
def test_tasks_without_a_policy_are_measured_without_tta(task, monkeypatch):
    monkeypatch.setattr("unstride.evaluation.benching.LEAST", 1e-9)
    assert [row.tta for row in small(task=task, budgets=(2,))] == [None]
