"""What the paper's search is asked for, made definite for one network."""

from dataclasses import dataclass

from unstride.geometry.states import State
from unstride.procedure.aggregate import Attention
from unstride.procedure.stopping import Stop


@dataclass(frozen=True, eq=False)
class Options:
    """A recipe's search on a network whose layers are known; `Recipe` has checked and documents each of them."""

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
