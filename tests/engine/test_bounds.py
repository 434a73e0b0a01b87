"""No value exceeds its bound; where nothing is known, or a picture is out of bounds, NaN stays NaN."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from unstride.engine.bounds import LARGEST, SAFE, bound_of, is_wild, mark_tame, wild_inside, wild_now
from unstride.engine.fused import FusedConv
from unstride.engine.packing import available
from unstride.enhanced import enhance
from unstride.graph.capture import capture, run_nodes

packs = pytest.mark.skipif(not available(torch.device("cpu"), torch.float32), reason="torch without oneDNN")


def net(seed: int, scale: float = 1.0) -> nn.Module:
    torch.manual_seed(seed)
    clip: list[nn.Module] = [nn.ReLU6(), nn.ReLU(), nn.Hardtanh(-2, 3), nn.SiLU()]
    layers: list[nn.Module] = [nn.ZeroPad2d(1), nn.Conv2d(3, 8, 3, stride=2, bias=bool(seed % 2)), clip[seed % 4]]
    layers += [nn.Conv2d(8, 8, 3, padding=1, groups=8), clip[seed // 4 % 4], nn.MaxPool2d(2)]
    layers += [nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)]
    out = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for p in out.parameters():
            p *= scale
    return out


@given(st.integers(0, 31), st.floats(0.1, LARGEST), st.sampled_from([1.0, 30.0]))
@settings(max_examples=25, deadline=None)
def test_no_value_exceeds_what_a_tame_node_says(seed: int, size: float, scale: float) -> None:
    graph = capture(net(seed, scale), torch.randn(1, 3, 16, 16))
    mark_tame(graph)
    images = (torch.rand(2, 3, 16, 16) * 2 - 1) * size
    seen = [(n, v) for n, v in run_nodes(graph, images) if n.meta.get("tame")]
    assert len(seen) >= 8
    assert all(float(v.abs().max()) < SAFE for _, v in seen if isinstance(v, Tensor))


def volumes(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    act: list[nn.Module] = [nn.PReLU(4), nn.LeakyReLU(3.0)]  # a slope may be steep
    layers: list[nn.Module] = [
        nn.Conv3d(1, 4, 3, 2, 1),
        nn.InstanceNorm3d(4, affine=bool(seed % 2)),
        act[seed // 2 % 2],
    ]
    layers += [nn.ConvTranspose3d(4, 6, 3, 2, 1, 1), nn.GroupNorm(2, 6), nn.AvgPool3d(2), nn.Conv3d(6, 2, 1)]
    return nn.Sequential(*layers).eval()


@given(st.integers(0, 3), st.floats(0.1, LARGEST), st.booleans())
@settings(max_examples=12, deadline=None)
def test_no_value_of_a_volume_exceeds_its_bound(seed: int, size: float, spike: bool) -> None:
    """A single cell that stands out is as far from the mean as it can be."""
    graph = capture(volumes(seed), torch.randn(1, 1, 8, 8, 8))
    mark_tame(graph)
    images = size * (torch.rand(2, 1, 8, 8, 8) * 2 - 1)
    if spike:
        images *= 0
        images[0, 0, 3, 3, 3] = size
    known: dict[Any, float] = {graph.image: LARGEST}
    for n, v in run_nodes(graph, images):
        if isinstance(v, Tensor) and n.op == "call_function":
            bound = bound_of(n, known, graph.constants)
            assert bound is not None and n.meta["tame"], n
            known[n] = bound
            assert float(v.abs().max()) <= 1.001 * bound


def fused(model: nn.Module, images: Tensor) -> list[FusedConv]:
    engine = enhance(model, images, recipe="paper", budget=2).prepare(images).engine
    return [m for s in engine.as_trained for m in s.module.modules() if isinstance(m, FusedConv)]


@packs
def test_an_activation_is_fused_where_nothing_can_overflow() -> None:
    images = torch.randn(1, 3, 32, 32)
    assert not any(conv.hears for conv in fused(net(0), images))
    assert any(conv.hears for conv in fused(net(5, 1e20), images))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_picture_out_of_bounds_is_answered_as_the_model_does(value: float, seed: int) -> None:
    model, images = net(seed), torch.randn(3, 3, 32, 32)
    images[1, 0, 5, 7] = value
    better = enhance(model, images[:1], recipe="paper", budget=4)
    with torch.no_grad():
        plain = model(images)
    for budget in (1, 4):
        got = better.with_options(budget=budget)(images)
        assert bool(got[1].isfinite().all()) == bool(plain[1].isfinite().all())
        assert got[[0, 2]].isfinite().all()


def test_a_network_that_overflows_says_nan_as_the_model_does() -> None:
    model, images = net(1, 1e20), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert not model(images).isfinite().all()
    assert not enhance(model, images, recipe="paper", budget=4)(images).isfinite().all()


def test_wild_is_what_is_not_finite_or_too_large() -> None:
    images = torch.zeros(2, 3, 4, 4)
    assert not is_wild(images)
    for value in (float("nan"), float("inf"), -2 * LARGEST):
        images[1, 2, 3, 0] = value
        assert is_wild(images)
    with wild_inside():
        assert wild_now()
    assert not wild_now()


def test_weights_that_are_no_numbers_bound_nothing() -> None:
    graph = capture(net(0, float("nan")), torch.randn(1, 3, 16, 16))
    mark_tame(graph)
    assert not any(n.meta.get("tame") for n in graph.nodes if "conv" in n.name)
