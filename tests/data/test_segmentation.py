"""Segmentation data sets, from tiny trees in exactly the layouts that they have in the world."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from unstride.data import load
from unstride.data.segmentation import CITYSCAPES
from unstride.errors import DataError, OptionError
from unstride.views.images import Preprocess

WHOLE = Preprocess(resize=None, crop=None)


def image(path, size=(6, 9)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)


def mask(path, values, palette=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.asarray(values)
    image = Image.fromarray(values.astype(np.uint16 if values.max() > 255 else np.uint8))
    if palette:
        image.putpalette(np.random.default_rng(1).integers(0, 256, 768).tolist())  # makes a gray image mode P
        assert image.mode == "P"
    image.save(path)
    return path


def spread(*values, size=(6, 9)):
    """A mask (H, W) that holds each of the values."""
    return np.resize(np.array(values), size)


def frame(root, city, number, values, kind="labelIds", split="val"):
    stem = f"{split}/{city}/{city}_{number:06d}_000019"
    image(root / f"leftImg8bit/{stem}_leftImg8bit.png")
    return mask(root / f"gtFine/{stem}_gtFine_{kind}.png", values)


def test_cityscapes(tmp_path):
    ids = spread(*range(34))
    frame(tmp_path, "munster", 0, ids)
    frame(tmp_path, "aachen", 1, ids)
    frame(tmp_path, "ulm", 2, ids, split="train")
    data = load(f"cityscapes:{tmp_path}", WHOLE, classes=19)
    assert [item.id for item in data] == [
        "leftImg8bit/val/aachen/aachen_000001_000019_leftImg8bit.png",
        "leftImg8bit/val/munster/munster_000000_000019_leftImg8bit.png",
    ]
    assert (data.task, data.classes) == ("segmentation", CITYSCAPES)
    x, target = data.tensors(0)
    assert (tuple(x.shape), tuple(target.shape), target.dtype) == ((3, 6, 9), (6, 9), torch.int64)
    # The table of the data set's own scripts: id -> trainId
    official = {7: 0, 8: 1, 11: 2, 12: 3, 13: 4, 17: 5, 19: 6, 20: 7, 21: 8, 22: 9, 23: 10, 24: 11, 25: 12}
    official |= {26: 13, 27: 14, 28: 15, 31: 16, 32: 17, 33: 18}
    assert target.tolist() == [[official.get(value, 255) for value in row] for row in ids.tolist()]
    assert len(load(f"cityscapes:{tmp_path}", WHOLE, split="train")) == 1


def test_cityscapes_with_train_ids(tmp_path):
    frame(tmp_path, "ulm", 0, spread(7))
    frame(tmp_path, "ulm", 0, spread(*range(19), 255), kind="labelTrainIds")
    target = load(f"cityscapes:{tmp_path}", WHOLE).tensors(0)[1]
    assert target.flatten().tolist() == spread(*range(19), 255).flatten().tolist()  # preferred, and taken as it is


def test_cityscapes_damaged(tmp_path):
    bad = frame(tmp_path, "ulm", 0, spread(7, 40, 41))
    with pytest.raises(
        DataError, match=r"ulm_000000_000019_gtFine_labelIds\.png: label values \[40, 41\]; known are 0-33"
    ):
        load(f"cityscapes:{tmp_path}", WHOLE).tensors(0)
    with pytest.raises(DataError, match="19 classes, but the model has 21"):
        load(f"cityscapes:{tmp_path}", WHOLE, classes=21)
    bad.unlink()
    with pytest.raises(DataError, match=r"labelIds\.png: no such file"):
        load(f"cityscapes:{tmp_path}", WHOLE)
    with pytest.raises(DataError, match="leftImg8bit"):
        load(f"cityscapes:{tmp_path}", WHOLE, split="train")


def test_ade20k(tmp_path):
    root = tmp_path / "ADEChallengeData2016"
    values = spread(0, 1, 2, 149, 150)
    for split, number in (("validation", 2), ("validation", 1), ("training", 3)):
        name = f"ADE_{'val' if split == 'validation' else 'train'}_{number:08d}"
        image(root / f"images/{split}/{name}.jpg")
        mask(root / f"annotations/{split}/{name}.png", values)
    for path in (tmp_path, root):
        data = load(f"ade20k:{path}", WHOLE, classes=150)
        assert [item.id for item in data] == [f"images/validation/ADE_val_0000000{i}.jpg" for i in (1, 2)]
        assert data.tensors(0)[1].tolist() == spread(255, 0, 1, 148, 149).tolist()
    assert data.classes == ()
    assert len(load(f"ade20k:{tmp_path}", WHOLE, split="val")) == 2
    assert len(load(f"ade20k:{tmp_path}", WHOLE, split="training")) == 1
    lines = ["Idx\tRatio\tTrain\tVal\tStuff\tName", *(f"{i}\t0.1\t1\t1\t0\tname{i}, other" for i in range(1, 151))]
    (root / "objectInfo150.txt").write_text("\n".join(lines) + "\n")
    assert load(f"ade20k:{tmp_path}", WHOLE).classes[149] == "name150"
    mask(root / "annotations/validation/ADE_val_00000001.png", spread(0, 151))
    with pytest.raises(DataError, match=r"ADE_val_00000001\.png: label values \[151\]; known are 0-150"):
        load(f"ade20k:{tmp_path}", WHOLE).tensors(0)
    (root / "annotations/validation/ADE_val_00000002.png").unlink()
    with pytest.raises(DataError, match=r"ADE_val_00000002\.png: no such file"):
        load(f"ade20k:{tmp_path}", WHOLE)
    with pytest.raises(DataError, match="151"):
        load(f"ade20k:{tmp_path}", WHOLE, split="training", classes=151)


@pytest.mark.parametrize("palette", [False, True], ids=["index", "palette"])
def test_masks(tmp_path, palette):
    for name in ("b", "a"):
        image(tmp_path / f"images/{name}.jpg")
        mask(tmp_path / f"masks/{name}.png", spread(0, 1, 2, 255), palette)
    data = load(f"masks:{tmp_path}", WHOLE, classes=3)
    assert [item.id for item in data] == ["images/a.jpg", "images/b.jpg"]
    assert data.tensors(0)[1].tolist() == spread(0, 1, 2, 255).tolist()


def test_masks_with_splits_and_a_void_class(tmp_path):
    for split, count in (("train", 3), ("test", 2)):
        for i in range(count):
            image(tmp_path / f"{split}/images/{i}.jpg")
            mask(tmp_path / f"{split}/masks/{i}.png", spread(0, 10, 11))
    with pytest.raises(DataError, match="choose a split: test, train"):
        load(f"masks:{tmp_path}", WHOLE)
    data = load(f"masks:{tmp_path}", WHOLE, split="test", classes=11, ignore=11)
    assert len(data) == 2
    assert data.tensors(0)[1].tolist() == spread(0, 10, 255).tolist()
    with pytest.raises(DataError, match=r"0\.png: label values \[11\]; known are 0-10, 255"):
        load(f"masks:{tmp_path}", WHOLE, split="test", classes=11).tensors(0)
    (tmp_path / "ignore.txt").write_text("11\n")
    (tmp_path / "classes.txt").write_text("\n".join(f"class {i}" for i in range(11)))
    named = load(f"masks:{tmp_path}", WHOLE, split="train", classes=11)
    assert named.tensors(2)[1].tolist() == spread(0, 10, 255).tolist()
    assert named.classes[10] == "class 10"
    with pytest.raises(DataError, match=r"masks:.*: 11 classes, but the model has 21"):
        load(f"masks:{tmp_path}", WHOLE, split="train", classes=21)
    (tmp_path / "ignore.txt").write_text("none")
    with pytest.raises(DataError, match=r"ignore\.txt"):
        load(f"masks:{tmp_path}", WHOLE, split="train")


def test_a_void_value_below_the_classes_is_void(tmp_path):
    image(tmp_path / "images/a.jpg")
    mask(tmp_path / "masks/a.png", spread(0, 1, 2))
    assert load(f"masks:{tmp_path}", WHOLE, classes=3, ignore=0).tensors(0)[1].tolist() == spread(255, 1, 2).tolist()


def test_masks_that_do_not_fit(tmp_path):
    image(tmp_path / "images/a.jpg")
    mask(tmp_path / "masks/a.png", spread(0, 1, size=(6, 8)))
    with pytest.raises(DataError, match=r"a\.png: the mask has 6 x 8 pixels, its image 6 x 9"):
        load(f"masks:{tmp_path}", WHOLE).tensors(0)
    mask(tmp_path / "masks/a.png", spread(0, 300))
    with pytest.raises(DataError, match=r"label values \[300\]"):
        load(f"masks:{tmp_path}", WHOLE).tensors(0)
    image(tmp_path / "masks/a.png")
    with pytest.raises(DataError, match=r"a\.png: a mask with RGB pixels"):
        load(f"masks:{tmp_path}", WHOLE).tensors(0)
    (tmp_path / "masks/a.png").write_bytes(b"junk")
    with pytest.raises(DataError, match=r"a\.png: cannot be read"):
        load(f"masks:{tmp_path}", WHOLE).tensors(0)
    image(tmp_path / "images/b.jpg")
    with pytest.raises(DataError, match=r"masks/b\.\*: no such file"):
        load(f"masks:{tmp_path}", WHOLE)
    (tmp_path / "images/b.jpg").unlink()
    mask(tmp_path / "masks/c.png", spread(0))
    with pytest.raises(DataError, match=r"images/c\.\*: no such file"):
        load(f"masks:{tmp_path}", WHOLE)
    (tmp_path / "masks/c.png").unlink()
    image(tmp_path / "images/a.png")
    with pytest.raises(DataError, match="matched by name"):
        load(f"masks:{tmp_path}", WHOLE)
    with pytest.raises(DataError, match=r"expected images/ and masks/"):
        load(f"masks:{tmp_path / 'nowhere'}", WHOLE)


def test_options_that_make_no_sense(tmp_path):
    with pytest.raises(OptionError, match="crop=None"):
        load(f"masks:{tmp_path}", Preprocess())
    with pytest.raises(OptionError, match="ignore"):
        load(f"ade20k:{tmp_path}", WHOLE, ignore=0)
    image(tmp_path / "images/a.jpg")
    mask(tmp_path / "masks/a.png", spread(0))
    with pytest.raises(OptionError, match="0 to 255"):
        load(f"masks:{tmp_path}", WHOLE, ignore=256)


def test_the_embedded_scenes():
    data = load("sample-segmentation", Preprocess(None, None, (0.5,), (0.5,), channels="L"), limit=3, classes=11)
    x, target = data.tensors(2)
    assert (tuple(x.shape), tuple(target.shape)) == ((1, 96, 96), (96, 96))
    assert int(target.max()) < len(data.classes) == 11
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy.tensors(2)[1], target)
    assert copy.fingerprint() == data.fingerprint()


def test_the_fingerprint_sees_the_masks(tmp_path):
    image(tmp_path / "images/a.jpg")
    mask(tmp_path / "masks/a.png", spread(0, 1))
    before = load(f"masks:{tmp_path}", WHOLE).fingerprint()
    mask(tmp_path / "masks/a.png", spread(1, 0))
    assert load(f"masks:{tmp_path}", WHOLE).fingerprint() != before


@pytest.mark.parametrize("suffix", ["jpg", "webp", "tif"])
def test_masks_of_lossy_formats_are_refused(tmp_path, suffix):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (16, 16)).save(tmp_path / "images" / "a.png")
    labels = np.arange(256, dtype=np.uint8).reshape(16, 16) % 3
    options = {"compression": "jpeg"} if suffix == "tif" else {}
    Image.fromarray(labels).save(tmp_path / "masks" / f"a.{suffix}", **options)
    data = load(f"masks:{tmp_path}", Preprocess(None, None), classes=3)
    with pytest.raises(DataError, match="expected a PNG"):
        data.tensors(0)


def test_values_outside_the_classes_are_refused(tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "images" / "a.png")
    Image.fromarray(np.array([[0, 1], [2, 255]], np.uint8)).save(tmp_path / "masks" / "a.png")
    assert load(f"masks:{tmp_path}", Preprocess(None, None), classes=3).tensors(0)[1].tolist() == [[0, 1], [2, 255]]
    with pytest.raises(DataError, match=r"label values \[2\]; known are 0-1, 255"):
        load(f"masks:{tmp_path}", Preprocess(None, None), classes=2).tensors(0)
