"""Packed and fused convolutions: the same numbers as the separate ops, to float rounding."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import unstride
from unstride.engine import fused as fused_module
from unstride.engine.engine import Run
from unstride.engine.fused import FusedConv, MovedDepthwise
from unstride.engine.packing import Packing, available
from unstride.evaluation.benching import peak_bytes

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


def fused(better: unstride.Enhanced, images: Tensor) -> list[FusedConv]:
    engine = better.prepare(images).engine
    segments = [*engine.as_trained, *engine.moved]
    return [m for s in segments for m in s.module.modules() if isinstance(m, FusedConv)]


@pytest.mark.parametrize("act", ["relu", "relu6", "silu", "hardswish", "gelu"])
def test_fused_is_the_same_network(act: str) -> None:
    torch.manual_seed(0)
    net = Residual(act).eval()
    nn.init.uniform_(net.norm.running_var, 0.5, 2.0)
    images = torch.randn(5, 3, 33, 30)
    fast = unstride.enhance(net, images[:1], budget=10)
    literal = unstride.enhance(net, images[:1], budget=10, optimise=False)
    for n in (1, 2, 5):
        torch.testing.assert_close(fast(images[:n]), literal(images[:n]), rtol=1e-5, atol=1e-5)
    names = [m.act[0] for m in fused(fast, images)]
    assert len(names) >= 12 and "relu" in names
    assert {"relu6": "hardtanh", "silu": "swish", "gelu": "none"}.get(act, act) in names
    assert not fused(literal, images)


def test_what_is_added_is_not_written_to() -> None:
    weight, x, other = torch.randn(4, 4, 3, 3), torch.randn(2, 4, 9, 9), torch.randn(2, 4, 9, 9)
    before = other.clone()
    out = FusedConv(Packing(weight), None, (1, 1, 1, 1), ("relu", []), tame=False)(x, other)
    torch.testing.assert_close(out, F.relu(F.conv2d(x, weight, padding=1) + other), rtol=1e-5, atol=1e-5)
    assert torch.equal(other, before)


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
def test_a_sum_is_written_over_a_shortcut_that_is_read_last_there(read: str) -> None:
    torch.manual_seed(0)
    net, images = Shortcut(read).eval(), torch.randn(3, 3, 32, 32)
    fast = unstride.enhance(net, images[:1], budget=10, layers=(1, 2))
    assert any(m.spends for m in fused(fast, images)) == (read == "last")
    literal = unstride.enhance(net, images[:1], budget=10, layers=(1, 2), optimise=False)
    torch.testing.assert_close(fast(images), literal(images), rtol=1e-5, atol=1e-5)
    zero = fast.with_options(states=[fast.plan.found.space.zero])
    for _ in range(2):  # nothing that is kept was written to
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
    better = unstride.enhance(net, images[:1], budget=4)
    expected = better(images)
    torch.testing.assert_close(copy.deepcopy(better)(images), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(better))(images), expected)  # to a worker process, say
    torch.testing.assert_close(better(images), expected)


def test_only_float32_on_the_cpu_is_fused() -> None:
    assert not available(torch.device("cpu"), torch.float64)
    assert not available(torch.device("meta"), torch.float32)
    net = Residual("relu").double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    better = unstride.enhance(net, images[:1], budget=4)
    better(images)
    assert not fused(better, images)


@pytest.mark.parametrize("act", ["relu", "relu6", "silu", "hardswish"])
def test_autocast_is_honoured(act: str) -> None:
    torch.manual_seed(0)
    net, images = Residual(act).eval(), torch.randn(3, 3, 32, 32)
    better = unstride.enhance(net, images[:1], budget=4)
    exact = better(images)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plain, cast = net(images), better(images)
        fresh = unstride.enhance(net, images[:1], budget=4)(images)  # captured inside: the same network
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
    ("net", "size", "taken"),
    [
        (Depthwise(3, 2, 1), 64, True),
        (Depthwise(5, 2, 2), 64, True),
        (Depthwise(3, 3, 1), 66, True),  # 33 cells: two more taps before the others still fit
        (Depthwise(3, 2, 1), 66, False),  # 33 cells: one more tap, one output fewer
        (Depthwise(3, 2, 1, groups=1), 64, False),
    ],
    ids=["3x3", "5x5", "stride 3", "odd map", "dense"],
)
def test_taps_are_moved_instead_of_a_large_map(
    net: nn.Module, size: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    images = torch.randn(3, 3, size, size)
    literal = unstride.enhance(net.eval(), images[:1], budget=16, layers=(1, 2), optimise=False)
    for large, used in ((1, taken), (1 << 20, False)):
        monkeypatch.setattr(fused_module, "_LARGE", large)
        fast = unstride.enhance(net, images[:1], budget=16, layers=(1, 2))
        parts = [m for s in fast.plan.engine.moved for m in s.module.modules()]
        assert any(isinstance(m, MovedDepthwise) for m in parts) == used
        for n in (1, 3):
            torch.testing.assert_close(fast(images[:n]), literal(images[:n]), rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu"):
            assert torch.isfinite(fast(images)).all()


class Same(Depthwise):
    """The same with TF's "same" padding: at the end alone, so that a state reads from one cell before."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.deep(F.pad(F.relu(self.stem(x)), (0, 1, 0, 1)))
        return self.last(F.relu6(y)).mean((2, 3))


