"""Align is "nearest upsample by T, shift by Delta, average back" in closed form."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unstride.geometry.grids import Grid
from unstride.method.align import Offset, align, align_covered, coverage, from_map, to_map


def literally(f: Tensor, delta: tuple[int, int], t: int) -> Tensor:
    """The paper's words: resize to image resolution, shift with zeros, resize back."""
    big = F.interpolate(f[None], scale_factor=float(t), mode="nearest")
    wide = F.pad(big, [side for d in reversed(delta) for side in (max(d, 0), max(-d, 0))])
    moved = wide[..., max(-delta[0], 0) :, max(-delta[1], 0) :][..., : big.shape[2], : big.shape[3]]
    return F.avg_pool2d(moved, t)[0]


@given(st.sampled_from([2, 4, 8, 32]), st.data())
def test_closed_form_equals_the_literal_procedure(t: int, data: st.DataObject) -> None:
    delta = (data.draw(st.integers(1 - 2 * t, 2 * t - 1)), data.draw(st.integers(1 - t, t - 1)))
    f = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(t), dtype=torch.float64)
    torch.testing.assert_close(align(f, Offset.of(delta, (t, t))), literally(f, delta, t), atol=1e-5, rtol=1e-5)


@given(st.integers(-50, 50), st.integers(-31, 31))
def test_coverage_is_the_alignment_of_ones(dy: int, dx: int) -> None:
    offset = Offset.of((dy, dx), (8, 8))
    ones = torch.ones(1, 5, 6)
    torch.testing.assert_close(coverage((5, 6), offset, ones), align(ones, offset))


def test_covered_alignment_continues_the_border() -> None:
    f = torch.arange(4.0).view(1, 1, 4).expand(1, 3, 4).contiguous()
    out = align_covered(f, Offset.of((0, 1), (4, 4)))
    torch.testing.assert_close(out[0, 0], torch.tensor([0.0, 0.75, 1.75, 2.75]))
    back = align_covered(f, Offset.of((0, -1), (4, 4)))
    torch.testing.assert_close(back[0, 0], torch.tensor([0.25, 1.25, 2.25, 3.0]))


@pytest.mark.parametrize(
    ("grid", "shape"),
    [
        (Grid((2, 3), (4, 5), (8, 8)), (2, 7, 4, 5)),
        (Grid((1, 2), (4, 5), (8, 8)), (2, 4, 5, 7)),
        (Grid((1, 1), (4, 5), (8, 8)), (2, 20, 7)),
        (Grid((2, 2), (4, 5), (8, 8)), (2, 7, 20)),
    ],
)
def test_layouts_round_trip(grid: Grid, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    maps = to_map(value, grid)
    assert maps.shape == (2, 7, 4, 5)
    assert torch.equal(from_map(maps, value, grid), value)
