"""Small networks and the images they are shown, all from fixed seeds. Nothing here comes from unstride."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

REFERENCE = {"seed": 99, "count": 16, "size": 64, "margin": 0}  # images on which the heads are scaled


def images(seed: int, count: int, size: int, margin: int) -> Tensor:
    """(count, 3, side, side) with side = size + 2 margin: coarse and fine noise of different contrast."""
    generator = torch.Generator().manual_seed(seed)
    side = size + 2 * margin
    coarse = torch.randn(count, 3, math.ceil(side / 8), math.ceil(side / 8), generator=generator)
    fine = torch.randn(count, 3, side, side, generator=generator)
    contrast = torch.linspace(0.6, 1.4, count).view(-1, 1, 1, 1)
    return contrast * F.interpolate(coarse, (side, side), mode="bilinear", align_corners=False) + 0.3 * fine


def attention(seed: int, channels: int) -> dict[str, Tensor]:
    """Weights of the learned aggregation: a query, a key and an output weight for each channel."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "query": torch.randn(channels, generator=generator) * 2 / channels**0.5,
        "key": torch.randn(channels, generator=generator) * 2 / channels**0.5,
        "query_bias": torch.randn(1, generator=generator) * 0.1,
        "key_bias": torch.randn(1, generator=generator) * 0.1,
        "out": torch.randn(channels, generator=generator) * 0.5,
    }


