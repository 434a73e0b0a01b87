"""What `explain` tells of one image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from unstride.geometry.states import State
from unstride.procedure.aggregate import top_class
from unstride.procedure.meaning import TASKS, Task
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

    `agreement` of the looks with it, from 0 to 1, and their `spread` are an uncertainty that one forward pass cannot
    give; what they are is the task's (`unstride.procedure.meaning`). Classes: the share of looks (and pixels) that give
    the final class, and the mutual information between look and class in nats, in segmentation a map (H, W); numbers:
    a standard deviation each; embeddings: cosines. `assumed` is what the output was taken for without being told. In a
    search over maps a state's own logits lie where its grid does, and are compared where they belong.
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
    task: str = "classification"
    assumed: str = ""

    @property
    def meaning(self) -> Task:
        return TASKS[self.task]

    @property
    def cost(self) -> float:
        """MACs used, as a multiple of a plain forward."""
        return self.macs / self.plain_macs

    @property
    def problem(self) -> str | None:
        """Why this is no answer that may be shown, or None."""
        if bool(self.logits.isfinite().all()):
            return None
        return "the model's answer is not finite; half precision may have overflowed, try float32"

    def to_json(self) -> dict[str, Any]:
        if self.logits.ndim > 1:
            raise TypeError(f"only vectors have a JSON form; save the maps of {self.task} as arrays")
        return {
            "task": self.task,
            "assumed": self.assumed,
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
        assumed = f", assumed: {self.assumed}" if self.assumed else ""
        return (
            f"Prediction({self._answer()}, {len(self.states)} states, {self.cost:.1f}x plain, agreement "
            f"{self.agreement:.0%}, spread {float(self.spread.mean()):.3f}, stopped: {self.stopped}{assumed})"
        )

    def _answer(self) -> str:
        if not self.meaning.one_label:
            return self.meaning.reads((1, *self.logits.shape))
        count = max(2, len(self.logits))  # one logit is that of the second of two classes
        top = int(top_class(self.logits, 0)) if self.logits.ndim == 1 else None
        return f"{count} classes" if top is None else f"class {top} of {count}" if top >= 0 else "not finite"


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


def at_size(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps (B, K, h, w) over `size` pixels: of signals, images or volumes."""
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
