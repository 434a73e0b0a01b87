"""Section 3: a subsampling layer keeps one of R x R activations; a state says which one, layer by layer.

`State` and `StateSpace` live in `unstride.geometry.states`, beside the networks that they are found in.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unstride.geometry.states import Selection, State, StateSpace

__all__ = ["State", "StateSpace", "displacement", "subsample"]


def subsample(full: Tensor, rate: Sequence[int], selection: Selection) -> Tensor:
    """Eq. 1: `out[n] = full[R n + s]` along the last axes of a stride-1 result."""
    index: Any = (..., *(slice(s, None, r) for s, r in zip(selection, rate, strict=True)))
    return full[index]


def displacement(state: State, rates: Sequence[Sequence[int]]) -> tuple[float, ...]:
    """Delta in image pixels: `sum_l s_l prod_{l' < l} R_l'` per axis (Eq. 10, second line; the first is a slip)."""
    axes = len(rates[0]) if rates else 0
    delta, stride = [0.0] * axes, [1.0] * axes
    for selection, rate in zip(state.selections, rates, strict=True):
        delta = [d + s * t for d, s, t in zip(delta, selection, stride, strict=True)]
        stride = [t * r for t, r in zip(stride, rate, strict=True)]
    return tuple(delta)
