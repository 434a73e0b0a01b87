"""Which of s and s - R a layer takes: computed by hand, op by op."""

import pytest
import torch
import torch.nn.functional as F
from checks import Net
from torch import Tensor, nn

import unstride
from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace


class Of(nn.Module):
    """A function of the image, then a mean: one layer, or what the function makes."""

    def __init__(self, f) -> None:
        super().__init__()
        self.f, self.conv = f, nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.conv(x)).mean((2, 3))


def conv(x: Tensor, size: int, stride: int, padding: int = 0) -> Tensor:
    return F.conv2d(x, torch.ones(3, 3, size, size), None, stride, padding)


def same(x: Tensor, size: int, stride: int) -> Tensor:
    """As TF pads: as much as needed, the odd cell at the end."""
    more = [max((-(-n // stride) - 1) * stride + size - n, 0) for n in x.shape[2:]]
    return conv(F.pad(x, (more[1] // 2, more[1] - more[1] // 2, more[0] // 2, more[0] - more[0] // 2)), size, stride)


CASES = {
    # even maps leave the last cell of symmetric padding unread
    "3x3, padding 1, even map": (lambda x: conv(x, 3, 2, 1), 32, (0, 1)),
    "7x7, padding 3, even map": (lambda x: conv(x, 7, 2, 3), 32, (0, 1)),
    # odd ones read it: both sides lose one cell, and + comes first
    "3x3, padding 1, odd map": (lambda x: conv(x, 3, 2, 1), 33, (0, 1)),
    # "same" pads the end alone: read from before, it pads the start alone
    "same 3x3, even map": (lambda x: same(x, 3, 2), 32, (0, -1)),
    "same 5x5, even map": (lambda x: same(x, 5, 2), 32, (0, -1)),
    "same 3x3, odd map": (lambda x: same(x, 3, 2), 33, (0, 1)),
    # a lone cell of every second row: the last row is unread, so that + reads it and - loses one more
    "1x1": (lambda x: conv(x, 1, 2), 32, (0, 1)),
    "slices": (lambda x: x[:, :, ::2, ::2], 32, (0, 1)),
    "slices of an odd map": (lambda x: x[:, :, ::2, ::2], 33, (0, 1)),
    "slices that begin at 1": (lambda x: x[:, :, 1::2, 1::2], 32, (0, -1)),
    # patches tile the map: the nearer side
    "patches of 4": (lambda x: conv(x, 4, 4), 32, (0, 1, 2, -1)),
    "pool of 2": (lambda x: F.max_pool2d(x, 2), 32, (0, 1)),
    "11x11 by 4": (lambda x: conv(x, 11, 4, 2), 224, (0, 1, 2, -1)),
    "reflecting": (lambda x: conv(F.pad(x, (1, 1, 1, 1), mode="reflect"), 3, 2), 32, (0, 1)),
    "reflecting at the end": (lambda x: conv(F.pad(x, (0, 1, 0, 1), mode="reflect"), 3, 2), 32, (0, -1)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_side_that_loses_least(name: str) -> None:
    f, size, side = CASES[name]
    net = Net.of(Of(f).eval(), torch.randn(1, 3, size, size))
    assert [layer.sides for layer in net.found.layers] == [(side, side)]


def test_a_group_takes_the_side_of_all_its_ops() -> None:
    """The 3x3 with padding at the end wants -1 and loses one cell at +1; each 1x1 loses two more at -1."""
    body = lambda x: same(x, 3, 2)  # noqa: E731
    one = lambda x: body(x) + conv(x, 1, 2)  # noqa: E731
    for f, side in ((body, (0, -1)), (one, (0, 1))):
        net = Net.of(Of(f).eval(), torch.randn(1, 3, 32, 32))
        assert [layer.sides for layer in net.found.layers] == [(side, side)]


def test_each_axis_has_its_own_side() -> None:
    net = Net.of(Of(lambda x: conv(F.pad(x, (0, 1, 1, 1)), 3, 2)).eval(), torch.randn(1, 3, 32, 32))
    assert net.found.layers[0].sides == ((0, 1), (0, -1))
    assert net.found.space.best_selections(1) == [(0, 0), (0, -1), (1, 0), (1, -1)]
    assert net.found.space.selections(1) == [(0, 0), (0, 1), (1, 0), (1, 1)]


SPACE = StateSpace(((2, 2), (2, 2)), ((1.0, 1.0), (2.0, 2.0)), (((0, -1), (0, -1)), ((0, 1), (0, 1))))


def test_near_states_are_the_natural_ones() -> None:
    near = SPACE.nearest(6)
    assert near[0] == State.zero(2)
    # moved by 1: the first layer's, or both at once, which cost as much and change more
    by_hand = [((0, -1), (0, 0)), ((-1, 0), (0, 0)), ((0, -1), (0, 1)), ((-1, 0), (1, 0))]
    assert near[1:5] == tuple(map(SPACE.parse, by_hand))
    moved = [SPACE.displacement(s) for s in SPACE.nearest(16)]
    lengths = [y * y + x * x for y, x in moved]
    assert lengths == sorted(lengths) and len(set(SPACE.nearest(16))) == 16


def test_states_on_both_sides_are_read_and_shown() -> None:
    state = SPACE.parse(((-1, 1), (0, 0)))
    assert str(state) == "(-1,1 0)" and SPACE.parse(state) == state
    assert SPACE.parse((3, 0)) == SPACE.parse(((1, 1), (0, 0)))
    assert SPACE.displacement(SPACE.parse(((-1, 1), (1, -1)))) == (1.0, -1.0)
    for beyond in (((-2, 0), (0, 0)), ((0, 2), (0, 0)), (4, 0), (-1, 0)):
        with pytest.raises(OptionError, match="outside its rate"):
            SPACE.parse(beyond)


def test_a_report_names_the_side() -> None:
    model = Of(lambda x: same(x, 3, 2)).eval()
    report = unstride.inspect(model, torch.randn(1, 3, 32, 32))
    assert report.to_json()["layers"][0]["sides"] == [[0, -1], [0, -1]]
    assert "loses least at 0/-1 x 0/-1" in str(report)
    symmetric = unstride.inspect(Of(lambda x: conv(x, 3, 2, 1)).eval(), torch.randn(1, 3, 32, 32))
    assert "loses least" not in str(symmetric)
