"""Convolutions whose weights are packed once, and the ops after them in place. Only for float32 on a CPU.

Eager torch rearranges the weights at every call, which takes much of the time of a small batch, and it convolves
a single volume by a kernel that is many times slower. Torch's public packed convolution (`aten.mkldnn_convolution` of a
packed weight) gives its result channels first, which costs more than it saves; so this uses the op that `torch.compile`
emits. `benchmarks/engine_speed.py` measures what the rewrite is worth.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from unstride.engine.movers import for_each

aten = torch.ops.aten
_NEEDED = ("_reorder_convolution_weight", "_get_mkldnn_serialized_md", "_convolution_pointwise")
_CONV = (aten.conv2d.default, aten.conv3d.default)
_IN_PLACE = {
    aten.relu.default: aten.relu_.default,
    aten.relu6.default: aten.relu6_.default,
    aten.hardtanh.default: aten.hardtanh_.default,
    aten.leaky_relu.default: aten.leaky_relu_.default,
    aten.silu.default: aten.silu_.default,
    aten.hardswish.default: aten.hardswish_.default,
    aten.add.Tensor: aten.add_.Tensor,
}


def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of torch has the ops for this device and type."""
    usable = device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()
    usable = usable and bool(torch.backends.mkldnn.enabled)
    return usable and all(hasattr(torch.ops.mkldnn, name) for name in _NEEDED)


@dataclass(eq=False)
class Packing:
    """One weight (K, C, ...) in the layouts that its uses want: few, though there are many batch sizes."""

    dense: Tensor
    layouts: dict[bytes, Tensor] = field(default_factory=dict)
    uses: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def __call__(self, shape: torch.Size, padding: Any, *where: Any) -> Tensor:
        """For images of this shape; `padding` and what follows as the op takes it."""
        key = (*shape, *padding)
        packed = self.uses.get(key)
        if packed is None:
            fresh = torch.ops.mkldnn._reorder_convolution_weight(self.dense, padding, *where, list(shape))
            layout = bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(fresh).tolist())
            packed = self.uses[key] = self.layouts.setdefault(layout, fresh)
        return packed


class PackedConv(nn.Module):
    """conv(x)."""

    def __init__(self, weight: Packing, bias: Tensor | None, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        stride, padding, dilation, groups = args
        each = [for_each(v, weight.dense.ndim - 2) for v in (padding, stride, dilation)]
        self.where: tuple[Any, ...] = (*each, int(groups))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):  # the packed op does not know of it
            padding, stride, dilation, groups = self.where
            conv = F.conv2d if x.ndim == 4 else F.conv3d
            return conv(x, self.weight.dense, self.bias, stride, padding, dilation, groups)
        packed = self.weight(x.shape, *self.where)
        return torch.ops.mkldnn._convolution_pointwise.default(x, packed, self.bias, *self.where, "none", [], "")


@dataclass(eq=False)
class Packer:
    """Rewrites segments of one network; a weight that several segments use is packed for all of them."""

    packings: dict[tuple[Any, ...], Packing] = field(default_factory=dict)

    def __call__(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, GraphModule)
        for i, n in enumerate(list(module.graph.nodes)):
            if n.target in _CONV:
                self._conv(module, n, f"conv_{i}")
        module.graph.eliminate_dead_code()
        _work_in_place(module)
        module.recompile()
        for name, child in module.named_children():
            module.__dict__[name] = child.forward  # calling the module would check for hooks first, and there are none
        return module

    def _conv(self, module: GraphModule, n: Node, name: str) -> None:
        args: list[Any] = [*n.args, *(None, 1, 0, 1, 1)[len(n.args) - 2 :]]
        weight, bias = _constant(module, args[1]), _constant(module, args[2])
        if weight is None or weight.dtype != torch.float32 or (args[2] is not None and bias is None) or n.kwargs:
            return
        key = (weight.data_ptr(), weight.shape, weight.stride())
        made = PackedConv(self.packings.setdefault(key, Packing(weight)), bias, tuple(args[3:7]))
        module.add_submodule(name, made)
        with module.graph.inserting_before(n):
            packed = module.graph.call_module(name, (args[0],))
        packed.meta = dict(n.meta)
        n.replace_all_uses_with(packed)


def _work_in_place(module: GraphModule) -> None:
    """An activation or a sum is written over what a convolution or a sum made for it alone."""
    fresh = {n for n in module.graph.nodes if n.op == "call_module" and _is_packed(module, n)}
    for n in module.graph.nodes:
        if n.target not in _IN_PLACE or n.kwargs:
            continue
        operands = [a for a in n.args if isinstance(a, Node)]
        own = next((a for a in operands if a in fresh and len(a.users) == 1), None)
        if own is None or operands.count(own) > 1 or any(_form(a) != _form(n) for a in operands):
            continue
        if own is not n.args[0]:  # a sum, written over its second operand
            n.args = (own, n.args[0])
        n.target = _IN_PLACE[n.target]
        fresh.add(n)


def _is_packed(module: GraphModule, n: Node) -> bool:
    return isinstance(module.get_submodule(str(n.target)), PackedConv)


def _form(n: Node) -> tuple[str, Any]:
    """Shape and dtype; the shape as text, because comparing symbols would fix them."""
    value = n.meta.get("val")
    return str(getattr(value, "shape", None)), getattr(value, "dtype", None)


def _constant(module: nn.Module, v: Any) -> Tensor | None:
    return getattr(module, str(v.target), None) if isinstance(v, Node) and v.op == "get_attr" else None
