"""Lists of states move a large map between its edges; the paper's search moves all of it."""

import pytest
import torch
import torch.nn.functional as F
from captures import split_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import unstride
from unstride.geometry.grids import pinned_pieces
from unstride.geometry.states import State

NEAR = unstride.Recipe((unstride.Stage(states=unstride.Near(9)),))


def index(extent: int, by: int, pinned: tuple[int, int]) -> Tensor:
    """Cell by cell."""
    low, high = pinned[0], extent - pinned[1]
    return torch.tensor([min(max(n + by, low), high - 1) if low <= n < high else n for n in range(extent)])


@given(st.integers(1, 20), st.integers(-4, 4), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_pieces_put_every_cell_where_it_belongs(extent, by, pinned):
    x, out = torch.arange(extent), torch.full((extent,), -1)
    for to, count, start, read in pinned_pieces(by, extent, pinned):
        out.narrow(0, to, count).copy_(x.narrow(0, start, read))
    assert torch.equal(out, index(extent, by, pinned))


class Same(nn.Conv2d):
    """TF's "same": the end alone is padded, by an op of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias)


class Shortcut(nn.Module):
    """A strided convolution, and every second cell: one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)) + x[:, :, ::2, ::2]


SECOND = {
    "convolution": lambda: nn.Conv2d(8, 8, 3, 2, 1),
    "reflecting": lambda: nn.Conv2d(8, 8, 3, 2),
    "same": lambda: Same(8, 8, 3, 2, 0),
    "depthwise": lambda: nn.Conv2d(8, 8, 5, 2, 2, groups=8),
    "max pool": lambda: nn.MaxPool2d(3, 2, 1),
    "mean pool": lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "shortcut": Shortcut,
}


def network(second: str) -> nn.Sequential:
    torch.manual_seed(0)
    before = nn.ReflectionPad2d(1) if second == "reflecting" else nn.Identity()
    stem = [nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1), nn.ReLU(), before]
    last = [nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return nn.Sequential(*stem, SECOND[second](), *last).eval()


def rerun(model: nn.Sequential, x: Tensor, state: State) -> Tensor:
    """The user's own model, the inputs of its first two strided modules moved by hand; a pad stays with the edge."""
    edge = (2, 2) if isinstance(model[4], nn.ReflectionPad2d) else (1, 1)
    for module in model:
        if module is model[0] or module is model[5]:
            layer, pinned = (1, (0, 0)) if module is model[0] else (2, edge)
            for d, by in zip((2, 3), state.selections[layer - 1], strict=True):
                x = x.index_select(d, index(x.shape[d], by, pinned))
        x = module(x)
    return x


@pytest.mark.parametrize("execution", ["frozen", "auto"])
@pytest.mark.parametrize("second", SECOND)
@torch.no_grad()
def test_a_state_is_the_network_on_the_moved_map(second, execution):
    model, x = network(second), torch.randn(2, 3, 112, 112, generator=torch.Generator().manual_seed(1))
    split = split_of(unstride.enhance(model, recipe=NEAR, task="classification", execution=execution), x[:1])
    space = split.found.space
    states = [s for s in space.nearest(24) if not any(s.selections[2])][1:]
    assert {k for s in states for k, moved in enumerate(s.selections) if any(moved)} == {0, 1}
    (values,) = split.pinned.start(x).add([(i, s) for s in states for i in (0, 1)])
    got = split.targets[0].finish(values).unflatten(0, (len(states), 2))
    wanted = torch.stack([rerun(model, x, s) for s in states])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_small_maps_and_the_papers_search_move_as_a_whole():
    model, x = network("convolution"), torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(1))
    split = split_of(unstride.enhance(model, recipe=NEAR, task="classification"), x)
    zero = split.found.space.zero

    def output(layer: int, pinned: bool) -> Tensor:
        state = zero.at(layer, (0, 1))
        run = (split.pinned if pinned else split.engine).start(x)
        return split.targets[0].finish(run.add([(0, state)])[0])

    torch.testing.assert_close(output(3, True), output(3, False))  # 28 cells
    assert not torch.allclose(output(2, True), output(2, False))  # 56 cells
