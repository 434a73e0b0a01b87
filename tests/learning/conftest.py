import pytest
from fitting_nets import labelled, net  # noqa: F401
from torch import Tensor

Batches = list[tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def train() -> Batches:
    x, y = labelled(40, 1)
    return list(zip(x.split(20), y.split(20), strict=True))


@pytest.fixture(scope="module")
def held() -> Batches:
    x, y = labelled(30, 2)
    return list(zip(x.split(20), y.split(20), strict=True))
