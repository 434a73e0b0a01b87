"""A task that does not fit the output, labels that do not fit the task: one clear error each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from procedure_nets import SmallNet, SmallSegmenter, seeded

import unstride
from unstride import data
from unstride.errors import CaptureError, DataError, InputError, OptionError
from unstride.models import LoadedModel
from unstride.views.images import Preprocess

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("task", ["boxes", "", 3, ["dense"], "Depth"], ids=repr)
def test_a_task_that_there_is_not(task: Any) -> None:
    with pytest.raises(OptionError, match="task: got"):
        unstride.enhance(seeded(SmallNet()), IMAGES[:1], task=task)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("segmentation", r"segmentation needs an output \(B, K, H, W\); this model returns \(B, 5\)"),
        ("multilabel-segmentation", r"multilabel-segmentation needs .*\(B, 5\)"),
        ("dense", r"dense needs an output \(B, H, W\) or \(B, C, H, W\); this model returns \(B, 5\)"),
    ],
)
def test_maps_of_a_model_that_gives_vectors(task: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        unstride.enhance(seeded(SmallNet()), task=task)(IMAGES)


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "embedding"])
def test_vectors_of_a_model_that_gives_maps(task: str) -> None:
    with pytest.raises(CaptureError, match=rf"{task} needs an output .*\(B, 4, 32, 32\).*task='segmentation'"):
        unstride.enhance(seeded(SmallSegmenter()), task=task)(IMAGES)


def table(folder: Path, text: str) -> data.Dataset:
    for k in range(3):
        Image.fromarray(np.full((32, 32, 3), 40 * k, np.uint8)).save(folder / f"p{k}.png")
    (folder / "t.csv").write_text(text)
    return data.load(f"labels:{folder / 't.csv'}", Preprocess(None, None))


def test_labels_that_are_not_as_many_as_the_models(tmp_path: Path) -> None:
    found = table(tmp_path, "path,a,b\np0.png,1,0\np1.png,0,1\n")
    with pytest.raises(DataError, match=r"got 2 for each image, expected 5"):
        unstride.evaluate(seeded(SmallNet()), found, recipe="plain", progress=False)


@pytest.mark.parametrize("measure", [unstride.evaluate, unstride.tune])
def test_data_of_another_task(tmp_path: Path, measure: Any) -> None:
    found = table(tmp_path, "path,a\np0.png,1\n")
    for task in ("dense", "classification", "embedding"):
        with pytest.raises(OptionError, match=f"for {task}, but .* is labelled for multilabel"):
            measure(seeded(SmallNet()), found, task=task)
    better = unstride.enhance(seeded(SmallNet()), task="classification")
    with pytest.raises(OptionError, match=r"for classification, but .* is labelled for multilabel"):
        measure(better, found)


@pytest.mark.parametrize("measure", [unstride.evaluate, unstride.tune])
def test_a_task_without_labels_is_said_before_the_classes_are_counted(tmp_path: Path, measure: Any) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / name / "p.png")
    loaded = LoadedModel("mine", seeded(SmallNet()), Preprocess(None, None))
    with pytest.raises(OptionError, match="'features' has no labels to be measured with"):
        measure(loaded, f"folder:{tmp_path}", task="features")


def test_several_labels_of_each_image_are_not_taken_for_classes() -> None:
    batch = torch.randn(6, 3, 32, 32), torch.ones(6, 5, dtype=torch.long)
    with pytest.raises(InputError, match=r"labels \(6, 5\).*task='multilabel'"):
        unstride.evaluate(seeded(SmallNet()), [batch])
