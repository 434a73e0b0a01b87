"""`unstride fit`: trains on labelled files, saves what `unstride.load` reads, and says what is wrong in one line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from fitting_nets import labelled
from typer.testing import CliRunner

from unstride import models
from unstride.cli.main import app
from unstride.enhanced import load

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


def run(folder: Path, *more: str) -> object:
    files = ["--data", f"npz:{folder}/data.npz", "--out", f"{folder}/a.safetensors"]
    return CliRunner().invoke(app, ["fit", f"{folder}/net.py:build", *files, "--epochs", "1", "--budget", "3", *more])


def test_a_fit_can_be_loaded(files):
    result = run(files, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["train_images"], report["val_images"], len(report["epochs"])) == (24, 6, 2)
    assert not list(files.glob("*.partial"))
    loaded = models.load(f"{files}/net.py:build")
    better = load(files / "a.safetensors", loaded.model, preprocess=loaded.preprocess)
    assert better.preprocess == loaded.preprocess
    assert "aggregate='attention'" in better.signature and "criterion='learned'" in better.signature
    x = loaded.example()
    assert better.with_options(budget=2)(x).shape == (1, 3)
    assert torch.isfinite(better(x)).all()


def test_mistakes_are_one_line(files):
    result = run(files, "--val-fraction", "1.5")
    assert result.exit_code == 1
    assert "--val-fraction 1.5" in result.stderr and "Traceback" not in result.output
    result = run(files, "--lr", "-1")
    assert result.exit_code == 1 and "lr" in result.stderr
    assert not (files / "a.safetensors").exists()
