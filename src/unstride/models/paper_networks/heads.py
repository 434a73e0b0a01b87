"""The decoders of the paper's segmentation networks, with mmsegmentation's key names (`decode_head.*`, `neck.*`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.models.paper_networks.parts import ConvModule, SeparableConv, resize

DILATIONS = (12, 24, 36)
POOL_SIDES = (1, 2, 3, 6)


class FCNHead(nn.Module):
    """3x3 convolutions of the last map; with two of them, their result beside the map goes through another."""

    def __init__(self, inputs: int, channels: int, classes: int, convolutions: int = 2) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            ConvModule(inputs, channels, 3), *[ConvModule(channels, channels, 3) for _ in range(convolutions - 1)]
        )
        self.concatenates = convolutions > 1
        if self.concatenates:
            self.conv_cat = ConvModule(inputs + channels, channels, 3)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x = maps[-1]
        y = self.convs(x)
        return self.conv_seg(self.conv_cat(torch.cat([x, y], 1)) if self.concatenates else y)


class DeepLabV3Head(nn.Module):
    """Atrous spatial pyramid pooling of the last map."""

    def __init__(self, inputs: int, classes: int, channels: int = 512) -> None:
        super().__init__()
        self.image_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvModule(inputs, channels))
        self.aspp_modules = nn.ModuleList([ConvModule(inputs, channels)])
        self.aspp_modules.extend(self.dilated(inputs, channels, dilation) for dilation in DILATIONS)
        self.bottleneck = ConvModule(5 * channels, channels, 3)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def dilated(self, inputs: int, channels: int, dilation: int) -> nn.Module:
        """One of the dilated 3x3 convolutions."""
        return ConvModule(inputs, channels, 3, dilation=dilation)

    def pyramid(self, x: Tensor) -> Tensor:
        """The means of the whole map and the dilated convolutions, in one."""
        return self.bottleneck(torch.cat([resize(self.image_pool(x), x), *[m(x) for m in self.aspp_modules]], 1))

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        return self.conv_seg(self.pyramid(maps[-1]))


class DeepLabV3PlusHead(DeepLabV3Head):
    """DeepLabV3 with separable convolutions, joined by the first map."""

    def __init__(self, inputs: int, first: int, classes: int, channels: int = 512) -> None:
        super().__init__(inputs, classes, channels)
        self.c1_bottleneck = ConvModule(first, 48)
        self.sep_bottleneck = nn.Sequential(SeparableConv(channels + 48, channels), SeparableConv(channels, channels))

    def dilated(self, inputs: int, channels: int, dilation: int) -> nn.Module:
        return SeparableConv(inputs, channels, dilation)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        fine = self.c1_bottleneck(maps[0])
        joined = torch.cat([resize(self.pyramid(maps[-1]), fine), fine], 1)
        return self.conv_seg(self.sep_bottleneck(joined))


class SegFormerHead(nn.Module):
    """Every map through a 1x1 convolution to the size of the first, and all of them through another."""

    def __init__(self, widths: Sequence[int], classes: int, channels: int = 256) -> None:
        super().__init__()
        self.convs = nn.ModuleList([ConvModule(width, channels) for width in widths])
        self.fusion_conv = ConvModule(len(widths) * channels, channels)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        same = [resize(conv(x), maps[0]) for conv, x in zip(self.convs, maps, strict=True)]
        return self.conv_seg(self.fusion_conv(torch.cat(same, 1)))


class LRASPPHead(nn.Module):
    """MobileNetV3's decoder. Its pool covers 49x49 positions, so an image side is at least 385 pixels."""

    def __init__(self, widths: Sequence[int], classes: int, channels: int = 128) -> None:
        super().__init__()
        branches = (32, 64)
        self.convs, self.conv_ups = nn.Sequential(), nn.Sequential()
        for index, (width, branch) in enumerate(zip(widths, branches, strict=False)):
            self.convs.add_module(f"conv{index}", nn.Conv2d(width, branch, 1, bias=False))
            self.conv_ups.add_module(f"conv_up{index}", ConvModule(channels + branch, channels, eps=1e-3))
        self.conv_up_input = nn.Conv2d(channels, channels, 1)
        self.aspp_conv = ConvModule(widths[-1], channels, eps=1e-3)
        gate = ConvModule(widths[-1], channels, norm=False, bias=False, activation=nn.Sigmoid)
        self.image_pool = nn.Sequential(nn.AvgPool2d(49, (16, 20)), gate)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        x = maps[-1]
        gate = F.interpolate(self.image_pool(x), x.shape[2:], mode="bilinear", align_corners=True)
        x = self.conv_up_input(self.aspp_conv(x) * gate)
        for finer, conv, join in list(zip(maps, self.convs, self.conv_ups, strict=False))[::-1]:
            x = join(torch.cat([resize(x, finer), conv(finer)], 1))
        return self.conv_seg(x)


