"""The paper's networks give the subsampling layers that its figures search, and the invariants hold on them."""

import pytest
import torch
from checks import Net, check_briefly, some_states

from unstride.models import paper_networks

STAGES = [(2, 2)] * 3
TRANSFORMER = [(4, 4), (2, 2), (2, 2), (2, 2)]
# Name, side of the image, rates, operations that move together.
QUICK = [
    ("cifar10-resnet20", 32, [(2, 2)] * 2, [2, 2]),
    ("cifar10-vgg11-bn", 32, [(2, 2)] * 4, [1] * 4),  # the fifth pool leaves one position: nothing to choose
    ("cifar10-repvgg-a0", 32, STAGES, [2] * 3),
    ("cifar10-mobilenetv2-x0-5", 32, STAGES, [1] * 3),
    ("cifar10-shufflenetv2-x0-5", 32, STAGES, [2] * 3),
    ("antialiased-resnet18", 64, [(2, 2)] * 5, [1, 1, 2, 2, 2]),
    ("cityscapes-fcn-m-v2-d8", 64, STAGES, [1] * 3),
    ("cityscapes-segformer-mit-b0", 64, TRANSFORMER, [1] * 4),
]
SLOW = [
    ("cifar10-resnet20-option-a", 32, [(2, 2)] * 2, [2, 2]),
    ("antialiased-mobilenet-v2", 64, [(2, 2)] * 5, [1] * 5),
    ("cifar100-resnet56", 32, [(2, 2)] * 2, [2, 2]),
    ("cifar100-vgg19-bn", 32, [(2, 2)] * 4, [1] * 4),
    ("cifar100-repvgg-a2", 32, STAGES, [2] * 3),
    ("cifar100-mobilenetv2-x1-4", 32, STAGES, [1] * 3),
    ("cifar100-shufflenetv2-x2-0", 32, STAGES, [2] * 3),
    ("antialiased-resnet50", 64, [(2, 2)] * 5, [1, 1, 2, 2, 2]),
    ("antialiased-wide-resnet50-2", 64, [(2, 2)] * 5, [1, 1, 2, 2, 2]),
    ("cityscapes-fcn-r50-d8", 64, STAGES, [1, 1, 2]),
    ("cityscapes-deeplabv3-r50-d8", 64, STAGES, [1, 1, 2]),
    ("ade20k-deeplabv3plus-r50-d8", 64, STAGES, [1, 1, 2]),
    ("ade20k-deeplabv3plus-m-v2-d8", 64, STAGES, [1] * 3),
    (
        "cityscapes-lraspp-m-v3-d8",
        392,
        STAGES,
        [1] * 3,
    ),  # one position of its pool; from 513 pixels on, the pool is a layer
    ("cityscapes-fcn-unet-s5-d16", 64, [(2, 2)] * 4, [1] * 4),
    ("ade20k-upernet-swin-t", 64, TRANSFORMER, [1] * 4),
    ("ade20k-upernet-twins-pcpvt-s", 64, TRANSFORMER, [1] * 4),
    ("ade20k-fpn-twins-pcpvt-s", 64, TRANSFORMER, [1] * 4),
]


def check(name: str, side: int, rates: list[tuple[int, int]], together: list[int]) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    net = Net.of(paper_networks.paper_network(name, classes=5), images[:1])
    assert [layer.rate for layer in net.found.layers] == rates
    assert [len(layer.ops) for layer in net.found.layers] == together
    check_briefly(net, images, some_states(net.found, 3)[1:], 3e-4)


@pytest.mark.parametrize(("name", "side", "rates", "together"), QUICK, ids=[q[0] for q in QUICK])
def test_quick(name: str, side: int, rates: list[tuple[int, int]], together: list[int]) -> None:
    check(name, side, rates, together)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side", "rates", "together"), SLOW, ids=[s[0] for s in SLOW])
def test_slow(name: str, side: int, rates: list[tuple[int, int]], together: list[int]) -> None:
    check(name, side, rates, together)
