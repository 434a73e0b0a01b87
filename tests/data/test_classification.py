"""Classification data sets, from tiny trees in exactly the layouts that they have in the world."""

import hashlib
import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets as tv

from unstride import enhance
from unstride.data import KINDS, load
from unstride.errors import DataError, OptionError, SpecError
from unstride.views.images import Preprocess

SMALL = Preprocess(resize=None, crop=8)
FIRST, SECOND, LAST = "n01440764", "n01443537", "n15075141"  # tench, goldfish, toilet tissue


def image(path, shade=0, size=(10, 12)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size[::-1], (shade, shade, shade)).save(path)
    return path


def ids(data):
    return [item.id for item in data]


def labels(data):
    return [item.target for item in data]


@pytest.fixture
def imagenet(tmp_path):
    for shade, wnid in enumerate((LAST, SECOND, FIRST)):
        for i in (2, 1):
            image(tmp_path / "val" / wnid / f"ILSVRC2012_val_0000000{i}.JPEG", 40 * shade)
    image(tmp_path / "train" / SECOND / "n01443537_7.JPEG")
    return tmp_path


def test_imagenet_in_torchvisions_layout(imagenet):
    data = load(f"imagenet:{imagenet}", SMALL, classes=1000)
    assert ids(data)[:2] == [f"{FIRST}/ILSVRC2012_val_00000001.JPEG", f"{FIRST}/ILSVRC2012_val_00000002.JPEG"]
    assert labels(data) == [0, 0, 1, 1, 999, 999]  # by wnid: a part keeps the whole's labels
    assert (data.task, data.classes[1], len(data.classes)) == ("classification", "goldfish", 1000)
    x, target = data.tensors(4)
    assert (tuple(x.shape), target) == ((3, 8, 8), 999)
    assert torch.equal(x, SMALL(Image.open(imagenet / "val" / ids(data)[4])))
    assert labels(load(f"imagenet:{imagenet}", SMALL, split="train")) == [1]
    assert ids(load(f"imagenet:{imagenet / 'val'}", SMALL)) == ids(data)


def test_imagenet_flat_with_torchvisions_meta(tmp_path):
    for i in (1, 2, 3):
        image(tmp_path / "val" / f"ILSVRC2012_val_0000000{i}.JPEG")
    with pytest.raises(DataError, match=r"meta\.bin"):
        load(f"imagenet:{tmp_path}", SMALL)
    torch.save(({FIRST: ("tench",)}, [SECOND, FIRST, LAST]), tmp_path / "meta.bin")
    assert labels(load(f"imagenet:{tmp_path}", SMALL)) == [1, 0, 999]
    image(tmp_path / "val" / "ILSVRC2012_val_00000004.JPEG")
    with pytest.raises(DataError, match="ILSVRC2012_val_00000004"):
        load(f"imagenet:{tmp_path}", SMALL)


class _Bomb:
    def __reduce__(self):
        return (exec, ("raise SystemExit('executed')",))


def test_a_strangers_meta_is_not_executed(tmp_path):
    image(tmp_path / "val" / "ILSVRC2012_val_00000001.JPEG")
    (tmp_path / "meta.bin").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(DataError, match=r"meta\.bin"):
        load(f"imagenet:{tmp_path}", SMALL)


def test_imagenet_that_is_not(imagenet):
    image(imagenet / "val" / "n99999999" / "a.jpg")
    with pytest.raises(DataError, match="n99999999"):
        load(f"imagenet:{imagenet}", SMALL)
    with pytest.raises(DataError, match="1000 classes, but the model has 10"):
        load(f"imagenet:{imagenet}", SMALL, split="train", classes=10)
    with pytest.raises(OptionError, match="val, train"):
        load(f"imagenet:{imagenet}", SMALL, split="test")
    with pytest.raises(DataError, match="no such folder"):
        load(f"imagenet:{imagenet / 'nowhere'}", SMALL)


