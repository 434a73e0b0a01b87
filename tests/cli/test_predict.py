"""`unstride predict`: every kind of image file, damaged ones named, plain against enhanced, images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_nets import photo, write_nets
from typer.testing import CliRunner

import unstride
from unstride import Gate, Recipe, Stage, models
from unstride.cli import app
from unstride.pipeline import open_pipeline
from unstride.predicting.names import is_model
from unstride.recipe.files import write
from unstride.recipe.presets import get
from unstride.views.images import open_image


@pytest.fixture
def nets(tmp_path: Path) -> str:
    return write_nets(tmp_path)


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


def answers(*arguments: Any, code: int = 0) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_answers_are_the_librarys_own(nets: str, tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    got = answers(f"{nets}:net", tmp_path / "a.png", "--recipe", "paper", "--set", "budget=5", "--top", 2)
    (one,) = got["images"]
    loaded = models.load(f"{nets}:net")
    x = loaded.preprocess(open_image(tmp_path / "a.png"))[None]
    (want,) = unstride.enhance(loaded, recipe="paper", budget=5).explain(x)
    p = want.output.softmax(0)
    assert [e["class"] for e in one["answer"]] == p.topk(2).indices.tolist()
    assert one["answer"][0]["probability"] == pytest.approx(float(p.max()), abs=1e-5)
    assert one["base"][0]["probability"] == pytest.approx(float(loaded.model(x).detach().softmax(1).max()), abs=1e-5)
    assert len(one["passes"]) == 5
    assert sum(s["weight"] for s in one["passes"]) == pytest.approx(1)
    assert one["cost"] == pytest.approx(want.cost)
    assert one["cost"] > 1


def test_options_reach_the_search(nets: str, tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    (plain,) = answers(f"{nets}:net", tmp_path / "a.png", "--recipe", "plain")["images"]
    assert plain["base"] == plain["answer"] and plain["cost"] == pytest.approx(1)
    changes = ["--set", "budget=4", "--set", "aggregate=mean"]
    (mean,) = answers(f"{nets}:net", tmp_path / "a.png", "--recipe", "paper", *changes)["images"]
    assert {s["weight"] for s in mean["passes"]} == {0.25}
    wrong = run(f"{nets}:net", tmp_path / "a.png", "--recipe", "paper", "--set", "criterion=luck")
    assert wrong.exit_code == 1
    assert "'luck'" in wrong.stderr
    assert "'entropy'" in wrong.stderr


def test_models_and_images_are_told_apart(nets: str, tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    both = answers(f"{nets}:net", f"{nets}:other", tmp_path / "a.png", "--top", 1)
    assert both["spec"] == f"{nets}:net + {nets}:other"
    nothing = run(f"{nets}:net", "timm:resnet18")
    assert nothing.exit_code == 2 and "no images" in nothing.stderr
    alone = run(tmp_path / "a.png")
    assert alone.exit_code == 1 and "Name a model" in alone.stderr
    assert is_model("timm:resnet18") and is_model("sample") and is_model("hf:google/vit") and is_model("a/b.py:make")
    for text in ("photos", "@list.txt", "s3://bucket/a", "a.png", "*.jpg", "photo:1.png"):
        assert not is_model(text)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text("{}")
    assert not is_model(f"hf:{tmp_path / 'data'}")


def test_networks_of_a_recipe_file_are_loaded(tmp_path: Path) -> None:
    recipe = Recipe((Stage(), Stage(("flip",), gate=Gate(below=0.9))))
    stored = open_pipeline("sample", recipe=recipe).stored_networks()
    write(tmp_path / "best.toml", recipe, stored)
    photo().save(tmp_path / "a.png")
    got = answers(tmp_path / "a.png", "--recipe", tmp_path / "best.toml")
    assert got["spec"] == "sample" and len(got["images"]) == 1


def save_all_kinds(folder: Path) -> list[str]:
    rgb = photo()
    rgb.save(folder / "rgb.png")
    rgb.convert("L").save(folder / "gray.png")
    rgb.quantize(64).save(folder / "palette.png")
    rgba = rgb.convert("RGBA")
    rgba.putalpha(200)
    rgba.save(folder / "rgba.png")
    rgb.convert("CMYK").save(folder / "cmyk.jpg")
    Image.fromarray(np.asarray(rgb.convert("L")).astype(np.uint16) * 257).save(folder / "sixteen.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb.rotate(90, expand=True).save(folder / "turned.png", exif=exif)
    return sorted(p.name for p in folder.iterdir())


def test_a_folder_of_every_kind_and_two_damaged_files(nets: str, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    kinds = save_all_kinds(folder)
    (folder / "cut.png").write_bytes((folder / "rgb.png").read_bytes()[:700])
    (folder / "lies.jpg").write_text("not an image")
    missing = tmp_path / "missing.png"
    got = answers(f"{nets}:net", missing, folder, "--recipe", "flip", code=3)
    assert sorted(Path(a["image"]).name for a in got["images"]) == kinds
    assert sorted(Path(f["image"]).name for f in got["failed"]) == ["cut.png", "lies.jpg", "missing.png"]
    by_name = {Path(a["image"]).name: a for a in got["images"]}
    turned, upright = ([e["probability"] for e in by_name[n]["answer"]] for n in ("turned.png", "rgb.png"))
    assert turned == pytest.approx(upright, rel=1e-4)  # turned upright before the network
    shown = run(f"{nets}:net", folder / "lies.jpg", folder / "gray.png", "--recipe", "plain")
    assert shown.exit_code == 3
    assert "lies.jpg" in shown.stderr
    assert "1 of 2 could not be read" in shown.stderr
    assert "gray.png" in shown.stdout
    assert run(f"{nets}:net", folder / "lies.jpg").exit_code == 1  # nothing was done at all


def test_text_names_passes_and_cost_and_escapes_markup(nets: str, tmp_path: Path) -> None:
    photo().save(tmp_path / "[red]a.png")
    out = run(f"{nets}:net", tmp_path / "[red]a.png", "--recipe", "paper", "--set", "budget=3")
    assert out.exit_code == 0
    assert "[red]a.png" in out.stdout
    assert "<b>[odd]</b> name" in out.stdout
    assert "3 passes" in out.stdout
    assert "forward passes of the base model" in out.stdout
    assert "(0,1 0)" in out.stdout


def test_images_one_name_each(nets: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        photo(len(folder)).save(tmp_path / folder / "a.png")
    target = tmp_path / "out.png"
    assert run(f"{nets}:net", tmp_path / "one" / "a.png", "--recipe", "paper", "--plot", target).exit_code == 0
    with Image.open(target) as image:
        assert image.width > 1000
        assert len(image.convert("RGB").resize((64, 64)).getcolors(4096)) > 50
    got = answers(f"{nets}:net", tmp_path / "one", tmp_path / "two", "--recipe", "flip", "--plot", target)
    assert [Path(a["plot"]).name for a in got["images"]] == ["out-a.png", "out-a-2.png"]
    assert all(Path(a["plot"]).is_file() for a in got["images"])


def test_segmentation_on_odd_sizes(nets: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    photo(size=(44, 52)).save(tmp_path / "a.png")
    photo(size=(40, 48)).save(tmp_path / "b.png")
    spec, paper = f"{nets}:segmenter", ["--recipe", "paper", "--set", "budget=4"]
    got = answers(spec, tmp_path / "a.png", tmp_path / "b.png", *paper, "--plot", tmp_path / "s.png")
    for one in got["images"]:
        assert sum(e["share"] for e in one["answer"]) == pytest.approx(1)
        assert 0 < one["changed"] < 1
        assert Path(one["plot"]).is_file()
    shown = run(spec, tmp_path / "a.png", *paper)
    assert "of the pixels change" in shown.stdout
    assert run(spec, tmp_path / "a.png", "--task", "detection").exit_code == 1


def test_an_image_that_cannot_be_made_is_said_before_the_work(
    nets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photo().save(tmp_path / "a.png")
    monkeypatch.setattr(models, "load", lambda *a, **k: pytest.fail("worked before checking"))
    assert "ends in .png" in run(f"{nets}:net", tmp_path / "a.png", "--plot", tmp_path / "a.doc").stderr
    assert "no folder" in run(f"{nets}:net", tmp_path / "a.png", "--plot", tmp_path / "no" / "a.png").stderr
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = run(f"{nets}:net", tmp_path / "a.png", "--plot", tmp_path / "p.png")
    assert result.exit_code == 1
    assert "unstride[plot]" in result.stderr


CHOOSY = """
import torch
from torch import nn
import unstride
from unstride.models import LoadedModel
from unstride.views.images import Preprocess


class Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, 3)

    def forward(self, x):
        if x.shape[-1] % 8:
            raise ValueError("wanted a width that is a multiple of 8")
        return self.head(self.conv(x).relu().mean((2, 3)))


def loaded(model):
    return LoadedModel("choosy", model, Preprocess(None, None), "classification")


def choosy():
    return loaded(Choosy().eval())


def loud():
    model = Choosy().eval()
    with torch.no_grad():
        model.head.weight.fill_(1e38)
        model.head.bias.copy_(torch.tensor([0.0, 1.0, 2.0]))
        model.conv.weight.fill_(1.0)
    return loaded(model)
"""


@pytest.fixture
def choosy(tmp_path: Path) -> str:
    (tmp_path / "choosy.py").write_text(CHOOSY)
    return str(tmp_path / "choosy.py")


@pytest.mark.parametrize("first", ["a-bad.png", "z-bad.png"])
def test_an_image_that_the_model_refuses_is_one_error(choosy: str, tmp_path: Path, first: str) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for k, name in enumerate(["m.png", "n.png", first]):
        photo(k, (32, 36 if "bad" in name else 32)).save(folder / name)
    got = answers(f"{choosy}:choosy", folder, code=3)
    assert [Path(a["image"]).name for a in got["images"]] == ["m.png", "n.png"]
    (bad,) = got["failed"]
    assert Path(bad["image"]).name == first
    assert "multiple of 8" in bad["error"]


def test_an_answer_that_is_not_finite_is_an_error_of_its_image(choosy: str, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (32, 32), (124, 116, 104)).save(folder / "gray.png")  # the mean: next to nothing after it
    Image.new("RGB", (32, 32), "white").save(folder / "white.png")
    got = answers(f"{choosy}:loud", folder, "--recipe", "flip", code=3)
    assert [Path(a["image"]).name for a in got["images"]] == ["gray.png"]
    assert "not finite" in got["failed"][0]["error"]
    out = tmp_path / "p.jsonl"
    assert run(f"{choosy}:loud", folder, "--recipe", "flip", "--out", out).exit_code == 3
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["error"] is None for row in rows] == [True, False]
    assert "not finite" in rows[1]["error"]


def test_a_recipe_that_was_made_for_a_task_is_run_for_it(nets: str, tmp_path: Path) -> None:
    """Also where the model's library says another: vectors that were tuned as such are no classes."""
    photo().save(tmp_path / "a.png")
    tuned = write(tmp_path / "tuned.toml", get("flip", "embedding"))
    assert answers(f"{nets}:net", tmp_path / "a.png", "--recipe", tuned)["task"] == "embedding"


def test_a_table_from_the_command_line(nets: str, tmp_path: Path) -> None:
    for k in range(3):
        photo(k).save(tmp_path / f"{k}.png")
    result = run(f"{nets}:net", f"{tmp_path}/[01].png", "--out", tmp_path / "t.csv", "--recipe", "flip")
    assert result.exit_code == 0, result.output
    assert "2 images" in result.stdout and len((tmp_path / "t.csv").read_text().splitlines()) == 3
    wrong = run(f"{nets}:net", tmp_path / "0.png", "--ray", "local")
    assert wrong.exit_code == 2 and "--out" in wrong.stderr
