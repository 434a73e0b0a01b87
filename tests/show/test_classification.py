"""Images of a classification hold what the prediction says; networks of every shape of state can be drawn."""

import pytest
import torch
from PIL import Image

pytest.importorskip("matplotlib")

from drawings import prediction, texts

from unstride.geometry.states import State
from unstride.show import plot_classification


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(("rate", "classes"), [((2, 2), 7), ((4, 4), 3), ((16, 16), 1), ((1, 2), 2)])
def test_every_state_its_answer_and_weight(rate: tuple[int, int], classes: int) -> None:
    states = [State.zero(1), State(((0, 1),)), State(((rate[0] - 1, rate[1] - 1),))][: 2 if rate == (1, 2) else 3]
    logits = torch.randn(len(states), classes, generator=torch.Generator().manual_seed(0))
    p = prediction(logits, states, torch.tensor(0.25))
    names = tuple(f"kind {k} with a long name, longer than any row" for k in range(classes))
    svg = texts(plot_classification(Image.new("RGB", (30, 50)), p, [rate], names, "Title & more"))
    assert "Title &amp; more" in svg
    assert "(plain)" in svg
    assert "layer 1" in svg
    for v in p.states:
        assert f"{v.weight:.1%}" in svg
    assert "3.0x the work" in svg


@pytest.mark.usefixtures("words")
def test_one_state_and_unnamed_classes() -> None:
    p = prediction(torch.tensor([[1.0, 3.0]]), [State.zero(2)], torch.tensor(0.0))
    svg = texts(plot_classification(Image.new("L", (20, 20)), p, [(2, 2), (2, 2)]))
    assert "class 1" in svg
    assert "100.0%" in svg
