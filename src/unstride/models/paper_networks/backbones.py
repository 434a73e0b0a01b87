"""The convolutional backbones of the paper's segmentation networks, with mmsegmentation's key names (`backbone.*`)."""

from __future__ import annotations

from itertools import pairwise

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.models.paper_networks.parts import ConvModule

# Expansion, channels, blocks, stride, dilation of the first block: output stride 8.
MOBILENETV2_STAGES = (
    (1, 16, 1, 1, 1),
    (6, 24, 2, 2, 1),
    (6, 32, 3, 2, 1),
    (6, 64, 4, 1, 2),
    (6, 96, 3, 1, 2),
    (6, 160, 3, 1, 4),
    (6, 320, 1, 1, 4),
)
# Kernel, hidden channels, channels, squeeze and excite, hard swish, stride, dilation: output stride 8.
MOBILENETV3_BLOCKS = (
    (3, 16, 16, False, False, 1, 1),
    (3, 64, 24, False, False, 2, 1),
    (3, 72, 24, False, False, 1, 1),
    (5, 72, 40, True, False, 2, 1),
    (5, 120, 40, True, False, 1, 1),
    (5, 120, 40, True, False, 1, 1),
    (3, 240, 80, False, True, 1, 2),
    (3, 200, 80, False, True, 1, 2),
    (3, 184, 80, False, True, 1, 2),
    (3, 184, 80, False, True, 1, 2),
    (3, 480, 112, True, True, 1, 2),
    (3, 672, 112, True, True, 1, 2),
    (5, 672, 160, True, True, 1, 4),
    (5, 960, 160, True, True, 1, 4),
    (5, 960, 160, True, True, 1, 4),
)
EPS_OF_MOBILENETV3 = 1e-3


def resnet50c() -> nn.Module:
    """ResNet-50 with a stem of three 3x3 convolutions and output stride 8: timm's is equal to mmsegmentation's."""
    return timm.create_model("resnet50c", features_only=True, output_stride=8, out_indices=(1, 2, 3, 4))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int, dilation: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [ConvModule(inputs, hidden, activation=nn.ReLU6)] if expansion > 1 else []
        depthwise = ConvModule(hidden, hidden, 3, stride=stride, dilation=dilation, groups=hidden, activation=nn.ReLU6)
        self.conv = nn.Sequential(*expand, depthwise, ConvModule(hidden, outputs, activation=nn.Identity))
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    """MobileNetV2 at output stride 8; maps of 24, 32, 96 and 320 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = ConvModule(3, 32, 3, stride=2, activation=nn.ReLU6)
        inputs = 32
        for number, (expansion, outputs, blocks, stride, dilation) in enumerate(MOBILENETV2_STAGES, 1):
            first = InvertedResidual(inputs, outputs, expansion, stride, dilation)
            rest = [InvertedResidual(outputs, outputs, expansion, 1, 1) for _ in range(blocks - 1)]
            self.add_module(f"layer{number}", nn.Sequential(first, *rest))
            inputs = outputs

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.conv1(x)
        maps = []
        for number in range(1, len(MOBILENETV2_STAGES) + 1):
            x = self.get_submodule(f"layer{number}")(x)
            maps.append(x)
        return [maps[index] for index in (1, 2, 4, 6)]


class SqueezeExcite(nn.Module):
    """Scales the channels by a function of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        fewer = _divisible_by_8(channels // 4)
        self.conv1 = ConvModule(channels, fewer, norm=False)
        self.conv2 = ConvModule(fewer, channels, norm=False, activation=nn.Hardsigmoid)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.conv2(self.conv1(F.adaptive_avg_pool2d(x, 1)))


def _divisible_by_8(channels: int) -> int:
    nearest = max(8, (channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8


class InvertedResidualV3(nn.Module):
    """MobileNetV3's block: expand, depthwise, squeeze and excite, project."""

    def __init__(
        self, inputs: int, kernel: int, hidden: int, outputs: int, excite: bool, swish: bool, stride: int, dilation: int
    ) -> None:
        super().__init__()
        act = nn.Hardswish if swish else nn.ReLU
        self.expand_conv = (
            ConvModule(inputs, hidden, activation=act, eps=EPS_OF_MOBILENETV3) if hidden != inputs else nn.Identity()
        )
        self.depthwise_conv = ConvModule(
            hidden,
            hidden,
            kernel,
            stride=stride,
            dilation=dilation,
            groups=hidden,
            activation=act,
            eps=EPS_OF_MOBILENETV3,
            tf_padding=stride == 2,
        )
        self.se = SqueezeExcite(hidden) if excite else nn.Identity()
        self.linear_conv = ConvModule(hidden, outputs, activation=nn.Identity, eps=EPS_OF_MOBILENETV3)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear_conv(self.se(self.depthwise_conv(self.expand_conv(x))))
        return x + y if self.residual else y


class MobileNetV3(nn.Module):
    """MobileNetV3-Large at output stride 8; maps of 16, 24 and 960 channels at strides 2, 4 and 8."""

    def __init__(self) -> None:
        super().__init__()
        stem = ConvModule(3, 16, 3, stride=2, activation=nn.Hardswish, eps=EPS_OF_MOBILENETV3, tf_padding=True)
        layers: list[nn.Module] = [stem]
        inputs = 16
        # A block that loses its stride to a dilation has no shortcut: its number of channels changes as well.
        for kernel, hidden, outputs, excite, swish, stride, dilation in MOBILENETV3_BLOCKS:
            layers.append(InvertedResidualV3(inputs, kernel, hidden, outputs, excite, swish, stride, dilation))
            inputs = outputs
        layers.append(ConvModule(inputs, 960, activation=nn.Hardswish, eps=EPS_OF_MOBILENETV3))
        for number, layer in enumerate(layers):
            self.add_module(f"layer{number}", layer)
        self.count = len(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        maps = []
        for number in range(self.count):
            x = self.get_submodule(f"layer{number}")(x)
            maps.append(x)
        return [maps[index] for index in (1, 3, 16)]


class ConvBlock(nn.Module):
    """Two 3x3 convolutions of the UNet."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(ConvModule(inputs, outputs, 3), ConvModule(outputs, outputs, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(x)


class Doubled(nn.Module):
    """Twice the size, then a 1x1 convolution."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.interp_upsample = nn.Sequential(upsample, ConvModule(inputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.interp_upsample(x)


class UpBlock(nn.Module):
    """A coarse map, doubled, beside the encoder's map of that size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv_block = ConvBlock(2 * outputs, outputs)
        self.upsample = Doubled(inputs, outputs)

    def forward(self, skip: Tensor, x: Tensor) -> Tensor:
        return self.conv_block(torch.cat([skip, self.upsample(x)], 1))


class UNet(nn.Module):
    """UNet-S5-D16: five stages of 64 to 1024 channels with 2x2 max pools between them; image sides divisible by 16."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64 * 2**stage for stage in range(5)]
        self.encoder = nn.ModuleList([nn.Sequential(ConvBlock(3, widths[0]))])
        self.decoder = nn.ModuleList()
        for fine, coarse in pairwise(widths):
            self.encoder.append(nn.Sequential(nn.MaxPool2d(2), ConvBlock(fine, coarse)))
            self.decoder.append(UpBlock(coarse, fine))

    def forward(self, x: Tensor) -> list[Tensor]:
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        maps = [x]
        for block, skip in zip(reversed(self.decoder), reversed(skips[:-1]), strict=True):
            maps.append(block(skip, maps[-1]))
        return maps
