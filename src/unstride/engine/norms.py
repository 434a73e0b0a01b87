"""Instance norm of maps that lie channels last, with the activation after it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unstride.engine.movers import lies_last
from unstride.engine.packing import AFTER, Activation


class FusedNorm(nn.Module):
    """activation(instance_norm(x)) by the values' own mean and variance.

    Eager torch copies a map that lies channels last to channels first and gives that back; this one stays as it lies.
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float, act: Activation) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.act = weight, bias, eps, act
        self.spends = False  # it is written over x, which nobody reads afterwards

    def forward(self, x: Tensor) -> Tensor:
        if lies_last(x) and not torch.is_autocast_enabled("cpu"):
            y = self._last(x)
        else:
            y = F.instance_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        name, scalars = self.act
        return AFTER[name](y, *scalars)

    def _last(self, x: Tensor) -> Tensor:
        y = x.sub_(_mean(x)) if self.spends else x - _mean(x)
        scale = _mean(y.square()).add_(self.eps).rsqrt_()
        y *= scale if self.weight is None else scale * _each(self.weight, x)
        return y if self.bias is None else y.add_(_each(self.bias, x))


def _each(v: Tensor, x: Tensor) -> Tensor:
    """A number for each channel."""
    return v.view(-1, *[1] * (x.ndim - 2))


def _mean(x: Tensor) -> Tensor:
    """(B, C, 1, ...): slab by slab, so that no sum is long and rounds much."""
    slabs = x.movedim(1, -1).flatten(2, -2)  # (B, D, H W, C), no copy
    mean = slabs.sum(2).sum(1).div_(slabs.shape[1] * slabs.shape[2])
    return mean.view(*mean.shape, *[1] * (x.ndim - 2))
