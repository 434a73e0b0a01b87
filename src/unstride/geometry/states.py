"""Selections: a State picks one entry per axis, (s_y, s_x) on images, at every subsampling layer; 0 is the trained
network.
"""

import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unstride.errors import OptionError

Selection = tuple[int, ...]
Sides = tuple[tuple[int, ...], ...]  # per axis, what stands for each phase 0 .. R - 1: s or s - R


@dataclass(frozen=True, order=True)
class State:
    """One selection (s_y, s_x) per layer. `State.zero(3)` is the base model; `str(state)` shows the entries.

    At a rate of R, s and s - R take the same phase, one cell of the output apart: -1 reads what lies one cell before.
    """

    selections: tuple[Selection, ...]

    @classmethod
    def zero(cls, layers: int, axes: int = 2) -> "State":
        return cls(((0,) * axes,) * layers)

    @property
    def plain(self) -> bool:
        return not any(map(any, self.selections))

    def at(self, layer: int, selection: Selection) -> "State":
        """This state with another selection at `layer` (counted from 1)."""
        s = self.selections
        return State((*s[: layer - 1], selection, *s[layer:]))

    def __str__(self) -> str:
        return "(" + " ".join(",".join(map(str, s)) if any(s) else "0" for s in self.selections) + ")"


@dataclass(frozen=True)
class StateSpace:
    """All states of a network: `rates` (R_y, R_x) and `strides` (cell size of the layer's input, in pixels) per layer.

    `sides` says which of s and s - R loses less at each layer, see `best_selections`; without it, that is s.
    Example: `StateSpace(((2, 2), (2, 2)), ((1.0, 1.0), (2.0, 2.0))).neighbours(State.zero(2), 1)` gives three states.
    """

    rates: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[float, ...], ...]
    sides: tuple[Sides, ...] | None = None

    def __len__(self) -> int:
        return math.prod(r for rate in self.rates for r in rate)

    @property
    def axes(self) -> int:
        return len(self.rates[0]) if self.rates else 2

    @cached_property
    def zero(self) -> State:
        return State.zero(len(self.rates), self.axes)

    def selections(self, layer: int) -> list[Selection]:
        """All selections of a layer in index order i = s_y R_x + s_x: the paper's, from 0 to R - 1."""
        return list(itertools.product(*(range(r) for r in self.rates[layer - 1])))

    def best_selections(self, layer: int) -> list[Selection]:
        """The same phases in the same order, each on the side, s or s - R, where the layer's ops lose least."""
        return self.selections(layer) if self.sides is None else list(itertools.product(*self.sides[layer - 1]))

    def neighbours(self, state: State, layer: int) -> list[State]:
        """The R_y R_x - 1 states that differ from `state` at `layer` only, in index order."""
        here = state.selections[layer - 1]
        return [state.at(layer, s) for s in self.selections(layer) if s != here]

    def displacement(self, state: State) -> tuple[float, ...]:
        """Delta, in image pixels (y, x): how far the state's map lies beyond the base model's."""
        both = list(zip(state.selections, self.strides, strict=True))
        return tuple(sum(s[a] * t[a] for s, t in both) for a in range(self.axes))

    def states(self, layers: Sequence[int] | None = None) -> Iterator[State]:
        """Every state that differs from 0 only at `layers` (all by default), in lexicographic order."""
        chosen = list(layers) if layers is not None else list(range(1, len(self.rates) + 1))

        def grow(state: State, rest: list[int]) -> Iterator[State]:
            if not rest:
                yield state
                return
            for s in self.selections(rest[0]):
                yield from grow(state.at(rest[0], s), rest[1:])

        yield from grow(self.zero, chosen)

    def nearest(self, count: int) -> tuple[State, ...]:
        """The `count` states that move the map least, the plain one first: an order without a search.

        Natural selections of up to two layers, by the distance of the displacement, then the cheaper ones (those that
        change later layers only), then those that change fewer layers.
        """
        return (self.zero,) if count == 1 else self._by_distance[:count]

    @cached_property
    def _by_distance(self) -> tuple[State, ...]:
        zero = self.zero
        singles = [(layer, s) for layer in range(len(self.rates), 0, -1) for s in self.best_selections(layer) if any(s)]
        found = [zero, *(zero.at(*one) for one in singles)]
        for one, two in itertools.combinations(singles, 2):
            if one[0] != two[0]:
                found.append(zero.at(*one).at(*two))

        def rank(state: State) -> tuple[float, int, int]:
            changed = [k for k, s in enumerate(state.selections) if any(s)]
            return round(math.hypot(*self.displacement(state)), 6), -min(changed, default=0), len(changed)

        return (zero, *sorted(found[1:], key=rank))

    def parse(self, value: Any) -> State:
        """A State, a sequence of (s_y, s_x) or of flat indices i = s_y R_x + s_x -> a State of this space."""
        try:
            entries = value.selections if isinstance(value, State) else tuple(value)
        except TypeError:
            raise OptionError(f"state {value!r}: expected a selection for each of {len(self.rates)} layers") from None
        if len(entries) != len(self.rates):
            raise OptionError(
                f"state {value!r}: got {len(entries)} selections, expected {len(self.rates)}, one per layer"
            )
        out = []
        for layer, (entry, rate) in enumerate(zip(entries, self.rates, strict=True), 1):
            s = self._selection(entry, layer)
            if len(s) != len(rate) or any(abs(k) >= r for k, r in zip(s, rate, strict=True)):
                raise OptionError(
                    f"state {value!r}: {entry!r} at layer {layer} is outside its rate {rate}, or no whole number"
                )
            out.append(s)
        return State(tuple(out))

    def _selection(self, entry: Any, layer: int) -> Selection:
        """A selection, or a flat index, of whole numbers; one that there is not -> none that could be meant."""
        try:
            if isinstance(entry, Sequence):
                return tuple(operator.index(e) for e in entry)
            index, found = operator.index(entry), self.selections(layer)
        except TypeError:
            return ()
        return found[index] if 0 <= index < len(found) else ()
