"""A network that never saw moved images is told from one that did, without labels."""

import pytest
import torch
from torch import Tensor, nn

import unstride
from unstride.errors import OptionError
from unstride.procedure.familiar import unfamiliar

datasets = pytest.importorskip("sklearn.datasets", reason="pip install 'unstride[demo]' has the digits")


def digits() -> tuple[Tensor, Tensor]:
    x, y = datasets.load_digits(return_X_y=True)
    small = torch.tensor(x).float().view(-1, 1, 8, 8) / 16
    return nn.functional.interpolate(small, (32, 32), mode="bilinear"), torch.tensor(y)


def trained(moved: bool) -> tuple[nn.Module, Tensor]:
    x, y = digits()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1),
        nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16, 10),
    )  # fmt: skip
    step = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(12):
        for rows in torch.randperm(1200).split(64):
            shift = torch.randint(-3, 4, (2,)).tolist() if moved else (0, 0)
            loss = nn.functional.cross_entropy(net(torch.roll(x[rows], shift, (2, 3))), y[rows])
            step.zero_grad()
            loss.backward()
            step.step()
    return net.eval(), x[1200:]


def test_only_the_network_without_shifts_is_doubted():
    told = []
    for moved in (False, True):
        net, x = trained(moved)
        told.append(unstride.enhance(net, x[:1], space="logits").doubts(x))
    assert told[0] is not None and "states look unfamiliar" in told[0] and "recipe='plain'" in told[0]
    assert told[1] is None


def test_a_mirror_that_the_network_does_not_know_is_doubted():
    """A mirrored digit is no digit: the default recipe, which mirrors, is to say so."""
    net, x = trained(moved=True)
    told = unstride.enhance(net, x[:1], task="classification").doubts(x)
    assert told is not None and "flip look unfamiliar" in told and "states" not in told


def test_large_batches_and_many_are_doubted_alike(monkeypatch):
    net, x = trained(moved=False)
    better = unstride.enhance(net, x[:1], task="classification")
    told = better.doubts(x[:40])
    assert told is not None and better.doubts(iter(x[:40].split(15))) == told
    monkeypatch.setattr("unstride.engine.engine.TOGETHER", 1)  # one image at a time
    assert better.doubts(x[:40]) == told


def test_the_same_answers_are_no_reason_to_doubt():
    logits = 5 * torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
    assert unfamiliar(logits, logits) is None
    assert unfamiliar(logits, logits.flip(1) * 0.1) is not None


def test_segmentation_is_refused_in_words():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.Upsample(scale_factor=2))
    better = unstride.enhance(net, torch.randn(1, 3, 16, 16), task="segmentation")
    with pytest.raises(OptionError, match="classification"):
        better.doubts(torch.randn(2, 3, 16, 16))
