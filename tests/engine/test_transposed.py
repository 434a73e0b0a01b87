"""Packed transposed convolutions: torch's own numbers, whether as one op or as channels that become cells."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.engine.bounds import wild_inside
from unstride.engine.packing import Packing, available
from unstride.engine.transposed import Cells, FusedTransposed

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="this build of torch has no oneDNN"
)


def torchs(x: Tensor, *rest: object) -> Tensor:
    return (F.conv_transpose2d if x.ndim == 4 else F.conv_transpose3d)(x, *rest)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_both_ways_are_torchs_op(axes: int, stride: int) -> None:
    torch.manual_seed(0)
    seen = 0
    for taps, padding, more, size in itertools.product((1, 2, 3, 4, 5), (0, 1, 2), (0, 1), (3, 4)):
        if more >= stride or (size - 1) * stride - 2 * padding + taps + more < 1:
            continue  # torch refuses these
        x = torch.randn(2, 5, *[size] * (axes - 1), size + 1)
        weight, bias = torch.randn(5, 3, *[taps] * axes), torch.randn(3)
        expected = torchs(x, weight, bias, stride, padding, more)
        packed = FusedTransposed(Packing(weight, transposed=True), bias, (stride, padding, more, 1, 1), tame=True)
        packed.cells = None
        torch.testing.assert_close(packed(x), expected, rtol=1e-4, atol=1e-4)
        if taps >= stride:
            cells = Cells(weight, bias, [padding] * axes, [more] * axes, [stride] * axes)
            torch.testing.assert_close(cells(x), expected, rtol=1e-4, atol=1e-4)
            seen += 1
    assert seen >= 10


def test_axes_may_differ() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 4, 3, 5, 4), torch.randn(4, 2, 1, 3, 4)
    where = ((1, 2, 2), (0, 1, 1), (0, 1, 0), 1, 1)
    made = FusedTransposed(Packing(weight, transposed=True), None, where, tame=True)
    assert made.cells is not None
    torch.testing.assert_close(made(x), torchs(x, weight, None, *where), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("channels", "as_cells"), [(2, True), (4, True), (16, False), (32, False)])
def test_few_channels_become_cells(channels: int, as_cells: bool) -> None:
    weight = torch.randn(8, channels, 3, 3, 3)
    made = FusedTransposed(Packing(weight, transposed=True), None, (2, 1, 1, 1, 1), tame=True)
    assert (made.cells is not None) == as_cells


@pytest.mark.parametrize("args", [(2, 1, 1, 2, 1), (2, 1, 1, 1, 2), (3, 0, 0, 1, 1)], ids=["groups", "dilated", "gaps"])
def test_what_cells_cannot_do_is_left_alone(args: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 2, *[2 if args[0] == 3 else 3] * 2)
    made = FusedTransposed(Packing(weight, transposed=True), None, args, tame=True)
    assert made.cells is None
    torch.testing.assert_close(made(x), torchs(x, weight, None, *args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_reaches_the_same_cells(value: float) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 4, 4, 4, 4), torch.randn(4, 2, 3, 3, 3)
    x[1, 2, 1, 2, 3] = value
    expected = torchs(x, weight, None, 2, 1, 1)
    for tame in (False, True):
        made = FusedTransposed(Packing(weight, transposed=True), None, (2, 1, 1, 1, 1), tame)
        assert made.cells is not None
        with wild_inside():
            assert torch.equal(made(x).isfinite(), expected.isfinite())
    made.tame = False
    assert torch.equal(made(x).isfinite(), expected.isfinite())
