"""The same rewriting for one, two and three axes: an axis is a number, not a letter."""

import pytest
import torch
import torch.nn.functional as F
from captures import frozen_form, split_of
from torch import Tensor, nn

import unstride
from unstride.engine.packed import PackedConv, available

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="this build of torch has no oneDNN"
)


class Hourglass(nn.Module):
    """A small U-Net of one, two or three axes: convolutions, transposed ones, instance norms and what comes after."""

    def __init__(self, axes: int, act: nn.Module, norm: str = "InstanceNorm") -> None:
        super().__init__()
        conv, up = getattr(nn, f"Conv{axes}d"), getattr(nn, f"ConvTranspose{axes}d")
        self.a, self.skip = conv(1, 8, 3, 2, 1), conv(1, 8, 1, 2)
        self.n = getattr(nn, f"{norm}{axes}d")(8, affine=True)
        self.b, self.c = conv(8, 16, 3, 2, 1, bias=False), conv(16, 16, 3, 1, 1)
        self.up, self.out, self.act = up(16, 16, 2, 2), up(24, 2, 3, 2, 1, 1), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.n(self.a(x))) + self.skip(x)
        y = self.act(self.c(F.relu(self.b(x))))
        return F.leaky_relu(self.out(torch.cat([self.up(y), x], 1)), 0.2)


def maps(net: nn.Module, images: Tensor, execution: str = "frozen") -> unstride.Enhanced:
    return unstride.enhance(
        net, images[:1], recipe="paper", budget=5, task="segmentation", aggregate="mean", execution=execution
    )


@pytest.mark.parametrize("act", [nn.PReLU(1, 0.5), nn.ReLU(), nn.GELU()], ids=str)
@pytest.mark.parametrize(("axes", "side"), [(1, 16), (2, 20), (3, 8)])
def test_axes_are_a_number(axes: int, side: int, act: nn.Module) -> None:
    torch.manual_seed(0)
    net, images = Hourglass(axes, act).eval(), torch.randn(3, 1, *[side] * axes)
    fast, literal = (maps(net, images, e) for e in ("frozen", "auto"))
    for n in (1, 3):
        torch.testing.assert_close(fast(images[:n]), literal(images[:n]), rtol=1e-4, atol=1e-5)
    engine = split_of(fast, images).engine
    made = [m for s in [*engine.as_trained, *engine.moved] for m in s.module.modules() if isinstance(m, PackedConv)]
    assert len(made) == (8 if axes > 1 else 0)  # as trained, and moved
    assert all(m.weight.uses for m in made)


def test_a_slope_for_each_channel_is_an_op_of_its_own() -> None:
    torch.manual_seed(0)
    net, images = Hourglass(2, nn.PReLU(8)), torch.randn(2, 1, 16, 16)
    net.c = nn.Conv2d(16, 8, 3, 1, 1)
    net.up = nn.ConvTranspose2d(8, 16, 2, 2)
    nn.init.uniform_(net.act.weight)
    fast, literal = (
        unstride.enhance(
            net.eval(), images[:1], recipe="paper", budget=3, task="segmentation", aggregate="mean", execution=e
        )
        for e in ("frozen", "auto")
    )
    torch.testing.assert_close(fast(images), literal(images), rtol=1e-4, atol=1e-5)


def test_a_batch_norm_after_a_volume_is_folded() -> None:
    torch.manual_seed(0)
    net, images = Hourglass(3, nn.ReLU(), "BatchNorm").eval(), torch.randn(2, 1, 8, 8, 8)
    nn.init.uniform_(net.n.running_var, 0.5, 2.0)
    nn.init.uniform_(net.n.running_mean, -1.0, 1.0)
    fast, literal = (maps(net, images, e) for e in ("frozen", "auto"))
    torch.testing.assert_close(fast(images), literal(images), rtol=1e-4, atol=1e-5)
    assert not [n for n in split_of(fast, images).graph.fx.nodes if "batch_norm" in str(n.target)]


def test_a_torch_without_the_ops_takes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Hourglass(3, nn.PReLU()).eval(), torch.randn(2, 1, 8, 8, 8)
    expected = maps(net, images)(images)
    monkeypatch.setattr("unstride.engine.packed._NEEDED", ("_no_such_op",))
    without = maps(net, images)
    torch.testing.assert_close(without(images), expected, rtol=1e-4, atol=1e-5)
    segments = [*split_of(without, images).engine.as_trained, *split_of(without, images).engine.moved]
    assert not any(isinstance(m, PackedConv) for s in segments for m in s.module.modules())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_volume_that_is_not_finite_stays_so(value: float) -> None:
    torch.manual_seed(0)
    net, images = Hourglass(3, nn.PReLU()).eval(), torch.randn(2, 1, 8, 8, 8)
    images[1, 0, 3, 4, 5] = value
    better = unstride.enhance(net, images[:1], recipe="paper", budget=1, task="segmentation")
    with torch.no_grad():
        assert torch.equal(better(images).isfinite(), net(images).isfinite())


def test_autocast_is_honoured() -> None:
    torch.manual_seed(0)
    net, images = Hourglass(3, nn.PReLU()).eval(), torch.randn(2, 1, 8, 8, 8)
    fast, literal = (maps(net, images, e) for e in ("frozen", "auto"))
    exact = fast(images)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        cast, other = fast(images), literal(images)
    assert cast.dtype == other.dtype and not torch.equal(cast.float(), exact)
    torch.testing.assert_close(cast.float(), exact, rtol=0.1, atol=0.05)


def test_depthwise_convolutions_of_volumes() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv3d(1, 4, 3, 2, 1), nn.ReLU(), nn.Conv3d(4, 4, 3, 2, 1, groups=4), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    images = torch.randn(2, 1, 16, 16, 16)
    live = unstride.enhance(net, images[:1], recipe="paper", budget=12, layers=(1, 2))
    torch.testing.assert_close(frozen_form(live)(images), live(images), rtol=1e-5, atol=1e-5)


def test_a_moved_window_is_counted_with_what_stands_out_of_the_map() -> None:
    net, images = Hourglass(3, nn.PReLU()).eval(), torch.randn(1, 1, 8, 8, 8)
    engine = split_of(maps(net, images), images).engine
    moved = [n for n in engine.moved[2].module.graph.nodes if str(n.target).startswith("move_")]
    assert [n.meta["bytes"] for n in moved] == [8 * 5**3 * 4, 8 * 4**3 * 4]  # of 4 cells, 5 are read; the skip
