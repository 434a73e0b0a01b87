"""`unstride predict`: every kind of image file, damaged ones named, plain against enhanced, images."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_nets import photo, write_nets
from typer.testing import CliRunner

import unstride
from unstride import models
from unstride.cli import app
from unstride.views.images import Preprocess, open_image


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
    got = answers(f"{nets}:net", tmp_path / "a.png", "--budget", 5, "--top", 2)
    (one,) = got["images"]
    loaded = models.load(f"{nets}:net")
    x = loaded.preprocess(open_image(tmp_path / "a.png"))[None]
    want = unstride.enhance(loaded.model, x, 5).explain(x)[0]
    p = want.logits.softmax(0)
    assert [e["class"] for e in one["enhanced"]] == p.topk(2).indices.tolist()
    assert one["enhanced"][0]["probability"] == pytest.approx(float(p.max()), abs=1e-5)
    assert one["plain"][0]["probability"] == pytest.approx(float(loaded.model(x).detach().softmax(1).max()), abs=1e-5)
    assert len(one["states"]) == 5
    assert sum(s["weight"] for s in one["states"]) == pytest.approx(1)
    assert one["cost"] == pytest.approx(want.cost)
    assert one["cost"] > 1


def test_options_reach_the_search(nets: str, tmp_path: Path) -> None:
    photo().save(tmp_path / "a.png")
    plain = answers(f"{nets}:net", tmp_path / "a.png", "--budget", 1)["images"][0]
    assert plain["plain"] == plain["enhanced"]
    assert plain["cost"] == pytest.approx(1)
    paper = answers(f"{nets}:net", tmp_path / "a.png", "--budget", 4)["images"][0]
    cheap = answers(f"{nets}:net", tmp_path / "a.png", "--budget", 4, "--order", "cost", "--aggregate", "mean")
    assert cheap["images"][0]["cost"] < paper["cost"]
    assert {s["weight"] for s in cheap["images"][0]["states"]} == {0.25}
    wrong = run(f"{nets}:net", tmp_path / "a.png", "--criterion", "luck")
    assert wrong.exit_code == 1
    assert "'luck'" in wrong.stderr
    assert "'entropy'" in wrong.stderr


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
    got = answers(f"{nets}:net", missing, folder, "--budget", 2, code=3)
    assert sorted(Path(a["image"]).name for a in got["images"]) == kinds
    assert sorted(Path(f["image"]).name for f in got["failed"]) == ["cut.png", "lies.jpg", "missing.png"]
    by_name = {Path(a["image"]).name: a for a in got["images"]}
    assert by_name["turned.png"]["enhanced"] == by_name["rgb.png"]["enhanced"]  # turned upright before the network
    shown = run(f"{nets}:net", folder / "lies.jpg", folder / "gray.png", "--budget", 1)
    assert shown.exit_code == 3
    assert "lies.jpg" in shown.stderr
    assert "1 of 2 could not be read" in shown.stderr
    assert "gray.png" in shown.stdout
    assert run(f"{nets}:net", folder / "lies.jpg").exit_code == 1  # nothing was done at all


def test_text_names_states_and_cost_and_escapes_markup(nets: str, tmp_path: Path) -> None:
    photo().save(tmp_path / "[red]a.png")
    out = run(f"{nets}:net", tmp_path / "[red]a.png", "--budget", 3)
    assert out.exit_code == 0
    assert "[red]a.png" in out.stdout
    assert "<b>[odd]</b> name" in out.stdout
    assert "3 states" in out.stdout
    assert "x the MACs of a plain forward" in out.stdout
    assert "(0,1 0)" in out.stdout


def test_images_one_name_each(nets: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        photo(len(folder)).save(tmp_path / folder / "a.png")
    target = tmp_path / "out.png"
    assert run(f"{nets}:net", tmp_path / "one" / "a.png", "--budget", 5, "--plot", target).exit_code == 0
    with Image.open(target) as image:
        assert image.width > 1000
        assert len(image.convert("RGB").resize((64, 64)).getcolors(4096)) > 50
    got = answers(f"{nets}:net", tmp_path / "one", tmp_path / "two", "--budget", 2, "--plot", target)
    assert [Path(a["plot"]).name for a in got["images"]] == ["out-a.png", "out-a-2.png"]
    assert all(Path(a["plot"]).is_file() for a in got["images"])


def test_segmentation_on_odd_sizes(nets: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    photo(size=(44, 52)).save(tmp_path / "a.png")
    photo(size=(40, 48)).save(tmp_path / "b.png")
    spec = f"{nets}:segmenter"
    images, target = [tmp_path / "a.png", tmp_path / "b.png"], tmp_path / "s.png"
    got = answers(spec, *images, "--task", "segmentation", "--budget", 4, "--plot", target)
    for one in got["images"]:
        assert sum(e["share"] for e in one["enhanced"]) == pytest.approx(1)
        assert 0 < one["changed"] < 1
        assert Path(one["plot"]).is_file()
    shown = run(spec, tmp_path / "a.png", "--task", "segmentation", "--budget", 2)
    assert "of the pixels change" in shown.stdout
    assert run(spec, tmp_path / "a.png", "--task", "detection").exit_code == 1
    asked = [spec, tmp_path / "b.png", "--task", "segmentation", "--budget", 4]
    ways = [answers(*asked, "--align", way)["images"][0] for way in ("on", "stitch", "off")]
    assert len({way["changed"] for way in ways}) == 3
    assert run(*asked, "--align", "maybe").exit_code == 2


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


def test_preprocess_seen_shows_what_the_network_sees() -> None:
    from unstride.show import seen

    image = photo(size=(60, 80))
    rgb, bgr = (seen(Preprocess(40, 32, channels=c), image) for c in ("RGB", "BGR"))
    assert rgb.size == (32, 32)
    assert np.array_equal(np.asarray(rgb), np.asarray(bgr))
    gray = seen(Preprocess(None, None, (0.5,), (0.5,), channels="L"), image)
    assert torch.equal(torch.tensor(np.asarray(gray)[..., 0]), torch.tensor(np.asarray(image.convert("L"))))


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


def ready():
    return loaded(unstride.enhance(Choosy().eval(), torch.zeros(1, 3, 32, 32), recipe="paper", budget=3))


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
    for model in ("choosy", "ready"):
        got = answers(f"{choosy}:{model}", folder, code=3)
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


def test_a_model_that_is_enhanced_already_keeps_its_recipe_or_takes_the_one_asked_for(
    choosy: str, tmp_path: Path
) -> None:
    photo(0, (32, 32)).save(tmp_path / "a.png")
    for ask, looks in (([], 3), (["--budget", 2], 2), (["--recipe", "flip"], 2)):
        (shown,) = answers(f"{choosy}:ready", tmp_path / "a.png", *ask)["images"]
        assert len(shown["states"]) == looks
        out = tmp_path / f"{looks}{len(ask)}{ask[:1]}.jsonl"
        assert run(f"{choosy}:ready", tmp_path / "a.png", *ask, "--out", out).exit_code == 0
        row = json.loads(out.read_text())
        assert row["looks"] == looks
        assert row["probabilities"][0] == pytest.approx(shown["enhanced"][0]["probability"], abs=1e-5)
    other = unstride.recipe.write(tmp_path / "other.toml", unstride.recipe.get("flip"), model="of another model")
    refused = run(f"{choosy}:ready", tmp_path / "a.png", "--recipe", other)
    assert refused.exit_code == 1
    assert "fingerprint" in refused.stderr


def test_a_recipe_that_was_made_for_a_task_is_run_for_it(nets: str, tmp_path: Path) -> None:
    """Also where the model's library says another: vectors that were tuned as such are no classes."""
    photo().save(tmp_path / "a.png")
    tuned = unstride.recipe.files.write(tmp_path / "tuned.toml", unstride.recipe.presets.get("flip", "embedding"))
    assert answers(f"{nets}:net", tmp_path / "a.png", "--recipe", tuned)["task"] == "embedding"
    assert answers(f"{nets}:net", tmp_path / "a.png", "--recipe", tuned, "--task", "multilabel")["task"] == "multilabel"
