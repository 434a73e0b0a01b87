"""Fine-tuning on a stand-in for Flowers102: it learns, it continues after a kill, and its weights are a network's."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from unstride.errors import DataError, SpecError
from unstride.models.weights import read_weights
from unstride.paper import finetune as module
from unstride.paper.finetune import FineTuning, finetune
from unstride.views.images import Preprocess

IMAGES = 36


class TinyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.Linear(8, 102)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


def tiny(*_):
    torch.manual_seed(0)
    return TinyNet()


@pytest.fixture
def flowers(tmp_path, monkeypatch):
    """Three classes that differ in colour, in the official layout."""
    io = pytest.importorskip("scipy.io")
    root = tmp_path / "flowers-102"
    (root / "jpg").mkdir(parents=True)
    rng = np.random.default_rng(0)
    labels = np.arange(IMAGES) % 3
    for i, label in enumerate(labels, 1):
        pixels = rng.integers(0, 60, (20, 24, 3))
        pixels[..., label] += 180
        Image.fromarray(pixels.astype(np.uint8)).save(root / "jpg" / f"image_{i:05d}.jpg")
    io.savemat(root / "imagelabels.mat", {"labels": (labels + 1)[None].astype(np.uint8)})
    rows = np.arange(1, IMAGES + 1)
    io.savemat(root / "setid.mat", {"trnid": rows[None, :18], "valid": rows[None, 18:27], "tstid": rows[None, 27:]})
    monkeypatch.setattr(module, "PREPROCESS", Preprocess(20, (16, 16)))
    monkeypatch.setattr(module, "starting_network", tiny)
    monkeypatch.setattr(module, "BATCH", 6)
    monkeypatch.setattr(module, "LR", 0.1)
    return tmp_path


def weights(folder):
    return read_weights(folder / "weights" / "flowers102-resnet18.safetensors")


def test_it_learns_and_writes_the_weights_of_the_best_epoch(flowers):
    result = finetune("ResNet18", flowers, epochs=8, progress=False)
    assert result.test_images == 9
    assert result.test >= 0.6  # chance is a third
    network = tiny()
    network.load_state_dict(weights(flowers))
    assert "test accuracy" in str(result)
    assert not list((flowers / "weights").glob("*.partial*"))


def test_a_killed_run_continues_and_gives_the_same_weights(flowers, monkeypatch):
    finetune("ResNet18", flowers, epochs=4, progress=False)
    whole = weights(flowers)
    (flowers / "weights" / "flowers102-resnet18.safetensors").unlink()
    epoch, started = FineTuning._epoch, []

    def killed(self, number):
        started.append(number)
        if len(started) == 3:
            raise KeyboardInterrupt
        epoch(self, number)

    monkeypatch.setattr(FineTuning, "_epoch", killed)
    with pytest.raises(KeyboardInterrupt):
        finetune("ResNet18", flowers, epochs=4, progress=False)
    finetune("ResNet18", flowers, epochs=4, progress=False)
    assert started == [0, 1, 2, 2, 3]  # two epochs were done
    again = weights(flowers)
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_other_settings_start_anew(flowers, monkeypatch):
    epoch, started = FineTuning._epoch, []

    def stops(self, number):
        started.append(number)
        if number == 1:
            raise KeyboardInterrupt
        epoch(self, number)

    monkeypatch.setattr(FineTuning, "_epoch", stops)
    for seed in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            finetune("ResNet18", flowers, epochs=2, seed=seed, progress=False)
    assert started == [0, 1, 0, 1]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match="flowers-102/ with jpg/"):
        finetune("ResNet18", tmp_path)
    with pytest.raises(SpecError, match="did you mean ResNet18"):
        finetune("ResNet19", tmp_path)
