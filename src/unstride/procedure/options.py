"""What the paper's search is asked for, made definite for one network."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.procedure.aggregate import Attention
from unstride.procedure.stopping import Stop

MOST_BUDGETS = 4096


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


def each_budget(budgets: Any) -> tuple[int, ...]:
    """Each budget once, in the order given."""
    several = isinstance(budgets, Iterable) and not isinstance(budgets, str | bytes)
    found = list(islice(budgets, MOST_BUDGETS + 1)) if several else []
    if not found or len(found) > MOST_BUDGETS or any(type(b) is not int or b < 1 for b in found):
        raise OptionError(
            f"budgets: got {budgets!s:.60}, wanted a list of whole numbers from 1 on, such as [1, 4, 10], "
            f"{MOST_BUDGETS} at most"
        )
    return tuple(dict.fromkeys(found))
