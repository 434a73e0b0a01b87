"""Stages equal running the model itself, pass by pass; an image that a gate stops keeps the passes before it."""

import pytest
import torch
from captures import split_of
from hypothesis import given, settings
from hypothesis import strategies as st
from procedure_nets import SmallNet, SmallSegmenter
from torch import Tensor

import unstride
from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Stage
from unstride.tasks.tasks import confidence
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
BETTER = unstride.enhance(MODEL, recipe="plain", task="classification")


def alone(x: Tensor, state: State) -> Tensor:
    """One state, from the image on; that it is right is for `test_pinned_edges` to check."""
    split = split_of(BETTER, x)
    run, target = split.pinned.start(x), split.targets[0]
    return target.finish(run.plain[target.tap] if state.plain else run.add([(0, state)])[0])


@torch.no_grad()
def brute(stages: tuple[Stage, ...]) -> tuple[Tensor, list[int]]:
    """Pass by pass from the image, image by image; and how many passes each took."""
    answers, counts = [], []
    for i in range(len(CANVAS)):
        image, outputs, taken = CANVAS.rows([i]), [], set()
        for stage in stages:
            if stage.gate is not None:
                value = confidence(torch.stack(outputs).mean(0), stage.gate.by, [s.argmax(1) for s in outputs])
                if not stage.gate.passes(value)[0]:
                    break
            for view in stage.views:
                x = image.render(view)
                for state in stage.listed(split_of(BETTER, x).found.space):
                    if (view, state) not in taken:
                        outputs.append(alone(x, state))
                        taken.add((view, state))
        answers.append(torch.stack(outputs).mean(0)[0])
        counts.append(len(outputs))
    return torch.stack(answers), counts


some_views = st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3, unique=True)
some_states = st.sampled_from([None, Near(2), Near(5)])
some_gates = st.none() | st.builds(
    Gate, st.sampled_from(["margin", "probability", "entropy", "agreement"]), st.floats(0, 1)
)


@st.composite
def some_stages(draw):
    more = draw(st.lists(st.tuples(some_views, some_states, some_gates), max_size=2))
    first = Stage(states=draw(some_states))
    return (first, *(Stage(views, states, gate=gate) for views, states, gate in more))


@settings(max_examples=12)
@given(some_stages())
def test_sharing_and_gates(stages):
    better = BETTER.replace(Recipe(stages))
    wanted, counts = brute(stages)
    torch.testing.assert_close(better(CANVAS), wanted, atol=2e-4, rtol=2e-4)
    assert [len(p.passes) for p in better.explain(CANVAS)] == counts


@settings(max_examples=12)
@given(some_stages())
def test_independence_of_the_batch(stages):
    better = BETTER.replace(Recipe(stages))
    alone = torch.cat([better(CANVAS.rows([i])) for i in range(len(CANVAS))])
    torch.testing.assert_close(better(CANVAS), alone, atol=2e-4, rtol=2e-4)


def test_a_share_needs_calibration_and_then_costs_that():
    better = BETTER.replace(Recipe((Stage(), Stage(("flip",), gate=Gate(share=0.4)))))
    with pytest.raises(OptionError, match="calibrate"):
        better(CANVAS)
    first = better.calibrate(CANVAS)
    assert first.shares == (0.4,) and first.cost == pytest.approx(1.4, abs=1e-6)
    costs = better.run(CANVAS).costs
    assert sum(costs) / len(costs) == pytest.approx(1.4, abs=1e-6)
    again = better.calibrate(CANVAS, cost=1.2)
    assert again.cost == pytest.approx(1.2, abs=1e-6) and "mean cost 1.20" in str(again)
    with pytest.raises(OptionError, match="every image takes"):
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
            out = model(Canvas(x).render(view))["out"]
            out = out.flip(-1) if "flip" in str(view) else out
            back = torch.nn.functional.interpolate(out, (64, 64), mode="bilinear", antialias=True)
            total += back.softmax(1)
    got = better(x)
    torch.testing.assert_close(got["out"].softmax(1), total / len(stage.views), atol=1e-4, rtol=1e-4)
    assert got["half"].shape == model(x)["half"].shape
    costs = [p.cost for p in better.explain(x)]
    assert costs[0] == pytest.approx(2 * (1 + 0.25 + 0.5625 + 1.5625 + 2.25 + 3.0625), rel=0.02)


def test_a_larger_size_costs_what_it_costs():
    better = BETTER.replace(Recipe((Stage(), Stage(("1.5x",)))))
    costs = better.run(CANVAS).costs
    assert costs[0] == pytest.approx(1 + 1.5**2, rel=0.05)
    assert str(better.explain(CANVAS)[0].passes[1]) == "1.5x"