@pytest.mark.parametrize("net", [Same(3, 2, 0), Depthwise(3, 2, 1), Depthwise(3, 3, 1)])
def test_taps_go_after_the_others_where_a_state_reads_from_before(
    net: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every selection of the layer, those whose taps cannot be moved among them (+1 of "same")."""
    torch.manual_seed(0)
    monkeypatch.setattr(fused_module, "_LARGE", 1)
    r, images = net.deep.stride[0], torch.randn(2, 3, 64, 64)
    states = [((0, 0), s, (0, 0)) for s in itertools.product(range(1 - r, r), repeat=2)]
    fast, literal = (
        unstride.enhance(net.eval(), images[:1], states=states, aggregate="mean", optimise=o) for o in (True, False)
    )
    moved = [m for s in fast.plan.engine.moved for m in s.module.modules() if isinstance(m, MovedDepthwise)]
    assert moved and any(min(start) < -m.mover.windows[0].start for m in moved for start in m.by_start)
    torch.testing.assert_close(fast(images), literal(images), rtol=1e-5, atol=1e-5)
    for state in states:  # one by one, for in a mean errors could cancel
        one, two = (b.with_options(states=(state,)).explain(images)[0].states[-1].logits for b in (fast, literal))
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


def test_taps_stay_where_another_site_of_the_layer_moves_farther(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(fused_module, "_LARGE", 1)
    net, images = Unequal().eval(), torch.randn(2, 3, 32, 48)
    fast, literal = (unstride.enhance(net, images[:1], budget=8, optimise=o) for o in (True, False))
    assert fast.plan.found.layers[0].rate == (2, 4)
    torch.testing.assert_close(fast(images), literal(images), rtol=1e-5, atol=1e-5)


class Thick(nn.Module):
    """What follows the depthwise convolution is small beside it; a second output keeps its level from running as
    trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.d = nn.Conv2d(3, 64, 3, 2, 1), nn.Conv2d(64, 64, 3, 2, 1, groups=64)
        self.e, self.f, self.g = nn.Conv2d(64, 8, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.relu6(self.d(F.relu(self.a(x))))
        return self.g(F.relu(self.f(self.e(y))).mean((2, 3))), y.mean((2, 3))


def test_parts_of_a_depthwise_convolution_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    net, images = Thick().eval(), torch.randn(1, 3, 256, 256)
    better = unstride.enhance(net, images, budget=16, layers=(1, 2, 3))
    better(images)
    assert any(isinstance(m, MovedDepthwise) for m in better.plan.engine.moved[2].module.modules())
    level, measured = Run._level, []

    def watch(run: Run, k: int, keys: Any, states: Any, plain: bool = False) -> None:
        real = peak_bytes(lambda: level(run, k, keys, states, plain))
        if k == 2 and not plain:
            measured.append(real / run._chunk_bytes(k, len(keys)))

    monkeypatch.setattr(Run, "_level", watch)
    better(images)
    assert measured and max(measured) <= 1.1


class Same(nn.Module):
    """A depthwise convolution after a pad of its own, as TF's "same" has it."""

    def __init__(self, taps: int, stride: int, sides: tuple[int, int, int, int], fill: float = 0.0) -> None:
        super().__init__()
        self.stem, self.deep = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, taps, stride, groups=8)
        self.sides, self.fill = sides, fill

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(self.deep(F.pad(F.relu6(self.stem(x)), self.sides, value=self.fill))).mean((2, 3))


@pytest.mark.parametrize(
    ("net", "taken"),
    [
        (Same(3, 2, (0, 1, 0, 1)), True),
        (Same(5, 2, (1, 2, 1, 2)), True),
        (Same(3, 1, (2, 0, 0, 1)), True),
        (Same(3, 3, (1, 1, 3, 2)), True),
        (Same(3, 2, (0, 1, 0, 1), fill=1.0), False),
        (Same(3, 2, (0, 1, 0, -1)), False),
    ],
    ids=["3x3", "5x5", "uneven", "stride 3", "filled with ones", "cut"],
)
@pytest.mark.parametrize("value", [0.5, float("inf"), float("nan")])
def test_zero_taps_stand_for_a_pad(net: nn.Module, taken: bool, value: float) -> None:
    net, images = net.eval(), torch.randn(3, 3, 24, 24)
    images[1, 0, -1, -1] = value  # read next to the pad, where a zero tap would make NaN of it
    better = unstride.enhance(net, images[:1], recipe="flip", task="classification")
    engine = better.plan.engine_for([better.plan.found.space.zero])
    made = [type(m).__name__ for m in engine.as_trained[0].module.modules()]
    assert (made.count("PaddedDepthwise") == 1) == taken
    with torch.no_grad():
        wanted = (net(images) + net(images.flip(3))) / 2
    torch.testing.assert_close(better(images), wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
