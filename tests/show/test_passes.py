"""A figure of passes holds what the prediction says, for every task with a vector for an answer."""

import pytest
import torch
from PIL import Image

pytest.importorskip("matplotlib")

from drawings import prediction, texts

from unstride.errors import InputError
from unstride.geometry.states import State

STATES = [State.zero(1), State(((0, 1),)), State(((1, 1),))]


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize("classes", [7, 2, 1])
def test_every_pass_has_its_answer_weight_and_cost(classes: int) -> None:
    logits = torch.randn(3, classes, generator=torch.Generator().manual_seed(0))
    p = prediction(logits, STATES, torch.tensor(0.25))
    names = tuple(f"kind {k} with a long name, longer than any row" for k in range(classes))
    svg = texts(p.plot(Image.new("RGB", (30, 50)), names, "Title & more"))
    assert "Title &amp; more" in svg
    assert "layer 1: plain in (0,1)" in svg
    for v in p.passes:
        assert f"{v.weight:.1%}" in svg
    assert "3 passes · cost 3.00x" in svg
    assert "3.00x" in svg


@pytest.mark.usefixtures("words")
@pytest.mark.parametrize(
    ("task", "text"), [("multilabel", "class 1"), ("regression", "value 1"), ("embedding", "value 1")]
)
def test_other_vectors_and_no_image(task: str, text: str) -> None:
    p = prediction(torch.tensor([[1.0, 3.0]]), STATES[:1], torch.tensor(0.0), task)
    svg = texts(p.plot())
    assert text in svg
    assert "1 pass ·" in svg
    assert ("95.3%" if task == "multilabel" else ">3<") in svg


def test_an_image_that_is_none_is_an_error() -> None:
    p = prediction(torch.tensor([[1.0, 3.0]]), STATES[:1], torch.tensor(0.0))
    with pytest.raises(InputError, match="expected a PIL image"):
        p.plot(torch.zeros(3, 8, 8))
