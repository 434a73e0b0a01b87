"""Labels in tuning: those that the model does not have are refused before any look, as `evaluate` refuses them."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

import unstride
from unstride.cli.main import app
from unstride.errors import DataError, LeftOut, OptionError, UnstrideWarning
from unstride.recipe import read

NET, MAPS = (f"{Path(tiny.__file__)}:{build}" for build in ("build", "build_maps"))  # 6 classes each
QUICK = ("--pool", "small", "--no-paper", "--cost", "1.1")
ASK: dict[str, Any] = {"pool": "small", "paper": False, "frontier": False}


@pytest.fixture
def no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gather.look_at", "pixels.listen"):
        monkeypatch.setattr(f"unstride.tuning.{name}", lambda *_: pytest.fail("it has begun to look"))


def run(*arguments: Any, code: int = 0) -> Any:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == code, (done.output, done.exception)
    return done


def drawn(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)


def folders(root: Path, *names: str, each: int = 6) -> str:
    for k, name in enumerate(names):
        for j in range(each):
            drawn(root / name / f"{j}.png", each * k + j)
    return f"folder:{root}"


def table(root: Path, labels: list[int]) -> str:
    for k in range(len(labels)):
        drawn(root / f"{k}.png", k)
    (root / "t.csv").write_text("".join(f"{k}.png,{label}\n" for k, label in enumerate(labels)))
    return f"csv:{root / 't.csv'}"


def masks(root: Path, count: int, odd: int | None = None) -> str:
    for k in range(count):
        drawn(root / "images" / f"{k}.png", k)
        values = np.random.default_rng(k).integers(0, 6, (16, 16)).astype(np.uint8)
        values[0, 0] = 7 if k == odd else 0
        (root / "masks").mkdir(exist_ok=True)
        Image.fromarray(values).save(root / "masks" / f"{k}.png")
    return f"masks:{root}"


def images(count: int = 32) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("0", "1", "2", "3", "eleven"), "5 classes, but the model has 6"),
        (("train", "val", "test"), "test, train, val: 3 classes, but the model has 6"),
    ],
)
def test_folders_that_are_not_the_models_classes(names, words, tmp_path, no_look):
    data = folders(tmp_path / "d", *names)
    told = [run(c, NET, "--data", data, "--out", tmp_path / "o.toml", code=1).stderr for c in ("tune", "evaluate")]
    assert words in told[0] and told[0] == told[1] and not (tmp_path / "o.toml").exists()


def test_a_row_with_a_class_too_many(tmp_path, no_look):
    data = table(tmp_path, [k % 6 for k in range(30)] + [6])
    told = [run(c, NET, "--data", data, "--out", tmp_path / "o.toml", code=1).stderr for c in ("tune", "evaluate")]
    assert "row 31, 30.png: its label is 6; wanted 0 to 5" in told[0] and told[0] == told[1]


@pytest.mark.parametrize("first", [1, -1])
@pytest.mark.parametrize("job", [unstride.tune, unstride.evaluate])
def test_batches_with_classes_that_the_model_does_not_have(first, job, no_look):
    labels = torch.arange(32) % 6 + first
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images(), labels), batch_size=4)
    wrong = labels.tolist().index(6 if first > 0 else -1)
    with pytest.raises(DataError, match=rf"image {wrong}: its label is {labels[wrong]}; wanted 0 to 5"):
        job(tiny.net(), loader)


def test_a_loader_is_read_no_further_than_the_label(no_look):
    def batches():
        yield images(8), torch.full((8,), 9)
        pytest.fail("it reads on")

    with pytest.raises(DataError, match="image 0: its label is 9"):
        unstride.tune(tiny.net(), batches())


def test_a_data_set_that_was_loaded_without_the_models_classes(tmp_path, no_look):
    data = unstride.data.load(table(tmp_path, [k % 7 for k in range(35)]), tiny.PREPROCESS)
    for job in (unstride.tune, unstride.evaluate):
        with pytest.raises(DataError, match=r"6\.png: its label is 6; wanted 0 to 5"):
            job(tiny.net(), data)


def test_masks_with_classes_that_the_model_does_not_have(tmp_path, no_look):
    values = torch.zeros(12, 16, 16, dtype=torch.long)
    values[7, 3, 3], values[7, 3, 4], values[8] = 6, 9, 255
    with pytest.raises(DataError, match=r"image 7: its mask holds class \[6, 9\]; wanted 0 to 5, or 255"):
        unstride.tune(tiny.net(maps=True), [(images(12), values)], task="segmentation")
    with pytest.raises(DataError, match=r"image 7: its mask holds class \[6, 9\]; wanted 0 to 5, or 255"):
        unstride.evaluate(tiny.net(maps=True), [(images(12), values)])
    data = unstride.data.load(masks(tmp_path, 12, odd=3), tiny.PREPROCESS)
    name = data[[item.id for item in data].index("images/3.png")].id
    with pytest.raises(DataError, match=rf"{name}: its mask holds class \[7\]"):
        unstride.tune(tiny.net(maps=True), data)


@pytest.mark.parametrize(("task", "what"), [("multilabel", "labels"), ("regression", "numbers")])
def test_as_many_labels_or_numbers_as_the_model_gives(task, what, no_look):
    with pytest.raises(DataError, match=rf"4 {what} for a model that gives \(6,\)"):
        unstride.tune(tiny.net(), [(images(), torch.ones(32, 4))], task=task)


def test_embeddings_need_several_classes(no_look):
    with pytest.raises(DataError, match="no neighbour"):
        unstride.tune(tiny.net(), [(images(), torch.zeros(32, dtype=torch.long))], task="embedding")


@pytest.mark.parametrize(("task", "least"), [(None, 30), ("segmentation", 10), ("depth", 10)])
def test_too_few_are_refused_before_the_looking(task, least, no_look):
    shape = () if task is None else (16, 16)
    model = tiny.Deep().eval() if task == "depth" else tiny.net(maps=task is not None)
    labels = torch.ones(least - 1, *shape, dtype=torch.float if task == "depth" else torch.long)
    with pytest.raises(DataError, match=f"{least - 1} labelled images are too few .* at least {least}"):
        unstride.tune(model, [(images(least - 1), labels)], task=task)


def test_a_limit_holds_for_a_loaded_data_set_and_is_refused_for_batches(tmp_path, no_look):
    data = unstride.data.load(table(tmp_path, [k % 6 for k in range(36)]), tiny.PREPROCESS, classes=6)
    with pytest.raises(DataError, match="12 labelled images are too few"):
        unstride.tune(tiny.net(), data, limit=12)
    with pytest.raises(OptionError, match="limit"):
        unstride.tune(tiny.net(), [(images(), torch.zeros(32, dtype=torch.long))], limit=12)


# ------------------------------------------------------------------------------------------------------ told


def test_what_the_labels_mean_and_that_they_are_doubtful(tmp_path):
    """At the level of chance; the file is in the form that its name says."""
    data, out = table(tmp_path, [k % 6 for k in range(36)]), tmp_path / "tuned.json"
    done = run("tune", NET, "--data", data, *QUICK, "--out", out)
    lines = done.stderr.splitlines()
    assert lines[0] == "labels: 0 is class 0, 1 is class 1, 2 is class 2, 3 is class 3, ...; 6 in all"
    assert "no better than guessing (16.67 %, give or take" in lines[-1] and "labels in another order" in lines[-1]
    assert json.loads(out.read_text())["version"] == 1 and read(out).recipe.task == "classification"


def test_nothing_is_doubted_where_the_labels_fit():
    x = images(36)
    labels = tiny.net()(x).argmax(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnstrideWarning)
        unstride.tune(tiny.net(), [(x, labels)], 1.1, **ASK)


@pytest.mark.parametrize("task", ["segmentation", "embedding"])
def test_doubts_in_other_tasks(task, capsys):
    x, g = images(32), torch.Generator().manual_seed(1)
    labels = torch.randint(6, (32, 16, 16) if task == "segmentation" else (32,), generator=g)
    with pytest.warns(UnstrideWarning, match="no better than guessing"):
        unstride.tune(tiny.net(maps=task == "segmentation"), [(x, labels)], 1.1, task=task, progress=True, **ASK)
    assert capsys.readouterr().err.startswith("labels are taken for the model's class numbers\n")


def test_random_weights_are_doubted(monkeypatch, tmp_path):
    data = table(tmp_path, [k % 6 for k in range(36)])
    loaded = unstride.models.load(NET)
    object.__setattr__(loaded, "weights", "random")
    with pytest.warns(UnstrideWarning, match="top-1 with random weights is the accuracy of guessing"):
        unstride.tune(loaded, data, 1.1, **ASK)


def test_an_image_that_is_left_out_is_named_and_counted(tmp_path):
    done = run("tune", MAPS, "--data", masks(tmp_path, 11, odd=4), *QUICK, "--json", code=3)
    assert "left out: images/4.png" in done.stderr and "label values [7]" in done.stderr
    assert json.loads(done.stdout)["rows"]
    with pytest.warns(LeftOut, match="images/4"), pytest.raises(DataError, match="9 labelled images are too few"):
        unstride.tune(MAPS, f"masks:{tmp_path}", limit=10)


class Yes(nn.Module):
    """One number for each image: a yes where it is above 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny.net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, :1] - self.net(x)[:, 1:2]


