"""Depth maps, several labels, numbers: read, or refused with the file and the row."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from unstride import data
from unstride.errors import DataError, OptionError
from unstride.views.images import Preprocess

WHOLE = Preprocess(None, None)


def images(folder: Path, count: int = 3, size: tuple[int, int] = (12, 10)) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    names = [f"p{k}.png" for k in range(count)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)
    return names


def depth_set(root: Path) -> Path:
    images(root / "images")
    (root / "depth").mkdir()
    steps = np.arange(120, dtype=np.uint16).reshape(12, 10) * 100
    Image.fromarray(steps).save(root / "depth" / "p0.png")
    np.save(root / "depth" / "p1.npy", steps.astype(np.float32))
    np.save(root / "depth" / "p2.npy", steps[..., None].astype(np.float64))
    return root


def test_depth_from_16_bits_and_from_arrays(tmp_path: Path) -> None:
    root = depth_set(tmp_path)
    (root / "scale.txt").write_text("1000\n")
    found = data.load(f"depth:{root}", WHOLE)
    assert found.task == "dense" and len(found) == 3 and found.legend == "targets: dense"
    png, npy, odd = (found.tensors(k)[1] for k in range(3))
    assert torch.isnan(png[0, 0])
    assert [float(png[0, 1]), float(png[-1, -1])] == pytest.approx([0.1, 11.9])
    assert float(npy[0, 0]) == 0 and float(npy[-1, -1]) == 11900 and odd.shape == (12, 10)  # arrays are as they are
    with pytest.raises(OptionError, match="whole image"):
        data.load(f"depth:{root}", Preprocess(8, 8))


def test_two_images_of_one_name_are_refused(tmp_path: Path) -> None:
    root = depth_set(tmp_path)
    (root / "images" / "p1.jpg").write_bytes((root / "images" / "p1.png").read_bytes())
    with pytest.raises(DataError, match=r"p1\.png: there is p1\.jpg, too"):
        data.load(f"depth:{root}", WHOLE)


def test_depth_that_does_not_fit(tmp_path: Path) -> None:
    root = depth_set(tmp_path)
    np.save(root / "depth" / "p1.npy", np.zeros((3, 3), np.float32))
    found = data.load(f"depth:{root}", WHOLE)
    with pytest.raises(DataError, match=r"p1\.npy.*3 x 3.*12 x 10"):
        found.tensors(1)
    np.save(root / "depth" / "p2.npy", np.zeros((12, 10, 3), np.float32))
    with pytest.raises(DataError, match=r"p2\.npy.*\(12, 10, 3\)"):
        found.tensors(2)
    (root / "depth" / "p2.npy").write_bytes(b"no array")
    with pytest.raises(DataError, match=r"p2\.npy.*cannot be read"):
        found.tensors(2)
    (root / "scale.txt").write_text("-1")
    with pytest.raises(DataError, match=r"scale\.txt.*positive"):
        data.load(f"depth:{root}", WHOLE)
    (root / "depth" / "p2.npy").unlink()
    with pytest.raises(DataError, match=r"p2.*no such file"):
        data.load(f"depth:{root}", WHOLE)


def labels_set(root: Path, text: str | None = None) -> Path:
    names = images(root)
    table = root / "labels.csv"
    table.write_text(text or "path,cat,dog\n" + "\n".join(f"{n},{k % 2},1" for k, n in enumerate(names)) + "\n")
    return table


def test_several_labels_in_the_models_order(tmp_path: Path) -> None:
    table = labels_set(tmp_path)
    found = data.load(f"labels:{table}", WHOLE)
    assert found.task == "multilabel" and found.classes == ("cat", "dog")
    assert [found.tensors(k)[1].tolist() for k in range(3)] == [[0, 1], [1, 1], [0, 1]]
    turned = data.load(f"labels:{table}", WHOLE, classes=("dog", "cat"))
    assert turned.tensors(0)[1].tolist() == [1, 0] and turned.classes == ("dog", "cat")
    before = found.fingerprint()
    table.write_text(table.read_text().replace("p0.png,0", "p0.png,1"))
    assert data.load(f"labels:{table}", WHOLE).fingerprint() != before
    for classes, words in (((("dog", "cow")), "'cow'"), (5, "2 labels.*5")):
        with pytest.raises(DataError, match=words):
            data.load(f"labels:{table}", WHOLE, classes=classes)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,cat\np0.png,2\n", "row 2.*0 or 1"),
        ("path,cat\np0.png,yes\n", "row 2.*0 or 1"),
        ("path,cat\np0.png,1,0\n", "row 2: 3 cells; expected 2"),
        ("path,cat\nnone.png,1\n", r"none\.png: no such file.*row 2"),
        ("path,cat,cat\np0.png,1,0\n", "named twice"),
        ("path,cat\np0.png,1\np1.png,1\n./p0.png,0\n", "row 4.*row 2, too"),
        ("path\n", "titles"),
        ("", "titles"),
    ],
)
def test_labels_that_do_not_fit(tmp_path: Path, text: str, words: str) -> None:
    table = labels_set(tmp_path, text or "\n")
    with pytest.raises(DataError, match=words):
        data.load(f"labels:{table}", WHOLE)


def test_images_are_known_by_what_is_in_them_and_what_their_labels_mean(tmp_path: Path) -> None:
    table = labels_set(tmp_path)
    keys = data.load(f"labels:{table}", WHOLE).keys()
    assert len(set(keys)) == 3 and data.load(f"labels:{table}", WHOLE).keys() == keys
    assert not set(data.load(f"labels:{table}", WHOLE, classes=("dog", "cat")).keys()) & set(keys)
    table.write_text(table.read_text().replace("p0.png,0", "p0.png,1"))
    (tmp_path / "p2.png").write_bytes((tmp_path / "p1.png").read_bytes() + b"x")
    assert [a == b for a, b in zip(data.load(f"labels:{table}", WHOLE).keys(), keys, strict=True)] == [
        False,
        True,
        False,
    ]


def test_numbers(tmp_path: Path) -> None:
    names = images(tmp_path)
    table = tmp_path / "ages.csv"
    table.write_text("path,age,weight\n" + "\n".join(f"{n},{k + 0.5},-{k}" for k, n in enumerate(names)))
    found = data.load(f"values:{table}", WHOLE)
    assert found.task == "regression" and found.tensors(2)[1].tolist() == [2.5, -2.0]
    table.write_text("path,age\np0.png,nan\n")
    with pytest.raises(DataError, match=r"row 2.*finite"):
        data.load(f"values:{table}", WHOLE)


def test_class_folders_serve_embeddings(tmp_path: Path) -> None:
    for name in ("a", "b"):
        images(tmp_path / name)
    found = data.load(f"folder:{tmp_path}", WHOLE)
    assert found.serving("embedding").task == "embedding" and found.serving("dense").task == "classification"


def test_pairs(tmp_path: Path) -> None:
    images(tmp_path, 5)
    table = tmp_path / "pairs.csv"
    table.write_text("query,match\np0.png,p3.png\np0.png,p4.png\np1.png,p3.png\np3.png,p0.png\n")
    found = data.load(f"pairs:{table}", WHOLE)
    assert found.task == "embedding" and [item.id for item in found] == ["p0.png", "p3.png", "p4.png", "p1.png"]
    wanted = [[0, 1, 1, 2], [1, 1, 0, -1], [2, 1, -1, -1], [3, 0, 1, -1]]  # number, in the gallery, its matches
    assert [found.tensors(k)[1].tolist() for k in range(4)] == wanted
    before = found.fingerprint()
    table.write_text(table.read_text().replace("p1.png,p3.png", "p1.png,p4.png"))
    assert data.load(f"pairs:{table}", WHOLE).fingerprint() != before
    with pytest.raises(OptionError, match="both of its images"):
        data.load(f"pairs:{table}", WHOLE, limit=2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("query,match\np0.png,none.png\n", r"none\.png: no such file.*row 2"),
        ("query,match\nnone.png,p0.png\n", r"none\.png: no such file.*row 2"),
        ("query,match\np0.png,p0.png\n", "row 2.*its own match"),
        ("p0.png,p1.png\np1.png,p2.png\n", r"titles.*p1\.png; expected query,match"),
        ("query,match,how\np0.png,p1.png,1\n", "match, how; expected query,match"),
        ("query,match\np0.png\n", "row 2: 1 cells; expected 2"),
        ("query,match\n", "no image found"),
    ],
)
def test_pairs_that_do_not_fit(tmp_path: Path, text: str, words: str) -> None:
    images(tmp_path)
    (tmp_path / "pairs.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        data.load(f"pairs:{tmp_path / 'pairs.csv'}", WHOLE)


def test_an_image_has_one_row_of_targets_and_may_have_a_group(tmp_path):
    for name in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    table = tmp_path / "t.csv"
    for kind in ("labels", "values"):
        table.write_text("path,x,group\na.png,0,p\nb.png,1,q\n")
        found = data.load(f"{kind}:{table}", Preprocess(None, None))
        assert found.groups == ("p", "q") and found.tensors(1)[1].tolist() == [1.0]
        table.write_text("path,x\na.png,0\n./a.png,1\n")
        with pytest.raises(DataError, match=r"row 3: \./a\.png is in row 2, too"):
            data.load(f"{kind}:{table}", Preprocess(None, None))
