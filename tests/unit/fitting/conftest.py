import pytest
import torch
from fitting_nets import labelled, small_net
from torch import Tensor, nn

import unstride
from unstride.enhanced import Enhanced

Batches = list[tuple[Tensor, Tensor]]


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
    return unstride.enhance(net, torch.zeros(1, 3, 24, 24), budget=6)


@pytest.fixture(scope="module")
def train() -> Batches:
    x, y = labelled(48, 1)
    return list(zip(x.split(20), y.split(20), strict=True))


@pytest.fixture(scope="module")
def val() -> Batches:
    x, y = labelled(40, 2)
    return list(zip(x.split(20), y.split(20), strict=True))
