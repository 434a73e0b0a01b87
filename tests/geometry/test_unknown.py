"""What is not known is never guessed: ops that hide positions, a network of two scales around each of them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from checks import Net, check_all, some_states
from torch import Tensor, nn

import unstride
from unstride.errors import CaptureError

Join = Callable[[Tensor, Tensor], Tensor]


class Scales(nn.Module):
    """A fine map and a coarse one, joined in some way: (fine, coarse) -> a fine map."""

    def __init__(self, join: Join) -> None:
        super().__init__()
        self.fine, self.coarse, self.out = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 3, 1)
        self.join = join
        self.register_buffer("rows", torch.eye(8).repeat_interleave(2, 0))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        return self.out(self.join(fine, self.coarse(fine)))


def judged(model: nn.Module) -> Net:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    net = Net.of(model.double().eval(), x[:1])
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)
    return net


def layers(net: Net) -> list[str]:
    return [path for layer in net.found.layers for path, _ in layer.ops]


def up(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)


def nearest(f: Tensor, c: Tensor) -> Tensor:
    """A fine map from the coarse cells that are most like its own."""
    fine, coarse = f.flatten(2).transpose(1, 2), c.flatten(2).transpose(1, 2)
    return ((-torch.cdist(fine, coarse)).softmax(-1) @ coarse).transpose(1, 2).reshape(f.shape)


HIDING: dict[str, Join] = {
    "cdist": nearest,
    "sort": lambda f, c: f + up(c.sort(-1).values),
    "topk": lambda f, c: f + up(c.flatten(2).topk(64).values.view_as(c)),
    "cummax": lambda f, c: f + up(c.cummax(-1).values),
    "cumprod": lambda f, c: f + up(c.cumprod(-1)),
    "gather": lambda f, c: f + up(c.gather(-1, c.argsort(-1))),
    "gather at fixed places": lambda f, c: f + up(c.gather(-1, torch.arange(7, -1, -1).expand_as(c))),
    "scatter": lambda f, c: f + up(torch.zeros_like(c).scatter(-1, c.argsort(-1), c)),
    "rot90": lambda f, c: f + up(torch.rot90(c, 1, (2, 3))),
}


@pytest.mark.parametrize("name", HIDING)
def test_nothing_moves_along_with_what_may_lie_anywhere(name: str) -> None:
    net = judged(Scales(HIDING[name]))
    assert layers(net) == ["fine"]
    assert any(name.split()[0] in unknown for unknown in net.found.unknown)
    (left,) = net.found.left_out
    assert left.op == "coarse (conv2d)" and "has lost its position" in left.reason


class Matrix(Scales):
    """A map made finer by a matrix, beside another that was made finer as usual."""

    def forward(self, x: Tensor) -> Tensor:
        fine = self.fine(x)
        coarse = self.coarse(fine)
        return self.out((fine + self.rows @ coarse @ self.rows.T) + up(coarse))


def test_a_matrix_over_positions_hides_them() -> None:
    net = judged(Matrix(lambda f, c: f))
    assert layers(net) == ["fine"] and "matrix over all cells" in net.found.unknown[0]


TURNED: dict[str, Join] = {
    "flipped": lambda f, c: f + up(c.flip(-1)),
    "turned": lambda f, c: f + up(c.transpose(2, 3)),
    "in another order": lambda f, c: f + up(c[..., torch.arange(7, -1, -1)]),
    "first its own flip": lambda f, c: f + f.flip(-1) + up(c),
}


@pytest.mark.parametrize("name", TURNED)
def test_maps_in_different_directions_have_no_place(name: str) -> None:
    net = judged(Scales(TURNED[name]))
    assert "different directions" in net.found.unknown[0] and net.found.grid(net.outputs[0]) is None
    with pytest.raises(CaptureError, match=r"no known place on the image.*different directions"):
        unstride.enhance(Scales(TURNED[name]).eval(), torch.randn(1, 3, 32, 32), task="segmentation", recipe="paper")


KNOWN: dict[str, Join] = {
    "added": lambda f, c: f + up(c),
    "a ring": lambda f, c: f + up(c.roll(1, -1)),
    "repeated": lambda f, c: f + c.repeat_interleave(2, -1).repeat_interleave(2, -2),
    "aligned corners": lambda f, c: f + F.interpolate(c, size=f.shape[2:], mode="bilinear", align_corners=True),
    "turned and back": lambda f, c: f + up(c.transpose(2, 3).flip(2).flip(2).transpose(2, 3)),
    "rows times columns": lambda f, c: f + up(c.mean(3, keepdim=True) * c.mean(2, keepdim=True)),
    "beside its sorted self": lambda f, c: f + up(c + c.sort(-1).values),
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_known_stays_known(name: str) -> None:
    net = judged(Scales(KNOWN[name]))
    grid = net.found.grid(net.outputs[0])
    assert layers(net) == ["fine", "coarse"] and grid is not None and grid.size == (16, 16)
