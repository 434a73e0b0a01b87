"""The embedded sample: there, small, labelled, and of test images only."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fashion import FashionMNIST, find_fashion_mnist, load_fashion_mnist
from benchmarks.scenes import compose_scenes
from benchmarks.train_sample import TEST_IMAGES, TEST_SCENE_SEED
from unstride.errors import DataError, OptionError
from unstride.sample import CLASSES, SCENE_CLASSES, classification_sample, segmentation_sample


@pytest.fixture(scope="module")
def fashion() -> FashionMNIST:
    try:
        return load_fashion_mnist()
    except DataError as error:
        pytest.skip(str(error))


def test_all_files_together_stay_under_nine_megabytes():
    files = list(Path(str(resources.files("unstride.sample").joinpath("files"))).iterdir())
    assert {file.suffix for file in files} == {".npz", ".safetensors", ".txt"}
    assert sum(file.stat().st_size for file in files) < 9e6


def test_the_licence_of_the_images_travels_with_them():
    text = resources.files("unstride.sample").joinpath("files", "LICENSE.txt").read_text()
    assert "Copyright (c) 2017 Zalando SE" in text
    assert "this permission notice shall be included" in text


def test_classification_sample():
    images, labels = classification_sample()
    assert images.shape == (TEST_IMAGES, 28, 28)
    assert images.dtype == np.uint8
    assert labels.shape == (TEST_IMAGES,)
    counts = np.bincount(labels, minlength=len(CLASSES))
    assert len(counts) == len(CLASSES)
    assert counts.min() > 200


def test_segmentation_sample():
    scenes, masks = segmentation_sample()
    assert scenes.shape == masks.shape == (240, 96, 96)
    assert scenes.dtype == masks.dtype == np.uint8
    share = np.bincount(masks.ravel(), minlength=len(SCENE_CLASSES)) / masks.size
    assert len(share) == len(SCENE_CLASSES)
    assert 0.5 < share[0] < 0.8
    assert share[1:].min() > 0.01


@pytest.mark.parametrize("sample", [classification_sample, segmentation_sample])
def test_limit_takes_the_first(sample):
    for part, whole in zip(sample(7), sample(), strict=True):
        np.testing.assert_array_equal(part, whole[:7])
    with pytest.raises(OptionError, match="limit: got 0"):
        sample(0)


def test_no_train_image_is_in_the_test_sample(fashion):
    """Fashion-MNIST itself has no image in both splits, so an overlap would be a mistake of ours."""
    seen = {image.tobytes() for image in fashion.train_images} | {image.tobytes() for image in fashion.fit_images}
    assert not [i for i, image in enumerate(classification_sample()[0]) if image.tobytes() in seen]


def test_sample_is_the_start_of_the_official_test_set(fashion):
    images, labels = classification_sample()
    np.testing.assert_array_equal(images, fashion.test_images[: len(images)])
    np.testing.assert_array_equal(labels, fashion.test_labels[: len(labels)])


def test_scenes_reproduce_from_test_images_and_seed(fashion):
    scenes, masks = compose_scenes(fashion.test_images, fashion.test_labels, 40, TEST_SCENE_SEED)
    embedded_scenes, embedded_masks = segmentation_sample(40)
    # sin, cos and hypot may differ in the last bit between machines: a gray may flip to its neighbour, hardly ever.
    difference = np.abs(scenes.astype(int) - embedded_scenes)
    assert difference.max() <= 4
    assert (difference > 0).mean() < 1e-3
    assert (masks != embedded_masks).mean() < 1e-4


def test_missing_data_says_how_to_get_it(tmp_path):
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        find_fashion_mnist(tmp_path)


@pytest.mark.parametrize("content", [b"", b"not gzip at all"])
def test_damaged_data_is_named(tmp_path, content):
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=path.name):
        load_fashion_mnist(tmp_path)