@pytest.fixture
def flowers(tmp_path):
    io = pytest.importorskip("scipy.io")
    root = tmp_path / "flowers-102"
    for i in range(1, 7):
        image(root / "jpg" / f"image_{i:05d}.jpg", 30 * i)
    io.savemat(root / "imagelabels.mat", {"labels": np.array([[77, 1, 102, 5, 6, 77]], np.uint8)})
    split = {"trnid": np.array([[1, 3]]), "valid": np.array([[2, 3]]), "tstid": np.array([[6, 4, 5]])}
    io.savemat(root / "setid.mat", split)
    return tmp_path


def test_flowers102_as_torchvision_reads_it(flowers, monkeypatch):
    for split in ("train", "val", "test"):
        data = load(f"flowers102:{flowers}", SMALL, split=split, classes=102)
        # torchvision insists on the official files; only that check is set aside for the tiny ones.
        monkeypatch.setattr(tv.Flowers102, "_check_integrity", lambda self: True)
        theirs = tv.Flowers102(flowers, split=split)
        assert labels(data) == [label for _, label in theirs]
        for i in range(len(theirs)):
            assert data[i].image().tobytes() == theirs[i][0].tobytes()
    assert ids(load(f"flowers102:{flowers}", SMALL))[0] == "jpg/image_00006.jpg"  # the test split, in its own order
    assert load(f"flowers102:{flowers / 'flowers-102'}", SMALL).classes[0] == "pink primrose"


def test_flowers102_incomplete(flowers):
    (flowers / "flowers-102/jpg/image_00004.jpg").unlink()
    with pytest.raises(DataError, match=r"image_00004\.jpg: no such file"):
        load(f"flowers102:{flowers}", SMALL)
    (flowers / "flowers-102/setid.mat").write_bytes(b"MATLAB nonsense" * 20)
    with pytest.raises(DataError, match=r"setid\.mat"):
        load(f"flowers102:{flowers}", SMALL)
    (flowers / "flowers-102/imagelabels.mat").unlink()
    with pytest.raises(DataError, match=r"imagelabels\.mat: no such file"):
        load(f"flowers102:{flowers}", SMALL)


