"""Packed convolutions and ops in place: the same numbers as the ops of the captured graph, to float rounding."""

import copy
import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captures import frozen_form, split_of
from torch import Tensor, nn

import unstride
from unstride.engine.packed import PackedConv, Packing, available

pytestmark = pytest.mark.skipif(
    not available(torch.device("cpu"), torch.float32), reason="this build of torch has no oneDNN"
)


class Residual(nn.Module):
    """Every shape the rewriting looks for, and the neighbours it must leave alone."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.a, self.b = nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 1, 1)
        self.skip = nn.Conv2d(8, 8, 1, 2)
        self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.head = nn.Linear(8, 5)
        self.act = act

    def f(self, x: Tensor) -> Tensor:
        return {"relu": F.relu, "relu6": F.relu6, "silu": F.silu, "hardswish": F.hardswish, "gelu": F.gelu}[self.act](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(self.norm(self.stem(x)))
        y = F.relu(self.b(self.f(self.a(x))) + self.skip(x))
        y = self.f(self.deep(y) + y.mean((2, 3), keepdim=True))  # a sum that broadcasts is not fused
        z = self.deep(y)
        return self.head((z + F.hardtanh(z, -0.5, 2.0) + y).mean((2, 3)))  # read twice: nothing to fuse


def listed(states: Sequence[Any]) -> unstride.Recipe:
    """These states, aggregated as a search aggregates them."""
    return unstride.Recipe((unstride.Stage(states=list(states), space="features", edges="zeros"),))


def packed(better: unstride.Enhanced, images: Tensor) -> list[PackedConv]:
    engine = split_of(better, images).engine
    segments = [*engine.as_trained, *engine.moved]
    return [m for s in segments for m in s.module.modules() if isinstance(m, PackedConv)]


def ops(better: unstride.Enhanced, images: Tensor) -> list[str]:
    """Names of the ops that are left in the segments."""
    engine = split_of(better, images).engine
    nodes = [n for s in [*engine.as_trained, *engine.moved] for n in s.module.graph.nodes]
    return [str(n.target).split(".")[1] for n in nodes if n.op == "call_function" and "aten" in str(n.target)]


@pytest.mark.parametrize("act", ["relu", "relu6", "silu", "hardswish", "gelu"])
def test_packed_is_the_same_network(act: str) -> None:
    torch.manual_seed(0)
    net = Residual(act).eval()
    nn.init.uniform_(net.norm.running_var, 0.5, 2.0)
    images = torch.randn(5, 3, 33, 30)
    fast = unstride.enhance(net, images[:1], recipe="paper", budget=10, execution="frozen")
    live = unstride.enhance(net, images[:1], recipe="paper", budget=10)
    for n in (1, 2, 5):
        torch.testing.assert_close(fast(images[:n]), live(images[:n]), rtol=1e-5, atol=1e-5)
    assert len(packed(fast, images)) >= 12
    assert ("gelu" if act == "gelu" else f"{act}_") in ops(fast, images)
    assert not packed(live, images)


class Shortcut(nn.Module):
    """A block whose shortcut is made by a convolution, and read in one of several ways."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.a, self.b, self.c = (nn.Conv2d(8, 8, 3, 1, 1) for _ in range(3))
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = F.max_pool2d(x, 3, 1, 1) if self.read == "pooled" else self.a(x)
        match self.read:
            case "last" | "pooled":
                z = F.relu(self.c(F.relu(self.b(y))) + y)
            case "by the convolution":
                z = F.relu(self.c(y) + y)
            case "afterwards":
                z = self.c(F.relu(self.b(y))) + y
                z = z * y.sigmoid()
            case "through a view":
                turned = y.transpose(2, 3)
                z = self.c(F.relu(self.b(y))) + y
                z = z * turned.transpose(2, 3).sigmoid()
        return self.last(z).mean((2, 3))


@pytest.mark.parametrize("read", ["last", "pooled", "by the convolution", "afterwards", "through a view"])
def test_a_sum_is_written_only_over_what_nobody_else_reads(read: str) -> None:
    torch.manual_seed(0)
    net, images = Shortcut(read).eval(), torch.randn(3, 3, 32, 32)
    fast = unstride.enhance(net, images[:1], recipe="paper", budget=10, layers=(1, 2), execution="frozen")
    assert "add_" in ops(fast, images)
    live = unstride.enhance(net, images[:1], recipe="paper", budget=10, layers=(1, 2))
    torch.testing.assert_close(fast(images), live(images), rtol=1e-5, atol=1e-5)
    zero = fast.replace(listed([((0, 0),) * 2]))
    for _ in range(2):  # nothing that is stored was written to
        torch.testing.assert_close(zero(images), net(images), rtol=1e-5, atol=1e-5)


