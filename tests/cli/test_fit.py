"""`unstride fit`: fits on labelled files, writes a recipe that every command reads, explains mistakes in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
from fitting_nets import labelled
from typer.testing import CliRunner

import unstride
from unstride.cli.main import app
from unstride.errors import Inconclusive
from unstride.models import load

NET = """
from torch import nn
import torch
from unstride.views.images import Preprocess

def build():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU(),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))
    return body, Preprocess(32, 32)
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    x, y = labelled(30, 1)
    pixels = ((x.clamp(-2, 2) + 2) * 63).byte().permute(0, 2, 3, 1).numpy()
    np.savez(tmp_path / "data.npz", x=pixels, y=y.numpy())
    return tmp_path


def run(folder: Path, *more: str, out: str = "a.toml"):
    files = ["--data", f"npz:{folder}/data.npz", "--out", f"{folder}/{out}"]
    return CliRunner().invoke(app, ["fit", f"{folder}/net.py:build", *files, *more])


def test_a_fit_of_the_attention_is_a_recipe_file(files: Path) -> None:
    result = run(files, "--epochs", "1", "--budget", "3", "--schedule", "fast", "--json", "--set", "budget=2")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["train_images"], report["validation_images"], len(report["epochs"])) == (24, 6, 2)
    assert (report["method"], report["schedule"], report["kept"]) == ("attention", "fast", 1)
    assert sorted(p.suffix for p in files.glob("a.*")) == [".safetensors", ".toml"]
    loaded = load(f"{files}/net.py:build")
    better = unstride.enhance(loaded, recipe=files / "a.toml")
    assert better.recipe.search.states.budget == 2
    assert better(loaded.example()).shape == (1, 3)


@pytest.mark.parametrize("method", ["gps", "augtta", "classtta"])
def test_a_fit_of_views_is_a_recipe_file(files: Path, method: str) -> None:
    result = run(files, "--method", method, "--policy", "expanded:4", "--limit", "20")
    assert result.exit_code == 0, result.output
    assert f"{method} (4 views of expanded:4)" in result.stdout
    assert "validation accuracy (4 images)" in result.stdout
    loaded = load(f"{files}/net.py:build")
    better = unstride.enhance(loaded, recipe=files / "a.toml")
    assert 1 <= len(better.recipe.stages[0].views) <= 4
    assert better(loaded.example()).shape == (1, 3)


def test_a_fit_that_did_nothing_says_so(files: Path) -> None:
    result = run(files, "--epochs", "1", "--budget", "2")
    assert result.exit_code == 0, result.output
    assert "WARNING: Training did not move the attention" in result.stdout
    assert "Training did not move the attention" in result.stderr
    with pytest.warns(Inconclusive, match="this recipe gives the plain mean"):  # and whoever uses the file is told
        unstride.enhance(load(f"{files}/net.py:build"), recipe=files / "a.toml")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--method", "luck"), "method: got 'luck'"),
        (("--schedule", "slow"), "schedule: got 'slow'"),
        (("--recipe", "paper"), "no Search with aggregate='learned'"),
        (("--method", "gps", "--policy", "luck:3"), "unknown policy 'luck'"),
        (("--heads", "5"), "divisor of the 12 channels"),
        (("--validation", "npz:missing.npz"), "no such file"),
    ],
)
def test_mistakes_are_one_line(files: Path, options: tuple[str, ...], word: str) -> None:
    result = run(files, *options)
    assert result.exit_code == 1
    assert word in result.stderr and "Traceback" not in result.output
    assert not (files / "a.toml").exists()


def test_the_name_of_the_file_says_its_form(files: Path) -> None:
    result = run(files, out="a.safetensors")
    assert result.exit_code == 1 and ".toml or .json" in result.stderr
