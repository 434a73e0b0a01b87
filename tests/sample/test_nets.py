"""The embedded networks: as good as said, ordinary to torch.export, unmoved by their batch."""

from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

import unstride
from unstride import models, sample
from unstride.errors import ArtefactError, InputError


def test_classifier_is_right_on_more_than_91_percent():
    images, labels = sample.classification_sample(2000)
    with torch.no_grad():
        guessed = sample.load_classifier()(sample.preprocess_classification(images)).argmax(1).numpy()
    assert (guessed == labels).mean() > 0.91


def test_the_large_classifier_is_better_by_nine_tenths_of_a_point_and_small_enough():
    images, labels = sample.classification_sample()
    ready = sample.preprocess_classification(images)
    with torch.no_grad():
        right = [
            (torch.cat([model(part) for part in ready.split(500)]).argmax(1).numpy() == labels).mean()
            for model in (sample.load_classifier(), sample.load_large_classifier())
        ]
    assert right[1] >= right[0] + 0.009
    file = resources.files("unstride.sample").joinpath("files", sample.LARGE_CLASSIFIER_FILE)
    assert Path(str(file)).stat().st_size < 3e6


def test_the_large_classifier_costs_three_to_eight_times_as_much():
    macs = [
        unstride.inspect(models.load(name).model, torch.zeros(1, 1, 64, 64)).macs for name in ("sample", "sample-large")
    ]
    assert 3 < macs[1] / macs[0] < 8


def test_segmenter_finds_every_class():
    scenes, masks = sample.segmentation_sample(60)
    with torch.no_grad():
        guessed = sample.load_segmenter()(sample.preprocess_segmentation(scenes)).argmax(1).numpy()
    ious = [
        ((guessed == c) & (masks == c)).sum() / ((guessed == c) | (masks == c)).sum()
        for c in range(len(sample.SCENE_CLASSES))
    ]
    assert min(ious) > 0.2
    assert np.mean(ious) > 0.5


@pytest.mark.parametrize(
    ("load", "shape", "strides"),
    [
        (sample.load_classifier, (1, 64, 64), [2, 2, 2]),
        (sample.load_large_classifier, (1, 64, 64), [2, 2, 2]),
        (sample.load_segmenter, (1, 96, 96), [2, 2, 2]),
    ],
)
def test_network_exports_with_its_strides(load, shape, strides):
    model = load()
    assert not model.training
    images = torch.randn(3, *shape)
    exported = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(images), model(images), rtol=0, atol=1e-5)
    # 3x3 only: the 1x1 shortcuts stride along with them
    found = [m.stride[0] for m in model.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert [stride for stride in found if stride > 1] == strides


def test_preprocessing_keeps_shape_and_margin():
    images = np.full((2, 28, 28), 255, np.uint8)
    ready = sample.preprocess_classification(images)
    assert ready.shape == (2, 1, 64, 64)
    black, white = ready[0, 0, 0, 0], ready[0, 0, 32, 32]
    assert (ready[:, :, :4] == black).all()
    assert (ready[:, :, 4:60, 4:60] == white).all()
    with pytest.raises(InputError, match="uint8"):
        sample.preprocess_segmentation(np.zeros((2, 96, 96)))


def test_damaged_weights_are_named(monkeypatch, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / sample.CLASSIFIER_FILE).write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    monkeypatch.setattr(sample.resources, "files", lambda _: tmp_path)
    with pytest.raises(ArtefactError, match=r"classifier\.safetensors is missing or damaged"):
        sample.load_classifier()
    with pytest.raises(ArtefactError, match=r"segmenter\.safetensors is missing or damaged"):
        sample.load_segmenter()
