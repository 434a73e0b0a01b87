"""Streams equal the formulas of the paper, written out."""

import math
from collections.abc import Callable

import pytest
import torch

from unstride.method.aggregate import Maximum, WeightedMean
from unstride.method.align import Offset, align, align_covered, coverage

ONE = slice(0, 1)
OFFSETS = [Offset.of((dy, dx), (8, 8)) for dy, dx in ((0, 0), (1, 2), (4, 7), (6, 0))]


def maps(n: int = 4) -> torch.Tensor:
    return torch.randn(n, 3, 4, 5, generator=torch.Generator().manual_seed(1))


def test_weighted_mean_with_the_papers_border() -> None:
    f, weights = maps(), [0.5, 1.0, 0.25, 0.7]
    total = WeightedMean(border="zeros")
    for m, w, o in zip(f, weights, OFFSETS, strict=True):
        total.add(ONE, m[None], torch.tensor([w]), o)
    expected = sum(w * align(m, o) for m, w, o in zip(f, weights, OFFSETS, strict=True)) / sum(weights)
    torch.testing.assert_close(total.value()[0], expected)


def test_weighted_mean_renormalised_by_what_is_covered() -> None:
    f, weights = maps(), [0.5, 1.0, 0.25, 0.7]
    total = WeightedMean(border="renormalise")
    for m, w, o in zip(f, weights, OFFSETS, strict=True):
        total.add(ONE, m[None], torch.tensor([w]), o)
    parts = [coverage((4, 5), o, f) * w for w, o in zip(weights, OFFSETS, strict=True)]
    expected = sum(w * align(m, o) for m, w, o in zip(f, weights, OFFSETS, strict=True)) / sum(parts)
    torch.testing.assert_close(total.value()[0], expected)


@pytest.mark.parametrize("border", ["renormalise", "zeros"])
def test_pixels_are_weighed_by_the_entropy_of_the_aligned_map(border: str) -> None:
    total = WeightedMean(border=border)
    top = bottom = torch.zeros(())
    for m, o in zip(maps(), OFFSETS, strict=True):
        weight = total.add_by_entropy(ONE, m[None], o)[0]
        moved = align_covered(m, o) if border == "renormalise" else align(m, o)
        inside = coverage((4, 5), o, m) if border == "renormalise" else 1.0
        p = moved.softmax(0)
        w = (1 + (p * p.log()).sum(0) / math.log(len(p))) * inside
        torch.testing.assert_close(weight, w.squeeze(0))
        top, bottom = top + w * moved, bottom + w
    torch.testing.assert_close(total.value()[0], top / bottom)


def test_confident_cells_do_not_spread_over_uncertain_ones() -> None:
    """Half a confident cell and half an uncertain one count as much as they cover."""
    m = torch.tensor([[[8.0, 0.0]], [[0.0, 2.0]]])  # (2, 1, 2): certain of class 0, then uncertain for class 1
    total = WeightedMean()
    total.add_by_entropy(ONE, m[None], Offset((0, 0), (0.0, 0.5)))
    torch.testing.assert_close(total.value()[0, :, 0, 1], m[:, 0].mean(1))


def test_constant_maps_stay_constant_when_renormalised() -> None:
    total = WeightedMean(border="renormalise")
    for o in OFFSETS:
        total.add(ONE, torch.full((1, 2, 4, 5), 3.0), torch.tensor([0.7]), o)
    torch.testing.assert_close(total.value(), torch.full((1, 2, 4, 5), 3.0))


def test_streams_hold_one_map_whatever_the_budget() -> None:
    total = WeightedMean()
    for _ in range(100):
        total.add(ONE, torch.randn(1, 3, 4, 5), torch.ones(1), OFFSETS[1])
    tensors = [t for t in vars(total).values() if isinstance(t, torch.Tensor)]
    assert sum(t.numel() for t in tensors) == 3 * 20 + 20


def test_maximum_ignores_what_is_not_covered() -> None:
    best = Maximum(border="renormalise")
    best.add(ONE, torch.full((1, 1, 2, 4), -5.0), torch.ones(1), OFFSETS[0])
    best.add(ONE, torch.full((1, 1, 2, 4), -7.0), torch.ones(1), Offset.of((0, 16), (8, 8)))
    torch.testing.assert_close(best.value(), torch.full((1, 1, 2, 4), -5.0))


@pytest.mark.parametrize("make", [WeightedMean, Maximum], ids=["mean", "max"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_together_are_images_alone(
    make: Callable[[int], WeightedMean | Maximum], layout: torch.memory_format
) -> None:
    """Three images, of which the last two have two more states: bit for bit what each gives by itself."""
    together, weights = make(3), torch.tensor([0.5, 0.25, 1.0])
    alone = [make(1) for _ in range(3)]
    for offset, images in zip(OFFSETS, (slice(0, 3), slice(1, 3), slice(2, 3)), strict=False):
        f = torch.randn(3, 6, 4, 5).contiguous(memory_format=layout)[images]
        with torch.no_grad():
            together.add(images, f, weights[images], offset)
            for i, own in zip(range(3)[images], f, strict=True):
                alone[i].add(ONE, own[None], weights[i : i + 1], offset)
    with torch.no_grad():
        assert torch.equal(together.value([2, 0]), torch.cat([alone[2].value(), alone[0].value()]))
