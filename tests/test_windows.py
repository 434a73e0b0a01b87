"""Sliding windows cover every pixel and blend without a seam."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from procedure_nets import SmallSegmenter, seeded
from torch import nn

import unstride
from unstride.errors import InputError, OptionError
from unstride.windows import SlidingWindow, window_starts


@given(st.integers(1, 300), st.integers(1, 100), st.floats(0, 0.9))
def test_windows_cover_the_axis(extent: int, window: int, overlap: float) -> None:
    window = min(window, extent)
    begin = window_starts(extent, window, overlap)
    assert begin[0] == 0
    assert begin[-1] == extent - window
    assert all(0 < b - a <= max(1, window) for a, b in itertools.pairwise(begin))


class Pointwise(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": x * 2, "name": torch.zeros(len(x))}


def test_a_pointwise_model_is_not_changed_by_windows() -> None:
    x = torch.randn(2, 3, 50, 71)
    out = SlidingWindow(Pointwise(), (16, 24), overlap=0.3)(x)
    torch.testing.assert_close(out["out"], x * 2)
    assert out["name"].shape == (2,)


def test_one_window_is_the_model_and_enhanced_models_slide() -> None:
    net = seeded(SmallSegmenter())
    better = unstride.enhance(net, torch.randn(1, 3, 32, 32), task="segmentation", recipe="paper", budget=3)
    small = torch.randn(1, 3, 24, 32)
    assert torch.equal(SlidingWindow(better, (32, 32))(small)["out"], better(small)["out"])
    assert SlidingWindow(better, (32, 32))(torch.randn(1, 3, 40, 50))["out"].shape == (1, 4, 40, 50)


def test_bad_windows_are_errors() -> None:
    with pytest.raises(OptionError, match="overlap"):
        SlidingWindow(Pointwise(), (8, 8), overlap=1.0)
    with pytest.raises(OptionError, match="window: got"):
        SlidingWindow(Pointwise(), (0, 8))
    with pytest.raises(InputError, match="map"):
        SlidingWindow(nn.Flatten(), (8, 8))(torch.randn(1, 3, 16, 16))
