"""Random networks for every network of the paper, noise for every data set: exhibits end to end in seconds."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from unstride.data import Dataset
from unstride.data.items import Item, Listing, of_arrays
from unstride.models import LoadedModel
from unstride.paper.exhibits import SEGMENTATION
from unstride.paper.sources import FittingImages
from unstride.views.images import Preprocess

PRE = Preprocess(None, None, (0.5,), (0.25,), channels="L")


class TinyNet(nn.Module):
    """Four convolutions of stride 2."""

    def __init__(self, segments):
        super().__init__()
        widths = (1, 4, 6, 8, 8)
        self.convs = nn.Sequential(*(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths)))
        self.head = nn.Conv2d(8, 3, 1) if segments else nn.Linear(8, 3)
        self.segments = segments
        for p in self.parameters():  # as drawn, they give every pixel the same class
            p.data.mul_(3)

    def forward(self, x):
        h = torch.tanh(self.convs(x))
        return F.interpolate(self.head(h), x.shape[2:], mode="bilinear") if self.segments else self.head(h.mean((2, 3)))


def noise(count, segments):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (count, 32, 32), dtype=np.uint8)
    if not segments:
        return of_arrays(x, (np.arange(count) % 3).tolist())
    y = torch.from_numpy(rng.integers(0, 3, (count, 32, 32)))
    listing = of_arrays(x, [0] * count)
    return Listing(range(count), lambda i: Item(str(i), listing.item(i).image, lambda: y[i]))


@dataclass(frozen=True)
class TinySource:
    note: str = "tiny"
    schedule: str = "fast"
    epochs: int | None = 1

    def check(self, needs):
        return

    def key(self, model, data):
        return data if data in SEGMENTATION else "tiny"

    def load(self, model, data):
        torch.manual_seed(0)
        segments = data in SEGMENTATION
        task = "segmentation" if segments else "classification"
        return LoadedModel("tiny", TinyNet(segments).eval(), PRE, task)

    def _data(self, data, chosen):
        segments = data in SEGMENTATION
        return Dataset("tiny", "segmentation" if segments else "classification", PRE, noise(48, segments), chosen)

    def test(self, loaded, data):
        return self._data(data, range(6))

    def fitting(self, loaded, data):
        return FittingImages(self._data(data, range(6, 42)), limit=24)
