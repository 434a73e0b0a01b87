"""What is no layer is left out, with its reason."""

import pytest
import torch
import torch.nn.functional as F
from checks import Net, check_all, some_states
from torch import Tensor, nn

from unstride.engine.engine import Engine
from unstride.errors import CaptureError
from unstride.geometry.find import find_layers
from unstride.graph.capture import capture


def test_no_spatial_map() -> None:
    graph = capture(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)), torch.randn(1, 3, 16, 16))
    assert find_layers(graph).layers == ()


def test_slices_along_two_axes_are_one_stride() -> None:
    class Slices(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, ::2, ::2]

    (layer,) = find_layers(capture(Slices(), torch.randn(1, 3, 16, 16))).layers
    assert (layer.rate, layer.stride, layer.map) == ((2, 2), (2, 2), (8, 8))


# ---------------------------------------------------------------- unpooling
class SegNet(nn.Module):
    """Unpooling puts values back to where the maxima were: that pool, and what lies between, must stay."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 4, 3, 2, 1), nn.MaxPool2d(2, 2, return_indices=True)
        self.deep, self.out = nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, where = self.pool(self.stem(x))
        x = F.interpolate(self.deep(x), scale_factor=2)
        return self.out(F.max_unpool2d(x, where, 2))


def test_a_pool_whose_indices_are_used_is_left_out() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    net = Net.of(SegNet().double().eval(), x[:1])
    assert [[path for path, _ in layer.ops] for layer in net.found.layers] == [["stem"]]
    reasons = {item.op.split()[0]: item.reason for item in net.found.left_out}
    assert "unpooling" in reasons["pool"]
    assert "cannot be moved" in reasons["deep"]
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)


def test_a_pool_whose_indices_are_not_used_is_a_layer() -> None:
    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool, self.conv = nn.MaxPool2d(2, 2, return_indices=True), nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.pool(x)[0])

    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    net = Net.of(Ignores().double().eval(), x[:1])
    assert len(net.found.layers) == 1
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)


# ---------------------------------------------------------------- batches that are not image after image
class Columns(nn.Module):
    """Puts the batch behind the rows of the image: (H, B, ...) where a layer follows."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        self.together, self.a, self.b = together, nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, (1, 3), (1, 2), (0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        b, c, h, w = x.shape
        if self.together:  # each image keeps its rows together
            y = x.transpose(1, 2).reshape(b * h, c, 1, w)
            return self.b(y).reshape(b, h, c, -1).mean((1, 3))
        y = x.permute(2, 0, 1, 3).reshape(h * b, c, 1, w)
        return self.b(y).reshape(h, b, c, -1).mean((0, 3))


@pytest.mark.parametrize("together", [True, False])
def test_a_convolution_over_separate_rows_is_left_out(together: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    net = Net.of(Columns(together).double().eval(), x[:1])
    assert [[path for path, _ in layer.ops] for layer in net.found.layers] == [["a"]]
    assert "not a plain map" in net.found.left_out[0].reason
    check_all(net, x, some_states(net.found, 4)[1:], 1e-9)


def test_values_can_be_kept_only_where_an_image_keeps_its_rows_together() -> None:
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64)
    for together in (True, False):
        net = Net.of(Columns(together).double().eval(), x[:1])
        folded = next(n for n in net.graph.nodes if "reshape" in n.name)
        if together:
            run = Engine(net.graph, net.found, [folded]).start(x)
            assert run.plain[folded].shape == (12, 4, 1, 6)
        else:
            with pytest.raises(CaptureError, match="mixes the images"):
                Engine(net.graph, net.found, [folded])
