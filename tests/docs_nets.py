"""What the examples in the docs may use without defining it: small, quick, the same each time."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Tiny(nn.Module):
    """(B, 3, H, W) -> (B, 10), four layers of stride 2."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = (3, width, width, 2 * width, 2 * width)
        self.body = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in pairwise(widths)))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class TinyUnet(nn.Module):
    """(B, 3, H, W) -> (B, 4, H, W) with a skip, for sizes that are multiples of 4 only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.first(x).relu()
        coarse = F.interpolate(self.second(fine).relu(), scale_factor=2.0)
        return F.interpolate(self.head(torch.cat([fine, coarse], 1)), scale_factor=2.0, mode="bilinear")


def namespace() -> dict[str, Any]:
    """Fresh names for one page."""
    torch.manual_seed(0)
    model, segmenter = Tiny().eval(), TinyUnet().eval()
    images, labels = torch.randn(8, 3, 32, 32) * 0.3, torch.arange(8) % 10
    loader = [(images[:4], labels[:4]), (images[4:], labels[4:])]
    return {
        "__name__": "docs",
        "wide_model": Tiny(24).eval(),
        "model": model,
        "segmenter": segmenter,
        "images": images[:2],
        "labels": labels[:2],
        "scenes": torch.randn(2, 3, 32, 32),
        "train_loader": loader,
        "val_loader": loader[:1],
    }
