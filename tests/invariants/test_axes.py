"""Invariant 2 and what follows for signals (one axis) and volumes (three): by hand, and against the dense op."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checks import Net, gap
from networks import AVG, CONV, MAX, SMOOTH, UP
from torch import Tensor, nn

import unstride
from unstride import Near, Recipe, Stage
from unstride.errors import InputError, OptionError
from unstride.geometry.states import State
from unstride.method.align import Offset, align
from unstride.windows import SlidingWindow

SIZE = {1: (14,), 2: (12, 14), 3: (8, 9, 10)}


class Of(nn.Module):
    """A 1x1 convolution, so that it is plain how many axes there are, then a function."""

    def __init__(self, n: int, f) -> None:
        super().__init__()
        self.mix, self.f = CONV[n](2, 2, 1), f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self.mix(x))


def wide(x: Tensor, low: int, high: int, mode: str = "constant", value: float = 0.0) -> Tensor:
    pads = (low, high) * (x.ndim - 2)
    return F.pad(x, pads, mode=mode, value=value) if mode == "constant" else F.pad(x, pads, mode=mode)


def ops(n: int) -> dict[str, tuple]:
    """name: the strided op, the stride-1 op on the same map going on at the far end, the rate."""
    weight = torch.randn(2, 2, *[3] * n, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    patch = torch.randn(2, 2, *[2] * n, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[n]
    every = lambda x, r: x[(slice(None), slice(None), *[slice(None, None, r)] * n)]  # noqa: E731
    max_pool = lambda x, k, r: MAX[n](k, r)(x)  # noqa: E731
    avg_pool = lambda x, k, r: AVG[n](k, r)(x)  # noqa: E731
    return {
        "conv": (lambda x: conv(x, weight, None, 2, 1), lambda x: conv(wide(x, 1, 2), weight), 2),
        "conv by 3": (lambda x: conv(x, weight, None, 3, 1), lambda x: conv(wide(x, 1, 3), weight), 3),
        "tubes": (lambda x: conv(x, patch, None, 2), lambda x: conv(wide(x, 0, 1), patch), 2),
        "reflecting": (
            lambda x: conv(wide(x, 1, 1, "reflect"), weight, None, 2),
            lambda x: conv(wide(x, 1, 2, "reflect"), weight),
            2,
        ),
        "max": (
            lambda x: MAX[n](3, 2, 1)(x),
            lambda x: max_pool(wide(x, 1, 2, value=-torch.inf), 3, 1),
            2,
        ),
        "mean": (lambda x: AVG[n](3, 2, 1)(x), lambda x: avg_pool(wide(x, 1, 2), 3, 1), 2),
        "mean of what is there": (
            lambda x: AVG[n](3, 2, 1, count_include_pad=False)(x),
            lambda x: avg_pool(wide(x, 1, 2), 3, 1) / avg_pool(wide(torch.ones_like(x), 1, 2), 3, 1),
            2,
        ),
        "slices": (lambda x: every(x, 2) * 1.0, lambda x: wide(x, 0, 1), 2),
    }


@pytest.mark.parametrize("name", ops(1))
@pytest.mark.parametrize("n", [1, 3])
def test_a_state_is_a_slice_of_the_dense_op(n: int, name: str) -> None:
    op, dense, r = ops(n)[name]
    model = Of(n, op).double().eval()
    x = torch.randn(2, 2, *SIZE[n], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net = Net.of(model, x[:1])
    assert [layer.rate for layer in net.found.layers] == [(r,) * n]
    assert len(net.found.space) == r**n
    cells, full = model(x).shape[2:], dense(model.mix(x))
    run = net.engine().start(x)
    for s in itertools.product(range(1 - r, r), repeat=n):
        (got,) = run.add([(i, State((s,))) for i in range(2)])
        for d, (k, count) in enumerate(zip(s, cells, strict=True), 2):  # s - R is s, one cell later
            got = got.narrow(d, int(k < 0), count - int(k < 0))
        wanted = full
        for d, (k, count) in enumerate(zip(s, cells, strict=True), 2):
            wanted = wanted.index_select(d, k % r + r * torch.arange(count - int(k < 0)))
        assert gap(got, wanted) < 1e-12, f"selection {s}"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_window_beyond_the_map_says_what_its_last_cell_does(n: int) -> None:
    """1..5 in windows of two by two: 1 2, 3 4, 5; one later 2 3, 4 5, and nothing, whose maximum would be -inf."""
    x = torch.arange(1.0, 6.0, dtype=torch.float64).view(1, 1, 5, *[1] * (n - 1)).expand(1, 2, *[5] * n)
    model = Of(n, lambda y: MAX[n](2, 2, ceil_mode=True)(y)).double().eval()
    net = Net.of(model, x)
    mixed = model.mix(x)
    (got,) = net.engine().start(x).add([(0, State(((1, *[0] * (n - 1)),)))])
    first = mixed.narrow(2, 1, 4)
    wanted = torch.cat([first, mixed.narrow(2, 4, 1), mixed.narrow(2, 4, 1)], 2)
    assert torch.equal(got, MAX[n](2, 2, ceil_mode=True)(wanted))
    assert got.isfinite().all()


def test_a_signal_by_hand() -> None:
    """1..6 in windows of three by two, padded by one: 0 1 2, 2 3 4, 4 5 6; one later 1 2 3 ..., one before 0 0 1 ..."""
    x = torch.arange(1.0, 7.0, dtype=torch.float64).view(1, 1, 6)
    model = nn.Conv1d(1, 1, 3, 2, 1, bias=False).double()
    nn.init.ones_(model.weight)
    net = Net.of(model, x)
    run = net.engine().start(x)
    hand = {0: [3.0, 9.0, 15.0], 1: [6.0, 12.0, 11.0], -1: [1.0, 6.0, 12.0]}
    for s, wanted in hand.items():
        assert run.add([(0, State(((s,),)))])[0][0, 0].tolist() == wanted
    assert net.found.space.best_selections(1) == [(0,), (1,)] and net.found.space.displacement(State(((-1,),))) == (
        -1.0,
    )
    assert str(State(((-1,), (0,)))) == "(-1 0)" and net.found.space.parse((1,)) == State(((1,),))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_ramp_and_its_aligned_map(n: int) -> None:
    """Means of a ramp: the displacement is what the map moved by; aligned maps agree, inside, with the plain one."""
    size = (16,) * n
    ramps = torch.meshgrid(*(torch.arange(k, dtype=torch.float64) for k in size), indexing="ij")
    x = torch.stack(ramps)[None]
    net = Net.of(nn.Sequential(AVG[n](2), AVG[n](2)).double(), x) if n == 2 else _ramp_net(n, x)
    run = net.engine().start(x)
    plain = run.plain[net.outputs[0]][0]
    inner = (slice(None), *[slice(1, -1)] * n)
    for s in itertools.product((-1, 0, 1), repeat=2):
        state = State(tuple((k,) * n for k in s))
        moved = run.add([(0, state)])[0][0]
        delta = net.found.space.displacement(state)
        assert delta == (s[0] + 2.0 * s[1],) * n
        assert torch.allclose(moved[inner], plain[inner] + delta[0])
        aligned = align(moved, Offset.of(delta, (4.0,) * n))
        assert torch.allclose(aligned[inner][inner], plain[inner][inner]), (
            "an aligned ramp does not depend on the state"
        )


def _ramp_net(n: int, x: Tensor) -> Net:
    """The same behind a convolution that changes nothing, so that the axes can be counted."""
    still = CONV[n](n, n, 1, bias=False)
    with torch.no_grad():
        still.weight.copy_(torch.eye(n).view(n, n, *[1] * n))
    return Net.of(nn.Sequential(still, AVG[n](2), AVG[n](2)).double(), x)


class Small(nn.Module):
    def __init__(self, n: int, maps: bool) -> None:
        super().__init__()
        self.a, self.b, self.maps = CONV[n](2, 4, 3, 2, 1), CONV[n](4, 4, 3, 2, 1), maps
        self.mean, self.up, self.fc = AVG[n](2, 2, ceil_mode=True), UP[n](4, 3, 2, 2), nn.Linear(4, 3)
        self.short = CONV[n](4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x).relu()
        b = self.b(a) + self.short(self.mean(a))
        if self.maps:
            return F.interpolate(self.up(b), x.shape[2:], mode=SMOOTH[x.ndim - 2])
        return self.fc(b.flatten(2).mean(2))


@pytest.mark.parametrize("maps", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_enhanced_models_of_any_axes(n: int, maps: bool) -> None:
    """Searched, near, stitched and by windows: the shapes of the model's outputs."""
    torch.manual_seed(0)
    model, x = Small(n, maps).eval(), torch.randn(2, 2, *[16] * n)
    task = "segmentation" if maps else "classification"
    better = unstride.enhance(model, x[:1], recipe="paper", budget=5, task=task)
    assert better(x).shape == model(x).shape
    torch.testing.assert_close(better.replace(budget=1)(x), model(x))
    near = better.replace(Recipe((Stage(states=Near(4)),), task))
    assert near(x).shape == model(x).shape and len(near.explain(x)[0].passes) == 4
    prediction = better.explain(x)[0]
    assert prediction.output.shape == model(x)[0].shape and len(prediction.passes) == min(5, 4**n)
    assert unstride.enhance(model, x[:1], task=task)(x).shape == model(x).shape
    if maps:
        assert better.replace(align="stitch")(x).shape == model(x).shape
        larger = torch.randn(1, 2, *[24] * n)
        assert SlidingWindow(better, (16,) * n)(larger).shape == (1, 3, *[24] * n)


