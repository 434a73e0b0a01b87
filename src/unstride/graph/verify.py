"""A captured graph is compared with its model before anything else uses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from unstride.errors import CaptureError

if TYPE_CHECKING:
    from unstride.graph.capture import Graph

_ALONE = 50  # kernels differ between batch sizes, and deep networks magnify that; seeing other images does far more


def verify(graph: Graph, pair: Tensor, expected: Any) -> None:
    """The graph must give what the model gave for two images, and the same for the last of them alone.

    The last: what goes on from image to image (a running sum over the batch) leaves the first one as it is.
    """
    both = zip(graph.leaves, pytree.tree_leaves(expected), strict=True)
    wanted = [(n, leaf) for n, leaf in both if isinstance(n, Node) and isinstance(leaf, Tensor)]
    for count, slack in ((2, 1), (1, _ALONE)):
        found = graph.outputs(pair[-count:])
        for n, reference in wanted:
            pairs = [(found[n], reference)] if count == 2 else []
            if n in graph.from_image:
                pairs = list(zip(_rows(found[n], count), _rows(reference, 2)[-count:], strict=True))
            for value, other in pairs:  # one by one: maps may be large
                difference = gap(value, other)
                if not difference <= slack * tolerance(other.dtype):
                    raise CaptureError(_why(value, other, difference, count == 2))


def verify_alone(net: nn.Module, graph: Graph, pair: Tensor, expected: Any) -> None:
    """The model itself must give for an image alone what it gave in the pair: it may branch on a batch of one."""
    try:
        alone = pytree.tree_leaves(net(pair[-1:].clone()))
    except Exception:  # it takes several images only
        return
    for n, value, reference in zip(graph.leaves, alone, pytree.tree_leaves(expected), strict=True):
        if isinstance(n, Node) and n in graph.from_image and isinstance(value, Tensor):
            rows = _rows(value, 1)[0], _rows(reference, 2)[-1]
            if not (difference := gap(*rows)) <= _ALONE * tolerance(reference.dtype):
                raise CaptureError(_why(*rows, difference, together=False))


def _rows(output: Tensor, count: int) -> Sequence[Tensor]:
    """An output of `count` images, image by image."""
    if output.ndim == 0:
        raise CaptureError(
            "an output is a single number made from all images of a batch: every output must have a row for each "
            "image. Return it for each image, or wrap the model so that it is left out."
        )
    if output.shape[0] == 0 or output.shape[0] % count:
        raise CaptureError(
            f"an output has shape {tuple(output.shape)} for {count} images: the first dimension of every output must "
            "be the batch"
        )
    return output.chunk(count)


def _why(value: Tensor, reference: Tensor, difference: float, together: bool) -> str:
    if value.shape != reference.shape:
        return (
            f"an output has shape {tuple(value.shape)} for an image alone and {tuple(reference.shape)} in a batch: the "
            "first dimension of every output must be the batch"
        )
    if not (value.isfinite() == reference.isfinite()).all():
        return (
            f"the model's output overflows {reference.dtype} on the example, and not always at the same places: it "
            "cannot be compared there. Pass a real image as the example, prepared as the model expects it."
        )
    what = "the graph differs from the model" if together else "an image alone and in a batch differ"
    return f"{what} by {difference:.1e} (relative): the model is not a deterministic function of each image alone"


def gap(value: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the largest value; where neither is finite there is nothing to compare."""
    if value.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0 or not reference.is_floating_point():
        return 0.0 if torch.equal(value, reference) else float("inf")
    known = reference.isfinite()
    scale = float(reference.abs().masked_fill_(~known, 0.0).amax())
    difference = (value - reference).abs_().masked_fill_(~(known | value.isfinite()), 0.0)
    return float(difference.amax()) / max(scale, 1e-6)


def tolerance(dtype: torch.dtype) -> float:
    """How far two orders of the same sums may lie apart, relative to the largest value."""
    return {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float64: 1e-9}.get(dtype, 2e-4)
