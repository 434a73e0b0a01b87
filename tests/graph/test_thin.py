"""What a plain network computes and never reads is left out, and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import unstride
from unstride.errors import OptionError
from unstride.graph.capture import capture
from unstride.graph.optimise import optimise
from unstride.graph.thin import thinned
from unstride.procedure.gates import Stage
from unstride.recipe import Recipe
from unstride.views.policies import parse_view

MIRROR = Recipe("mirrored", stages=(Stage(), Stage((parse_view("mirror"),))))


class Block(nn.Module):
    """A bottleneck that strides in its first 1x1 convolution, as caffe's and detectron's ResNets do, or in its 3x3."""

    def __init__(self, wide_in: int, wide: int, stride: tuple[int, int], early: bool) -> None:
        super().__init__()
        one = (1, 1)
        self.a = nn.Conv2d(wide_in, 4, 1, stride if early else one)
        self.b = nn.Conv2d(4, 4, 3, one if early else stride, 1)
        self.c = nn.Conv2d(4, wide, 1)
        self.skip = nn.Conv2d(wide_in, wide, 1, stride) if wide != wide_in or stride != one else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.c(F.relu(self.b(F.relu(self.a(x))))) + self.skip(x))


class Stages(nn.Module):
    def __init__(self, blocks: list[tuple[int, tuple[int, int], bool]]) -> None:
        super().__init__()
        self.stem, wide = nn.Conv2d(3, 6, 3, 2, 1), 6
        self.blocks = nn.Sequential()
        for to, stride, early in blocks:
            self.blocks.append(Block(wide, to, stride, early))
            wide = to
        self.head = nn.Linear(wide, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def mirrored(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The mean with the mirror image: by the engine, and by the model itself."""
    better = unstride.enhance(model, images[:1], recipe=MIRROR, task="classification")
    with torch.no_grad():
        return better(images), (model(images) + model(images.flip(3))) / 2


def test_a_block_before_an_early_stride_is_computed_at_the_cells_that_are_read() -> None:
    torch.manual_seed(0)
    model = Stages([(8, (1, 1), True), (8, (1, 1), True), (12, (2, 2), True)]).eval()
    found = thinned(optimise(capture(model, torch.randn(1, 3, 20, 20))), ())
    names = sorted(n.name.rpartition("_default")[0] or n.name for n in found)
    assert set(found.values()) == {(2, 2)}
    # of the second block: relu, sum, its last two convolutions and the relu between; what the first gives is read whole
    assert len(found) == 5, names


def test_values_that_are_wanted_or_read_by_a_window_are_whole() -> None:
    model = Stages([(8, (1, 1), True), (12, (2, 2), False)]).eval()  # the 1x1 before the strided 3x3 reads everything
    assert not thinned(optimise(capture(model, torch.randn(1, 3, 20, 20))), ())
    early = optimise(capture(Stages([(8, (1, 1), True), (12, (2, 2), True)]).eval(), torch.randn(1, 3, 20, 20)))
    last = next(n for n in early.fx.nodes if n in thinned(early, ()) and n.users and "relu" in n.name)
    assert last not in thinned(early, [last])


@settings(deadline=None, max_examples=25)
@given(
    blocks=st.lists(
        st.tuples(st.sampled_from((6, 8)), st.sampled_from(((1, 1), (2, 2), (1, 2), (3, 3))), st.booleans()),
        min_size=1, max_size=4,
    ),
    size=st.tuples(st.integers(24, 40), st.integers(24, 40)),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_law_the_thin_network_is_the_network(
    blocks: list[tuple[int, tuple[int, int], bool]], size: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    model, images = Stages(blocks).eval(), torch.randn(3, 3, *size)
    found, wanted = mirrored(model, images)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_it_runs_only_where_nothing_moves_and_the_graph_may_be_rewritten() -> None:
    torch.manual_seed(0)
    model, images = Stages([(8, (1, 1), True), (12, (2, 2), True)]).eval(), torch.randn(2, 3, 24, 24)
    plan = unstride.enhance(model, images[:1], recipe="plain", task="classification").prepare(images)
    assert plan.engine_for([plan.found.space.zero]).cutter.thin
    assert not plan.engine_for(plan.found.space.nearest(3)).cutter.thin
    as_captured = unstride.enhance(model, images[:1], recipe="plain", task="classification", optimise=False)
    plan = as_captured.prepare(images)
    assert not plan.engine_for([plan.found.space.zero]).cutter.thin


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    torch.manual_seed(0)
    model, images = Stages([(8, (1, 1), True), (12, (2, 2), True)]).eval(), torch.randn(3, 3, 24, 24)
    images[1, :, 12, 12] = value
    found, wanted = mirrored(model, images)
    assert torch.equal(found.isfinite(), wanted.isfinite())


class Beside(nn.Module):
    """Maps before an early stride that are summed with something, or stand beside other convolutions."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem, self.a, self.b = nn.Conv2d(3, 6, 3, 1, 1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 8, 1, 2)
        self.pos = nn.Parameter(torch.randn(1, 6, 20, 20))
        self.along = nn.Conv1d(1, 1, 3, padding=1)
        self.deep = nn.Conv3d(1, 1, 3, padding=1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(F.relu(self.stem(x)))
        if self.way == "expand":
            x = x + self.pos.expand(len(x), -1, -1, -1)
        elif self.way == "repeat":
            x = F.relu(x) + self.pos.repeat(len(x), 1, 1, 1)
        elif self.way == "conv of a constant":
            x = x + self.a(self.pos.expand(len(x), -1, -1, -1))
        elif self.way == "broadcast":
            x = x + self.pos
        elif self.way == "alpha":
            x = torch.add(x, F.relu(x), alpha=2)
        y = self.b(F.relu(x)).mean((2, 3))
        if self.way == "along channels":
            y = y + self.along(y[:, None])[:, 0]
        elif self.way == "deeper":
            y = y + self.deep(y[:, None, :, None, None])[:, 0, :, 0, 0]
        return self.head(y)


@pytest.mark.parametrize(
    "way", ["expand", "repeat", "conv of a constant", "broadcast", "alpha", "along channels", "deeper"]
)
def test_what_is_not_a_map_of_the_picture_is_left_as_it_is(way: str) -> None:
    torch.manual_seed(0)
    model, images = Beside(way).eval(), torch.randn(3, 3, 20, 20)
    found, wanted = mirrored(model, images)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_a_thin_engine_refuses_states_and_knows_its_size() -> None:
    torch.manual_seed(0)
    model, images = Stages([(8, (1, 1), True), (12, (2, 2), True)]).eval(), torch.randn(2, 3, 26, 26)
    plan = unstride.enhance(model, images[:1], recipe="plain", task="classification").prepare(images)
    still = plan.engine_for([plan.found.space.zero])
    thin = next(iter(still.cutter.thin))
    assert plan.found.trace.shapes[thin][2:] == (13, 13) and still.cutter.shape(thin)[2:] == (7, 7)
    with pytest.raises(OptionError, match="only what the plain network reads"):
        still.start(images).add([(0, plan.found.space.nearest(2)[1])])
