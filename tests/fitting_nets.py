"""A small network and images whose class it can learn to tell."""

import pytest
import torch
from torch import Tensor, nn

import unstride
from unstride.enhanced import Enhanced


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


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """The head fits the random features, so that accuracy is well above chance and below one."""
    model = small_net()
    x, y = labelled(120, 5)
    with torch.no_grad():
        f = model[:-1](x)
        target = torch.nn.functional.one_hot(y, 3).float() * 4
        a = torch.cat([f, torch.ones(len(f), 1)], 1).double()
        # A little ridge: dead features make plain least squares jump with the last bit.
        solved = torch.linalg.solve(a.T @ a + 1e-3 * torch.eye(a.shape[1]), a.T @ target.double()).float()
        model[-1].weight.copy_(solved[:-1].T)
        model[-1].bias.copy_(solved[-1])
    return model


@pytest.fixture
def better(net: nn.Module) -> Enhanced:
    return unstride.enhance(net, recipe="paper", task="classification", budget=6)
