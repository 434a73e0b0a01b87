"""Labelled images that fit a pipeline: the task comes from whoever knows it, and groups from names and columns."""

import numpy as np
import pytest
import small_nets
import tiny
import torch
from PIL import Image

import unstride
from unstride import models
from unstride.data import load
from unstride.errors import DataError, InputError, OptionError
from unstride.evaluation.labelled import groups_of, labelled_data, open_labelled, scoring_of, suggested_groups
from unstride.pipeline import open_pipeline


def labels_file(folder, header, rows):
    lines = [header]
    for k, cells in enumerate(rows):
        noise = np.random.default_rng(k).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{k}.png")
        lines.append(",".join([f"{k}.png", *map(str, cells)]))
    (folder / "d.csv").write_text("\n".join(lines))
    return folder / "d.csv"


def test_one_head_is_what_the_labels_say(tmp_path):
    spec = f"{small_nets.write_nets(tmp_path)}:net"
    path = labels_file(tmp_path, "path,red,green,blue,<b>[odd]</b> name", [(1, 0, 0, 1)] * 4)
    for kind, task in (("labels", "multilabel"), ("values", "regression")):
        pipeline, data = open_labelled(spec, f"{kind}:{path}")
        assert pipeline.task == data.task == task
        assert scoring_of(pipeline, data).task == task


def test_maps_are_prepared_whole(tmp_path):
    """A module that says nothing of its preprocessing sees the images of a mask whole, not cropped."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    Image.new("RGB", (24, 16)).save(tmp_path / "images" / "a.png")
    Image.new("L", (24, 16), 3).save(tmp_path / "masks" / "a.png")
    (tmp_path / "f.py").write_text("import tiny\ndef make():\n    return tiny.net(maps=True)\n")
    pipeline, data = open_labelled(f"{tmp_path / 'f.py'}:make", f"masks:{tmp_path}")
    assert pipeline.task == "segmentation"
    assert pipeline.better.networks["base"].preprocess.crop is None
    assert data.tensors(0)[0].shape[1:] == data.tensors(0)[1].shape == (16, 24)


def test_depth_and_vectors(tmp_path):
    nets = small_nets.write_nets(tmp_path)
    for name in "ab":
        (tmp_path / "f" / name).mkdir(parents=True)
        for k in range(3):
            small_nets.photo(k).save(tmp_path / "f" / name / f"{k}.png")
    pipeline, data = open_labelled(f"{nets}:tower", f"folder:{tmp_path / 'f'}")
    assert pipeline.task == data.task == "embedding"
    with pytest.raises(OptionError, match="is labelled for classification"):
        open_labelled(f"{nets}:depth", f"folder:{tmp_path / 'f'}")


def test_masks_in_batches_make_it_segmentation():
    pairs = [(torch.randn(1, 3, 16, 16), torch.randint(6, (1, 16, 16))) for _ in range(2)]
    pipeline, data = open_labelled(tiny.net(maps=True), pairs)
    assert pipeline.task == data.task == "segmentation"
    pairs[1][1][0, 0, 0] = 9
    with pytest.raises(DataError, match=r"image 1: its mask: got class \[9\]"):
        open_labelled(tiny.net(maps=True), pairs)


def test_class_numbers_in_batches_are_the_models():
    x = torch.randn(4, 3, 16, 16)
    with pytest.raises(DataError, match="label is 7"):
        open_labelled(f"{tiny.__file__}:build", [(x, torch.tensor([0, 1, 7, 2]))])


def test_what_is_no_batch_is_an_error():
    model = tiny.net()
    for wrong, error, match in (
        ([torch.zeros(2, 3, 16, 16)], InputError, "images, labels"),
        (3, OptionError, "got int"),
        (iter([(torch.zeros(2, 3, 16, 16), torch.zeros(2).long())]), InputError, "iterator"),
        ([], DataError, "no image"),
    ):
        with pytest.raises(error, match=match):
            open_labelled(model, wrong)
    with pytest.raises(OptionError, match="expected a pipeline"):
        labelled_data(3, "sample")


def test_a_pipeline_a_loaded_model_or_an_enhanced_one():
    loaded = models.load("sample")
    pipeline = open_pipeline(loaded)
    better = unstride.enhance(loaded, recipe="flip")
    sizes = [len(labelled_data(model, "sample", limit=7)) for model in (pipeline, loaded, better)]
    assert sizes == [7, 7, 7]
    data = load("sample", loaded.preprocess, limit=20)
    assert labelled_data(pipeline, data, limit=5).chosen == [data.chosen[i] for i in (0, 4, 8, 12, 16)]


def named(tmp_path, names, label=lambda k: "x"):
    folder = tmp_path / "g"
    for k, name in enumerate(names):
        path = folder / label(k) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (k, 0, 0)).save(path)
    return load(f"folder:{folder}", tiny.PREPROCESS)


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ([f"patient{k // 3:02d}_slice{k % 3}.png" for k in range(12)], 4),
        ([f"A7{k // 4}_{k % 4}.png" for k in range(12)], 3),
        ([f"img_{k:04d}.png" for k in range(12)], None),
        ([f"n0144_{k}.png" for k in range(12)], None),
        ([f"{k:04d}.png" for k in range(12)], None),
    ],
)
def test_file_names_suggest_groups(tmp_path, names, groups):
    found = suggested_groups(named(tmp_path, names))
    assert found == groups if groups is None else len(set(found)) == groups


def test_classes_in_file_names_are_no_groups(tmp_path):
    names = [f"n{k % 2:04d}_{k}.png" for k in range(12)]
    assert suggested_groups(named(tmp_path, names, label=lambda k: f"n{k % 2:04d}")) is None


def test_groups_that_are_given(tmp_path):
    data = named(tmp_path, [f"{k}.png" for k in range(4)])
    assert groups_of(data, [1, 1, 2, 2]) == ["1", "1", "2", "2"]
    assert groups_of(data, None) is None
    with pytest.raises(DataError, match="at least 2 groups"):
        groups_of(data, ["a"] * 4)
