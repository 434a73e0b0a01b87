"""Stages of looks, and the gates between them: look again only where the network is not sure.

Stage(views=(parse_view("mirror"),), gate=Gate(below=0.5))   # mirror the images whose margin is below one half
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace
from unstride.procedure.aggregate import agreement, entropy, top_class, two_class
from unstride.views.policies import IDENTITY, View

MEASURES = ("margin", "probability", "entropy", "agreement")
CONTEXT = 64  # pixels around a tile
_TILE, _SMALL = 32, 256  # pixels: a smaller image has smaller tiles, and no room for much around them
_STATES = "'plain', 'near:N' such as 'near:4', or a list of states"
States = str | tuple[Any, ...]  # "plain", "near:N", or states as `StateSpace.parse` reads them


@dataclass(frozen=True)
class Gate:
    """Only images that are less sure than `below` go on; `share` asks for that share of images, set by `calibrate`.

    Example: `Gate("margin", below=0.5)`, `Gate(share=0.25)`. Every measure runs from 0 (knows nothing) to 1 (certain):
    `margin` between the two likeliest classes, `probability` of the first, `entropy` as 1 - H / log K, `agreement` as
    the share of looks so far that give the merged answer. Of a map it is the mean over its pixels.

    With `tile`, segmentation looks again only at squares of that many pixels where the mean is below, with `context`
    pixels around them: at least as far as the network sees, so that no seam can be seen; a `share` is of the squares.
    """

    by: str = "margin"
    below: float | None = None
    share: float | None = None
    tile: int | None = None
    context: int = CONTEXT

    def __post_init__(self) -> None:
        if self.by not in MEASURES:
            raise OptionError(f"gate: got by={self.by!r}, wanted one of {', '.join(MEASURES)}")
        if self.below is None and self.share is None:
            raise OptionError("gate: give below=0.5 (look again where less sure than that) or share=0.25 of the images")
        for name, value in (("below", self.below), ("share", self.share)):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value <= (1.000001 if name == "below" else 1)):
                raise OptionError(f"gate: got {name}={value!r}, wanted a number from 0 to 1")
            if value is not None:
                object.__setattr__(self, name, float(value))  # 1 and 1.0, and numpy's, are written alike
        for name, pixels, least in (("tile", 1 if self.tile is None else self.tile, 1), ("context", self.context, 0)):
            if not isinstance(pixels, int) or isinstance(pixels, bool) or pixels < least:
                raise OptionError(f"gate: got {name}={pixels!r}, wanted a whole number of pixels, at least {least}")

    def opens(self, sure: Tensor) -> Tensor:
        """Which of these images (B,), or tiles of them (B, rows, columns), look again."""
        if self.below is None:
            raise OptionError(
                f"the gate asks for the least sure {self.share:.0%} of the images, and which those are is not known "
                "yet: call better.calibrate(images) with some unlabelled ones, or give a threshold: Gate(below=0.5)"
            )
        return ~(sure >= self.below)  # what is not a number is not sure

    def __str__(self) -> str:
        where = f"{self.by} below {self.below:.4g}" if self.below is not None else f"the least sure by {self.by}"
        what = "images" if self.tile is None else f"tiles of {self.tile} px"
        if self.share is not None:
            return f"{where} ({self.share:.0%} of {what})"
        return where if self.tile is None else f"{where} in {what}"


def tile_gate(size: Sequence[int]) -> Gate:
    """Tiles for images of this size, all of them as yet: `calibrate`, or who tunes, says which share looks again."""
    if min(size) >= _SMALL:
        return Gate(share=1.0, tile=_TILE)
    return Gate(share=1.0, tile=_TILE // 2, context=_TILE // 2)


@dataclass(frozen=True)
class Stage:
    """Looks that are taken together: every view in every state, where the gate is open (always, without one).

    `states`: "plain", "near:N" (the N nearest, the plain one included), or states written out. `weights` and
    `temperatures` belong to the views: a view's logits are divided by its temperature and count by its weight.
    """

    views: tuple[View, ...] = (IDENTITY,)
    states: States = "plain"
    gate: Gate | None = None
    weights: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        views = tuple(self.views) if isinstance(self.views, Iterable) else ()
        if isinstance(self.views, str) or not all(isinstance(v, View) for v in views):
            raise OptionError(f"stage: got the views {self.views!r}, wanted each as parse_view('mirror') gives it")
        if not views or len(set(views)) < len(views):
            raise OptionError(f"stage: got the views {', '.join(map(str, views)) or 'none'}, wanted each once")
        object.__setattr__(self, "views", views)
        if not isinstance(self.gate, Gate | None):
            raise OptionError(f"stage: got the gate {self.gate!r}, wanted one such as Gate(below=0.5)")
        if isinstance(self.states, str):
            near_count(self.states)
        elif states := written_states(self.states):
            object.__setattr__(self, "states", states)
        else:
            raise OptionError(f"states: got {self.states!r}, wanted {_STATES}")
        for name in ("weights", "temperatures"):
            values = getattr(self, name)
            if not _positive(values) or len(values) not in (0, len(views)):
                raise OptionError(f"stage: got {name}={values!r}, wanted one positive number for each view")
            object.__setattr__(self, name, tuple(map(float, values)))

    def weight(self, view: View) -> float:
        return self.weights[self.views.index(view)] if self.weights else 1.0

    def temperature(self, view: View) -> float:
        return self.temperatures[self.views.index(view)] if self.temperatures else 1.0

    def only(self, view: View) -> "Stage":
        """The same for one of its views."""
        return Stage((view,), self.states, self.gate, (self.weight(view),), (self.temperature(view),))

    def chosen(self, space: StateSpace) -> tuple[State, ...]:
        """The states of one network."""
        if isinstance(self.states, str):
            return space.nearest(near_count(self.states))
        return tuple(dict.fromkeys(space.parse(s) for s in self.states))

    def _weighed(self, view: View) -> str:
        both = (("weight", self.weight(view)), ("temperature", self.temperature(view)))
        told = ", ".join(f"{name} {value:.4g}" for name, value in both if value != 1)
        return f" ({told})" if told else ""

    def __str__(self) -> str:
        looks = " and ".join(("plain" if v == IDENTITY else str(v)) + self._weighed(v) for v in self.views)
        if self.states != "plain":
            looks += f" in {self.states if isinstance(self.states, str) else f'{len(self.states)} states'}"
        return looks if self.gate is None else f"where {self.gate}: {looks}"


def written_states(states: Any) -> tuple[Any, ...]:
    """States as plain, hashable data: of each, a selection or a flat index for every layer; () where they are none."""

    def written(state: Any) -> tuple[Any, ...]:
        entries = state.selections if isinstance(state, State) else state
        return tuple(
            tuple(map(operator.index, e)) if isinstance(e, list | tuple) else operator.index(e) for e in entries
        )

    try:
        return tuple(map(written, states))
    except TypeError:
        return ()


def _positive(values: Any) -> bool:
    numbers = isinstance(values, list | tuple) and all(isinstance(v, int | float) for v in values)
    return numbers and all(0 < v < float("inf") for v in values)


def near_count(text: str) -> int:
    """ "plain" -> 1, "near:4" -> 4."""
    if text == "plain":
        return 1
    name, _, count = text.partition(":")
    if name != "near" or not count.isdecimal() or not 1 <= int(count) <= 4096:
        raise OptionError(f"states: got {text!r}, wanted {_STATES}")
    return int(count)


def sureness(logits: Tensor, by: str, own: Sequence[Tensor] = ()) -> Tensor:
    """How sure merged logits (B, K) are, (B,), from 0 to 1; `own`: the classes (B,) of each look, for agreement.

    Of a map (B, K, H, W), every pixel: (B, H, W).
    """
    logits = two_class(logits).float()
    if by == "entropy":
        return 1.0 - entropy(logits)
    if by == "agreement":
        final = top_class(logits)
        return torch.stack([agreement(top, final) for top in own]).mean(0)
    p = logits.softmax(1).topk(2, 1).values
    return p[:, 0] - p[:, 1] if by == "margin" else p[:, 0]
