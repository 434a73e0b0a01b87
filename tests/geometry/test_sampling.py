"""Reading at computed places (grid_sample): deformable attention, warps by a flow, by one transform, fixed places."""

import pytest
import torch
import torch.nn.functional as F
from checks import Net, check_all, some_states
from torch import Tensor, nn

import unstride
from unstride.errors import CaptureError
from unstride.geometry.states import State


def net_of(model: nn.Module, size: int = 32) -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    return Net.of(model.double().eval(), x[:1]), x


def layers(net: Net) -> list[str]:
    return [path for layer in net.found.layers for path, _ in layer.ops]


def centres(h: int, w: int, like: Tensor) -> Tensor:
    """(h, w, 2): where the cells of a map lie, from 0 to 1, as grid_sample has it."""
    y, x = ((torch.arange(n, dtype=like.dtype) + 0.5) / n for n in (h, w))
    return torch.stack([x.expand(h, w), y[:, None].expand(h, w)], -1)


class Deformable(nn.Module):
    """Mask2Former's pixel decoder: the levels of a pyramid in one sequence, each token reads from all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
        self.offset, self.weight, self.out = nn.Linear(4, 2 * 2 * 2), nn.Linear(4, 2 * 2), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        levels = [self.down(fine), fine]
        sizes = [level.shape[2:] for level in levels]
        tokens = torch.cat([level.flatten(2).transpose(1, 2) for level in levels], 1)
        reference = torch.cat([centres(h, w, x).flatten(0, 1) for h, w in sizes])[None, :, None, None]
        offset = self.offset(tokens).tanh().unflatten(-1, (2, 2, 2)) / sizes[1][0]
        places = 2 * (reference + offset) - 1
        weight = self.weight(tokens).softmax(-1).unflatten(-1, (2, 2))
        parts = tokens.split([h * w for h, w in sizes], 1)
        read = 0
        for i, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            level = part.transpose(1, 2).unflatten(2, size)
            found = F.grid_sample(level, places[:, :, i], align_corners=False)
            read = read + (found * weight[:, None, :, i]).sum(-1)
        parts = (tokens + read.transpose(1, 2)).split([h * w for h, w in sizes], 1)
        maps = [p.transpose(1, 2).unflatten(2, size) for p, size in zip(parts, sizes, strict=True)]
        return self.out(maps[1] + F.interpolate(maps[0], scale_factor=2, mode="bilinear"))


def test_deformable_attention_follows_its_queries() -> None:
    net, x = net_of(Deformable())
    assert layers(net) == ["stem", "down"] and not net.found.unknown
    assert check_all(net, x, some_states(net.found, 6)[1:], 1e-9) > 1e-3


def test_deformable_attention_keeps_a_ramp() -> None:
    """Of plain averages, and places that are no other than its own: a state's map is as much later as is said."""
    model = Deformable()
    with torch.no_grad():
        for layer in (model.stem, model.down):
            layer.weight.fill_(1 / layer.weight[0].numel())
        for layer in (model.offset, model.weight):
            layer.weight.zero_()
        model.offset.bias.zero_()
    net, _ = net_of(model)
    state = State(((0, 1), (0, 1)))
    run = net.engine().start(torch.arange(32, dtype=torch.float64).expand(1, 3, 32, 32))
    (moved,), plain = run.add([(0, state)]), net.leaves(run.plain)[0]
    grid, (_, pixels) = net.found.grid(net.outputs[0]), net.found.space.displacement(state)
    assert pixels == 3 and grid is not None
    slope = plain.diff(dim=-1)[..., 6:-6] / grid.spacing[1]
    torch.testing.assert_close((moved - plain)[..., 6:-7], pixels * slope)


class Warped(nn.Module):
    """A coarse map on the cells of a finer one, read where a flow says (SFNet); or by one transform for all cells."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem, self.down, self.way = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), way
        self.flow, self.out = nn.Conv2d(8 if way == "flow" else 4, 2, 3, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(x)
        coarse = self.down(fine)
        h, w = fine.shape[2:]
        places = 2 * centres(h, w, x).expand(x.shape[0], h, w, 2) - 1
        if self.way == "transform":
            theta = torch.tanh(self.flow(coarse).mean((2, 3)))[:, :, None] * 0.1 + torch.eye(2, 3, dtype=x.dtype)
            places = F.affine_grid(theta, [x.shape[0], 4, h, w], align_corners=False)
        elif self.way != "fixed":  # "fine": it has not seen the coarse map, which was moved more
            seen = torch.cat([F.interpolate(coarse, scale_factor=2), fine], 1) if self.way == "flow" else fine
            places = places + 0.1 * self.flow(seen).tanh().permute(0, 2, 3, 1)
        return self.out(F.grid_sample(coarse, places, align_corners=False))


@pytest.mark.parametrize("way", ["flow", "fixed"])
def test_places_that_move_with_the_map_or_not_at_all(way: str) -> None:
    net, x = net_of(Warped(way))
    assert layers(net) == ["stem", "down"] and not net.found.unknown
    grid = net.found.grid(net.outputs[0])
    assert way == "fixed" or (grid is not None and grid.spacing == (2, 2))
    assert check_all(net, x, some_states(net.found, 4)[1:], 1e-9) > 1e-3


def test_places_that_would_have_to_move_stay() -> None:
    net, x = net_of(Warped("fine"))
    assert layers(net) == ["stem"]
    assert "says where to read" in net.found.left_out[0].reason
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)


def test_one_transform_for_all_cells_is_named() -> None:
    net, x = net_of(Warped("transform"))
    assert "reads where the image says" in net.found.unknown[0]
    with pytest.raises(CaptureError, match=r"no known place on the image.*reads where the image says"):
        unstride.enhance(Warped("transform").eval(), x[:1].float(), task="segmentation", recipe="paper")
