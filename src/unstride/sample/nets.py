"""The embedded networks: two classifiers and a segmenter of gray garment images.

    Classifier()(torch.zeros(1, 1, 64, 64)).shape       # (1, 10)
    LargeClassifier()(torch.zeros(1, 1, 64, 64)).shape  # (1, 10)
    SampleSegmenter()(torch.zeros(1, 1, 96, 96)).shape  # (1, 11, 96, 96)

All are ordinary residual networks, built as large ones are.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _conv(wide_in: int, wide_out: int, size: int, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (size // 2)
    conv = nn.Conv2d(wide_in, wide_out, size, stride, padding, dilation, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(wide_out))


class ResidualBlock(nn.Module):
    """Basic residual block: two 3x3 convolutions; a 1x1 shortcut where the shape changes."""

    def __init__(self, wide_in: int, wide_out: int, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = _conv(wide_in, wide_out, 3, stride)
        self.conv2 = _conv(wide_out, wide_out, 3, dilation=dilation)
        same = stride == 1 and wide_in == wide_out
        self.shortcut = nn.Identity() if same else _conv(wide_in, wide_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Classifier(nn.Module):
    """(B, 1, 64, 64) -> (B, 10): a stem and two residual stages of stride 2, one of stride 1; the map is 8x8."""

    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (16, 32, 64, 96)) -> None:
        super().__init__()
        first, second, third, last = widths
        self.stem = nn.Sequential(_conv(1, first, 3, stride=2), nn.ReLU())
        self.stages = nn.Sequential(
            ResidualBlock(first, second, stride=2), ResidualBlock(second, third, stride=2), ResidualBlock(third, last)
        )
        self.head = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1), 1))


class LargeClassifier(nn.Module):
    """(B, 1, 64, 64) -> (B, 10): wider than `Classifier`, and with two blocks in each strided stage."""

    def __init__(self, classes: int = 10, widths: tuple[int, ...] = (32, 64, 128, 160)) -> None:
        super().__init__()
        first, second, third, last = widths
        self.stem = nn.Sequential(_conv(1, first, 3, stride=2), nn.ReLU())
        self.stages = nn.Sequential(
            ResidualBlock(first, second, stride=2),
            ResidualBlock(second, second),
            ResidualBlock(second, third, stride=2),
            ResidualBlock(third, third),
            ResidualBlock(third, last),
        )
        self.head = nn.Linear(last, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1), 1))


class SampleSegmenter(nn.Module):
    """(B, 1, H, W) -> (B, 11, H, W): like DeepLab, a dilated encoder of output stride 8, two branches, upsampling.

    There is no skip from early layers: the strides discard detail below a cell of 8 pixels.
    """

    def __init__(self, classes: int = 11, widths: tuple[int, ...] = (24, 32, 64, 96)) -> None:
        super().__init__()
        first, second, third, last = widths
        self.stem = nn.Sequential(_conv(1, first, 3, stride=2), nn.ReLU())
        self.stages = nn.Sequential(
            ResidualBlock(first, second, stride=2),
            ResidualBlock(second, third, stride=2),
            ResidualBlock(third, last, dilation=2),
        )
        self.near = _conv(last, third, 1)
        self.far = _conv(last, third, 3, dilation=3)
        self.head = nn.Conv2d(third, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.stem(x))
        cells = self.head(F.relu(self.near(features) + self.far(features)))
        return F.interpolate(cells, size=x.shape[-2:], mode="bilinear", align_corners=False)
