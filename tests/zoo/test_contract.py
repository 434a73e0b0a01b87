"""All invariants on families that differ: a line or two each says what to build."""

import pytest
import timm
import torchvision
from contract import Contract
from procedure_nets import SmallNet, SmallSegmenter, seeded
from torch import nn


class TestSmallNet(Contract):
    layers = 4

    def build(self) -> nn.Module:
        return seeded(SmallNet())


class TestSmallSegmenter(Contract):
    size, task, layers = (48, 64), "segmentation", 3

    def build(self) -> nn.Module:
        return seeded(SmallSegmenter())


class TestResNet18(Contract):
    layers = 5

    def build(self) -> nn.Module:
        return torchvision.models.resnet18(num_classes=5)


@pytest.mark.slow
class TestMobileNetV3(Contract):
    layers = 5

    def build(self) -> nn.Module:
        return torchvision.models.mobilenet_v3_small(num_classes=5)


@pytest.mark.slow
class TestShuffleNet(Contract):
    layers = 5

    def build(self) -> nn.Module:
        return torchvision.models.shufflenet_v2_x0_5(num_classes=5)


@pytest.mark.slow
class TestConvNeXt(Contract):
    layers = 4

    def build(self) -> nn.Module:
        return timm.create_model("convnext_atto", num_classes=5)


@pytest.mark.slow
class TestSwin(Contract):
    layers = 4

    def build(self) -> nn.Module:
        return torchvision.models.swin_transformer.SwinTransformer(
            [4, 4], 24, [2, 2, 2, 2], [3, 6, 12, 24], [4, 4], num_classes=5
        )


@pytest.mark.slow
class TestVisionTransformer(Contract):
    layers = 1

    def build(self) -> nn.Module:
        return timm.create_model("vit_tiny_patch16_224", img_size=64, num_classes=5, depth=2)


@pytest.mark.slow
class TestLRASPP(Contract):
    size, task = (64, 96), "segmentation"

    def build(self) -> nn.Module:
        return torchvision.models.segmentation.lraspp_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=5
        )
