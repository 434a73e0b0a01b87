"""Instance norm of maps that lie channels last: torch's own numbers, and the map stays as it lies."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from unstride.engine.movers import LAST, lies_last
from unstride.engine.norms import FusedNorm

SIZES = [(3, 5, 9, 7), (1, 16, 8, 8), (2, 3, 4, 6, 5), (1, 2, 8, 8, 8)]


def last(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return (3 * torch.randn(shape) + 5).contiguous(memory_format=LAST[len(shape)])


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("affine", [False, True])
def test_it_is_torchs_norm_where_the_map_lies(shape: tuple[int, ...], affine: bool) -> None:
    x, c = last(*shape), shape[1]
    weight, bias = (torch.rand(c) + 0.5, torch.randn(c)) if affine else (None, None)
    expected = F.instance_norm(x.double(), None, None, *(v.double() if affine else v for v in (weight, bias)), True)
    before = x.clone()
    got = FusedNorm(weight, bias, 1e-5, ("none", []))(x)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
    assert lies_last(got) and torch.equal(x, before)
    act = ("leaky_relu", [0.25])
    for one in (x, x.contiguous()):
        got = FusedNorm(weight, bias, 1e-5, act)(one)
        torch.testing.assert_close(got.double(), F.leaky_relu(expected, 0.25), rtol=1e-5, atol=1e-5)


def test_it_is_written_over_what_nobody_reads_afterwards() -> None:
    x = last(2, 4, 5, 6)
    norm = FusedNorm(None, None, 1e-5, ("relu", []))
    expected = norm(x)
    norm.spends = True
    got = norm(x)
    assert got.data_ptr() == x.data_ptr() and torch.equal(got, expected)


@pytest.mark.parametrize("size", [1e-25, 1e15, 1e25])  # of the last, squares overflow
def test_any_size_of_values_is_normed_as_torch_does(size: float) -> None:
    x = size * last(1, 3, 4, 5, 6)
    got = FusedNorm(None, None, 1e-5, ("none", []))(x)
    torch.testing.assert_close(got, F.instance_norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_channel_alone(value: float) -> None:
    x = last(2, 3, 4, 5)
    x[1, 2, 0, 0] = value
    got = FusedNorm(None, None, 1e-5, ("leaky_relu", [0.1]))(x)
    finite = got.isfinite().all((2, 3))
    assert finite.tolist() == [[True, True, True], [True, True, False]]
