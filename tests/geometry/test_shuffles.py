"""A pixel shuffle written as views, as it must be on signals and volumes: torch has an op for images only."""

import pytest
import torch
from captures import split_of
from torch import Tensor, nn

import unstride

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class Shuffle(nn.Module):
    def __init__(self, axes: int, r: int) -> None:
        super().__init__()
        self.axes, self.r = axes, r

    def forward(self, x: Tensor) -> Tensor:
        n, r = self.axes, self.r
        split = x.reshape(len(x), -1, *[r] * n, *x.shape[2:])
        order = [0, 1, *(d for k in range(n) for d in (2 + n + k, 2 + k))]
        return split.permute(order).reshape(len(x), -1, *(r * size for size in x.shape[2:]))


def net(axes: int, last: nn.Module, channels: int) -> nn.Module:
    torch.manual_seed(0)
    conv = CONV[axes]
    return nn.Sequential(conv(3, 8, 3, 2, 1), nn.ReLU(), conv(8, channels, 3, 1, 1), last).eval()


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_cells_that_came_out_of_one_lie_beside_each_other(axes: int) -> None:
    x = torch.randn(1, 3, *[16] * axes, generator=torch.Generator().manual_seed(1))
    model = net(axes, Shuffle(axes, 2), 3 * 2**axes)
    better = unstride.enhance(model, x, recipe="paper", budget=2**axes, task="segmentation")
    grid = split_of(better, x).targets[0].grid
    assert grid is not None and grid.size == (16,) * axes and tuple(grid.spacing) == (1.0,) * axes
    assert not torch.equal(better(x), model(x))


@pytest.mark.parametrize("r", [2, 3])
def test_views_are_what_the_op_is(r: int) -> None:
    x = torch.randn(2, 3, 16, 18, generator=torch.Generator().manual_seed(1))
    one, two = (net(2, last, 3 * r**2) for last in (Shuffle(2, r), nn.PixelShuffle(r)))
    outputs = [unstride.enhance(m, x[:1], recipe="paper", budget=4, task="segmentation")(x) for m in (one, two)]
    assert torch.equal(one(x), two(x))
    assert torch.allclose(*outputs, atol=1e-6)
