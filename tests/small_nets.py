"""Networks small enough to be tried in a moment, in a file that can be named as a model."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

SOURCE = """
from torch import nn
from unstride.views.images import Preprocess
from unstride.models import LoadedModel

def net():
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )
    for p in body.parameters():
        p.data.mul_(4)
    return LoadedModel("net", body, Preprocess(32, 32), "classification", ("red", "green", "blue", "<b>[odd]</b> name"))

def other():
    loaded = net()
    for p in loaded.model.parameters():
        p.data.neg_()
    return loaded

def segmenter():
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 3, 2, 1), nn.Upsample(scale_factor=4, mode="bilinear"),
    )
    for p in body.parameters():
        p.data.mul_(4)
    return LoadedModel("seg", body, Preprocess(None, None), "segmentation", ("background", "sky", "road"))

def depth():
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, 2, 1), nn.Upsample(scale_factor=4, mode="bilinear"),
        nn.Flatten(1, 2),
    )
    return LoadedModel("depth", body, Preprocess(None, None), "dense")

def tower():
    body = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )
    return LoadedModel("tower", body, Preprocess(32, 32), "embedding")
"""


def write_nets(folder: Path) -> str:
    path = folder / "nets.py"
    path.write_text(SOURCE)
    return str(path)


def photo(seed: int = 0, size: tuple[int, int] = (40, 48)) -> Image.Image:
    y, x = np.mgrid[: size[0], : size[1]] / 48
    noise = np.random.default_rng(seed).random((*size, 3)) * 0.4
    waves = np.stack([np.sin(9 * x + seed), np.cos(7 * y), np.sin(5 * (x + y))], -1) * 0.3 + 0.3
    return Image.fromarray(((waves + noise).clip(0, 1) * 255).astype(np.uint8))


def png(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()
