"""Images of depth, features and neighbours: what is drawn is what was computed."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from procedure_nets import SmallDepth, SmallNet, seeded

import unstride
from unstride import show
from unstride.show.maps import principal

pytest.importorskip("matplotlib")
IMAGES = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PHOTO = Image.new("RGB", (32, 32), (90, 120, 60))


def titles(figure: object) -> list[str]:
    return [ax.get_title() for ax in figure.axes if ax.get_title()]  # type: ignore[attr-defined]


def test_a_depth_map_with_its_spread(tmp_path: Path) -> None:
    p = unstride.enhance(seeded(SmallDepth()), IMAGES, task="depth").explain(IMAGES)[0]
    figure = show.plot_map(PHOTO, p, "a room")
    assert titles(figure) == ["image", "plain", "enhanced", "spread of 2 looks"]
    plain, final, spread = (figure.axes[k].images[0] for k in (1, 2, 3))
    assert plain.get_clim() == final.get_clim()  # one scale: what looks nearer is nearer
    np.testing.assert_allclose(np.asarray(final.get_array()), p.logits.numpy(), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(spread.get_array()), p.spread.numpy(), rtol=1e-6)
    assert show.save(figure, tmp_path / "depth.png") is not None


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


def test_features_plain_and_finer() -> None:
    better = unstride.enhance(seeded(SmallNet()), IMAGES, task="features")
    maps = {"plain": better.features(IMAGES)[0], "finer": better.features(IMAGES, finer=2)[0]}
    figure = show.plot_features(PHOTO, maps)
    assert titles(figure) == ["image", "plain, 2 x 2", "finer, 4 x 4"]
    assert titles(show.plot_map(PHOTO, better.explain(IMAGES)[0]))[-1] == "spread of 4 looks"


def test_neighbours_before_and_after() -> None:
    others = [Image.new("RGB", (8, 8), (k, k, k)) for k in range(3)]
    figure = show.plot_neighbours(PHOTO, others, others[::-1], [[True, False, True], [True] * 3])
    assert titles(figure) == ["plain", "enhanced"] and len(figure.axes) == 8
    frames = [ax.spines["top"].get_edgecolor() for ax in figure.axes if ax.spines["top"].get_visible()]
    assert len(frames) == 6 and len(set(frames)) == 2
    first = [np.asarray(figure.axes[k].images[0].get_array())[0, 0, 0] for k in (1, 5)]
    assert first == [0, 2]
