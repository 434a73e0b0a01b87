"""The figures: curves against the budget, criterion against accuracy. They print no numbers, so all are ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unstride.paper.exhibits import Cell, Exhibit, Run
from unstride.paper.numbers import FOUR, SEGMENTATION_MODELS

BUDGETS = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
TIMM = ("MobileNetV3", "MViTv2", "DenseNet", "VGG", "RepVGG", "DeiT", "CoaT", "ConvNeXtV2", "XCiT", "VOLO", "PvTV2",
        "Efficientformer")  # fmt: skip
CIFAR = (
    *(f"ResNet{n}" for n in (20, 32, 44, 56)),
    *(f"VGG{n}-BN" for n in (11, 13, 16, 19)),
    *(f"MobileNetV2-{w}" for w in ("x0.5", "x0.75", "x1.0", "x1.4")),
    *(f"ShuffleNetV2-{w}" for w in ("x0.5", "x1.0", "x1.5", "x2.0")),
    *(f"RepVGG-{n}" for n in ("A0", "A1", "A2")),
)
SEGMENTATION_MORE = (
    *SEGMENTATION_MODELS, "MobileNetV3-LRASPP", "UNet", "Swin-UperNet", "Twins-UperNet",
)  # fmt: skip
STATES = "every state"  # the column of a scatter: one point per state
_TITLES = {"cityscapes": "Cityscapes", "ade20k": "ADE20K"}


def _curves(name: str, where: str, title: str, data: str, models: Iterable[str], learned: bool) -> Exhibit:
    cells = [
        Cell((model,), str(b), Run(model, data, b, learned and b > 1), "top1") for model in models for b in BUDGETS
    ]
    return Exhibit(name, where, title, ("model",), tuple(cells), shape="lines", x="states, B_ours")


def _segmentation(name: str, where: str, data: str, models: Sequence[str]) -> Exhibit:
    """mIoU, aAcc and mAcc against B_total; that of a flipped pair is twice the budget."""
    cells = []
    for model in models:
        for flip in (False, True):
            for b in (1, 2, 4, 6, 8, 10):
                views = {"views": 2, "policy": "flip", "method": "mean"} if flip else {}
                run = Run(model, data, b, **views)  # type: ignore[arg-type]
                row = f"{model}{' + flip' * flip}"
                for measure, title in (("miou", "mIoU %"), ("aacc", "aAcc %"), ("macc", "mAcc %")):
                    cells.append(Cell((row, title), str(b * (1 + flip)), run, measure))
    title = f"More results on {_TITLES[data]}"
    return Exhibit(name, where, title, ("model", "measure"), tuple(cells), shape="lines", x="B_total")


FIGURES = (
    _curves("budget", "Figure 'Acc. vs. budget'", "Accuracy against budget, ImageNet", "imagenet", FOUR, True),
    Exhibit(
        "criterion",
        "Figure 'Criterion vs. accuracy'",
        "Criterion of a state against its accuracy alone, ResNet18 on ImageNet",
        ("criterion",),
        (
            Cell(("learned",), STATES, Run("ResNet18", "imagenet", 64, True), "top1"),
            Cell(("entropy",), STATES, Run("ResNet18", "imagenet", 64), "top1"),
        ),
        shape="scatter",
        x="mean criterion of the state (lower is searched first)",
    ),
    _curves("cifar10", "Figure A1", "CIFAR-10, accuracy against budget", "cifar10", CIFAR, False),
    _curves("cifar100", "Figure A2", "CIFAR-100, accuracy against budget", "cifar100", CIFAR, False),
    _curves("imagenet-more", "Figure A3", "More ImageNet networks, accuracy against budget", "imagenet", TIMM, False),
    _segmentation("cityscapes-more", "Figure A4", "cityscapes", SEGMENTATION_MORE),
    _segmentation("ade20k-more", "Figure A5", "ade20k", SEGMENTATION_MORE),
)