class Strided(nn.Module):
    """Four strided convolutions, a mean over the map, and a linear head, or none."""

    def __init__(self, outputs: int | None) -> None:
        super().__init__()
        widths = [3, 8, 12, 16, 24]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths))
        self.head = nn.Identity() if outputs is None else nn.Linear(24, outputs)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem of 7x7, max-pooling, four blocks: five subsampling layers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 12, 2), Block(12, 16, 2), Block(16, 24, 2))
        self.head = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(F.relu(self.bn(self.stem(x)))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Same(nn.Module):
    """A strided convolution padded as TensorFlow's "same" does it: more at the far end."""

    def __init__(self, before: int, after: int, kernel: int, groups: int = 1) -> None:
        super().__init__()
        self.kernel = kernel
        self.conv, self.bn = nn.Conv2d(before, after, kernel, 2, groups=groups, bias=False), nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        pads = [max((-(-side // 2) - 1) * 2 + self.kernel - side, 0) for side in x.shape[:1:-1]]
        x = F.pad(x, [end for pad in pads for end in (pad // 2, pad - pad // 2)])
        return F.hardswish(self.bn(self.conv(x)))


class Mobile(nn.Module):
    """Depthwise convolutions with asymmetric padding, a squeeze-and-excitation gate."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = Same(3, 8, 3)
        self.deep = nn.ModuleList([Same(8, 8, 3, 8), Same(12, 12, 5, 12), Same(16, 16, 3, 16)])
        self.wide = nn.ModuleList([nn.Conv2d(8, 12, 1), nn.Conv2d(12, 16, 1), nn.Conv2d(16, 24, 1)])
        self.gate, self.head = nn.Conv2d(24, 24, 1), nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for deep, wide in zip(self.deep, self.wide, strict=True):
            x = wide(deep(x))
        x = F.hardswish(x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid())
        return self.head(x.mean((2, 3)))


class Mixer(nn.Module):
    """One transformer block without biases of position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, t: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(t)).chunk(3, -1)
        t = t + self.out(F.scaled_dot_product_attention(q, k, v))
        return t + self.mlp(self.norm2(t))


class Patches(nn.Module):
    """Patches of 8x8 pixels, two transformer blocks; the mean of the tokens is classified, or a class token."""

    def __init__(self, classes: int, token: bool) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, 16)) if token else None
        self.blocks, self.norm = nn.Sequential(Mixer(16), Mixer(16)), nn.LayerNorm(16)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patch(x).flatten(2).transpose(1, 2)
        if self.token is not None:
            t = torch.cat([self.token.expand(len(t), -1, -1), t], 1)
        t = self.norm(self.blocks(t))
        return self.head(t.mean(1) if self.token is None else t[:, 0])


class Segmenter(nn.Module):
    """An encoder of stride 8, logit maps from its last and its last but one map, upsampled to the image.

    It takes sizes that are a multiple of `step`.
    """

    def __init__(self, classes: int, step: int = 1) -> None:
        super().__init__()
        self.step = step
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1), nn.Conv2d(12, 16, 3, 2, 1)
        self.head, self.side = nn.Conv2d(16, classes, 1), nn.Conv2d(12, classes, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if x.shape[2] % self.step or x.shape[3] % self.step:
            raise ValueError(f"{tuple(x.shape)} is no multiple of {self.step}")
        b = F.relu(self.b(F.relu(self.a(x))))
        out, aux = self.head(F.relu(self.c(b))), self.side(b)
        size = x.shape[2:]
        return {
            "out": F.interpolate(out, size, mode="bilinear", align_corners=False),
            "aux": F.interpolate(aux, size, mode="bilinear", align_corners=False),
        }


class Depth(nn.Module):
    """Two steps down, two up with skips, one positive number at each pixel: (B, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.up, self.head = nn.Conv2d(16, 8, 3, 1, 1), nn.Conv2d(16, 1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.relu(self.b(a))
        y = F.interpolate(F.relu(self.c(b)), scale_factor=2.0)
        y = F.relu(self.up(torch.cat([y, b], 1)))
        y = F.interpolate(y, scale_factor=2.0)
        return F.softplus(self.head(torch.cat([y, a], 1))[:, 0])


class Pyramid(nn.Module):
    """Maps of stride 4 and 8."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 6, 3, 2, 1), nn.Conv2d(6, 8, 3, 2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        b = F.relu(self.b(F.relu(self.a(x))))
        return [b, self.c(b)]


def weighted(model: nn.Module, seed: int) -> nn.Module:
    """The model with random weights that keep the scale of the values from layer to layer."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            scale = (1.5 / p[0].numel()) ** 0.5 if p.ndim > 1 else 0.1
            p.data = torch.randn(p.shape, generator=generator) * scale
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm) and name == "weight":
                p.data += 1.0
        if isinstance(module, nn.BatchNorm2d):
            channels = module.num_features
            module.running_mean = torch.randn(channels, generator=generator) * 0.1
            module.running_var = torch.rand(channels, generator=generator) + 0.5
    return model.eval().requires_grad_(False)


def spread(model: nn.Module, heads: dict[str, nn.Module], scale: float) -> nn.Module:
    """The heads scaled so that each output has mean 0 and deviation `scale` over images: confidence then varies."""
    for name, head in heads.items():
        output = model(images(**REFERENCE))
        output = output if isinstance(output, Tensor) else output[name]
        values = output.movedim(1, 0).flatten(1)
        factor = scale / values.std(1)
        head.weight.data *= factor.view(-1, *[1] * (head.weight.ndim - 1))  # type: ignore[operator]
        head.bias.data = (head.bias.data - values.mean(1)) * factor  # type: ignore[operator]
    return model


def strided(outputs: int | None, seed: int, scale: float = 1.5) -> nn.Module:
    model = weighted(Strided(outputs), seed)
    return model if outputs is None else spread(model, {"": model.head}, scale)  # type: ignore[dict-item]


def headed(model: nn.Module, seed: int, scale: float = 1.5) -> nn.Module:
    model = weighted(model, seed)
    return spread(model, {"": model.head}, scale)  # type: ignore[dict-item]


def segmenter(step: int = 1) -> nn.Module:
    model = weighted(Segmenter(4, step), 5)
    return spread(model, {"out": model.head, "aux": model.side}, 2.0)  # type: ignore[dict-item]


NETWORKS: dict[str, Callable[[], Any]] = {
    "strided": lambda: strided(6, 0),
    "strided-one": lambda: strided(1, 1),
    "strided-labels": lambda: strided(5, 2),
    "strided-numbers": lambda: strided(3, 3),
    "strided-vector": lambda: strided(None, 4),
    "resnet": lambda: headed(ResNet(6), 1),
    "mobile": lambda: headed(Mobile(6), 2),
    "patches": lambda: headed(Patches(6, token=False), 3),
    "patches-token": lambda: headed(Patches(6, token=True), 4),
    "segmenter": segmenter,
    "segmenter-32": lambda: segmenter(32),
    "depth": lambda: weighted(Depth(), 6),
    "pyramid": lambda: weighted(Pyramid(), 7),
}


def build(name: str) -> nn.Module:
    with torch.no_grad():
        model: nn.Module = NETWORKS[name]()
    return model
