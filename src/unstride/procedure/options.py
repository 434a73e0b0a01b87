"""What `enhance` can be asked for, and what it means for one network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.procedure.aggregate import BORDERS, Attention
from unstride.procedure.search import CRITERIA, ORDERS
from unstride.procedure.stopping import Stop
from unstride.procedure.tasks import SPACES, TASKS

AGGREGATES = ("mean", "entropy", "attention", "max")
ALIGNS = (True, False, "stitch")
OPTIMISE = (True, False, "compile")


@dataclass(frozen=True, eq=False)
class Options:
    """What `enhance` was asked for, validated there."""

    budget: int
    layers: tuple[int, ...]
    criterion: str
    aggregate: str
    align: bool | str
    border: str
    order: str
    seed: int
    states: tuple[State, ...] | None = None
    stop: Stop | None = None
    attention: Attention | None = None


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise OptionError(f"{name}: got {value!r}, wanted one of {', '.join(map(repr, allowed))}")


def validate(task: str, space: str | None, asked: dict[str, Any], optimise: bool | str = True) -> None:
    """Refuse what `enhance` cannot mean; what depends on the network is checked when it is known."""
    _one_of("task", task, TASKS)
    _one_of("space", space, (None, *SPACES))
    _one_of("optimise", optimise, OPTIMISE)
    _one_of("criterion", asked["criterion"], CRITERIA)
    _one_of("aggregate", asked["aggregate"], AGGREGATES)
    _one_of("align", asked["align"], ALIGNS)
    _one_of("border", asked["border"], BORDERS)
    _one_of("order", asked["order"], ORDERS)
    budget = asked["budget"]
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise OptionError(
            f"budget: got {budget!r}, wanted a whole number of states, at least 1 (1 is the model itself)"
        )
    layers = asked["layers"]
    if layers is not None and list(layers) != list(range(min(layers, default=0), max(layers, default=-1) + 1)):
        raise OptionError(f"layers: got {layers}, wanted a contiguous range such as range(2, 5)")
    if asked["stop"] is not None and not hasattr(asked["stop"], "reason"):
        raise OptionError(f"stop: got {asked['stop']!r}, wanted a rule such as unstride.Confident(p=0.9)")
    if asked["criterion"] == "learned" and asked["aggregate"] != "attention":
        raise OptionError("criterion='learned' is the attention's own score: it goes with aggregate='attention'")
    if task == "segmentation" and asked["aggregate"] == "attention":
        raise OptionError(
            "aggregate='attention' is for classification; segmentation is learning-free (mean, entropy, max)"
        )
    if asked["align"] == "stitch" and (task != "segmentation" or asked["aggregate"] == "max"):
        raise OptionError("align='stitch' is for segmentation with aggregate 'entropy' or 'mean'")