def _views(better: unstride.Enhanced, x: Tensor) -> list[str]:
    open_gates = tuple(replace(stage, gate=None) for stage in better.recipe.stages)
    every = better.replace(better.recipe.changed(stages=open_gates))
    return [str(p.view) for p in every.explain(x)[0].passes]


@pytest.mark.parametrize("maps", [True, False])
def test_by_default_a_signal_is_never_reversed(maps: bool) -> None:
    """Backwards it is another signal; near states take the place of the flip. A flip by name is done."""
    task = "segmentation" if maps else "classification"
    model, x = Small(1, maps).eval(), torch.randn(1, 2, 32)
    better = unstride.enhance(model, x, task=task)
    assert _views(better, x) == ["plain"] * 2
    assert better.replace("default").recipe == better.recipe
    assert _views(better.replace("flip"), x) == ["plain", "flip"]


@pytest.mark.parametrize("maps", [True, False])
def test_by_default_time_and_depth_are_never_reversed(maps: bool) -> None:
    """A clip or a volume is flipped along its last axis only."""
    torch.manual_seed(0)
    task = "segmentation" if maps else "classification"
    model, x = Small(3, maps).eval(), torch.randn(1, 2, 8, 16, 16)
    recipe = Recipe((Stage(("plain", "flip")),), task)
    result = unstride.enhance(model, x, recipe=recipe)(x)
    other = model(x.flip(-1))
    torch.testing.assert_close(result, (model(x) + (other.flip(-1) if maps else other)) / 2, rtol=1e-4, atol=1e-5)
    assert _views(unstride.enhance(model, x, task=task), x) == ["plain", "flip"]


