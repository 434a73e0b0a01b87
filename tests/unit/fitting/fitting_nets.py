"""A small network and images whose class it can learn to tell."""

import torch
from torch import Tensor, nn


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3),
    ).eval()  # fmt: skip


def labelled(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Stripes whose direction and width are the class: a random net tells them apart a little."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (count,), generator=g)
    ramp = torch.arange(24.0)
    images = torch.randn(count, 3, 24, 24, generator=g) * 0.5
    waves = [torch.sin(ramp * 1.5)[:, None], torch.sin(ramp * 1.5)[None, :], torch.sin(ramp * 0.5)[:, None]]
    return images + torch.stack([waves[k].expand(24, 24) for k in y])[:, None], y
