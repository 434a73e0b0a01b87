"""Whether the answer for an image depends on the images beside it, and which module makes it so.

warn_of_batch_dependence(better.networks, images)

Batch norm that normalises with the batch's statistics does, and so does any operation over the batch axis. Then no
result is that of an image alone, and another batch size gives other answers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from unstride.errors import UnstrideWarning
from unstride.execution.executors import Network
from unstride.graph.evaluation import evaluating, evaluation_copy, unwrapped

_BESIDE, _UNLIKE = 3, 7  # images beside the one that is compared: two sizes of batch
_ROUNDING = 2**10  # times the precision of the type: what other kernels for another batch size may change


def warn_of_batch_dependence(networks: Mapping[str, Network], images: Tensor) -> None:
    """Warn about each network whose answers depend on the batch. `images`: one or more, as the base network's."""
    for model in dict.fromkeys(network.model for network in networks.values()):
        message = batch_dependence(model, images)
        if message:
            warnings.warn(UnstrideWarning(message), stacklevel=3)


def batch_dependence(model: nn.Module, images: Tensor) -> str:
    """A sentence that names the module, or "" where every image has an answer of its own.

    The first image is answered alone, beside some images and beside quite different ones.
    """
    model = _copied(unwrapped(model))
    alone, beside, unlike = _batches(images)
    try:
        with torch.no_grad():
            answers = [_leaves(model(batch), len(batch)) for batch in (alone, beside, unlike)]
    except Exception:  # a model for one image at a time; the run itself says what else is wrong
        return ""
    if all(_same(a, b) and _same(a, c) for a, b, c in zip(*answers, strict=False)):
        return ""
    where = _first_dependent(model, beside, unlike)
    what = f"Its module {where} mixes the images of a batch" if where else "It mixes the images of a batch"
    return (
        f"{type(model).__name__}: the answer for an image depends on the images beside it. {what}. Results change with "
        "the batch size and the order of the images. Use running statistics, or batch_size=1."
    )


def _copied(model: nn.Module) -> nn.Module:
    """A copy, so that the user's model keeps what it writes to itself; a ScriptModule cannot be copied."""
    try:
        return evaluation_copy(model)
    except TypeError:
        return evaluating(model)


def _batches(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first image alone, with its neighbours, and with images that are unlike it in mean and variance."""
    first, others = images[:1], images[1 : 1 + _BESIDE]
    noise = torch.randn(_UNLIKE, *images.shape[1:], generator=torch.Generator().manual_seed(0)).to(images)
    others = torch.cat([others, noise[len(others) : _BESIDE]])
    return first, torch.cat([first, others]), torch.cat([first, 3 * noise.flip(0) + 2])


def _leaves(output: Any, count: int) -> list[Tensor]:
    """Of every output tensor, what belongs to the first image."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf[: len(leaf) // count] for leaf in found if leaf.ndim and len(leaf) and len(leaf) % count == 0]


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return True  # such as windows of another count; the outputs decide
    allowed = _ROUNDING * torch.finfo(a.dtype).eps * max(float(a.abs().max()), 1e-12)
    return bool(torch.equal(a, b)) or not float((a - b).abs().max()) > allowed


def _first_dependent(model: nn.Module, beside: Tensor, unlike: Tensor) -> str:
    """The name and kind of the first module, in the order of the pass, whose answer differs; innermost first."""
    runs: list[dict[str, list[Tensor]]] = []
    for batch in (beside, unlike):
        outputs: dict[str, list[Tensor]] = {}
        hooks = [
            module.register_forward_hook(_recorder(outputs, name, len(batch))) for name, module in model.named_modules()
        ]
        try:
            with torch.no_grad():
                model(batch)
        finally:
            for hook in hooks:
                hook.remove()
        runs.append(outputs)
    for name, first in runs[0].items():
        if not all(_same(a, b) for a, b in zip(first, runs[1].get(name, []), strict=False)):
            kind = type(model.get_submodule(name)).__name__
            return f"{name} ({kind})" if name else ""
    return ""


def _recorder(outputs: dict[str, list[Tensor]], name: str, count: int) -> Any:
    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.setdefault(name, [leaf.clone() for leaf in _leaves(output, count)])

    return record


__all__ = ["batch_dependence", "warn_of_batch_dependence"]
