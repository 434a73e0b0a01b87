"""The paper's networks once more, by hand: functions that read their tensors from a checkpoint in its public format.

A `Checkpoint` makes a tensor when it is first asked for, so that a forward pass here also writes the file that a
converter must accept: names and shapes are stated twice, here and in `unstride.models.paper_networks`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


class Checkpoint:
    """Random tensors by name; `state` is what a trainer would have saved."""

    def __init__(self, seed: int = 0) -> None:
        self.state: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)

    def tensor(self, name: str, *shape: int, around: float = 0.0, spread: float = 0.1) -> Tensor:
        if name not in self.state:
            self.state[name] = around + spread * torch.randn(shape, generator=self.generator)
        assert self.state[name].shape == shape, name
        return self.state[name]

    def conv(self, x: Tensor, name: str, outputs: int, kernel: int = 1, bias: bool = False, **options: Any) -> Tensor:
        inputs = x.shape[1] // options.get("groups", 1)
        spread = math.sqrt(2 / (inputs * kernel**2))
        weight = self.tensor(f"{name}.weight", outputs, inputs, kernel, kernel, spread=spread)
        return F.conv2d(x, weight, self.tensor(f"{name}.bias", outputs) if bias else None, **options)

    def norm(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        mean, weight, bias = (
            self.tensor(f"{name}.{part}", x.shape[1], around=around)
            for part, around in (("running_mean", 0.0), ("weight", 1.0), ("bias", 0.0))
        )
        variance = self.tensor(f"{name}.running_var", x.shape[1], around=1.0).clamp_(0.5)
        self.state[f"{name}.num_batches_tracked"] = torch.tensor(7)
        return F.batch_norm(x, mean, variance, weight, bias, eps=eps)

    def linear(self, x: Tensor, name: str, outputs: int) -> Tensor:
        weight = self.tensor(f"{name}.weight", outputs, x.shape[-1], spread=1 / math.sqrt(x.shape[-1]))
        return F.linear(x, weight, self.tensor(f"{name}.bias", outputs))

    def module(
        self,
        x: Tensor,
        name: str,
        outputs: int,
        kernel: int = 1,
        activation: Activation = F.relu,
        eps: float = 1e-5,
        same: bool = False,
        **options: Any,
    ) -> Tensor:
        """mmsegmentation's ConvModule with a norm."""
        if same:  # as TensorFlow pads
            stride = options["stride"]
            needed = [max((math.ceil(n / stride) - 1) * stride + kernel - n, 0) for n in x.shape[2:]]
            (top, left), (below, right) = zip(*((n // 2, n - n // 2) for n in needed), strict=True)
            x = F.pad(x, (left, right, top, below))
        else:
            options["padding"] = options.get("dilation", 1) * (kernel // 2)
        return activation(self.norm(self.conv(x, f"{name}.conv", outputs, kernel, **options), f"{name}.bn", eps))

    def biased(self, x: Tensor, name: str, outputs: int, activation: Activation, kernel: int = 1) -> Tensor:
        """mmsegmentation's ConvModule without a norm."""
        return activation(self.conv(x, f"{name}.conv", outputs, kernel, bias=True, padding=kernel // 2))


# ---------------------------------------------------------------------------------------------------- CIFAR


def cifar_resnet(file: Checkpoint, x: Tensor, depth: int, classes: int, option_a: bool = False) -> Tensor:
    x = F.relu(file.norm(file.conv(x, "conv1", 16, 3, padding=1), "bn1"))
    for stage, width in ((1, 16), (2, 32), (3, 64)):
        for block in range((depth - 2) // 6):
            name, stride = f"layer{stage}.{block}", 2 if block == 0 and stage > 1 else 1
            y = F.relu(file.norm(file.conv(x, f"{name}.conv1", width, 3, stride=stride, padding=1), f"{name}.bn1"))
            y = file.norm(file.conv(y, f"{name}.conv2", width, 3, padding=1), f"{name}.bn2")
            if stride == 2 and option_a:
                zeros = torch.zeros_like(y[:, : width // 4])
                x = torch.cat([zeros, x[:, :, ::2, ::2], zeros], 1)
            elif stride == 2:
                x = file.norm(file.conv(x, f"{name}.downsample.0", width, stride=2), f"{name}.downsample.1")
            x = F.relu(x + y)
    return file.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), "linear" if option_a else "fc", classes)


def cifar_vgg(file: Checkpoint, x: Tensor, plan: str, classes: int) -> Tensor:
    """The plan: a width in units of 64 for a convolution, M for a pool."""
    index = 0
    for step in plan:
        if step == "M":
            x, index = F.max_pool2d(x, 2), index + 1
        else:
            x = file.conv(x, f"features.{index}", 64 * int(step), 3, bias=True, padding=1)
            x, index = F.relu(file.norm(x, f"features.{index + 1}")), index + 3
    x = F.relu(file.linear(x.flatten(1), "classifier.0", 512))
    return file.linear(F.relu(file.linear(x, "classifier.3", 512)), "classifier.6", classes)


VGG11, VGG13 = "1M2M44M88M88M", "11M22M44M88M88M"
VGG16, VGG19 = "11M22M444M888M888M", "11M22M4444M8888M8888M"


def cifar_repvgg(file: Checkpoint, x: Tensor, widths: tuple[int, ...], classes: int) -> Tensor:
    def block(x: Tensor, name: str, width: int, stride: int) -> Tensor:
        dense = file.conv(x, f"{name}.rbr_dense.conv", width, 3, stride=stride, padding=1)
        single = file.conv(x, f"{name}.rbr_1x1.conv", width, stride=stride)
        y = file.norm(dense, f"{name}.rbr_dense.bn") + file.norm(single, f"{name}.rbr_1x1.bn")
        if stride == 1 and x.shape[1] == width:
            y = y + file.norm(x, f"{name}.rbr_identity")
        return F.relu(y)

    x = block(x, "stage0", widths[0], 1)
    for stage, blocks in ((1, 2), (2, 4), (3, 14), (4, 1)):
        for index in range(blocks):
            x = block(x, f"stage{stage}.{index}", widths[stage], 2 if stage > 1 and index == 0 else 1)
    return file.linear(x.mean((2, 3)), "linear", classes)


def divisible(value: float) -> int:
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded


def mobilenet_v2(
    file: Checkpoint, x: Tensor, width: float, classes: int, strides: tuple[int, ...], blur: bool = False
) -> Tensor:
    """torchvision's layout: CIFAR's and the anti-aliased one. `strides`: of the stem and the seven stages."""

    def unit(x: Tensor, name: str, outputs: int, kernel: int = 1, **options: Any) -> Tensor:
        y = file.conv(x, f"{name}.0", outputs, kernel, padding=kernel // 2, **options)
        return F.relu6(file.norm(y, f"{name}.1"))

    x = unit(x, "features.0", divisible(32 * width), 3, stride=strides[0])
    index = 1
    stages = ((1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1))
    for (expansion, channels, blocks), first in zip(stages, strides[1:], strict=True):
        for block in range(blocks):
            name, part, stride = f"features.{index}.conv", 0, first if block == 0 else 1
            outputs, hidden, y = divisible(channels * width), x.shape[1] * expansion, x
            if expansion > 1:
                y, part = unit(y, f"{name}.0", hidden), 1
            y = unit(y, f"{name}.{part}", hidden, 3, groups=hidden, stride=1 if blur else stride)
            if blur and stride == 2:
                part += 1
                y = blurred(file, y, f"{name}.{part}")
            y = file.norm(file.conv(y, f"{name}.{part + 1}", outputs), f"{name}.{part + 2}")
            x, index = x + y if stride == 1 and x.shape[1] == outputs else y, index + 1
    x = unit(x, "features.18", divisible(1280 * max(1.0, width)))
    return file.linear(x.mean((2, 3)), "classifier.0" if blur else "classifier.1", classes)


def cifar_shufflenet_v2(file: Checkpoint, x: Tensor, widths: tuple[int, ...], classes: int) -> Tensor:
    def convs(x: Tensor, name: str, plan: tuple[tuple[int, bool, int], ...], width: int) -> Tensor:
        for index, depthwise, stride in plan:  # a depthwise convolution has no activation
            if depthwise:
                x = file.conv(x, f"{name}.{index}", x.shape[1], 3, groups=x.shape[1], stride=stride, padding=1)
                x = file.norm(x, f"{name}.{index + 1}")
            else:
                x = F.relu(file.norm(file.conv(x, f"{name}.{index}", width), f"{name}.{index + 1}"))
        return x

    x = F.relu(file.norm(file.conv(x, "conv1.0", widths[0], 3, padding=1), "conv1.1"))
    for stage, blocks in ((2, 4), (3, 8), (4, 4)):
        half = widths[stage - 1] // 2
        for block in range(blocks):
            name, stride = f"stage{stage}.{block}", 2 if block == 0 else 1
            kept, changed = (x, x) if stride == 2 else x.chunk(2, 1)
            if stride == 2:
                kept = convs(kept, f"{name}.branch1", ((0, True, 2), (2, False, 1)), half)
            changed = convs(changed, f"{name}.branch2", ((0, False, 1), (3, True, stride), (5, False, 1)), half)
            x = torch.stack([kept, changed], 2).flatten(1, 2)
    x = F.relu(file.norm(file.conv(x, "conv5.0", widths[4]), "conv5.1"))
    return file.linear(x.mean((2, 3)), "fc", classes)


# ---------------------------------------------------------------------------------------------------- anti-aliased


def blurred(file: Checkpoint, x: Tensor, name: str) -> Tensor:
    row = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
    kernel = (row[:, None] * row[None, :]).repeat(x.shape[1], 1, 1, 1)
    file.state[f"{name}.filt"] = kernel
    return F.conv2d(F.pad(x, (1, 2, 1, 2), mode="reflect"), kernel, stride=2, groups=x.shape[1])


def antialiased_resnet(file: Checkpoint, x: Tensor, depths: tuple[int, ...], wide: int, bottleneck: bool) -> Tensor:
    x = F.relu(file.norm(file.conv(x, "conv1", 64, 7, stride=2, padding=3), "bn1"))
    x = blurred(file, F.max_pool2d(x, 2, 1), "maxpool.1")
    for stage, blocks in enumerate(depths, 1):
        planes = 64 * 2 ** (stage - 1)
        for block in range(blocks):
            name, down = f"layer{stage}.{block}", block == 0 and stage > 1
            outputs = 4 * planes if bottleneck else planes
            plan = [(1, planes * wide), (3, planes * wide), (1, outputs)] if bottleneck else [(3, planes), (3, planes)]
            y = x
            for index, (kernel, width) in enumerate(plan, 1):
                conv = f"{name}.conv{index}"
                if down and index == len(plan):
                    y, conv = blurred(file, y, f"{conv}.0"), f"{conv}.1"
                y = file.norm(file.conv(y, conv, width, kernel, padding=kernel // 2), f"{name}.bn{index}")
                y = F.relu(y) if index < len(plan) else y
            if down:
                x = file.conv(blurred(file, x, f"{name}.downsample.0"), f"{name}.downsample.1", outputs)
                x = file.norm(x, f"{name}.downsample.2")
            elif block == 0 and x.shape[1] != outputs:
                x = file.norm(file.conv(x, f"{name}.downsample.0", outputs), f"{name}.downsample.1")
            x = F.relu(x + y)
    return file.linear(x.mean((2, 3)), "fc", 1000)
