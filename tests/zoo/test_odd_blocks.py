"""Blocks that single families have, written small: what they group into, and the invariants on them."""

import torch
import torch.nn.functional as F
from checks import Net, check_all, some_states
from torch import Tensor, nn


def judged(model: nn.Module, size: int = 16) -> Net:
    torch.manual_seed(0)
    x = torch.randn(2, 3, size, size, dtype=torch.float64)
    net = Net.of(model.double().eval(), x[:1])
    assert not net.found.unknown
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)
    return net


def ops(net: Net) -> list[list[str]]:
    return [[path for path, _ in layer.ops] for layer in net.found.layers]


class HalfACell(nn.Module):
    """HGNet's stem: branches with even kernels lie half a cell apart; side by side they are one map, no merging."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 2), nn.Conv2d(4, 4, 2)
        self.pool, self.down = nn.MaxPool2d(2, 1, ceil_mode=True), nn.Conv2d(8, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.a(x), (0, 1, 0, 1))
        y = self.c(F.pad(self.b(x), (0, 1, 0, 1)))
        return self.down(torch.cat([self.pool(x), y], 1)).mean((2, 3))


def test_branches_half_a_cell_apart() -> None:
    assert ops(judged(HalfACell(), 24)) == [["a"], ["down"]]


class Factorised(nn.Module):
    """NASNet's reduction: one path reads x[0::2], the other x[1::2]; both are one layer, and the next one follows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.AvgPool2d(1, 2, count_include_pad=False), nn.AvgPool2d(1, 2, count_include_pad=False)
        self.mix, self.down, self.skip = nn.Conv2d(6, 4, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(torch.cat([self.one(x), self.two(F.pad(x, (-1, 1, -1, 1)))], 1))
        x = torch.cat([x, F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 2, 1)], 1)  # and again, half a cell apart
        return (self.down(x) + self.skip(x)).mean((2, 3))


def test_factorised_reduction() -> None:
    assert ops(judged(Factorised())) == [["one", "two"], ["down", "skip"]]


class PooledGate(nn.Module):
    """GhostNetV2: a gate from a coarser map, back on the finer one, then a strided block with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.gate = nn.Conv2d(3, 4, 3, 2, 1), nn.AvgPool2d(2), nn.Conv2d(4, 4, 1)
        self.down, self.short = nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = x * F.interpolate(self.gate(self.pool(x)).sigmoid(), size=x.shape[2:])
        return (self.down(y) + self.short(x)).mean((2, 3))


def test_a_pooled_gate_does_not_take_the_place_of_the_strided_block() -> None:
    net = judged(PooledGate(), 32)
    assert ops(net) == [["stem"], ["down", "short"]]
    assert [item.op for item in net.found.left_out] == ["pool (avg_pool2d)"]


class PixelsInPatches(nn.Module):
    """TNT: patches are cut out, their pixels attend to each other, and a linear layer makes a token of each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cut = nn.Conv2d(3, 4, 3, 2, 1), nn.Unfold(2, stride=2)
        self.inner, self.one, self.two = nn.Linear(4, 4), nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        x = self.cut(self.stem(x)).transpose(1, 2).reshape(-1, 4, 4).transpose(1, 2)
        tokens = self.one(x.reshape(b, -1, 16))
        x = x + (x @ x.transpose(1, 2)).softmax(-1) @ self.inner(x)
        return (tokens + self.two(x.reshape(b, -1, 16))).mean(1)


def test_pixels_inside_patches() -> None:
    assert ops(judged(PixelsInPatches())) == [["stem"], ["cut"]]


class Frequencies(nn.Module):
    """CSATv2: patches through two linear layers, put in an order that the forward pass computes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns, self.down = nn.Linear(2, 2), nn.Linear(2, 2), nn.Conv2d(12, 4, 3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
        x = self.columns(self.rows(x).transpose(-1, -2)).reshape(-1, c, 4)
        x = x[:, :, [0, 2, 1, 3]].reshape(b, h // 2, w // 2, c * 4)
        return self.down(x.permute(0, 3, 1, 2)).mean((2, 3))


def test_an_order_that_is_the_same_for_every_image() -> None:
    class Net_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = Frequencies()

        def forward(self, x: Tensor) -> Tensor:
            return self.stem(x)

    net = judged(Net_())
    assert [layer.rate for layer in net.found.layers] == [(2, 2), (2, 2)]
    assert ops(net)[1] == ["stem.down"]
    assert not net.found.left_out
