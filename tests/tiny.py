"""Tiny networks and data for the evaluation's tests; also the `file.py:function` of the subprocesses."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from unstride.views.images import Preprocess

PREPROCESS = Preprocess(None, None, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


class Net(nn.Module):
    """(B, 3, H, W) -> (B, 6), or (B, 6, H, W): three strided convolutions."""

    def __init__(self, maps: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.head, self.maps = nn.Conv2d(8, 6, 1), maps

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.c(self.b(self.a(x).relu()).relu()).relu())
        if self.maps:
            return nn.functional.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)
        return y.mean((2, 3))


def net(maps: bool = False) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Net(maps).eval()
        for p in model.parameters():
            p.data *= 2.0  # so that the states disagree
    return model


def build() -> tuple[nn.Module, Preprocess]:
    return net(), PREPROCESS


def build_maps() -> tuple[nn.Module, Preprocess]:
    return net(maps=True), PREPROCESS


class Deep(nn.Module):
    """(B, 3, H, W) -> (B, H, W), positive."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net(maps=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).mean(1).exp()


def build_depth() -> tuple[nn.Module, Preprocess]:
    return Deep().eval(), PREPROCESS


def build_dying() -> tuple[nn.Module, Preprocess]:
    """Rank 1 is killed once, when the run has finished some batches in the folder UNSTRIDE_TEST_OUT."""
    out = Path(os.environ["UNSTRIDE_TEST_OUT"])
    mark = out / "died"

    def die() -> None:
        while len(list(out.glob("cache/evaluation-*/*.safetensors"))) < 3:
            time.sleep(0.002)
        mark.write_text("once")
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK") == "1" and not mark.exists():
        threading.Thread(target=die, daemon=True).start()
    return build()


def images(count: int, size: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """uint8 (N, H, W, 3), and labels (N,) that the network often gets right."""
    rng = np.random.default_rng(seed)
    x = np.kron(rng.integers(0, 256, (count, size // 4, size // 4, 3)), np.ones((1, 4, 4, 1))).astype(np.uint8)
    with torch.no_grad():
        y = net()(normalised(x)).argmax(1).numpy()
    wrong = rng.random(count) < 0.3
    return x, np.where(wrong, rng.integers(0, 6, count), y)


def normalised(x: np.ndarray) -> Tensor:
    return (torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25


def npz(folder: Path, count: int, size: int = 16) -> str:
    x, y = images(count, size)
    np.savez(folder / "data.npz", x=x, y=y)
    return f"npz:{folder / 'data.npz'}"


# What may differ between two runs that measured the same.
BY_CHANCE = ("latency", "plain_ms", "peak_memory", "created", "batch_size", "command", "threads", "seconds")


def numbers(row: dict) -> dict:
    """A row without what may differ between two runs that measured the same."""
    provenance = {k: v for k, v in row.get("provenance", {}).items() if k not in BY_CHANCE}
    return {k: v for k, v in {**row, "provenance": provenance}.items() if k not in BY_CHANCE}
