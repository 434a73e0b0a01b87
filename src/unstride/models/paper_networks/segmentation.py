"""The segmentation networks of the paper's tables and figures, as mmsegmentation builds them.

Twins-PCPVT-S is here with both decoders that mmsegmentation publishes: the paper does not say which one it used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from unstride.models.paper_networks.attention import MixTransformer, TwinsPCPVT
from unstride.models.paper_networks.backbones import MobileNetV2, MobileNetV3, UNet, resnet50c
from unstride.models.paper_networks.heads import (
    DeepLabV3Head,
    DeepLabV3PlusHead,
    FCNHead,
    FPNHead,
    FPNNeck,
    LRASPPHead,
    SegFormerHead,
    UPerHead,
)
from unstride.models.paper_networks.swin import SwinTransformer

TWINS_WIDTHS = (64, 128, 320, 512)


class Segmenter(nn.Module):
    """A backbone, a neck where there is one, and a decoder; logits at the size of the image."""

    def __init__(self, backbone: nn.Module, decode_head: nn.Module, neck: nn.Module | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        self.neck = neck
        self.decode_head = decode_head

    def forward(self, image: Tensor) -> Tensor:
        maps: Sequence[Tensor] = self.backbone(image)
        if self.neck is not None:
            maps = self.neck(maps)
        return F.interpolate(self.decode_head(maps), image.shape[2:], mode="bilinear", align_corners=False)


ARCHITECTURES: dict[str, Callable[[int], Segmenter]] = {
    "fcn-r50-d8": lambda k: Segmenter(resnet50c(), FCNHead(2048, 512, k)),
    "fcn-m-v2-d8": lambda k: Segmenter(MobileNetV2(), FCNHead(320, 512, k)),
    "deeplabv3-r50-d8": lambda k: Segmenter(resnet50c(), DeepLabV3Head(2048, k)),
    "deeplabv3-m-v2-d8": lambda k: Segmenter(MobileNetV2(), DeepLabV3Head(320, k)),
    "deeplabv3plus-r50-d8": lambda k: Segmenter(resnet50c(), DeepLabV3PlusHead(2048, 256, k)),
    "deeplabv3plus-m-v2-d8": lambda k: Segmenter(MobileNetV2(), DeepLabV3PlusHead(320, 24, k)),
    "segformer-mit-b0": lambda k: Segmenter(MixTransformer(), SegFormerHead((32, 64, 160, 256), k)),
    "lraspp-m-v3-d8": lambda k: Segmenter(MobileNetV3(), LRASPPHead((16, 24, 960), k)),
    "fcn-unet-s5-d16": lambda k: Segmenter(UNet(), FCNHead(64, 64, k, convolutions=1)),
    "upernet-swin-t": lambda k: Segmenter(SwinTransformer(), UPerHead((96, 192, 384, 768), k)),
    "upernet-twins-pcpvt-s": lambda k: Segmenter(TwinsPCPVT(), UPerHead(TWINS_WIDTHS, k)),
    "fpn-twins-pcpvt-s": lambda k: Segmenter(TwinsPCPVT(), FPNHead(4, 256, k), FPNNeck(TWINS_WIDTHS)),
}
