"""What the segmentation networks share, under mmsegmentation's names: `conv`, `bn` and an activation in one module."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class ConvModule(nn.Module):
    """A convolution that keeps the size at stride 1, a batch norm and an activation; the last two may be left out.

    Args:
        tf_padding: pad as TensorFlow does, at the end first, instead of on both sides alike.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        norm: bool = True,
        bias: bool | None = None,
        activation: Callable[[], nn.Module] = nn.ReLU,
        eps: float = 1e-5,
        tf_padding: bool = False,
    ) -> None:
        super().__init__()
        padding = 0 if tf_padding else dilation * (kernel // 2)
        bias = not norm if bias is None else bias
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias)
        self.bn = nn.BatchNorm2d(outputs, eps) if norm else nn.Identity()
        self.activate = activation()
        self.tf_padding = tf_padding

    def forward(self, x: Tensor) -> Tensor:
        if self.tf_padding:
            x = F.pad(x, same_padding(x.shape[2], x.shape[3], self.conv.kernel_size[0], self.conv.stride[0]))
        return self.activate(self.bn(self.conv(x)))


def same_padding(height: int, width: int, kernel: int, stride: int) -> tuple[int, int, int, int]:
    """Left, right, top, bottom of TensorFlow's "same" padding."""
    rows, columns = (max((-(-n // stride) - 1) * stride + kernel - n, 0) for n in (height, width))
    return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2


class SeparableConv(nn.Module):
    """A depthwise 3x3 and a pointwise convolution, each with norm and activation."""

    def __init__(self, inputs: int, outputs: int, dilation: int = 1) -> None:
        super().__init__()
        self.depthwise_conv = ConvModule(inputs, inputs, 3, dilation=dilation, groups=inputs)
        self.pointwise_conv = ConvModule(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise_conv(self.depthwise_conv(x))


def resize(x: Tensor, like: Tensor) -> Tensor:
    """Bilinear, to the height and width of another map."""
    return F.interpolate(x, like.shape[2:], mode="bilinear", align_corners=False)
