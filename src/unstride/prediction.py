"""What `explain` tells of one image."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unstride.search import Expansion
from unstride.states import State


@dataclass(frozen=True, eq=False)
class Visited:
    """One state of one image: its criterion when the search ended, its weight in the aggregate, its own logits."""

    state: State
    criterion: float
    weight: float
    logits: Tensor


@dataclass(frozen=True, eq=False)
class Prediction:
    """The answer for one image, the plain network's, and all that lies between.

    `agreement` is the share of states (segmentation: of states and pixels) that give the final class; `spread` is the
    mutual information between state and class in nats, an uncertainty that one forward pass cannot give (segmentation:
    a map (H, W)).
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
        return (
            f"Prediction({len(self.states)} states, {self.cost:.1f}x plain, agreement {self.agreement:.0%}, "
            f"spread {float(self.spread.mean()):.3f}, stopped: {self.stopped})"
        )
