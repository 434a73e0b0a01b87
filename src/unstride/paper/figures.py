"""The paper's figures that are measured: curves over the budget, criterion against accuracy. They print no numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from unstride.paper.exhibits import Cell, Exhibit, Run
from unstride.paper.numbers import FOUR, SEGMENTATION_MODELS

BUDGETS = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
TIMM = (
    *("MobileNetV3", "MViTv2", "DenseNet", "VGG", "RepVGG", "DeiT", "CoaT", "ConvNeXtV2", "XCiT", "VOLO", "PvTV2"),
    "Efficientformer",
)
CIFAR = (
    *(f"ResNet{n}" for n in (20, 32, 44, 56)),
    *(f"VGG{n}-BN" for n in (11, 13, 16, 19)),
    *(f"MobileNetV2-{w}" for w in ("x0.5", "x0.75", "x1.0", "x1.4")),
    *(f"ShuffleNetV2-{w}" for w in ("x0.5", "x1.0", "x1.5", "x2.0")),
    *(f"RepVGG-{n}" for n in ("A0", "A1", "A2")),
)
MORE_MODELS = {  # beside the five of Table 6; which data set each has published weights for
    "cityscapes": (*SEGMENTATION_MODELS, "MobileNetV3-LRASPP", "UNet"),
    "ade20k": (*SEGMENTATION_MODELS, "Swin-UperNet", "Twins-UperNet"),
}
STATES = "every state"  # the column of a scatter: one point for each state


def _curves(name: str, where: str, title: str, data: str, models: Iterable[str], learned: bool = False) -> Exhibit:
    cells = [
        Cell((model,), "", str(b), Run(model, data, b, learned and b > 1), "top1") for model in models for b in BUDGETS
    ]
    return Exhibit(name, where, title, ("network",), tuple(cells), shape="lines", x="states, B_ours")


def _segmentation(name: str, where: str, title: str, data: str) -> Exhibit:
    """Three metrics against B_total; that of a flipped pair is twice the budget."""
    cells = []
    for model in MORE_MODELS[data]:
        for flip in (False, True):
            views: dict[str, Any] = {"views": 2, "policy": "flip", "method": "mean"} if flip else {}
            for b in (1, 2, 4, 6, 8, 10):
                run = Run(model, data, b, **views)
                for measure, metric in (("miou", "mIoU %"), ("aacc", "aAcc %"), ("macc", "mAcc %")):
                    cells.append(Cell((f"{model}{' + flip' * flip}", metric), "", str(b * (1 + flip)), run, measure))
    return Exhibit(name, where, title, ("network", "metric"), tuple(cells), shape="lines", x="B_total")


FIGURES = (
    _curves("budget", "Figure 5", "Accuracy over the budget, ImageNet", "imagenet", FOUR, learned=True),
    Exhibit(
        "criterion",
        "Figure 6",
        "Criterion of each state and its accuracy alone, ResNet18 on ImageNet",
        ("criterion",),
        (
            Cell(("learned",), "", STATES, Run("ResNet18", "imagenet", 64, True), "top1"),
            Cell(("entropy",), "", STATES, Run("ResNet18", "imagenet", 64), "top1"),
        ),
        shape="scatter",
        x="mean criterion of the state (lower is searched first)",
    ),
    _curves("cifar10", "Figure A1", "CIFAR-10, accuracy over the budget", "cifar10", CIFAR),
    _curves("cifar100", "Figure A2", "CIFAR-100, accuracy over the budget", "cifar100", CIFAR),
    _curves("imagenet-more", "Figure A3", "More ImageNet networks, accuracy over the budget", "imagenet", TIMM),
    _segmentation("cityscapes-more", "Figure A4", "More results on Cityscapes", "cityscapes"),
    _segmentation("ade20k-more", "Figure A5", "More results on ADE20K", "ade20k"),
)
