"""Streams equal the formulas of the paper, written out."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from unstride.procedure.aggregate import Accumulator, Attended, Attention, Maximum, WeightedMean, entropy
from unstride.procedure.align import Offset, align, align_covered, coverage

ONE = slice(0, 1)
OFFSETS = [Offset.of((dy, dx), (8, 8)) for dy, dx in ((0, 0), (1, 2), (4, 7), (6, 0))]


def maps(n: int = 4) -> torch.Tensor:
    return torch.randn(n, 3, 4, 5, generator=torch.Generator().manual_seed(1))


def test_entropy_is_zero_for_certainty_and_one_for_ignorance() -> None:
    logits = torch.tensor([[100.0, 0, 0], [0, 0, 0]])
    torch.testing.assert_close(entropy(logits), torch.tensor([0.0, 1.0]))


def test_one_logit_counts_as_two_classes() -> None:
    torch.testing.assert_close(entropy(torch.tensor([[0.0]])), torch.tensor([1.0]))


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
        given = total.add_by_entropy(ONE, m[None], o)[0]
        moved = align_covered(m, o) if border == "renormalise" else align(m, o)
        inside = coverage((4, 5), o, m) if border == "renormalise" else 1.0
        p = moved.softmax(0)
        w = (1 + (p * p.log()).sum(0) / math.log(len(p))) * inside
        torch.testing.assert_close(given, w.squeeze(0))
        top, bottom = top + w * moved, bottom + w
    torch.testing.assert_close(total.value()[0], top / bottom)


def test_sure_cells_do_not_spread_over_the_unsure_ones_beside_them() -> None:
    """Half a cell of a certain class and half of a doubtful one: neither wins by being surer where it is alone."""
    m = torch.tensor([[[8.0, 0.0]], [[0.0, 2.0]]])  # (2, 1, 2): certain of class 0, then doubtful for class 1
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
    held = [t for t in vars(total).values() if isinstance(t, torch.Tensor)]
    assert sum(t.numel() for t in held) == 3 * 20 + 20


def test_maximum_ignores_what_is_not_covered() -> None:
    best = Maximum()
    best.add(ONE, torch.full((1, 1, 2, 4), -5.0), torch.ones(1), OFFSETS[0])
    best.add(ONE, torch.full((1, 1, 2, 4), -7.0), torch.ones(1), Offset.of((0, 16), (8, 8)))
    torch.testing.assert_close(best.value(), torch.full((1, 1, 2, 4), -5.0))


def test_untrained_attention_is_the_mean_and_trained_is_the_formula() -> None:
    torch.manual_seed(0)
    attention = Attention(3)
    f = maps()[None]
    torch.testing.assert_close(attention(f), f.mean(1))
    attention.out.data = torch.randn(3)
    q = torch.einsum("nschw,c->nshw", f, attention.query.weight[0]) + attention.query.bias
    k = torch.einsum("nschw,c->nshw", f, attention.key.weight[0]) + attention.key.bias
    w = (q[:, :, None] * k[:, None]).softmax(2)  # (n, s, s', h, w)
    mixed = torch.einsum("nsthw,ntchw->nschw", w, f)
    expected = (f + attention.out.view(1, 1, -1, 1, 1) * mixed).mean(1)
    torch.testing.assert_close(attention(f), expected)


def test_learned_criterion_prefers_the_state_that_is_attended_to() -> None:
    attention = Attention(1)
    attention.query.weight.data.fill_(0.0)
    attention.query.bias.data.fill_(1.0)
    attention.key.weight.data.fill_(1.0)
    kept = Attended(attention)
    for value in (0.0, 3.0, 1.0):
        kept.add(ONE, torch.full((1, 1, 2, 2), value), torch.ones(1), OFFSETS[0])
    (scores,) = kept.criteria([0])
    assert scores.index(min(scores)) == 1
    assert scores.index(max(scores)) == 0


@pytest.mark.parametrize("shape", [(6, 3, 4), (6,)])
def test_attention_step_by_step_is_all_at_once(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    attention = Attention(6)
    torch.nn.init.normal_(attention.out)
    kept, maps = Attended(attention), torch.randn(5, *shape)
    with torch.no_grad():
        for count, f in enumerate(maps, 1):
            kept.add(slice(0, 1), f[None], torch.ones(1), None)
            torch.testing.assert_close(torch.tensor(kept.criteria([0])), attention.criterion(maps[None, :count]))
            if count > 1:
                torch.testing.assert_close(kept.value(), attention(maps[None, :count]))


@pytest.mark.parametrize(
    "make", [WeightedMean, Maximum, lambda n: Attended(attention(), n)], ids=["mean", "max", "att"]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_together_are_images_alone(make: Callable[[int], Accumulator], layout: torch.memory_format) -> None:
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


def attention() -> Attention:
    made = Attention(6)
    for p in made.parameters():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(2))
    return made


class Counted(TorchDispatchMode):
    """How many ops are called: on small maps they are the time."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_the_attention_of_many_images_takes_as_many_ops_as_of_one() -> None:
    torch.manual_seed(0)
    module, ops = Attention(6), []
    for count in (1, 16):
        kept, maps = Attended(module, count), torch.randn(5, count, 6, 4, 4)
        with torch.no_grad(), Counted() as counted:
            for f in maps:
                kept.add(list(range(count)), f, torch.ones(count), Offset((0, 1), (0.5, 0.0)))
            scores, merged = kept.criteria(list(range(count))), kept.value()
        assert (len(scores), len(merged)) == (count, count)
        ops.append(counted.ops)
    assert ops[1] <= 1.2 * ops[0]
    alone = Attended(module)
    for f in maps:
        alone.add(slice(0, 1), f[3:4], torch.ones(1), Offset((0, 1), (0.5, 0.0)))
    torch.testing.assert_close(alone.value()[0], merged[3])
    assert alone.criteria([0])[0] == pytest.approx(scores[3])
