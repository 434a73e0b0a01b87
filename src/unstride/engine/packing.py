"""Weights packed once for the convolutions of oneDNN, of two and three axes.

Only for float32 on a CPU. Eager torch rearranges the weights at every call, which is most of the time of a small batch,
and a single volume it convolves by a way that is many times slower.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = tuple[str, list[float]]  # by oneDNN's name, and its numbers
AFTER: dict[str, Callable[..., Tensor]] = {  # the same as an op of its own, over what it reads where it can be
    "none": lambda y: y,
    "relu": F.relu_,
    "leaky_relu": F.leaky_relu_,
    "hardtanh": F.hardtanh_,
    "swish": F.silu,
    "hardswish": F.hardswish,
}
_NEEDED = (
    "_reorder_convolution_weight",
    "_reorder_convolution_transpose_weight",
    "_get_mkldnn_serialized_md",
    "_convolution_pointwise",
    "_convolution_pointwise_",
    "_convolution_transpose_pointwise",
)


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch has the ops, and they speak of this device and type."""
    usable = device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()
    usable = usable and bool(torch.backends.mkldnn.enabled)
    return usable and all(hasattr(torch.ops.mkldnn, name) for name in _NEEDED)


@dataclass(eq=False)
class Packing:
    """One weight (K, C, ...) in the layouts that its uses want: few, though there are many batch sizes.

    A `transposed` convolution's is (C, K, ...).
    """

    dense: Tensor
    transposed: bool = False
    layouts: dict[bytes, Tensor] = field(default_factory=dict)
    uses: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def __call__(self, shape: torch.Size, padding: Any, *where: Any) -> Tensor:
        """For images of this shape; `padding` and what follows as the op takes it."""
        key = (*shape, *padding)
        packed = self.uses.get(key)
        if packed is None:
            ops = torch.ops.mkldnn
            op = ops._reorder_convolution_transpose_weight if self.transposed else ops._reorder_convolution_weight
            fresh = op(self.dense, padding, *where, list(shape))
            layout = bytes(ops._get_mkldnn_serialized_md(fresh).tolist())
            packed = self.uses[key] = self.layouts.setdefault(layout, fresh)
        return packed
