"""Composed scenes: the same from the same seed, labelled where the garments are."""

import numpy as np
import pytest

from benchmarks.scenes import compose_scenes, silhouette
from unstride.errors import InputError, OptionError
from unstride.sample import classification_sample


@pytest.fixture(scope="module")
def garments():
    return classification_sample(200)


def test_the_same_seed_gives_the_same_scenes(garments):
    first, again, other = (compose_scenes(*garments, n=4, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[0], other[0])


def test_a_longer_run_starts_with_the_shorter_one(garments):
    short, long = (compose_scenes(*garments, n=n, seed=5) for n in (2, 5))
    for few, many in zip(short, long, strict=True):
        np.testing.assert_array_equal(few, many[:2])


def test_masks_hold_only_labels_that_were_given(garments):
    images, labels = garments
    bags = labels == 8
    scenes, masks = compose_scenes(images[bags], labels[bags], n=6, seed=0, size=64)
    assert scenes.shape == masks.shape == (6, 64, 64)
    assert set(np.unique(masks)) == {0, 9}
    assert all((mask == 9).any() for mask in masks)


def test_the_mask_follows_the_garment():
    """White squares on whatever lies behind: inside the mask all is light, so labels and pixels are laid alike."""
    square = np.zeros((1, 28, 28), np.uint8)
    square[:, 4:24, 4:24] = 255
    scenes, masks = compose_scenes(square, np.array([0]), n=20, seed=1)
    eroded = masks == 1
    for axis in (1, 2):
        for step in (-1, 1):
            eroded &= np.roll(masks == 1, step, axis)
    assert eroded.sum() > 1000
    assert scenes[eroded].min() >= 0.45 * 255  # cloth is painted at 0.55 or lighter, noise and grays aside


def test_silhouette_keeps_dark_cloth_inside():
    image = np.zeros((28, 28), np.uint8)
    image[5:20, 5:20] = 200
    image[10:12, 10:12] = 0  # a black button
    want = np.zeros((28, 28), bool)
    want[5:20, 5:20] = True
    np.testing.assert_array_equal(silhouette(image), want)


def test_wrong_input_is_refused(garments):
    images, labels = garments
    with pytest.raises(InputError, match=r"uint8 \(N, 28, 28\)"):
        compose_scenes(images.astype(float), labels, n=1, seed=0)
    with pytest.raises(OptionError, match="0 scenes"):
        compose_scenes(images, labels, n=0, seed=0)