def tiny_cifar(root, monkeypatch, kind, key, meta_key, n_classes):
    """The official layout with 4 images in each file, and torchvision told their MD5 as the official ones."""
    base = root / kind.base_folder
    base.mkdir()
    rng = np.random.default_rng(0)

    def write(name, content):
        (base / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((base / name).read_bytes()).hexdigest()

    def batch():
        return {"data": rng.integers(0, 256, (4, 3072), dtype=np.uint8), key: rng.integers(0, n_classes, 4).tolist()}

    for part in ("train_list", "test_list"):
        monkeypatch.setattr(kind, part, [[name, write(name, batch())] for name, _ in getattr(kind, part)])
    meta = dict(kind.meta)
    meta["md5"] = write(meta["filename"], {meta_key: [f"class {i}" for i in range(n_classes)]})
    monkeypatch.setattr(kind, "meta", meta)
    return base


@pytest.mark.parametrize(
    ("name", "kind", "key", "meta_key", "n"),
    [
        ("cifar10", tv.CIFAR10, "labels", "label_names", 10),
        ("cifar100", tv.CIFAR100, "fine_labels", "fine_label_names", 100),
    ],
)
def test_cifar_as_torchvision_reads_it(tmp_path, monkeypatch, name, kind, key, meta_key, n):
    base = tiny_cifar(tmp_path, monkeypatch, kind, key, meta_key, n)
    for split in ("test", "train"):
        theirs = kind(tmp_path, train=split == "train")
        for path in (tmp_path, base):
            data = load(f"{name}:{path}", SMALL, split=split, classes=n)
            assert labels(data) == theirs.targets
            assert all(data[i].image().tobytes() == theirs[i][0].tobytes() for i in range(len(data)))
    assert len(load(f"{name}:{tmp_path}", SMALL)) == 4  # the test split
    assert data.classes[3] == "class 3"
    # One bit off, and nothing is unpickled any more.
    (base / kind.test_list[0][0]).write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(DataError, match="MD5"):
        load(f"{name}:{tmp_path}", SMALL)


def test_cifar_never_opens_a_strangers_pickle(tmp_path):
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    for name in ("test_batch", "batches.meta", *(f"data_batch_{i}" for i in range(1, 6))):
        (base / name).write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(DataError, match="not the official files"):
        load(f"cifar10:{tmp_path}", SMALL)
    with pytest.raises(DataError, match="no such folder"):
        load(f"cifar100:{tmp_path}", SMALL)


def test_a_folder_per_class_as_torchvision_orders_it(tmp_path):
    for name in ("zebra/b.png", "zebra/deep/a.png", "cat/x.JPG", "10/q.png", "9/q.png", "cat/notes.txt", "cat/._x.png"):
        if name.endswith("txt"):
            (tmp_path / name).write_text("not an image")
        else:
            image(tmp_path / name)
    data = load(f"folder:{tmp_path}", SMALL, classes=4)
    assert data.classes == ("10", "9", "cat", "zebra") == tuple(tv.ImageFolder(tmp_path).classes)
    assert ids(data) == ["10/q.png", "9/q.png", "cat/x.JPG", "zebra/b.png", "zebra/deep/a.png"]
    assert labels(data) == [0, 1, 2, 3, 3]
    with pytest.raises(DataError, match="4 classes, but the model has 1000"):
        load(f"folder:{tmp_path}", SMALL, classes=1000)
    assert load(f"folder:{tmp_path.parent}", SMALL, split=tmp_path.name).fingerprint() == data.fingerprint()
    with pytest.raises(DataError, match="no folder in it"):
        load(f"folder:{tmp_path / 'cat'}", SMALL)


def test_csv(tmp_path):
    for name in ("a.png", "sub/b, c.png"):
        image(tmp_path / name)
    (tmp_path / "numbers.csv").write_text('file,label\na.png,7\n"sub/b, c.png", 2\n')
    data = load(f"csv:{tmp_path}/numbers.csv", SMALL)
    assert list(zip(ids(data), labels(data), strict=True)) == [("a.png", 7), ("sub/b, c.png", 2)]
    assert data.classes == ()
    (tmp_path / "words.csv").write_text('a.png,dog\n"sub/b, c.png",cat\n')
    words = load(f"csv:{tmp_path}/words.csv", SMALL)
    assert (labels(words), words.classes) == ([1, 0], ("cat", "dog"))
    with pytest.raises(DataError, match=r"a\.png: its label is 7; expected 0 to 4"):
        load(f"csv:{tmp_path}/numbers.csv", SMALL, classes=5)
    for text, hint in (
        ("a.png,0\nabsent.png,1\n", r"absent\.png: no such file"),
        ("path,label\na.png\n", "row 2"),
        ("a.png,-3\n", "label is -3"),
        ("", "no image found"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(DataError, match=hint):
            load(f"csv:{tmp_path}/bad.csv", SMALL)
    with pytest.raises(OptionError, match="no splits"):
        load(f"csv:{tmp_path}/words.csv", SMALL, split="val")


def test_npz(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8), rng.integers(0, 5, 12)
    np.savez(tmp_path / "d.npz", x=x, y=y)
    data = load(f"npz:{tmp_path}/d.npz", SMALL, classes=5)
    assert labels(data) == y.tolist()
    assert ids(data)[-3:] == ["09", "10", "11"]
    np.testing.assert_array_equal(np.asarray(data[5].image()), x[5])
    np.savez(tmp_path / "gray.npz", x=x[..., 0], y=y)
    gray = load(f"npz:{tmp_path}/gray.npz", Preprocess(None, None, (0.0,), (1.0,), channels="L"))
    torch.testing.assert_close(gray.tensors(3)[0][0], torch.tensor(x[3, ..., 0]) / 255)
    for arrays, hint in (
        ({"x": x.astype(float), "y": y}, "float64"),
        ({"x": x, "y": y[:5]}, "expected 12 integers"),
        ({"x": x, "y": y - 1}, "image [0-9]+: its label is -1"),
        ({"x": x}, "arrays x and y"),
        ({"x": x, "y": np.array([_Bomb()] * 12, dtype=object)}, "arrays x and y"),
    ):
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(DataError, match=hint):
            load(f"npz:{tmp_path}/bad.npz", SMALL)
    (tmp_path / "bad.npz").write_bytes(b"PK nonsense")
    with pytest.raises(DataError, match=r"bad\.npz"):
        load(f"npz:{tmp_path}/bad.npz", SMALL)


def test_hf_on_disk(tmp_path):
    hf = pytest.importorskip("datasets")
    good = image(tmp_path / "a.png", 50)
    rows = {"img": [{"bytes": good.read_bytes(), "path": None}, {"bytes": b"junk", "path": None}], "label": [1, 0]}
    features = hf.Features({"img": hf.Image(), "label": hf.ClassLabel(names=["no", "yes"])})
    one = hf.Dataset.from_dict(rows, features=features)
    hf.DatasetDict({"train": one, "validation": one.select([0])}).save_to_disk(str(tmp_path / "both"))
    one.save_to_disk(str(tmp_path / "one"))
    assert len(load(f"hf:{tmp_path}/both", SMALL)) == 1  # validation before train
    data = load(f"hf:{tmp_path}/both", SMALL, split="train", classes=2)
    assert (labels(data), data.classes) == ([1, 0], ("no", "yes"))
    assert data.tensors(0)[0].shape == (3, 8, 8)
    with pytest.raises(DataError, match="image 1: "):
        data.tensors(1)
    single = load(f"hf:{tmp_path}/one", SMALL)
    assert single.fingerprint() == load(f"hf:{tmp_path}/one", SMALL).fingerprint()
    with pytest.raises(OptionError, match="train"):
        load(f"hf:{tmp_path}/both", SMALL, split="test")
    with pytest.raises(DataError, match="save_to_disk"):
        load(f"hf:{tmp_path}", SMALL)
    hf.Dataset.from_dict({"text": ["x"]}).save_to_disk(str(tmp_path / "text"))
    with pytest.raises(DataError, match="expected one Image"):
        load(f"hf:{tmp_path}/text", SMALL)


def test_the_embedded_sample():
    data = load("sample", Preprocess(56, 64, (0.2,), (0.3,), channels="L"), limit=50, classes=10)
    assert len(data) == 50
    assert data.tensors(0)[0].shape == (1, 64, 64)
    assert len(set(labels(data))) == len(data.classes) == 10
    with pytest.raises(DataError, match="expected 0 to 2"):
        load("sample", SMALL, classes=3)


def test_a_damaged_image_is_an_error_of_its_own(imagenet):
    bad = imagenet / "val" / FIRST / "ILSVRC2012_val_00000001.JPEG"
    bad.write_bytes(bad.read_bytes()[:100])
    data = load(f"imagenet:{imagenet}", SMALL)
    assert len(data) == 6
    with pytest.raises(DataError, match=f"{FIRST}/ILSVRC2012_val_00000001"):
        data.tensors(0)
    assert data.tensors(1)[1] == 0


def test_a_limit_is_spread_over_the_classes(tmp_path):
    for label in "abcd":
        for i in range(10):
            image(tmp_path / label / f"{i}.png")
    data = load(f"folder:{tmp_path}", SMALL, limit=8)
    assert labels(data) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(load(f"folder:{tmp_path}", SMALL, limit=1000)) == 40
    assert len(set(ids(load(f"folder:{tmp_path}", SMALL, limit=39)))) == 39
    with pytest.raises(OptionError, match="limit is 0"):
        load(f"folder:{tmp_path}", SMALL, limit=0)


def test_the_fingerprint_is_of_the_data_not_of_the_place(tmp_path):
    def tree(root, shade=0, name="x.png", label="a"):
        image(root / label / name, shade)
        image(root / "b" / "y.png")
        return load(f"folder:{root}", SMALL).fingerprint()

    same = tree(tmp_path / "1")
    assert tree(tmp_path / "2") == same
    others = [
        tree(tmp_path / "3", shade=9),  # the same size in bytes or not: contents count
        tree(tmp_path / "4", name="z.png"),
        tree(tmp_path / "5", label="c"),
        load(f"folder:{tmp_path / '1'}", SMALL, limit=1).fingerprint(),
    ]
    assert len({same, *others}) == 5


def test_data_is_known_by_its_contents_however_large_it_is(tmp_path):
    """Names, sizes and even times may stay as they are."""
    file = image(tmp_path / "a" / "x.png")
    with file.open("ab") as more:
        more.truncate(33 << 20)
    stat = file.stat()
    before = load(f"folder:{tmp_path}", SMALL).fingerprint()
    with file.open("r+b") as content:
        content.seek(-1, 2)
        content.write(b"x")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load(f"folder:{tmp_path}", SMALL).fingerprint() != before


def test_data_goes_to_worker_processes(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8), y=np.arange(6))
    image(tmp_path / "f" / "a" / "x.png")
    for name in (f"npz:{tmp_path}/d.npz", f"folder:{tmp_path}/f"):
        data = load(name, SMALL)
        copy = pickle.loads(pickle.dumps(data))
        assert torch.equal(copy.tensors(0)[0], data.tensors(0)[0])
        assert copy.fingerprint() == data.fingerprint()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("imagnet:x", "did you mean imagenet"),
        ("folder", "folder:PATH"),
        ("sample:x", "expected sample"),
        ("", "folder:PATH"),
    ],
)
def test_names_that_mean_nothing(name, hint):
    with pytest.raises(SpecError, match=hint):
        load(name, SMALL)


