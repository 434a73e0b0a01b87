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
from unstride.errors import CaptureError, DataError, InputError, OptionError, UnstrideError
from unstride.evaluation import measures
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
        unstride.enhance(seeded(SmallNet()), IMAGES[:1], task=task)


@pytest.mark.parametrize("task", ["classification", "multilabel", "regression", "embedding"])
def test_vectors_of_a_model_that_gives_maps(task: str) -> None:
    with pytest.raises(CaptureError, match=rf"{task} needs an output .*\(B, 4, 32, 32\).*task='segmentation'"):
        unstride.enhance(seeded(SmallSegmenter()), IMAGES[:1], task=task)


def table(folder: Path, text: str) -> data.Dataset:
    for k in range(3):
        Image.fromarray(np.full((32, 32, 3), 40 * k, np.uint8)).save(folder / f"p{k}.png")
    (folder / "t.csv").write_text(text)
    return data.load(f"labels:{folder / 't.csv'}", Preprocess(None, None))


def test_labels_that_are_not_as_many_as_the_models(tmp_path: Path) -> None:
    found = table(tmp_path, "path,a,b\np0.png,1,0\np1.png,0,1\n")
    with pytest.raises(DataError, match="2 labels for a model that gives"):
        unstride.evaluate(seeded(SmallNet()), found, recipe="plain")


def test_data_of_another_task(tmp_path: Path) -> None:
    found = table(tmp_path, "path,a\np0.png,1\n")
    for task in ("dense", "classification", "embedding"):
        with pytest.raises(OptionError, match=f"task is '{task}', but .* is labelled for multilabel"):
            unstride.evaluate(seeded(SmallNet()), found, task=task)
    better = unstride.enhance(seeded(SmallNet()), IMAGES[:1], task="classification")
    with pytest.raises(OptionError, match=r"enhanced for classification.*labelled for multilabel"):
        unstride.evaluate(better, found)
    with pytest.raises(OptionError, match=r"task is 'dense', but .* is labelled for multilabel"):
        unstride.tune(seeded(SmallNet()), found, cost=2, task="dense")
    with pytest.raises(DataError, match=r"1 labels for a model that gives \(5,\)"):
        unstride.tune(seeded(SmallNet()), found, cost=2)


@pytest.mark.parametrize("measure", [unstride.evaluate, unstride.tune])
def test_a_task_without_labels_is_said_before_the_classes_are_counted(tmp_path: Path, measure: Any) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / name / "p.png")
    loaded = LoadedModel("mine", seeded(SmallNet()), Preprocess(None, None))
    for task in ("features", "multilabel-segmentation"):
        with pytest.raises(OptionError, match=f"task='{task}' has no labels to be measured with"):
            measure(loaded, f"folder:{tmp_path}", task=task)


def test_several_labels_of_each_image_are_not_taken_for_classes() -> None:
    batch = torch.randn(6, 3, 32, 32), torch.ones(6, 5, dtype=torch.long)
    with pytest.raises(InputError, match=r"labels \(6, 5\).*task='multilabel'"):
        unstride.evaluate(seeded(SmallNet()), [batch])


def test_answers_that_are_not_numbers() -> None:
    for task, target in (("dense", torch.ones(2, 2)), ("embedding", 1), ("multilabel", torch.ones(4))):
        with pytest.raises(InputError, match="not finite"):
            measures.score(task, [torch.full((1, 4, 4) if task == "dense" else (1, 4), torch.nan)], [target])
    with pytest.raises(DataError, match="nothing is measured"):
        measures.score("dense", [torch.ones(1, 2, 2)], [torch.full((2, 2), torch.nan)])
    with pytest.raises(InputError, match="3 numbers at each pixel"):
        measures.score("dense", [torch.ones(1, 3, 2, 2)], [torch.ones(2, 2)])


def test_too_few_to_have_neighbours() -> None:
    values = {"label": np.array([0, 0, 0]), "vectors": np.eye(3, dtype=np.float32)[:, None]}
    with pytest.raises(DataError, match="3 images of 1 class"):
        measures.summarise("embedding", values, 0)


def test_what_cannot_be_exported_or_shown_says_so(tmp_path: Path) -> None:
    better = unstride.enhance(seeded(SmallNet()), IMAGES[:1], task="embedding")
    with pytest.raises(OptionError, match="classification and segmentation so far; this is embedding"):
        unstride.export(better, IMAGES[:1], tmp_path / "net.onnx")
    from unstride import show

    with pytest.raises(UnstrideError, match="no common components"):
        show.plot_features(Image.new("RGB", (8, 8)), {"a": torch.ones(3, 2, 2), "b": torch.ones(4, 2, 2)})
    with pytest.raises(UnstrideError, match="as many of both"):
        show.plot_neighbours(Image.new("RGB", (8, 8)), [], [])
