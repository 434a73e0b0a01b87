"""Invariant 2: the activations of state s are the slice [R n + s] of the stride-1 op, op by op, computed by hand."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from checks import Net, gap
from torch import Tensor, nn

from unstride.geometry.states import State


class Op(nn.Module):
    """A function of the image with its own weights, as a model."""

    def __init__(self, f, **weights: Tensor) -> None:
        super().__init__()
        self.f = f
        for name, value in weights.items():
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


def image(h: int = 13, w: int = 16, c: int = 3, b: int = 2) -> Tensor:
    return torch.randn(b, c, h, w, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def weight(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def of_state(net: Net, x: Tensor, state: State) -> Tensor:
    (out,) = net.engine().start(x).add([(i, state) for i in range(x.shape[0])])
    return out


def every_state(model: nn.Module, x: Tensor, dense, rate: tuple[int, int]) -> None:
    """`dense(x)` is the stride-1 op with its own padding going on at the far end, by R - 1 cells or more."""
    net = Net.of(model, x[:1])
    assert [layer.rate for layer in net.found.layers] == [rate]
    cells = model(x).shape[2:]
    full = dense(x)
    for s in net.found.space.states():
        ((sy, sx),) = s.selections
        wanted = full[:, :, sy :: rate[0], sx :: rate[1]][:, :, : cells[0], : cells[1]]
        assert wanted.shape[2:] == cells, "the dense op of this test is too small"
        assert gap(of_state(net, x, s), wanted) < 1e-12, f"state {s}"
        for back in itertools.product(*((k, k - r) if k else (0,) for k, r in zip((sy, sx), rate, strict=True))):
            # s - R takes what s takes, one cell of the output later; its first cell lies before the dense op's
            late = tuple(int(k < 0) for k in back)
            got = of_state(net, x, State((back,)))[:, :, late[0] :, late[1] :]
            assert gap(got, wanted[:, :, : cells[0] - late[0], : cells[1] - late[1]]) < 1e-12, f"selection {back}"


CONVS = {
    "stride 2": ((2, 2), (1, 1), (1, 1), 1, (3, 3)),
    "stride 3": ((3, 3), (1, 1), (1, 1), 1, (3, 3)),
    "stride 4, patches": ((4, 4), (0, 0), (1, 1), 1, (4, 4)),
    "stride 4, kernel 7": ((4, 4), (3, 3), (1, 1), 1, (7, 7)),
    "rectangular": ((2, 3), (0, 2), (1, 1), 1, (3, 5)),
    "one axis": ((1, 2), (1, 1), (1, 1), 1, (3, 3)),
    "dilated": ((2, 2), (2, 2), (2, 2), 1, (3, 3)),
    "grouped": ((2, 2), (1, 1), (1, 1), 3, (3, 3)),
    "kernel 1": ((2, 2), (0, 0), (1, 1), 1, (1, 1)),
    "even kernel": ((2, 2), (1, 1), (1, 1), 1, (2, 2)),
    "padding beyond need": ((2, 2), (3, 3), (1, 1), 1, (3, 3)),
}


@pytest.mark.parametrize("name", CONVS)
def test_convolution(name: str) -> None:
    stride, padding, dilation, groups, kernel = CONVS[name]
    w, b = weight(6, 3 // groups, *kernel), weight(6)
    model = Op(lambda m, x: F.conv2d(x, m.w, m.b, stride, padding, dilation, groups), w=w, b=b)
    far = (0, stride[1] - 1, 0, stride[0] - 1)
    every_state(model, image(), lambda x: F.conv2d(F.pad(x, far), w, b, 1, padding, dilation, groups), stride)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("kernel", [3, 5])
def test_padding_modes_go_on_beyond_the_end(mode: str, kernel: int) -> None:
    conv = nn.Conv2d(3, 4, kernel, 2, kernel // 2, padding_mode=mode).double().eval()
    p, x = kernel // 2, image()
    # Far more of the border than needed, made by F.pad itself: reflect and wrap by p + 1 at the end.
    wide = F.pad(x, (p, p + 1, p, p + 1), mode=mode)
    every_state(conv, x, lambda _: F.conv2d(wide, conv.weight, conv.bias), (2, 2))


def test_same_padding_as_tensorflow_does_it() -> None:
    w = weight(4, 3, 3, 3)
    model = Op(lambda m, x: F.conv2d(F.pad(x, (0, 1, 1, 1)), m.w, None, 2), w=w)
    every_state(model, image(), lambda x: F.conv2d(F.pad(x, (0, 2, 1, 2)), w), (2, 2))


def test_padding_same_before_a_strided_pool() -> None:
    w = weight(4, 3, 3, 3)
    model = Op(lambda m, x: F.max_pool2d(F.conv2d(x, m.w, padding="same"), 2), w=w)

    def dense(x: Tensor) -> Tensor:
        inner = F.conv2d(x, w, padding="same")
        return F.max_pool2d(F.pad(inner, (0, 1, 0, 1), value=-torch.inf), 2, 1)

    every_state(model, image(), dense, (2, 2))


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(
    ("size", "stride", "padding", "dilation"), [(2, 2, 0, 1), (3, 2, 1, 1), (3, 3, 1, 1), (3, 2, 1, 2)]
)
def test_max_pool(size: int, stride: int, padding: int, dilation: int, ceil: bool) -> None:
    model = Op(lambda m, x: F.max_pool2d(x, size, stride, padding, dilation, ceil_mode=ceil))
    far = padding + 2 * stride

    def dense(x: Tensor) -> Tensor:
        sides = (padding, far, padding, far)
        # windows that see nothing of the map say what the cell at its edge does; for all others it is as good as -inf
        wide = F.pad(x, sides, mode="replicate") if dilation == 1 else F.pad(x, sides, value=-torch.inf)
        return F.max_pool2d(wide, size, 1, 0, dilation)

    every_state(model, image(14, 15), dense, (stride, stride))


@pytest.mark.parametrize(("size", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 3, 1), (5, 2, 2)])
def test_average_pool_counts_padding(size: int, stride: int, padding: int) -> None:
    model = Op(lambda m, x: F.avg_pool2d(x, size, stride, padding, count_include_pad=True))
    far = padding + stride - 1
    every_state(
        model, image(), lambda x: F.avg_pool2d(F.pad(x, (padding, far, padding, far)), size, 1), (stride, stride)
    )


@pytest.mark.parametrize("ceil", [False, True])
@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 2, 1), (3, 3, 1), (2, 2, 0)])
def test_average_pool_counts_only_what_is_there(size: int, stride: int, padding: int, ceil: bool) -> None:
    model = Op(lambda m, x: F.avg_pool2d(x, size, stride, padding, ceil_mode=ceil, count_include_pad=False))

    def dense(x: Tensor) -> Tensor:
        far = padding + 2 * stride
        wide = (padding, far, padding, far)
        total = F.avg_pool2d(F.pad(x, wide), size, 1, divisor_override=1)
        count = F.avg_pool2d(F.pad(torch.ones_like(x), wide), size, 1, divisor_override=1)
        return total / count.clamp(min=1)

    every_state(model, image(14, 15), dense, (stride, stride))


def test_average_pool_with_a_ceiling_keeps_its_rule_at_the_moved_border() -> None:
    """7 cells, windows of 3 by 2, padding 1, ceil: state 1 reads 0..2, 2..4, 4..6, 6..8; its map ends at 7 + 1 + 1."""
    x = torch.arange(1.0, 8.0, dtype=torch.float64).view(1, 1, 1, 7).expand(1, 1, 7, 7).contiguous()
    net = Net.of(Op(lambda m, t: F.avg_pool2d(t, 3, 2, 1, ceil_mode=True)), x)
    out = of_state(net, x, State(((1, 1),)))
    assert torch.allclose(out[0, 0, 1], torch.tensor([2.0, 4.0, 6.0, 7 / 3], dtype=torch.float64))


def test_what_lies_before_the_map_is_the_ops_own_padding() -> None:
    """Five cells 1..5 read from one cell earlier, by hand: zeros for a sum, nothing for a maximum, and what counts."""
    x = torch.arange(1.0, 6.0, dtype=torch.float64).view(1, 1, 1, 5).expand(1, 1, 5, 5).contiguous()
    one = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    hand = {
        "sum": (lambda m, t: F.conv2d(t, m.w, None, 2, 1), [3 * 1.0, 3 * 6.0, 3 * 12.0]),  # 0 0 1, 1 2 3, 3 4 5
        "max": (lambda m, t: F.max_pool2d(t, 3, 2, 1), [1.0, 3.0, 5.0]),
        "mean": (lambda m, t: F.avg_pool2d(t, 3, 2, 1), [1 / 3, 2.0, 4.0]),
        "mean of what is there": (lambda m, t: F.avg_pool2d(t, 3, 2, 1, count_include_pad=False), [1.0, 2.0, 4.0]),
        "slice": (lambda m, t: t[:, :, ::2, ::2] * 1.0, [0.0, 2.0, 4.0]),
    }
    for name, (f, wanted) in hand.items():
        net = Net.of(Op(f, w=one), x)
        out = of_state(net, x, State(((-1, -1),)))
        assert torch.allclose(out[0, 0, 1], torch.tensor(wanted, dtype=torch.float64)), name


def test_average_pool_with_its_own_divisor() -> None:
    model = Op(lambda m, x: F.avg_pool2d(x, 2, 2, divisor_override=3))
    every_state(model, image(), lambda x: F.avg_pool2d(F.pad(x, (0, 1, 0, 1)), 2, 1, divisor_override=3), (2, 2))


def test_lp_pool() -> None:
    model = Op(lambda m, x: F.lp_pool2d(x.abs(), 2.0, 2))

    def dense(x: Tensor) -> Tensor:
        return (F.avg_pool2d(F.pad(x.abs() ** 2, (0, 1, 0, 1)), 2, 1) * 4) ** 0.5

    every_state(model, image(), dense, (2, 2))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "constant"])
def test_blur_pool(mode: str) -> None:
    kernel = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    w = (kernel[:, None] * kernel / 16).expand(3, 1, 3, 3).contiguous()
    model = Op(lambda m, x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode=mode), m.w, stride=2, groups=3), w=w)
    x = image(12, 12)
    every_state(model, x, lambda x: F.conv2d(F.pad(x, (1, 2, 1, 2), mode=mode), w, groups=3), (2, 2))


def test_strided_slices() -> None:
    w = weight(4, 3, 1, 1)
    model = Op(lambda m, x: F.conv2d(x[:, :, ::2, ::3], m.w), w=w)
    every_state(model, image(), lambda x: F.conv2d(F.pad(x, (0, 2, 0, 1)), w), (2, 3))


def test_patch_merging_by_slices() -> None:
    w = weight(5, 12, 1, 1)

    def merge(m: nn.Module, x: Tensor) -> Tensor:
        parts = [x[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return F.conv2d(torch.cat(parts, 1), m.w)

    def dense(x: Tensor) -> Tensor:
        far = F.pad(x, (0, 2, 0, 2))
        parts = [far[:, :, i : i + x.shape[2] + 1, j : j + x.shape[3] + 1] for j in (0, 1) for i in (0, 1)]
        return F.conv2d(torch.cat(parts, 1), w)

    every_state(Op(merge, w=w), image(12, 16), dense, (2, 2))


def test_patch_merging_by_reshape() -> None:
    w = weight(5, 12)

    def merge(m: nn.Module, x: Tensor) -> Tensor:
        b, c, h, v = x.shape
        x = x.reshape(b, c, h // 2, 2, v // 2, 2).permute(0, 2, 4, 3, 5, 1).flatten(3)
        return F.linear(x, m.w).permute(0, 3, 1, 2)

    def dense(x: Tensor) -> Tensor:
        far = F.pad(x, (0, 2, 0, 2))
        h, v = x.shape[2] + 1, x.shape[3] + 1
        parts = [far[:, :, i : i + h, j : j + v] for i in (0, 1) for j in (0, 1)]
        return F.conv2d(torch.cat(parts, 1), w[:, :, None, None])

    every_state(Op(merge, w=w), image(12, 16), dense, (2, 2))


def test_pixel_unshuffle() -> None:
    w = weight(5, 12, 1, 1)
    model = Op(lambda m, x: F.conv2d(F.pixel_unshuffle(x, 2), m.w), w=w)

    def dense(x: Tensor) -> Tensor:
        far = F.pad(x, (0, 2, 0, 2))
        h, v = x.shape[2] + 1, x.shape[3] + 1
        parts = torch.stack([far[:, :, i : i + h, j : j + v] for i in (0, 1) for j in (0, 1)], 2).flatten(1, 2)
        return F.conv2d(parts, w)

    every_state(model, image(12, 16), dense, (2, 2))


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_resizing_by_a_half(mode: str) -> None:
    w = weight(4, 3, 1, 1)
    model = Op(lambda m, x: F.conv2d(F.interpolate(x, scale_factor=0.5, mode=mode), m.w), w=w)

    def dense(x: Tensor) -> Tensor:
        far = F.pad(x, (0, 2, 0, 2), mode="replicate")
        return F.conv2d(F.avg_pool2d(far, 2, 1) if mode == "bilinear" else far, w)

    every_state(model, image(12, 16), dense, (2, 2))


def test_a_stride_of_one_cell_is_no_layer() -> None:
    """Global pools, adaptive pools and gates throw no grid away."""

    class Net_(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.gate, self.fc = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 1), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            x = x * self.gate(F.adaptive_avg_pool2d(x, 1)).sigmoid()
            return self.fc(F.avg_pool2d(x, 8).flatten(1))

    net = Net.of(Net_().double().eval(), image(16, 16))
    assert [[path for path, _ in layer.ops] for layer in net.found.layers] == [["conv"]]
    assert any("global pool" in item.reason for item in net.found.left_out)