def test_every_kind_is_in_the_text():
    import unstride.data

    assert all(kind in unstride.data.__doc__ for kind in KINDS)


def test_a_path_without_its_kind_is_an_error_that_names_the_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("digits/val/cat", "scenes/images", "scenes/masks"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("labels.csv", "notes.txt"):
        (tmp_path / file).touch()
    asked = {"digits/val": "folder:digits/val", "scenes": "masks:scenes", "labels.csv": "csv:labels.csv"}
    for name, meant in asked.items():
        with pytest.raises(SpecError, match=rf"expected one of .*; did you mean {meant}\?$"):
            load(name, SMALL)
    for name in ("", "notes.txt", "x" * 5000, "a\0b"):
        with pytest.raises(SpecError, match=r"is not understood; expected one of .*(PATH|sample-segmentation)$"):
            load(name, SMALL)


def test_columns_of_a_table_say_which_images_belong_together(tmp_path):
    for name in "abcd":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    table = tmp_path / "t.csv"
    table.write_text("path,Site,label,group\na.png,north,0,p1\nb.png,south,1,p1\nc.png,north,1,p2\nd.png,,0,p2\n")
    data = load(f"csv:{table}", Preprocess(8, 8), classes=2)
    assert data.groups == ("p1", "p1", "p2", "p2")
    assert data.column("site") == ("north", "south", "north", "")
    assert load(f"csv:{table}", Preprocess(8, 8), classes=2, limit=2).groups == ("p1", "p2")
    with pytest.raises(DataError, match=r"no column 'patient'; there are site, group"):
        data.column("patient")
    table.write_text("path,label\na.png,0\n")
    assert load(f"csv:{table}", Preprocess(8, 8), classes=2).groups == ()
    for text, message in (("path,label,group\na.png,0,\n", "no group"), ("path,label,group\na.png,0\n", "2 cells")):
        table.write_text(text)
        with pytest.raises(DataError, match=message):
            load(f"csv:{table}", Preprocess(8, 8), classes=2)


@pytest.mark.parametrize("top", [255, 65535])
def test_deep_images_of_data_are_those_that_better_takes(tmp_path, top):
    """16 bits are scaled to 8, not clipped, wherever an image comes from."""
    values = np.rint(np.linspace(0, top, 64)).reshape(8, 8).astype(np.uint16 if top > 255 else np.uint8)
    Image.fromarray(values).save(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("a.png,0\n")
    preprocess = Preprocess(None, None, (0.0,) * 3, (1.0,) * 3)
    x, _ = load(f"csv:{tmp_path / 't.csv'}", preprocess, classes=2).tensors(0)
    np.testing.assert_allclose(x[0].numpy(), np.linspace(0, 1, 64).reshape(8, 8), atol=0.51 / 255 + 1e-6)
    model = torch.nn.Flatten(1)
    better = enhance(model, recipe="plain", preprocess=preprocess, task="embedding")
    with Image.open(tmp_path / "a.png") as image:
        torch.testing.assert_close(better([image])[0], x.flatten())