def test_all_eight_flips_of_a_volume() -> None:
    torch.manual_seed(0)
    model, x = Small(3, True).eval(), torch.randn(1, 2, 8, 16, 16)
    axes = {"FlipLR": -1, "FlipUD": -2, "FlipFB": -3}
    picks = [c for k in range(4) for c in itertools.combinations(axes, k)]
    views = tuple(" + ".join(c) or "plain" for c in picks)
    better = unstride.enhance(model, x, recipe=Recipe((Stage(views),), "segmentation"))
    outputs = [model(x.flip([axes[n] for n in c])).flip([axes[n] for n in c]) for c in picks]
    torch.testing.assert_close(better(x), torch.stack(outputs).mean(0), rtol=1e-4, atol=1e-5)
    front = Recipe((Stage(("plain", "FlipFB")),))
    with pytest.raises(OptionError, match="FlipFB"):
        unstride.enhance(Small(2, False).eval(), x[:, :, 0], recipe=front)(x[:, :, 0])
    with pytest.raises(OptionError, match="FlipUD is not for 1 axes"):
        unstride.enhance(Small(1, False).eval(), x[:, :, 0, 0], recipe=Recipe(stages=(Stage(views[:3]),)))(
            x[:, :, 0, 0]
        )


def test_what_the_model_wants_is_named() -> None:
    nets = {n: Small(n, False) for n in (1, 2, 3)}
    with pytest.raises(InputError, match=r"\(2, 16, 16\), expected \(B, C, H, W\); for one image \(C, H, W\) pass"):
        unstride.enhance(nets[2], torch.randn(2, 16, 16))
    with pytest.raises(InputError, match=r"expected \(B, C, D, H, W\); for one image \(C, D, H, W\) pass"):
        unstride.enhance(nets[3], torch.randn(2, 16, 16, 16))
    with pytest.raises(InputError, match=r"expected \(B, C, L\); for one image \(C, L\) pass"):
        unstride.enhance(nets[1], torch.randn(2, 16))
    better = unstride.enhance(nets[1], torch.randn(2, 2, 32))  # three dimensions, and no batch forgotten
    assert better(torch.randn(3, 2, 32)).shape == (3, 3)
    with pytest.raises(InputError, match=r"expected \(B, C, L\)"):
        better(torch.randn(2, 32))
    with pytest.raises(InputError, match=r"got shape \(1, 2, 8, 8\), expected \(B, C, L\) by the model's first"):
        better(torch.randn(1, 2, 8, 8))  # one axis too many: no other size would help
    for task in ("classification", "segmentation"):
        with pytest.raises(InputError, match=r"got shape \(1, 2, 8, 8, 8\), expected \(B, C, H, W\) by"):
            unstride.enhance(nets[2], task=task)(torch.randn(1, 2, 8, 8, 8))
