"""Criteria of one state, and the draw of training."""

import collections
import math

import pytest
import torch

from unstride.errors import InputError
from unstride.geometry.states import State, StateSpace
from unstride.method.criteria import (
    displacement_criterion,
    image_digest,
    random_criterion,
    random_criterion_per_image,
    training_draw,
)
from unstride.tasks.tasks import TASKS

uncertainty = TASKS["classification"].uncertainty  # Eq. 12
SPACE = StateSpace(((2, 2), (4, 4)), ((1, 1), (2, 2)))
STATES = list(SPACE.states())


def test_entropy_is_that_of_the_prediction_divided_by_log_k() -> None:
    logits = torch.tensor([[1.0, 1.0, 1.0], [1e9, 0.0, 0.0], [math.log(2), 0.0, 0.0]])
    mixed = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25)) / math.log(3)
    torch.testing.assert_close(uncertainty(logits), torch.tensor([1.0, 0.0, mixed]))


def test_entropy_of_maps_is_the_mean_over_the_pixels() -> None:
    maps = torch.randn(3, 4, 5, 6)
    pixels = uncertainty(maps.movedim(1, -1).reshape(-1, 4)).view(3, 5, 6)
    torch.testing.assert_close(uncertainty(maps), pixels.mean((1, 2)))


def test_entropy_of_one_logit_is_that_of_two_classes() -> None:
    z = torch.tensor([[0.3], [-2.0]])
    torch.testing.assert_close(uncertainty(z), uncertainty(torch.cat([torch.zeros_like(z), z], 1)))


def test_displacement_is_in_image_pixels() -> None:
    assert displacement_criterion(SPACE, State(((1, 0), (0, 3)))) == 1 + 6
    assert displacement_criterion(SPACE, State(((-1, 0), (0, 3)))) == 1 + 6


def test_the_random_order_is_one_order_for_a_seed() -> None:
    orders = [sorted(STATES, key=lambda s, seed=seed: random_criterion(s, seed)) for seed in (3, 3, 4)]
    assert orders[0] == orders[1] != orders[2]
    assert len({random_criterion(s, 3) for s in STATES}) == len(STATES)


def test_the_random_order_of_an_image_depends_on_its_content_alone() -> None:
    images = torch.randn(3, 3, 8, 8)
    alone = [image_digest(image.clone()) for image in images]
    assert [image_digest(image) for image in images.to(memory_format=torch.channels_last)] == alone
    orders = [sorted(STATES, key=lambda s, d=d: random_criterion_per_image(s, 0, d)) for d in alone]
    assert orders[0] != orders[1] != orders[2]
    assert image_digest(images[0]) != image_digest(images[0].view(3, 4, 16))
    assert image_digest(images[0].bfloat16()) != alone[0]


def test_the_draw_is_proportional_to_1_over_the_criterion() -> None:
    queue = STATES[:3]
    criterion = dict(zip(queue, (0.5, 1.0, 2.0), strict=True))  # weights 4 : 2 : 1
    choose = training_draw("7 1 image")
    drawn = collections.Counter(choose(queue, criterion) for _ in range(7000))
    assert [round(drawn[s] / 1000, 1) for s in queue] == pytest.approx([4.0, 2.0, 1.0], abs=0.2)
    again, other = training_draw("7 1 image"), training_draw("7 2 image")
    first = [training_draw("7 1 image")(queue, criterion)] + [again(queue, criterion) for _ in range(30)]
    assert first[0] == first[1]
    assert first[1:] != [other(queue, criterion) for _ in range(30)]


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_criterion_that_is_no_positive_number_is_an_error(value: float) -> None:
    with pytest.raises(InputError, match="not a positive number"):
        training_draw("0")(STATES[:2], {STATES[0]: 1.0, STATES[1]: value})