class UPerHead(nn.Module):
    """UPerNet: pyramid pooling of the last map, a feature pyramid above it, all sizes joined."""

    def __init__(self, widths: Sequence[int], classes: int, channels: int = 512) -> None:
        super().__init__()
        last = widths[-1]
        self.psp_modules = nn.ModuleList(
            [nn.Sequential(nn.AdaptiveAvgPool2d(side), ConvModule(last, channels)) for side in POOL_SIDES]
        )
        self.bottleneck = ConvModule(last + len(POOL_SIDES) * channels, channels, 3)
        self.lateral_convs = nn.ModuleList([ConvModule(width, channels) for width in widths[:-1]])
        self.fpn_convs = nn.ModuleList([ConvModule(channels, channels, 3) for _ in widths[:-1]])
        self.fpn_bottleneck = ConvModule(len(widths) * channels, channels, 3)
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        last = maps[-1]
        top = self.bottleneck(torch.cat([last, *[resize(pool(last), last) for pool in self.psp_modules]], 1))
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, maps[:-1], strict=True)]
        merged = top_down([*laterals, top], resize)
        refined = [conv(x) for conv, x in zip(self.fpn_convs, merged[:-1], strict=True)]
        joined = torch.cat([resize(x, merged[0]) for x in (*refined, top)], 1)
        return self.conv_seg(self.fpn_bottleneck(joined))


def top_down(maps: Sequence[Tensor], enlarge: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """Every map plus the enlarged sum of all coarser ones."""
    merged = [maps[-1]]
    for x in reversed(maps[:-1]):
        merged.insert(0, x + enlarge(merged[0], x))
    return merged


class FPNNeck(nn.Module):
    """A feature pyramid: every map at 256 channels, plus the coarser ones, enlarged without interpolation."""

    def __init__(self, widths: Sequence[int], channels: int = 256) -> None:
        super().__init__()
        plain = {"norm": False, "activation": nn.Identity}
        self.lateral_convs = nn.ModuleList([ConvModule(width, channels, **plain) for width in widths])  # type: ignore[arg-type]
        self.fpn_convs = nn.ModuleList([ConvModule(channels, channels, 3, **plain) for _ in widths])  # type: ignore[arg-type]

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        laterals = [conv(x) for conv, x in zip(self.lateral_convs, maps, strict=True)]
        merged = top_down(laterals, lambda x, like: F.interpolate(x, like.shape[2:], mode="nearest"))
        return [conv(x) for conv, x in zip(self.fpn_convs, merged, strict=True)]


class FPNHead(nn.Module):
    """Panoptic FPN: every map is convolved and doubled until it has the size of the first, and all are added."""

    def __init__(self, levels: int, inputs: int, classes: int, channels: int = 128) -> None:
        super().__init__()
        self.scale_heads = nn.ModuleList([nn.Sequential(ConvModule(inputs, channels, 3))])
        for doublings in range(1, levels):
            steps: list[nn.Module] = []
            for step in range(doublings):
                upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
                steps += [ConvModule(channels if step else inputs, channels, 3), upsample]
            self.scale_heads.append(nn.Sequential(*steps))
        self.conv_seg = nn.Conv2d(channels, classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        total = self.scale_heads[0](maps[0])
        for head, x in zip(self.scale_heads[1:], maps[1:], strict=True):
            total = total + resize(head(x), total)
        return self.conv_seg(total)
