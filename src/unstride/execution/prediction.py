"""What `explain` returns for one image: the answer, the base model's, every pass in between, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn.functional import interpolate

from unstride.geometry.states import State
from unstride.method.search import Expansion
from unstride.recipe.view import View
from unstride.tasks.tasks import TASKS, Task, top_class

COST_UNIT = "forward passes of the base model"
TIME_UNIT = "times the time of the base model"  # where MACs cannot be counted


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One evaluation of one network, on one view, in one state.

    Attributes:
        output: of this pass alone, aligned with the base view.
        weight: its share of the answer.
        criterion: of the search, when it ended; None without a search.
        running: the combined answer after this pass.
        cost: in forward passes of the base model.
    """

    stage: int
    network: str
    view: View
    state: State
    output: Tensor
    weight: float
    criterion: float | None
    running: Tensor
    cost: float

    def __str__(self) -> str:
        name = "" if self.network == "base" else f"{self.network}: "
        return f"{name}{self.view}" if self.state.plain else f"{name}{self.view} in {self.state}"


@dataclass(frozen=True, eq=False)
class Prediction:
    """The answer for one image.

    Attributes:
        output: the combined logits, map or vector.
        base: the base model's output.
        passes: every forward pass, in order.
        cost: in `cost_unit`: forward passes of the base model, or its time where MACs cannot be counted.
        agreement: of the passes with the answer, from 0 to 1: for classes the share of passes (and pixels).
        spread: of the passes: for classes the mutual information between pass and class in nats, a map (H, W) for
            segmentation; for numbers a standard deviation each; for embeddings 1 - the length of the mean direction.
        stopped: why no more passes were taken.
        expansions: the steps of the search, where there was one.
        assumed: what the output was taken for, if neither the user nor the model's library said it.
    """

    output: Tensor
    base: Tensor
    passes: tuple[ForwardPass, ...]
    cost: float
    agreement: float
    spread: Tensor
    stopped: str
    task: str = "classification"
    expansions: tuple[Expansion, ...] = ()
    assumed: str = ""
    cost_unit: str = COST_UNIT

    @property
    def meaning(self) -> Task:
        return TASKS[self.task]

    @property
    def problem(self) -> str | None:
        """Why this output is not usable, or None."""
        if bool(self.output.isfinite().all()):
            return None
        return "the model's output is not finite; half precision may have overflowed, try float32"

    def plot(self, image: Any = None, classes: Sequence[str] = (), title: str = "") -> Any:
        """A matplotlib Figure of the answer and every pass: `better.explain([photo])[0].plot(photo, names)`."""
        from unstride.show import plot_prediction

        return plot_prediction(self, image, tuple(classes), title)

    def to_json(self) -> dict[str, Any]:
        if self.output.ndim > 1:
            raise TypeError(f"only vectors have a JSON form; save the maps of {self.task} as arrays")
        return {
            "task": self.task,
            "assumed": self.assumed,
            "output": self.output.tolist(),
            "base": self.base.tolist(),
            "passes": [
                {
                    "stage": p.stage,
                    "network": p.network,
                    "view": str(p.view),
                    "state": [list(s) for s in p.state.selections],
                    "criterion": p.criterion,
                    "weight": p.weight,
                    "cost": p.cost,
                }
                for p in self.passes
            ],
            "expansions": [{"state": [list(s) for s in e.state.selections], "layer": e.layer} for e in self.expansions],
            "cost": self.cost,
            "cost_unit": self.cost_unit,
            "agreement": self.agreement,
            "spread": float(self.spread.mean()),
            "stopped": self.stopped,
        }

    def __repr__(self) -> str:
        assumed = f", assumed: {self.assumed}" if self.assumed else ""
        count = len(self.passes)
        return (
            f"Prediction({self._answer()}, {count} pass{'es' * (count != 1)}, cost {self.cost:.2f}, agreement "
            f"{self.agreement:.0%}, spread {float(self.spread.mean()):.3f}, stopped: {self.stopped}{assumed})"
        )

    def _answer(self) -> str:
        if not self.meaning.one_label:
            return self.meaning.reads((1, *self.output.shape))
        count = max(2, len(self.output))  # one logit is that of the second of two classes
        top = int(top_class(self.output, 0)) if self.output.ndim == 1 else None
        return f"{count} classes" if top is None else f"class {top} of {count}" if top >= 0 else "not finite"


def with_shares(passes: Sequence[ForwardPass]) -> tuple[ForwardPass, ...]:
    """Weights as shares of their sum."""
    total = sum(p.weight for p in passes) or 1.0
    return tuple(replace(p, weight=p.weight / total) for p in passes)


def at_size(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Maps (B, K, h, w) resized to `size` pixels: of signals, images or volumes."""
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    same = tuple(maps.shape[2:]) == tuple(size)
    return maps if same else interpolate(maps, tuple(size), mode=mode, align_corners=False)


__all__ = ["ForwardPass", "Prediction", "at_size", "with_shares"]