def test_batch_sizes_share_layouts() -> None:
    weight = torch.randn(64, 32, 1, 1)
    packing = Packing(weight.contiguous(memory_format=torch.channels_last))
    for n in range(1, 40):
        x = torch.randn(n, 32, 7, 7)
        packed = packing(x.shape, [0, 0], [1, 1], [1, 1], 1)
        assert packing(x.shape, [0, 0], [1, 1], [1, 1], 1) is packed
    assert len(packing.uses) == 39 and len(packing.layouts) < 10


def test_an_enhanced_model_can_be_copied_after_use() -> None:
    net, images = Residual("relu").eval(), torch.randn(2, 3, 32, 32)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=4, execution="frozen")
    expected = better(images)
    torch.testing.assert_close(copy.deepcopy(better)(images), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(better))(images), expected)  # to a worker process, say
    torch.testing.assert_close(better(images), expected)


def test_only_float32_on_the_cpu_is_packed() -> None:
    assert not available(torch.device("cpu"), torch.float64)
    assert not available(torch.device("meta"), torch.float32)
    net = Residual("relu").double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=4, execution="frozen")
    better(images)
    assert not packed(better, images)


@pytest.mark.parametrize("act", ["relu", "relu6", "silu", "hardswish"])
def test_autocast_is_honoured(act: str) -> None:
    torch.manual_seed(0)
    net, images = Residual(act).eval(), torch.randn(3, 3, 32, 32)
    better = unstride.enhance(net, images[:1], recipe="paper", budget=4, execution="frozen")
    exact = better(images)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plain, cast = net(images), better(images)
        fresh = unstride.enhance(net, images[:1], recipe="paper", budget=4, execution="frozen")(images)
    assert cast.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(cast.float(), exact, rtol=0.05, atol=0.02)
    assert not torch.equal(cast.float(), exact)
    torch.testing.assert_close(fresh, cast)
    torch.testing.assert_close(better(images), exact)


class Depthwise(nn.Module):
    """A strided depthwise convolution of some size and padding between two layers."""

    def __init__(self, taps: int, stride: int, pad: int, groups: int = 8) -> None:
        super().__init__()
        self.stem, self.last = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.deep = nn.Conv2d(8, 8, taps, stride, pad, groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu6(self.deep(F.relu(self.stem(x))))).mean((2, 3))


@pytest.mark.parametrize(
    ("net", "size"),
    [
        (Depthwise(3, 2, 1), 64),
        (Depthwise(5, 2, 2), 64),
        (Depthwise(3, 3, 1), 66),
        (Depthwise(3, 2, 1), 66),
        (Depthwise(3, 2, 1, groups=1), 64),
    ],
    ids=["3x3", "5x5", "stride 3", "odd map", "dense"],
)
def test_strided_convolutions_of_moved_rows(net: nn.Module, size: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 3, size, size)
    live = unstride.enhance(net.eval(), images[:1], recipe="paper", budget=16, layers=(1, 2))
    fast = frozen_form(live)
    for n in (1, 3):
        torch.testing.assert_close(fast(images[:n]), live(images[:n]), rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu"):
        assert torch.isfinite(fast(images)).all()


class Same(Depthwise):
    """The same with TF's "same" padding: at the end alone, so that a state reads from one cell before."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(F.pad(F.relu(self.stem(x)), (0, 1, 0, 1)))
        return self.last(F.relu6(y)).mean((2, 3))


@pytest.mark.parametrize("net", [Same(3, 2, 0), Depthwise(3, 2, 1), Depthwise(3, 3, 1)])
def test_every_selection_of_a_layer(net: nn.Module) -> None:
    torch.manual_seed(0)
    r, images = net.deep.stride[0], torch.randn(2, 3, 64, 64)
    states = [((0, 0), s, (0, 0)) for s in itertools.product(range(1 - r, r), repeat=2)]
    live = unstride.enhance(net.eval(), recipe=listed(states))
    fast = frozen_form(live)
    for state in states:  # one by one, for in a mean errors could cancel
        one, two = (b.replace(listed([state])).explain(images)[0].passes[-1].output for b in (fast, live))
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


class Unequal(nn.Module):
    """Two sites of one layer, of which the other thins out more along a row than the depthwise one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1, groups=8)
        self.wide, self.head = nn.Conv2d(8, 8, 3, (2, 4), 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.deep(x))
        z = F.interpolate(self.wide(x), size=y.shape[-2:])
        return self.head(F.relu(y + z).mean((2, 3)))


def test_two_sites_of_one_layer_with_other_rates() -> None:
    torch.manual_seed(0)
    net, images = Unequal().eval(), torch.randn(2, 3, 32, 48)
    live = unstride.enhance(net, images[:1], recipe="paper", budget=8)
    assert split_of(live, images).found.layers[0].rate == (2, 4)
    torch.testing.assert_close(frozen_form(live)(images), live(images), rtol=1e-5, atol=1e-5)
