"""The anti-aliased networks of the paper's appendix (Zhang, ICML 2019), with the key names of adobe/antialiased-cnns.

They are torchvision's networks in which a strided operation becomes the same operation at stride 1 and a blur pool.
The first convolution keeps its stride, as in the published weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn


class BlurPool(nn.Module):
    """A binomial filter of 4x4 at stride 2, one and the same for all channels, over reflected edges."""

    filt: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        row = torch.tensor([1.0, 3.0, 3.0, 1.0])
        kernel = torch.outer(row, row) / row.sum() ** 2
        self.register_buffer("filt", kernel.expand(channels, 1, 4, 4).contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 2, 1, 2), mode="reflect"), self.filt, stride=2, groups=self.filt.shape[0])


def antialiased_resnet(name: str, classes: int) -> nn.Module:
    """torchvision's resnet18, resnet34, resnet50 or wide_resnet50_2, anti-aliased after its first convolution."""
    model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    model.maxpool = nn.Sequential(nn.MaxPool2d(2, stride=1), BlurPool(64))
    for stage in (model.layer2, model.layer3, model.layer4):
        block = stage[0]
        strided, following = ("conv2", "conv3") if hasattr(block, "conv3") else ("conv1", "conv2")
        getattr(block, strided).stride = (1, 1)
        convolution = getattr(block, following)
        setattr(block, following, nn.Sequential(BlurPool(convolution.in_channels), convolution))
        projection, norm = block.downsample
        projection.stride = (1, 1)
        block.downsample = nn.Sequential(BlurPool(projection.in_channels), projection, norm)
    return model


def antialiased_mobilenet_v2(classes: int) -> nn.Module:
    """torchvision's mobilenet_v2, anti-aliased after its first convolution."""
    model = torchvision.models.mobilenet_v2(weights=None, num_classes=classes)
    for block in model.features[1:-1]:
        depthwise = block.conv[-3][0]
        if depthwise.stride == (2, 2):
            depthwise.stride = (1, 1)
            block.conv.insert(len(block.conv) - 2, BlurPool(depthwise.out_channels))
    model.classifier = nn.Sequential(model.classifier[-1])  # no dropout: the key is classifier.0
    return model
