"""Stages of looks equal running the model itself, look by look; what gates stop is answered by the looks before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from procedure_nets import SmallNet, SmallSegmenter
from torch import Tensor

import unstride
from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.procedure.gates import Gate, Stage, sureness
from unstride.procedure.looks import Look
from unstride.recipe.recipe import Recipe
from unstride.recipe.view import PLAIN, parse_view
from unstride.tuning.candidates import Unit
from unstride.tuning.gather import look_at, looks_of, usable
from unstride.tuning.pool import Pool
from unstride.tuning.simulate import simulate
from unstride.views.source import Canvas

VIEWS = ("flip", "1.25x", "flip + 1.25x", "ShiftX=4", "ShiftY=-3 + ShiftX=2", "Size=1.25 + Crop=1.25")
VIEWS += ("FiveCrop=LeftTop", "FlipUD")


def net() -> SmallNet:
    torch.manual_seed(0)
    model = SmallNet().eval()
    model.head.weight.data.mul_(20)
    return model


MODEL, PIXELS = net(), torch.randn(5, 3, 80, 80, generator=torch.Generator().manual_seed(1))
CANVAS = Canvas(PIXELS, crop=64)
BETTER = unstride.enhance(MODEL, CANVAS.render(PLAIN)[:1], recipe="plain")


def alone(x: Tensor, state: State) -> Tensor:
    """What one state says, from the image on; that it says the right thing is `test_held`'s to check."""
    plan = BETTER.prepare(x)
    run, target = plan.engine_for([state]).start(x), plan.targets[0]
    return target.finish(run.plain[target.tap] if state.plain else run.add([(0, state)])[0])


@torch.no_grad()
def brute(stages: tuple[Stage, ...]) -> tuple[Tensor, list[int]]:
    """Look by look from the image, image by image; how many looks each took."""
    answers, counts = [], []
    for i in range(len(CANVAS)):
        one, said, taken = CANVAS.rows([i]), [], set()
        for stage in stages:
            if stage.gate is not None:
                sure = sureness(torch.stack(said).mean(0), stage.gate.by, [s.argmax(1) for s in said])
                if not stage.gate.opens(sure)[0]:
                    break
            for view in stage.views:
                x = one.render(view)
                for state in stage.chosen(BETTER.prepare(x).found.space):
                    if (view, state) not in taken:
                        said.append(alone(x, state))
                        taken.add((view, state))
        answers.append(torch.stack(said).mean(0)[0])
        counts.append(len(said))
    return torch.stack(answers), counts


some_views = st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3, unique=True)
some_states = st.sampled_from(["plain", "near:2", "near:5"])
some_gates = st.none() | st.builds(
    Gate, st.sampled_from(["margin", "probability", "entropy", "agreement"]), st.floats(0, 1)
)


@st.composite
def some_stages(draw):
    more = draw(st.lists(st.tuples(some_views, some_states, some_gates), max_size=2))
    first = Stage((PLAIN,), draw(some_states))
    return (first, *(Stage(tuple(map(parse_view, views)), states, gate) for views, states, gate in more))


@settings(max_examples=12)
@given(some_stages())
def test_sharing_and_gates(stages):
    better = BETTER.with_options(recipe=Recipe(stages=stages))
    wanted, counts = brute(stages)
    torch.testing.assert_close(better(CANVAS), wanted, atol=2e-4, rtol=2e-4)
    assert [len(p.states) for p in better.explain(CANVAS)] == counts


@settings(max_examples=12)
@given(some_stages())
def test_independence_of_the_batch(stages):
    better = BETTER.with_options(recipe=Recipe(stages=stages))
    alone = torch.cat([better(CANVAS.rows([i])) for i in range(len(CANVAS))])
    torch.testing.assert_close(better(CANVAS), alone, atol=2e-4, rtol=2e-4)


@settings(max_examples=12)
@given(some_stages())
def test_simulated_equals_run(stages):
    units = [Unit(view, s.states) for s in stages for view in s.views]
    kept, work, refused = usable(BETTER, CANVAS, units)
    assert not refused
    looks = looks_of(kept, work)
    pool = Pool(looks, look_at(BETTER, CANVAS, looks), None, work)
    logits, costs = BETTER.with_options(recipe=Recipe(stages=stages)).looks(CANVAS)
    done = simulate(pool, stages)
    torch.testing.assert_close(done.logits, logits, atol=2e-4, rtol=2e-4)
    assert done.costs.tolist() == pytest.approx(costs, rel=1e-6)


def test_a_share_needs_calibrating_and_then_costs_what_was_asked():
    better = BETTER.with_options(recipe=Recipe(stages=(Stage(), Stage((parse_view("flip"),), gate=Gate(share=0.4)))))
    with pytest.raises(OptionError, match="calibrate"):
        better(CANVAS)
    found = better.calibrate(CANVAS)
    assert found.shares == (0.4,) and found.cost == pytest.approx(1.4, abs=1e-6)
    _, costs = better.looks(CANVAS)
    assert sum(costs) / len(costs) == pytest.approx(1.4, abs=1e-6)
    again = better.calibrate(CANVAS, cost=1.2)
    assert again.cost == pytest.approx(1.2, abs=1e-6) and "mean cost 1.20" in str(again)
    with pytest.raises(OptionError, match="plain forwards"):
        better.calibrate(CANVAS, cost=0.5)


def test_maps_come_back_to_the_plain_views_coordinates():
    torch.manual_seed(0)
    model = SmallSegmenter().eval()
    x = torch.randn(2, 3, 64, 64)
    better = unstride.enhance(model, x[:1], recipe="multiscale-flip", task="segmentation")
    with torch.no_grad():
        total = torch.zeros(2, 4, 64, 64)
        stage = better.recipe.stages[0]
        for view in stage.views:
            seen = Canvas(x).render(view)
            out = model(seen)["out"]
            out = out.flip(-1) if "flip" in str(view) else out
            back = torch.nn.functional.interpolate(out, (64, 64), mode="bilinear", antialias=True)
            total += back.softmax(1)
    got = better(x)
    torch.testing.assert_close(got["out"].softmax(1), total / len(stage.views), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got["half"], model(x)["half"], atol=1e-4, rtol=1e-4)
    costs = [p.cost for p in better.explain(x)]
    assert costs[0] == pytest.approx(2 * (1 + 0.25 + 0.5625 + 1.5625 + 2.25 + 3.0625), rel=0.02)


def test_a_larger_size_costs_what_it_costs():
    better = BETTER.with_options(recipe=Recipe(stages=(Stage(), Stage((parse_view("1.5x"),)))))
    _, costs = better.looks(CANVAS)
    assert costs[0] == pytest.approx(1 + 1.5**2, rel=0.05)
    assert str(Look(parse_view("1.5x"), BETTER.plan.found.space.zero)) == "1.5x"
