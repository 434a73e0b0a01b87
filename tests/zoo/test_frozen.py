"""Folded and packed is the same network: real architectures, frozen against live."""

import pytest
import torch
import torchvision

import unstride

QUICK = ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1"]
SLOW = ["mobilenet_v2", "efficientnet_b0", "densenet121", "mnasnet0_5", "regnet_y_400mf", "swin_t"]


@pytest.mark.parametrize("name", QUICK + [pytest.param(n, marks=pytest.mark.slow) for n in SLOW])
def test_frozen_is_as_captured(name: str) -> None:
    torch.manual_seed(0)
    net = torchvision.models.get_model(name, weights=None, num_classes=10)
    images = torch.randn(3, 3, 96, 96)
    for m in net.modules():
        if isinstance(m, torch.nn.BatchNorm2d):
            m.momentum = 1.0
    net.train()(images.repeat(4, 1, 1, 1))  # statistics of these images: nothing fades on its way through
    net.eval()
    count = len(unstride.inspect(net, images[:1]).layers)
    states = [[(0, 0)] * count, [(1, 0)] * count, [(0, 1)] * (count - 1) + [(1, 1)]]  # a list: rounding chooses nothing
    recipe = unstride.Recipe((unstride.Stage(states=states, edges="zeros"),))
    expected = unstride.enhance(net, recipe=recipe)(images)
    got = unstride.enhance(net, recipe=recipe, execution="frozen")(images)
    scale = float(expected.abs().max())
    assert not torch.allclose(expected, net(images), atol=1e-4 * scale)  # the states do change the answer
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * scale)
