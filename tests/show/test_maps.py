"""Figures of depth and features: what is drawn is what was computed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from drawings import prediction
from PIL import Image

from unstride import show
from unstride.geometry.states import State
from unstride.show.maps import principal

pytest.importorskip("matplotlib")
PHOTO = Image.new("RGB", (32, 32), (90, 120, 60))
STATES = [State.zero(1), State(((0, 1),))]


def titles(figure: object) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]  # type: ignore[attr-defined]


def test_a_depth_map_with_its_spread(tmp_path: Path) -> None:
    outputs = torch.rand(2, 6, 8, generator=torch.Generator().manual_seed(0))
    p = prediction(outputs, STATES, torch.rand(6, 8), "dense")
    figure = p.plot(PHOTO, title="a kitchen")
    assert titles(figure) == ["image", "base model", "combined", "spread of 2 passes"]
    base, final, spread = (figure.axes[k].images[0] for k in (1, 2, 3))
    assert base.get_clim() == final.get_clim()  # one scale, so that colours compare
    np.testing.assert_allclose(np.asarray(final.get_array()), p.output.numpy(), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(spread.get_array()), p.spread.numpy(), rtol=1e-6)
    assert show.save(figure, tmp_path / "depth.png") is not None


def test_features_are_shown_as_colours() -> None:
    p = prediction(torch.randn(2, 5, 4, 4), STATES, torch.rand(4, 4), "features")
    assert titles(p.plot()) == ["base model", "combined", "spread of 2 passes"]


def test_components_have_the_same_colour_in_every_map() -> None:
    a = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0))
    twice = a.repeat_interleave(2, 1).repeat_interleave(2, 2)
    coarse, fine = principal(a, twice)
    assert coarse.shape == (4, 5, 3) and fine.shape == (8, 10, 3)
    np.testing.assert_array_equal(fine[::2, ::2], coarse)
    assert len(np.unique(coarse.reshape(-1, 3), axis=0)) > 10
    assert principal(a[:2])[0][..., 2].max() == 0  # two channels have two components
    again = principal(a, twice)
    np.testing.assert_array_equal(again[0], coarse)
