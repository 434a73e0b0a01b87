"""The paper's networks that no library has, by name, each with its task, its preprocessing and its checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from unstride.errors import SpecError
from unstride.models.paper_networks import cifar
from unstride.models.paper_networks.antialiased import antialiased_mobilenet_v2, antialiased_resnet
from unstride.models.paper_networks.segmentation import ARCHITECTURES
from unstride.views.images import Preprocess


@dataclass(frozen=True)
class PaperNetwork:
    """One network. `build(classes)` gives it random weights; `checkpoint` says where trained ones are published.

    Args:
        keys: whose key names the checkpoint has: chenyaofo, akamaster, mmsegmentation or antialiased-cnns.
    """

    name: str
    build: Callable[[int], nn.Module]
    classes: int
    task: str
    preprocess: Preprocess
    keys: str
    checkpoint: str


# Mean and standard deviation of the training sets, as the authors of the checkpoints wrote them.
CIFAR10 = Preprocess(32, (32, 32), (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
CIFAR100 = Preprocess(32, (32, 32), (0.5070, 0.4865, 0.4409), (0.2673, 0.2564, 0.2761))
WHOLE = Preprocess(resize=None, crop=None)  # ImageNet's mean and standard deviation; Cityscapes has one size
ADE20K = Preprocess(resize=512, crop=None)
IMAGENET = Preprocess(resize=256, crop=(224, 224))
CIFAR_AS_IMAGENET = Preprocess(resize=32, crop=(32, 32))  # with ImageNet's mean and standard deviation


def _cifar() -> list[PaperNetwork]:
    builders: dict[str, Callable[[int], nn.Module]] = {}
    for depth in (20, 32, 44, 56):
        builders[f"resnet{depth}"] = partial(cifar.CifarResNet, depth)
    for depth in (11, 13, 16, 19):
        builders[f"vgg{depth}-bn"] = partial(cifar.CifarVGG, depth)
    for width in (0.5, 0.75, 1.0, 1.4):
        builders[f"mobilenetv2-x{_dashed(width)}"] = partial(cifar.cifar_mobilenetv2, width)
    for width in (0.5, 1.0, 1.5, 2.0):
        builders[f"shufflenetv2-x{_dashed(width)}"] = partial(cifar.cifar_shufflenetv2, width)
    for size, widths in cifar.REPVGG_WIDTHS.items():
        builders[f"repvgg-{size}"] = partial(cifar.CifarRepVGG, widths)
    networks = []
    for data, classes, preprocess in (("cifar10", 10, CIFAR10), ("cifar100", 100, CIFAR100)):
        for name, build in builders.items():
            file = f"{data}_{name.replace('-', '_')}"
            checkpoint = f"{file} in the releases of github.com/chenyaofo/pytorch-cifar-models"
            networks.append(
                PaperNetwork(f"{data}-{name}", build, classes, "classification", preprocess, "chenyaofo", checkpoint)
            )
    return networks


def _dashed(width: float) -> str:
    """0.5 as in the names of the checkpoints: 0-5."""
    return str(width).replace(".", "-")


def _option_a() -> list[PaperNetwork]:
    """He et al.'s own shortcut. The paper used the projections above; these have public weights with a licence."""
    return [
        PaperNetwork(
            f"cifar10-resnet{depth}-option-a",
            partial(cifar.CifarResNet, depth, padded_shortcut=True),
            10,
            "classification",
            CIFAR_AS_IMAGENET,
            "akamaster",
            f"resnet{depth} of github.com/akamaster/pytorch_resnet_cifar10",
        )
        for depth in (20, 32, 44, 56)
    ]


# Table 6: FCN, "DeepLab" and SegFormer on both data sets. Its numbers for DeepLab are those of DeepLabV3+.
BOTH = (
    "fcn-r50-d8",
    "fcn-m-v2-d8",
    "deeplabv3-r50-d8",
    "deeplabv3-m-v2-d8",
    "deeplabv3plus-r50-d8",
    "deeplabv3plus-m-v2-d8",
    "segformer-mit-b0",
)
ONLY_CITYSCAPES = ("lraspp-m-v3-d8", "fcn-unet-s5-d16")
ONLY_ADE20K = ("upernet-swin-t", "upernet-twins-pcpvt-s", "fpn-twins-pcpvt-s")


def _segmentation() -> list[PaperNetwork]:
    networks = []
    for data, classes, preprocess, names in (
        ("cityscapes", 19, WHOLE, BOTH + ONLY_CITYSCAPES),
        ("ade20k", 150, ADE20K, BOTH + ONLY_ADE20K),
    ):
        for name in names:
            networks.append(
                PaperNetwork(
                    f"{data}-{name}",
                    ARCHITECTURES[name],
                    classes,
                    "segmentation",
                    preprocess,
                    "mmsegmentation",
                    f"{name} for {data} in the model zoo of github.com/open-mmlab/mmsegmentation",
                )
            )
    return networks


def _antialiased() -> list[PaperNetwork]:
    """The paper prints "MobileNetV2-050"; its accuracy, 72.72, is that of the published network of width 1.0."""
    resnets = ("resnet18", "resnet34", "resnet50", "wide_resnet50_2")
    builders: dict[str, Callable[[int], nn.Module]] = {n: partial(antialiased_resnet, n) for n in resnets}
    builders["mobilenet_v2"] = antialiased_mobilenet_v2
    return [
        PaperNetwork(
            f"antialiased-{name.replace('_', '-')}",
            build,
            1000,
            "classification",
            IMAGENET,
            "antialiased-cnns",
            f"{name} with filter_size=4 of github.com/adobe/antialiased-cnns",
        )
        for name, build in builders.items()
    ]


NETWORKS = {n.name: n for n in (*_cifar(), *_option_a(), *_segmentation(), *_antialiased())}


def names() -> tuple[str, ...]:
    """All names, in the order of the paper's appendix."""
    return tuple(NETWORKS)


def get(name: str) -> PaperNetwork:
    """The network of that name; underscores are taken for dashes, so that `cifar10_resnet20` is a name, too."""
    dashed = name.lower().replace("_", "-")
    if dashed not in NETWORKS:
        near = difflib.get_close_matches(dashed, NETWORKS, n=5, cutoff=0.5)
        raise SpecError(
            f"the paper has no network {name!r} that a library lacks"
            + (f"; did you mean {', '.join(near)}?" if near else f"; there are {', '.join(NETWORKS)}")
        )
    return NETWORKS[dashed]


def paper_network(name: str, classes: int | None = None) -> nn.Module:
    """A network of the paper with random weights, in eval mode. `paper_network("cifar10-resnet20")`."""
    network = get(name)
    return network.build(network.classes if classes is None else classes).eval()
