"""Real third-party networks for measuring, and their labelled images: architectures whose weights no registry has.

`--assets DIR` names a folder with the weights and images; nothing of it belongs to this project.
"""

from __future__ import annotations

import csv
import io
import zipfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from unstride import data, models
from unstride.data import Dataset
from unstride.models import LoadedModel
from unstride.views.images import Preprocess

ROOT = Path(__file__).parent.parent
IMAGENET_NAMES = ("mobilenetv2", "lite0", "lite1", "lite2", "resnet50")
CIFAR_NAMES = ("resnet20", "resnet56")
SIDES = {"lite1": 240, "lite2": 256}  # pixels that a network sees of 256, where it is not 224
HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
CIFAR = Preprocess(resize=None, crop=None)  # ImageNet's mean and std


class OptionA(nn.Module):
    """The parameter-free shortcut of He et al. for CIFAR: every second pixel, zero channels on both sides."""

    def __init__(self, extra: int) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))


class CifarBlock(nn.Module):
    def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide_out)
        self.conv2 = nn.Conv2d(wide_out, wide_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(wide_out)
        self.shortcut = OptionA((wide_out - wide_in) // 2) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


class CifarResNet(nn.Module):
    """ResNet-20/56 of He et al.: 16-channel stem, three stages of `n` blocks."""

    def __init__(self, n: int, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        stages = []
        for wide_in, wide_out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            blocks = [CifarBlock(wide_in, wide_out, stride)] + [CifarBlock(wide_out, wide_out, 1) for _ in range(n - 1)]
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(F.avg_pool2d(x, x.shape[3]).flatten(1))


class DeepLabVOC(nn.Module):
    """DeepLabV3 with MobileNetV2 at output stride 8, 21 classes, a head of 1x1 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        import torchvision

        features = torchvision.models.mobilenet_v2(weights=None).features[:18]
        for i in range(7, 18):
            dilation = 1 if i == 7 else (2 if i < 15 else 4)
            for m in features[i].modules():
                if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3):
                    m.stride = (1, 1) if i in (7, 14) else m.stride
                    m.dilation, m.padding = (dilation, dilation), (dilation, dilation)
        self.backbone = features
        self.pool = nn.Conv2d(320, 256, 1)
        self.aspp0 = nn.Conv2d(320, 256, 1)
        self.proj = nn.Conv2d(512, 256, 1)
        self.cls = nn.Conv2d(256, 21, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.backbone(x)
        g = F.relu(self.pool(h.mean((2, 3), keepdim=True))).expand(-1, -1, h.shape[2], h.shape[3])
        y = self.cls(F.relu(self.proj(torch.cat([g, F.relu(self.aspp0(h))], 1))))
        return F.interpolate(y, x.shape[2:], mode="bilinear", align_corners=True)


class CaffeResNet50(nn.Module):
    """ResNet-50 as in caffe: each stage strides in its first 1x1 convolution, batch norms have a larger eps, BGR."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        import torchvision

        net = torchvision.models.resnet50(weights=None)
        for stage in (net.layer2, net.layer3, net.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
        for m in net.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eps = 1e-3
        net.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in weights.items()}, strict=False)
        with torch.no_grad():  # BGR in the first weights, so that images stay RGB
            net.conv1.weight.copy_(net.conv1.weight.flip(1))
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# ---------------------------------------------------------------- networks
def loaded(assets: Path, name: str) -> LoadedModel:
    """A network of `IMAGENET_NAMES` or `CIFAR_NAMES`, with the preprocessing that the images here need."""
    if name in CIFAR_NAMES:
        model: nn.Module = CifarResNet({"resnet20": 3, "resnet56": 9}[name])
        model.load_state_dict(load_file(assets / "cifar10" / f"{name}.safetensors"))
        return LoadedModel(name, quick(model), CIFAR, "classification")
    prepared = Preprocess(resize=256, crop=SIDES.get(name, 224), interpolation="bicubic", **HALF)
    if name == "resnet50":
        model = CaffeResNet50(load_file(assets / "imagenet" / "resnet50_caffe_fp16.safetensors"))
        caffe = {"mean": (123.68 / 255, 116.779 / 255, 103.939 / 255), "std": (1 / 255,) * 3}
        prepared = replace(prepared, **caffe)
    elif name == "mobilenetv2":
        import timm

        model = timm.create_model("mobilenetv2_100", pad_type="same")
        model.load_state_dict(load_file(assets / "imagenet" / "mobilenetv2_100_same.safetensors"))
    else:
        model = models.load(f"efficientnet-{name}").model
    return LoadedModel(name, quick(model), prepared, "classification")


def quick(model: nn.Module) -> nn.Module:
    """In the memory format in which CPUs run convolutions fastest."""
    return model.eval().to(memory_format=torch.channels_last)


# ---------------------------------------------------------------- images
def imagenet(assets: Path, build: Path = ROOT / "build", train: bool = False) -> Dataset:
    """2,000 validation images, two of each class; or 500 of the training split. Unpacked below `build` once."""
    zips = ("train_500_256.zip",) if train else ("val_1k_256.zip", "val_1k_b_256.zip")
    table = build / "imagenet" / ("train.csv" if train else "validation.csv")
    if not table.exists():
        rows = [row for name in zips for row in _unpacked(assets / "imagenet" / name, table.parent)]
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("path", "label"), *rows])
    return data.load(f"csv:{table}", Preprocess(resize=256, crop=224), classes=1000)


def _unpacked(path: Path, folder: Path) -> list[tuple[str, int]]:
    """(path below the folder, label) of each image of a zip with labels.csv."""
    with zipfile.ZipFile(path) as archive:
        table = next(name for name in archive.namelist() if name.endswith("labels.csv"))
        prefix = table[: -len("labels.csv")]
        rows = [row for row in csv.reader(io.TextIOWrapper(archive.open(table))) if row[1].isdigit()]
        for file, _ in rows:
            target = folder / path.stem / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(prefix + file))
    return [(f"{path.stem}/{file}", int(label)) for file, label in rows]


def cifar(assets: Path, train: bool = False) -> Dataset:
    """5,000 test images of CIFAR-10, or 5,000 training images."""
    name = "train_5k.npz" if train else "test_even.npz"
    return data.load(f"npz:{assets / 'cifar10' / name}", CIFAR, classes=10)


def images_of(assets: Path, name: str, train: bool = False) -> Dataset:
    """The labelled images of a network."""
    return cifar(assets, train) if name in CIFAR_NAMES else imagenet(assets, train=train)


def some(dataset: Dataset, chosen: list[int]) -> Dataset:
    """Some items of a data set, by their number."""
    return replace(dataset, chosen=[dataset.chosen[i] for i in chosen])


def spread(dataset: Dataset, count: int | None) -> Dataset:
    """At most so many items, evenly spread."""
    if count is None or count >= len(dataset):
        return dataset
    return some(dataset, [i * len(dataset) // count for i in range(count)])


def halves(dataset: Dataset, seed: int) -> tuple[list[int], list[int]]:
    """Two random halves: the numbers of their items, in order."""
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
    middle = len(order) // 2
    return sorted(order[:middle]), sorted(order[middle:])