def test_one_number_is_a_yes_or_no():
    x, model = images(40), Yes().eval()
    labels = (model(x)[:, 0] > 0).long()
    assert 5 < labels.sum() < 35
    tuned = unstride.tune(model, [(x, labels)], 1.1, **ASK)
    assert tuned.lines[0].value == 1.0
    with pytest.raises(DataError, match="wanted 0 to 1"):
        unstride.tune(model, [(x, labels + 1)], 1.1, **ASK)


# ------------------------------------------------------------------------------------------------------ said rightly


@pytest.mark.parametrize("name", ["tuned.txt", "tuned", "tuned.yaml"])
def test_other_names_of_recipe_files_are_refused_first(name, tmp_path, monkeypatch):
    monkeypatch.setattr("unstride.models.load", lambda *_, **__: pytest.fail("it has begun"))
    done = run("tune", NET, "--data", "sample", "--out", tmp_path / name, code=1)
    assert ".toml or .json" in done.stderr


def test_an_assumed_task_points_to_the_option(tmp_path):
    drawn(tmp_path / "a.png", 0)
    done = run("tune", NET, "--images", tmp_path, "--cost", 1.1)
    assert "--task says otherwise" in done.stderr and "task=..." not in done.stderr
    done = run("tune", NET, "--images", tmp_path, "--cost", 1.1, "--task", "classification")
    assert "--task" not in done.stderr
