"""Real third-party networks for measuring: architectures whose weights are not on any registry, and how to load them.

`--assets DIR` names a folder with the weights and labelled images; nothing of it belongs to this project.
"""

import csv
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from unstride.tasks.temperature import fit_temperature, nll
from unstride.views.source import Canvas

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CAFFE = ((123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255,) * 3)  # the network turns RGB into BGR


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


@dataclass(frozen=True, eq=False)
class Bench:
    """A network with labelled images to test on and others to fit on, already preprocessed."""

    name: str
    model: nn.Module
    test: tuple[Tensor, Tensor]
    fit: tuple[Tensor, Tensor]


def cifar(assets: Path, depth: int) -> Bench:
    model = CifarResNet({20: 3, 56: 9}[depth])
    model.load_state_dict(load_file(assets / "cifar10" / f"resnet{depth}.safetensors"))
    test, fit = (_npz(assets / "cifar10" / name) for name in ("test_even.npz", "train_5k.npz"))
    return Bench(f"CIFAR-10 ResNet-{depth}", model.eval(), test, fit)


def _npz(path: Path) -> tuple[Tensor, Tensor]:
    with np.load(path, allow_pickle=False) as data:
        return normalise(torch.from_numpy(data["x"]).permute(0, 3, 1, 2), IMAGENET), torch.from_numpy(data["y"]).long()


def normalise(x: Tensor, stats: tuple[tuple[float, ...], tuple[float, ...]]) -> Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in stats)
    return (x.float() / 255 - mean) / std


def imagenet(assets: Path, name: str, limit: int | None = None, side: int = 224) -> Bench:
    """`side`: of the centre that is kept of 256 px; views that crop need the margin. All 2,000 test images, or some."""
    import timm

    stats = HALF
    if name == "resnet50":
        model, title = (
            CaffeResNet50(load_file(assets / "imagenet" / "resnet50_caffe_fp16.safetensors")),
            "ImageNet ResNet-50",
        )
        stats = CAFFE
    elif name == "mobilenetv2":
        model = timm.create_model("mobilenetv2_100", pad_type="same")
        model.load_state_dict(load_file(assets / "imagenet" / "mobilenetv2_100_same.safetensors"))
        title = "ImageNet MobileNetV2"
    else:
        from unstride import models

        model, title = models.load(name).model, f"ImageNet {name}"
    each = None if limit is None else -(-limit // 2)
    both = [zipped(assets / "imagenet" / z, stats, each, side) for z in ("val_1k_256.zip", "val_1k_b_256.zip")]
    test = torch.cat([x for x, _ in both])[:limit], torch.cat([y for _, y in both])[:limit]
    fit = zipped(assets / "imagenet" / "train_500_256.zip", stats, limit, side)
    return Bench(title, model.eval(), test, fit)


@dataclass(frozen=True, eq=False)
class Real:
    """A network with labelled images as canvases (B, C, 256, 256), of which it sees the centre."""

    name: str
    model: nn.Module
    batches: list[tuple[Canvas, Tensor]]


# lite0 and lite1 are in wheels on PyPI; lite1 is held out: nothing in this project was decided by looking at it
THIRD = ("resnet50", "efficientnet-lite0", "efficientnet-lite1", "mobilenetv2", "cifar56", "cifar20")
REAL = (*THIRD, "garments", "garments-unmoved")
SIDES = {"efficientnet-lite1": 240}  # what a network sees of 256 px, where it is not 224


def real(assets: Path, name: str, limit: int | None = None) -> Real:
    """`real(assets, "resnet50")`: with all the images there are (CIFAR 5,000, ImageNet 2,000), or some of them."""
    if name.startswith("garments"):
        return _garments(name == "garments-unmoved", limit)
    if name.startswith("cifar"):
        bench = cifar(assets, int(name[5:]))
        x, y = (t[:: max(1, len(t) // limit)][:limit] if limit else t for t in bench.test)
        return Real(bench.name, bench.model, _canvases(x, y, None))
    folder = assets / "imagenet"
    both = [zipped(folder / z, ((0.0,) * 3, (1.0,) * 3), None, 256) for z in ("val_1k_256.zip", "val_1k_b_256.zip")]
    x, y = torch.cat([b[0] for b in both]), torch.cat([b[1] for b in both])
    x, y = (t[:: max(1, len(t) // limit)][:limit] if limit else t for t in (x, y))
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (CAFFE if name == "resnet50" else HALF))
    bench = imagenet(assets, name, 1)
    return Real(bench.name, bench.model, _canvases((x - mean) / std, y, SIDES.get(name, 224)))


def _garments(unmoved: bool, limit: int | None) -> Real:
    """The embedded classifier; or one like it that was trained for two epochs and never saw a moved garment."""
    from unstride import sample

    images, labels = sample.classification_sample(limit)
    batches = _canvases(sample.preprocess_classification(images), torch.from_numpy(labels), None)
    if not unmoved:
        return Real("Embedded garments", sample.load_classifier(), batches)
    from unstride.sample.data import load_fashion_mnist  # needs Debian's dataset-fashion-mnist
    from unstride.sample.nets import Classifier

    data = load_fashion_mnist()
    torch.manual_seed(1)
    model = Classifier()
    steps = torch.randperm(len(data.train_images))[:40000].repeat(2).split(100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=len(steps))
    for chosen in steps:
        x = sample.preprocess_classification(data.train_images[chosen.numpy()])
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.from_numpy(data.train_labels[chosen.numpy()])).backward()
        optimizer.step()
        schedule.step()
    return Real("Garments, trained without augmentation", model.eval(), batches)


def _canvases(x: Tensor, y: Tensor, crop: int | None) -> list[tuple[Canvas, Tensor]]:
    return [(Canvas(x[i : i + 64], crop=crop), y[i : i + 64]) for i in range(0, len(x), 64)]


def zipped(
    path: Path, stats: tuple[tuple[float, ...], tuple[float, ...]], limit: int | None, side: int = 224
) -> tuple[Tensor, Tensor]:
    """Images of a zip with labels.csv (file,label), the centre of 256 px."""
    at = slice((256 - side) // 2, (256 + side) // 2)
    images, labels = [], []
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        table = next(n for n in names if n.endswith("labels.csv"))
        rows = list(csv.reader(io.TextIOWrapper(archive.open(table))))
        rows = [r for r in rows if r[1].isdigit()]
        rows = rows[:: max(1, len(rows) // limit)][:limit] if limit else rows
        prefix = table[: -len("labels.csv")]
        for file, label in rows:
            with archive.open(prefix + file) as f:
                image = Image.open(f).convert("RGB")
                images.append(torch.from_numpy(np.asarray(image)[at, at].copy()).permute(2, 0, 1))
            labels.append(int(label))
    return normalise(torch.stack(images), stats), torch.tensor(labels)


def warm(logits: Tensor, labels: Tensor) -> Tensor:
    """The NLL of each image (N,) after one temperature; every second image's is fitted on the others."""
    out = torch.empty(len(logits), dtype=torch.float64)
    halves = [torch.arange(k, len(logits), 2) for k in (0, 1)]
    for one, other in (halves, halves[::-1]):
        out[other] = nll(logits[other], labels[other], fit_temperature(logits[one], labels[one]))
    return out


def give(page: str, out: Path | None) -> None:
    """Write a page, or print it."""
    if out is None:
        print(page)
    else:
        out.write_text(page, encoding="utf-8")
