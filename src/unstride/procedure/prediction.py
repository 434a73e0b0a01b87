"""What `explain` tells of one image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from unstride.geometry.states import State
from unstride.procedure.aggregate import agreement, top_class, two_class
from unstride.procedure.align import overlap
from unstride.procedure.search import Expansion
from unstride.procedure.tasks import Plan
from unstride.views.policies import IDENTITY, View


@dataclass(frozen=True, eq=False)
class Visited:
    """One look at an image: the state (its criterion when the search ended) and view, its weight, its own logits."""

    state: State
    criterion: float
    weight: float
    logits: Tensor
    view: View = IDENTITY


@dataclass(frozen=True, eq=False)
class Prediction:
    """The answer for one image, the plain network's, and all that lies between.

    `agreement` is the share of states (segmentation: of states and pixels) that give the final class; `spread` is the
    mutual information between state and class in nats, an uncertainty that one forward pass cannot give (segmentation:
    a map (H, W)). In segmentation a state's own logits lie where its grid does, and are compared where they belong.
    """

    logits: Tensor
    plain: Tensor
    states: tuple[Visited, ...]
    expansions: tuple[Expansion, ...]
    macs: int
    plain_macs: int
    agreement: float
    spread: Tensor
    stopped: str

    @property
    def cost(self) -> float:
        """MACs used, as a multiple of a plain forward."""
        return self.macs / self.plain_macs

    def to_json(self) -> dict[str, Any]:
        if self.logits.ndim != 1:
            raise TypeError("only classification predictions have a JSON form; save segmentation maps as arrays")
        return {
            "logits": self.logits.tolist(),
            "plain": self.plain.tolist(),
            "states": [
                {"state": [list(s) for s in v.state.selections], "criterion": v.criterion, "weight": v.weight}
                for v in self.states
            ],
            "expansions": [{"state": [list(s) for s in e.state.selections], "layer": e.layer} for e in self.expansions],
            "macs": self.macs,
            "plain_macs": self.plain_macs,
            "agreement": self.agreement,
            "spread": float(self.spread.mean()),
            "stopped": self.stopped,
        }

    def __repr__(self) -> str:
        count = max(2, len(self.logits))  # one logit is that of the second of two classes
        top = int(top_class(self.logits, 0)) if self.logits.ndim == 1 else None
        answer = f"{count} classes" if top is None else f"class {top} of {count}" if top >= 0 else "not finite"
        return (
            f"Prediction({answer}, {len(self.states)} states, {self.cost:.1f}x plain, agreement {self.agreement:.0%}, "
            f"spread {float(self.spread.mean()):.3f}, stopped: {self.stopped})"
        )


def moved(plan: Plan, state: State, size: Sequence[int]) -> tuple[int, ...]:
    """How far a state's own output (H, W) lies beyond the plain one, in its pixels (rows, columns)."""
    offset, grid = plan.offset(state, plan.targets[0]), plan.targets[0].grid
    if offset is None or grid is None:
        return (0,) * len(size)
    shift = [
        round((offset.cells[a] + offset.fraction[a]) * grid.spacing[a] * n / plan.graph.size[a])
        for a, n in enumerate(size)
    ]
    return tuple(max(1 - n, min(k, n - 1)) for k, n in zip(shift, size, strict=True))


def compare_states(own: Sequence[Tensor], final: Tensor, shifts: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
    """Agreement with the final logits (K, ...), and the spread (...), of states whose maps lie beyond it by `shifts`.

    A pixel that a state does not cover is decided by the others.
    """
    best = top_class(final, 0)
    first = two_class(own[0][None].float())[0]
    total, within, count = torch.zeros_like(first), torch.zeros_like(first[0]), torch.zeros_like(first[0])
    same, pixels = 0.0, 0
    for logits, shift in zip(own, shifts, strict=True):
        p = two_class(logits[None].float())[0].softmax(0)
        here: Any = ...
        if p.ndim > 1:
            here, source = overlap(p.shape[1:], shift)
            p = p[source]
        total[here] += p
        within[here] += _entropy(p)
        count[here] += 1
        equal = agreement(top_class(p, 0), best[here])
        same, pixels = same + float(equal.sum(dtype=torch.float64)), pixels + equal.numel()
    return same / pixels, (_entropy(total / count) - within / count).clamp(min=0)


def _entropy(p: Tensor) -> Tensor:
    return -(p * p.clamp(min=1e-12).log()).sum(0)


def at_size(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps (B, K, h, w) over `size` pixels: of signals, pictures or volumes."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    same = tuple(maps.shape[2:]) == tuple(size)
    return maps if same else interpolate(maps, tuple(size), mode=mode, align_corners=False)


def cropped(leaf: Any, crop: Sequence[float] | None) -> Any:
    """Cut the part of a map (.., H, W) that belongs to the image off the padding."""
    if crop is None or not isinstance(leaf, Tensor) or leaf.ndim < len(crop):
        return leaf
    size = leaf.shape[-len(crop) :]
    kept: Any = (..., *(slice(round(n * share)) for n, share in zip(size, crop, strict=True)))
    return leaf[kept]


def cropped_output(leaf: Any, crop: Sequence[float] | None) -> Any:
    """The same for an output of a batch: maps (B, H, W), (B, K, H, W); scores (B, K) have no place on the image."""
    return cropped(leaf, crop) if isinstance(leaf, Tensor) and leaf.ndim > 2 else leaf
