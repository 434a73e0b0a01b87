"""Models whose answer for an image depends on the images beside it are found, and the module is named."""

import pytest
import tiny
import torch
from torch import Tensor, nn

import unstride
from unstride.errors import UnstrideWarning
from unstride.execution.independence import batch_dependence, warn_of_batch_dependence

IMAGES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def with_batch_statistics() -> nn.Module:
    net = tiny.net()
    return nn.Sequential(nn.Conv2d(3, 3, 3, 1, 1), nn.BatchNorm2d(3, track_running_stats=False), net).eval()


class Centred(tiny.Net):
    """Takes a little of the batch's mean away."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - 0.1 * y.mean(0)


class BySize(tiny.Net):
    """Does something else for one image alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if len(x) == 1 else 1)


@pytest.mark.parametrize("count", [1, 3])
def test_independent_models_pass(count: int) -> None:
    norm = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Flatten()).eval()
    for model in (tiny.net(), tiny.net(maps=True), norm):
        assert batch_dependence(model, IMAGES[:count]) == ""


@pytest.mark.parametrize("count", [1, 3])
def test_the_module_is_named(count: int) -> None:
    message = batch_dependence(with_batch_statistics(), IMAGES[:count])
    assert "Its module 1 (BatchNorm2d) mixes the images of a batch" in message
    assert "It mixes the images of a batch" in batch_dependence(Centred().eval(), IMAGES[:count])
    assert batch_dependence(BySize().eval(), IMAGES[:count])


def test_an_image_and_its_flip_are_not_enough() -> None:
    """Their statistics are nearly equal, so that only unlike images show it."""
    flipped = torch.stack([IMAGES[0], IMAGES[0].flip(-1)])
    assert batch_dependence(with_batch_statistics(), flipped)


def test_nothing_is_left_on_the_model_and_training_models_stay_so() -> None:
    model = with_batch_statistics()
    batch_dependence(model, IMAGES)
    assert not any(module._forward_hooks for module in model.modules())
    training = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)).train()
    before = {name: value.clone() for name, value in training.state_dict().items()}
    assert batch_dependence(training, IMAGES) == ""
    assert training.training
    torch.testing.assert_close(dict(training.state_dict()), before)


class FromEight(tiny.Net):
    """Does something else for eight images or more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if len(x) >= 8 else 1)


def test_batches_of_two_sizes_are_tried() -> None:
    assert batch_dependence(FromEight().eval(), IMAGES)


def test_tune_and_prepare_warn() -> None:
    x, y = tiny.images(40)
    images = torch.from_numpy(x).permute(0, 3, 1, 2).float() / 255
    batches = [(images[k : k + 8], torch.from_numpy(y[k : k + 8])) for k in range(0, 40, 8)]
    model = with_batch_statistics()
    with pytest.warns(UnstrideWarning, match=r"Its module 1 \(BatchNorm2d\)"):
        unstride.tune(model, batches, cost=1.5, task="classification", progress=False)
    with pytest.warns(UnstrideWarning, match=r"Its module 1 \(BatchNorm2d\)"):
        unstride.enhance(model, recipe="flip", task="classification").prepare(images)


def test_every_network_is_warned_about() -> None:
    better = unstride.enhance({"base": tiny.net(), "other": Centred().eval()}, recipe="plain")
    with pytest.warns(UnstrideWarning, match="Centred: the answer for an image depends"):
        warn_of_batch_dependence(better.networks, IMAGES)
