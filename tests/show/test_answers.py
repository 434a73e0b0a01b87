"""A prediction in words and plain data, for every kind of task."""

import json

import pytest
import torch
from drawings import prediction

from unstride.geometry.states import State
from unstride.show.answers import changed, described, headline

STATES = [State.zero(1), State(((0, 1),))]


def test_classes_with_their_probabilities() -> None:
    p = prediction(torch.tensor([[2.0, 1.0, 0.0], [0.0, 4.0, 0.0]]), STATES, torch.tensor(0.1))
    found = described(p, ("cat", "dog"), top=2)
    assert [e["name"] for e in found["base"]] == ["cat", "dog"]
    assert [e["name"] for e in found["answer"]] == ["dog", "cat"]
    assert found["answer"][0]["probability"] == pytest.approx(float(torch.tensor([1.0, 2.5, 0.0]).softmax(0)[1]))
    assert [e["name"] for e in found["passes"]] == ["cat", "dog"]
    assert found["cost"] == 3.0 and changed(p) == 1.0
    assert headline(p, ("cat", "dog")) == "cat 67% becomes dog 77%"
    json.dumps(found)


def test_one_logit_is_the_second_of_two_classes() -> None:
    p = prediction(torch.tensor([[2.0]]), STATES[:1], torch.tensor(0.0))
    assert described(p)["answer"][0] == {"class": 1, "name": "class 1", "probability": pytest.approx(0.8808, abs=1e-4)}
    assert headline(p) == "class 1: 88% alone, 88% combined"


def test_a_map_of_classes_has_shares() -> None:
    outputs = torch.zeros(2, 2, 4, 4)
    outputs[0, 0], outputs[1, 1, :2] = 1.0, 3.0
    p = prediction(outputs, STATES, torch.zeros(4, 4), "segmentation")
    found = described(p, ("sky", "road"))
    assert found["changed"] == changed(p) == 0.5
    assert [(e["name"], e["share"]) for e in found["answer"]] == [("sky", 0.5), ("road", 0.5)]
    assert headline(p) == "50.0% of the pixels change"


def test_numbers() -> None:
    p = prediction(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), STATES, torch.zeros(2), "regression")
    assert described(p)["answer"] == [{"name": "value 0", "value": 2.0}, {"name": "value 1", "value": 3.0}]
    assert headline(p) == "value 0 1 becomes 2"
    p = prediction(torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), STATES, torch.zeros(1, 2), "dense")
    assert [e["name"] for e in described(p)["answer"]] == ["mean", "least", "most"]
