"""Greedy policy search against every candidate with every temperature, in plain loops."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from unstride.learning.gps import VARIANTS, select_views


def calibrated(p: Tensor, labels: Tensor) -> float:
    """The best mean loss over temperatures, by trying very many."""
    inverse = torch.logspace(-2, 2, 4001, dtype=torch.float64)
    loss = -(inverse[:, None, None] * p.log()).log_softmax(-1)[:, range(len(labels)), labels].mean(1)
    return float(loss.min())


def greedy(
    x: Tensor, labels: Tensor, length: int, replacement: bool, loss: Callable[[Tensor, Tensor], float]
) -> tuple[list[int], list[float]]:
    p = x.double().softmax(-1)
    taken: list[int] = []
    losses: list[float] = []
    for _ in range(length):
        tried = {v: loss(p[[*taken, v]].mean(0), labels) for v in range(len(x)) if replacement or v not in taken}
        best = min(tried, key=lambda v: tried[v])
        taken.append(best)
        losses.append(tried[best])
    return taken, losses


def labelled(seed: int, views: int = 5, images: int = 60) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (images,), generator=generator)
    x = torch.randn(views, images, 4, generator=generator) * torch.linspace(0.5, 3, views)[:, None, None]
    x += 1.5 * torch.nn.functional.one_hot(labels, 4) * torch.rand(views, 1, 1, generator=generator) * 2
    return x, labels


def blocks(x: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
    """In two parts of unlike size, as a cache gives them."""
    return [(x[:, :40], labels[:40]), (x[:, 40:], labels[40:])]


@pytest.mark.parametrize("seed", range(3))
def test_the_original_search(seed: int) -> None:
    x, labels = labelled(seed)
    expected, losses = greedy(x, labels, 5, True, calibrated)
    steps = select_views(blocks(x, labels), VARIANTS["gps"])
    assert [step.view for step in steps] == expected
    assert [step.nll for step in steps] == pytest.approx(losses, abs=1e-4)


def test_with_replacement_a_view_can_be_taken_twice() -> None:
    x, labels = labelled(1)
    x[0] = 6 * torch.nn.functional.one_hot(labels, 4)
    x[0, :5] = 0
    assert [step.view for step in select_views([(x, labels)], VARIANTS["gps"])].count(0) >= 2


@pytest.mark.parametrize("seed", range(3))
def test_shanmugams_search_takes_three_different_views_at_one_temperature(seed: int) -> None:
    x, labels = labelled(seed)
    inverse = torch.logspace(-2, 2, 4001).tolist()
    best = min(inverse, key=lambda b: float(torch.nn.functional.cross_entropy(x[0] * b, labels)))
    expected, losses = greedy(x * best, labels, 3, False, lambda p, y: float(-p[range(len(y)), y].log().mean()))
    steps = select_views(blocks(x, labels), VARIANTS["gps-shanmugam"])
    assert [step.view for step in steps] == expected
    assert len(set(expected)) == 3
    assert [step.nll for step in steps] == pytest.approx(losses, abs=1e-3)


def test_fewer_views_than_steps() -> None:
    x, labels = labelled(0, views=2)
    assert sorted(step.view for step in select_views([(x, labels)], VARIANTS["gps-shanmugam"])) == [0, 1]
