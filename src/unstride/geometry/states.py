"""Selections: a State picks (s_y, s_x) at every subsampling layer; 0 is the trained network."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from unstride.errors import OptionError

Selection = tuple[int, int]


@dataclass(frozen=True, order=True)
class State:
    """One selection (s_y, s_x) per layer. `State.zero(3)` is the plain network; `str(state)` shows the flat indices."""

    selections: tuple[Selection, ...]

    @classmethod
    def zero(cls, layers: int) -> "State":
        return cls(((0, 0),) * layers)

    def at(self, layer: int, selection: Selection) -> "State":
        """This state with another selection at `layer` (counted from 1)."""
        s = self.selections
        return State((*s[: layer - 1], selection, *s[layer:]))

    def __str__(self) -> str:
        return "(" + " ".join("0" if s == (0, 0) else f"{s[0]},{s[1]}" for s in self.selections) + ")"


@dataclass(frozen=True)
class StateSpace:
    """All states of a network: `rates` (R_y, R_x) and `strides` (cell size of the layer's input, in pixels) per layer.

    Example: `StateSpace(((2, 2), (2, 2)), ((1.0, 1.0), (2.0, 2.0))).neighbours(State.zero(2), 1)` gives three states.
    """

    rates: tuple[tuple[int, int], ...]
    strides: tuple[tuple[float, float], ...]

    def __len__(self) -> int:
        return math.prod(ry * rx for ry, rx in self.rates)

    @property
    def zero(self) -> State:
        return State.zero(len(self.rates))

    def selections(self, layer: int) -> list[Selection]:
        """All selections of a layer in index order i = s_y R_x + s_x."""
        ry, rx = self.rates[layer - 1]
        return [(y, x) for y in range(ry) for x in range(rx)]

    def neighbours(self, state: State, layer: int) -> list[State]:
        """The R_y R_x - 1 states that differ from `state` at `layer` only, in index order."""
        here = state.selections[layer - 1]
        return [state.at(layer, s) for s in self.selections(layer) if s != here]

    def displacement(self, state: State) -> tuple[float, float]:
        """Delta, in image pixels (y, x): how far the state's map lies beyond the plain network's."""
        dy = sum(s[0] * t[0] for s, t in zip(state.selections, self.strides, strict=True))
        dx = sum(s[1] * t[1] for s, t in zip(state.selections, self.strides, strict=True))
        return dy, dx

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

        By the distance of the displacement, then the cheaper ones (those that change later layers only).
        """
        found: list[State] = [self.zero]
        for layer in range(len(self.rates), 0, -1):  # changes of up to two layers: farther ones are never the nearest
            found += self.neighbours(self.zero, layer)
        singles = found[1:]
        for one, two in itertools.combinations(singles, 2):
            first, second = _changed(one), _changed(two)
            if first != second:
                found.append(one.at(second, two.selections[second - 1]))

        def rank(state: State) -> tuple[float, int]:
            dy, dx = self.displacement(state)
            return round(math.hypot(dy, dx), 6), -_changed(state)

        return tuple(sorted(found, key=rank)[:count])

    def parse(self, value: Any) -> State:
        """A State, a sequence of (s_y, s_x) or of flat indices i = s_y R_x + s_x -> a State of this space."""
        entries = value.selections if isinstance(value, State) else tuple(value)
        if len(entries) != len(self.rates):
            raise OptionError(
                f"state {value!r}: got {len(entries)} selections, wanted {len(self.rates)}, one per layer"
            )
        out = []
        for layer, (entry, (ry, rx)) in enumerate(zip(entries, self.rates, strict=True), 1):
            s = divmod(entry, rx) if isinstance(entry, int) else tuple(int(e) for e in entry)
            if len(s) != 2 or not (0 <= s[0] < ry and 0 <= s[1] < rx):
                raise OptionError(f"state {value!r}: {entry!r} at layer {layer} is outside its rate ({ry}, {rx})")
            out.append((s[0], s[1]))
        return State(tuple(out))


def _changed(state: State) -> int:
    """The first layer that a state changes; beyond the last for the plain one."""
    return next((k for k, s in enumerate(state.selections, 1) if any(s)), len(state.selections) + 1)
