"""Which label means which class: matched by name, or refused with the row or the folder; never numbered by luck."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from unstride import data as datasets
from unstride.data import load
from unstride.errors import DataError, OptionError
from unstride.models.libraries import imagenet_names
from unstride.views.images import Preprocess, find_images

PLAIN = Preprocess(None, None)
PETS = ("dog", "cat", "guinea pig")  # not in the order of their text


def image(path: Path, shade: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 12), (shade, 255 - shade, shade)).save(path)
    return path


def table(tmp_path: Path, *labels: str, head: str = "") -> str:
    lines = [head] if head else []
    for k, label in enumerate(labels):
        image(tmp_path / f"{k}.png", 10 * k)
        lines.append(f"{k}.png,{label}")
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    return f"csv:{tmp_path / 't.csv'}"


def folders(tmp_path: Path, *names: str) -> str:
    for k, name in enumerate(names):
        image(tmp_path / name / "a.png", 10 * k)
    return f"folder:{tmp_path}"


def labels(data: datasets.Dataset) -> list[Any]:
    return [item.target for item in data]


# ------------------------------------------------------------------------------------------------------ CSV


@pytest.mark.parametrize("classes", [None, 5, ("a", "b", "c", "d", "e")])
def test_whole_numbers_are_numbers_however_they_are_written(tmp_path: Path, classes: Any) -> None:
    assert labels(load(table(tmp_path, "3.0", "+3", "0", "04", "4."), PLAIN, classes=classes)) == [3, 3, 0, 4, 4]


@pytest.mark.parametrize("classes", [None, 5])
@pytest.mark.parametrize("odd", ["3x", "O", "1.5", "1e3", "nan", "", "٣", "9" * 400])
def test_one_label_that_is_no_number_among_numbers_names_its_row(tmp_path: Path, odd: str, classes: Any) -> None:
    with pytest.raises(DataError, match="row 3"):
        load(table(tmp_path, "0", "1", odd, "2"), PLAIN, classes=classes)


def test_words_are_the_models_names_in_the_models_order(tmp_path: Path) -> None:
    data = load(table(tmp_path, "cat", "Guinea_Pig", "dog", "guinea-pig"), PLAIN, classes=PETS)
    assert labels(data) == [1, 2, 0, 2]
    assert data.classes == PETS
    assert data.legend == (
        "labels: dog is class 0, cat is class 1, Guinea_Pig is class 2 (guinea pig), guinea-pig is class 2 (guinea pig)"
    )


def test_a_typo_names_its_row_and_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 2, 1\.png: 'dgo' is not one of the model's 3 classes; did you mean dog"):
        load(table(tmp_path, "cat", "dgo", "dog"), PLAIN, classes=PETS)


def test_words_that_are_more_or_fewer_than_a_nameless_models_classes(tmp_path: Path) -> None:
    for count in (2, 4):
        with pytest.raises(DataError, match=f"3 classes, but the model has {count}"):
            load(table(tmp_path, "cat", "dgo", "dog"), PLAIN, classes=count)
    assert labels(load(table(tmp_path, "cat", "ant", "dog"), PLAIN, classes=3)) == [1, 0, 2]


def test_a_name_of_two_classes_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'crane' .* classes 0 and 2, so write their numbers"):
        load(table(tmp_path, "crane", "tench"), PLAIN, classes=("crane", "tench", "crane"))


def test_names_that_are_digits_are_names(tmp_path: Path) -> None:
    assert labels(load(table(tmp_path, "9", "3"), PLAIN, classes=("9", "3", "0"))) == [0, 1]
    assert labels(load(table(tmp_path, "2", "1"), PLAIN, classes=("9", "3", "0"))) == [2, 1]  # no names: numbers


def test_columns_are_not_guessed(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    (tmp_path / "t.csv").write_text("a.png,640,cat\n")
    with pytest.raises(DataError, match="3 columns"):
        load(f"csv:{tmp_path / 't.csv'}", PLAIN, classes=PETS)
    (tmp_path / "t.csv").write_text("path,width,label\na.png,640,cat\n")
    assert labels(load(f"csv:{tmp_path / 't.csv'}", PLAIN, classes=PETS)) == [1]
    (tmp_path / "t.csv").write_text("path,width,height\na.png,640,480\n")
    with pytest.raises(DataError, match="path, width, height"):
        load(f"csv:{tmp_path / 't.csv'}", PLAIN, classes=PETS)


def test_an_image_in_two_rows(tmp_path: Path) -> None:
    image(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to(tmp_path / "a.png")
    for second in ("a.png", "./a.png", "b.png"):
        (tmp_path / "t.csv").write_text(f"a.png,0\n{second},1\n")
        with pytest.raises(DataError, match=r"row 2: .* is in row 1, too"):
            load(f"csv:{tmp_path / 't.csv'}", PLAIN)


# ------------------------------------------------------------------------------------------------------ folders


def test_folders_named_as_the_models_classes_in_another_order(tmp_path: Path) -> None:
    data = load(folders(tmp_path, "cat", "dog", "guinea_pig"), PLAIN, classes=PETS)
    assert [(item.id, item.target) for item in data] == [("cat/a.png", 1), ("dog/a.png", 0), ("guinea_pig/a.png", 2)]
    assert labels(load(f"folder:{tmp_path}", PLAIN, classes=(*PETS, "newt"))) == [1, 0, 2]  # a part of its classes
    assert labels(load(f"folder:{tmp_path}", PLAIN, classes=3)) == [0, 1, 2]  # nothing to match: torchvision's order


def test_a_folder_that_is_no_class_of_the_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"dgo: 'dgo' is not one of the model's 3 classes; did you mean dog"):
        load(folders(tmp_path, "cat", "dgo", "guinea pig"), PLAIN, classes=PETS)


def test_wnids_are_names_of_imagenets_classes(tmp_path: Path) -> None:
    data = load(folders(tmp_path, "n15075141", "n01443537"), PLAIN, classes=imagenet_names())
    assert labels(data) == [1, 999]


def test_folders_of_numbers_that_could_mean_two_things(tmp_path: Path) -> None:
    folders(tmp_path, *map(str, range(12)))
    with pytest.raises(DataError, match="class 10 by its number, but class 2 in the order of the folders' names"):
        load(f"folder:{tmp_path}", PLAIN, classes=12)
    assert labels(load(f"folder:{tmp_path}", PLAIN, classes=20)) == [0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9]


def test_folders_of_numbers_that_mean_one_thing(tmp_path: Path) -> None:
    assert labels(load(folders(tmp_path / "a", *(f"{k:02}" for k in range(12))), PLAIN, classes=12)) == list(range(12))
    one = load(folders(tmp_path / "b", *map(str, range(1, 13))), PLAIN, classes=12)  # 12 is no number of a class
    assert [item.id for item in one][:3] == ["1/a.png", "10/a.png", "11/a.png"]
    assert labels(one) == list(range(12))


# ------------------------------------------------------------------------------------------------------ own numbering


def test_a_data_set_with_its_own_order_is_held_against_the_models(tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets")
    image(tmp_path / "a.png")
    raw = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}

    def saved(*names: str) -> str:
        features = hf.Features({"img": hf.Image(), "label": hf.ClassLabel(names=list(names))})
        rows = {"img": [raw] * len(names), "label": list(range(len(names)))}
        hf.Dataset.from_dict(rows, features=features).save_to_disk(str(tmp_path / "-".join(names)))
        return f"hf:{tmp_path / '-'.join(names)}"

    assert labels(load(saved("cat", "dog", "guinea pig"), PLAIN, classes=PETS)) == [1, 0, 2]
    assert labels(load(saved("Hund", "Katze", "Ratte"), PLAIN, classes=PETS)) == [0, 1, 2]  # other words: its order
    with pytest.raises(DataError, match="'cat', which is the model's class 1, but 'newt' is no class of the model"):
        load(saved("cat", "dog", "newt"), PLAIN, classes=PETS)
    with pytest.raises(DataError, match="2 classes, but the model has 3"):
        load(saved("Hund", "Katze"), PLAIN, classes=PETS)


def test_masks_become_the_models_numbers(tmp_path: Path) -> None:
    image(tmp_path / "images" / "a.png")
    values = np.zeros((12, 12), np.uint8)
    values[0, :4] = (0, 1, 2, 255)
    (tmp_path / "masks").mkdir()
    Image.fromarray(values).save(tmp_path / "masks" / "a.png")
    (tmp_path / "classes.txt").write_text("cat\ndog\nguinea pig\n")
    data = load(f"masks:{tmp_path}", PLAIN, classes=PETS)
    mask = data.tensors(0)[1]
    assert isinstance(mask, torch.Tensor)
    assert mask[0, :4].tolist() == [1, 0, 2, 255]
    assert data.classes == PETS
    (tmp_path / "classes.txt").write_text("cat\n\nguinea pig\n")
    with pytest.raises(DataError, match="line 2: it is empty"):
        load(f"masks:{tmp_path}", PLAIN)
    for name, content in (("classes.txt", b"\xff\xfe\xff"), ("ignore.txt", b"9" * 5000)):
        (tmp_path / "classes.txt").write_text("cat\ndog\nguinea pig\n")
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            load(f"masks:{tmp_path}", PLAIN)


def test_two_classes_of_one_name_stay_two() -> None:
    names = ("crane", "tench", "crane", "newt")
    listing = datasets.items.Listing([(k, k) for k in range(4)], _item, names)
    matched = datasets.labels.match("mine", listing, datasets.labels.Classes.of(names))
    assert [matched.item(k).target for k in range(4)] == [0, 1, 2, 3]


def _item(entry: tuple[int, int]) -> datasets.Item:
    return datasets.Item(str(entry[0]), lambda: Image.new("RGB", (2, 2)), entry[1])


@pytest.mark.parametrize("classes", [0, -1, True, "cat", (), (1, 2), 3.5])
def test_classes_that_cannot_be(classes: Any) -> None:
    with pytest.raises(OptionError, match="classes is"):
        load("sample", PLAIN, classes=classes)


# ------------------------------------------------------------------------------------------------------ links


def test_each_real_file_once_whatever_links_there_are(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name in ("cat/a.png", "cat/deep/b.png", "dog/c.png"):
        image(root / name)
    (root / "cat" / "up").symlink_to(root)
    (root / "cat" / "deep" / "further up").symlink_to(tmp_path)
    (root / "dog" / "itself").symlink_to(root / "dog")
    (root / "again").symlink_to(root)
    (root / "dog" / "broken").symlink_to(root / "nothing")
    (root / "dog" / "endless.png").symlink_to(root / "dog" / "endless.png")
    (root / "cat" / "b too.png").symlink_to(root / "cat" / "deep" / "b.png")
    data = load(f"folder:{root}", PLAIN, classes=2)
    assert [item.id for item in data] == ["cat/a.png", "cat/deep/b.png", "dog/c.png"]
    found = find_images([root, root / "cat" / "up", root / "dog" / "c.png"])
    assert [p.relative_to(root).as_posix() for p in found] == ["cat/a.png", "cat/deep/b.png", "dog/c.png"]


def test_links_between_many_folders_end(tmp_path: Path) -> None:
    for k in range(12):
        image(tmp_path / "set" / str(k) / "a.png")
    for k in range(12):
        for other in range(12):
            if other != k:
                (tmp_path / "set" / str(k) / f"to {other}").symlink_to(tmp_path / "set" / str(other))
    assert len(find_images(tmp_path / "set")) == 12


def test_a_file_of_two_classes_is_refused(tmp_path: Path) -> None:
    image(tmp_path / "cat" / "a.png")
    (tmp_path / "dog").symlink_to(tmp_path / "cat")
    with pytest.raises(DataError, match="of two classes"):
        load(f"folder:{tmp_path}", PLAIN, classes=2)


def test_links_to_elsewhere_are_followed(tmp_path: Path) -> None:
    image(tmp_path / "store" / "x.png")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "cat").symlink_to(tmp_path / "store")
    assert [item.id for item in load(f"folder:{tmp_path / 'set'}", PLAIN)] == ["cat/x.png"]
    assert len(find_images(tmp_path / "set")) == 1
