"""The 19 networks of the paper's CIFAR figures, for 32x32 images, with the key names of chenyaofo/pytorch-cifar-models.

MobileNetV2 and ShuffleNetV2 are torchvision's, without the strides that 32x32 images have no use for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import MobileNetV2, ShuffleNetV2

VGG_STAGES = {  # 3x3 convolutions in each of the five stages
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
REPVGG_WIDTHS = {"a0": (48, 48, 96, 192, 1280), "a1": (64, 64, 128, 256, 1280), "a2": (64, 96, 192, 384, 1408)}
SHUFFLENET_WIDTHS = {
    0.5: [24, 48, 96, 192, 1024],
    1.0: [24, 116, 232, 464, 1024],
    1.5: [24, 176, 352, 704, 1024],
    2.0: [24, 244, 488, 976, 2048],
}
# Expansion, channels, blocks, stride: the second stage has stride 1 here and 2 on ImageNet.
MOBILENET_STAGES = [
    [1, 16, 1, 1],
    [6, 24, 2, 1],
    [6, 32, 3, 2],
    [6, 64, 4, 2],
    [6, 96, 3, 1],
    [6, 160, 3, 2],
    [6, 320, 1, 1],
]


class PaddedShortcut(nn.Module):
    """The shortcut without parameters of He et al. ("option A"): every second pixel, zero channels on both sides."""

    def __init__(self, missing: int) -> None:
        super().__init__()
        self.missing = missing

    def forward(self, x: Tensor) -> Tensor:
        before = self.missing // 2
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, before, self.missing - before))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, padded_shortcut: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride > 1 and padded_shortcut:
            self.downsample = PaddedShortcut(outputs - inputs)
        elif stride > 1:
            projection = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


class CifarResNet(nn.Module):
    """ResNet-20, 32, 44 or 56: three stages of (depth - 2) / 6 blocks with 16, 32 and 64 channels."""

    def __init__(self, depth: int, classes: int, padded_shortcut: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages = []
        for inputs, outputs, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            blocks = [BasicBlock(inputs, outputs, stride, padded_shortcut)]
            blocks += [BasicBlock(outputs, outputs, 1, padded_shortcut) for _ in range((depth - 2) // 6 - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(x.mean((2, 3)))


class CifarVGG(nn.Module):
    """VGG-BN: five stages that each end in a 2x2 max pool; the last one leaves a single position of a 32x32 image."""

    def __init__(self, depth: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for outputs, convolutions in zip((64, 128, 256, 512, 512), VGG_STAGES[depth], strict=True):
            for _ in range(convolutions):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        hidden = [nn.Linear(512, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout()]
        self.classifier = nn.Sequential(*hidden, nn.Linear(512, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


class RepVGGBlock(nn.Module):
    """A 3x3 and a 1x1 convolution of the same input, added, and the normalised input itself where it fits."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.rbr_identity = nn.BatchNorm2d(inputs) if inputs == outputs and stride == 1 else None
        self.rbr_dense, self.rbr_1x1 = nn.Sequential(), nn.Sequential()
        for branch, kernel in ((self.rbr_dense, 3), (self.rbr_1x1, 1)):
            branch.add_module("conv", nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False))
            branch.add_module("bn", nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.rbr_dense(x) + self.rbr_1x1(x)
        return F.relu(y if self.rbr_identity is None else y + self.rbr_identity(x))


class CifarRepVGG(nn.Module):
    """RepVGG-A in the form in which it was trained, with all branches."""

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.stage0 = RepVGGBlock(3, widths[0], 1)
        stages = []
        for inputs, outputs, blocks, stride in zip(widths[:-1], widths[1:], (2, 4, 14, 1), (1, 2, 2, 2), strict=True):
            rest = [RepVGGBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
            stages.append(nn.Sequential(RepVGGBlock(inputs, outputs, stride), *rest))
        self.stage1, self.stage2, self.stage3, self.stage4 = stages
        self.linear = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stage2(self.stage1(self.stage0(x)))
        return self.linear(self.stage4(self.stage3(x)).mean((2, 3)))


def cifar_mobilenetv2(width: float, classes: int) -> nn.Module:
    """torchvision's MobileNetV2 with a stem of stride 1 and three strided stages."""
    model = MobileNetV2(num_classes=classes, width_mult=width, inverted_residual_setting=MOBILENET_STAGES)
    model.features[0][0].stride = (1, 1)
    return model


def cifar_shufflenetv2(width: float, classes: int) -> nn.Module:
    """torchvision's ShuffleNetV2 with a stem of stride 1 and no pool after it."""
    model = ShuffleNetV2([4, 8, 4], SHUFFLENET_WIDTHS[width], num_classes=classes)
    model.conv1[0].stride = (1, 1)
    model.maxpool = nn.Identity()
    return model
