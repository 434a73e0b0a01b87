"""A stage of a recipe: which passes are taken, in which views, states and network, and the gate before them.

Stage(views=("flip",), gate=Gate(below=0.5))    # a flip for the images whose margin is below one half
Stage(states=Search(budget=10))                 # Algorithm 1 of the paper
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from unstride.errors import OptionError
from unstride.geometry.states import State, StateSpace
from unstride.recipe.view import PLAIN, View, as_view
from unstride.tasks.tasks import MEASURES

CRITERIA = ("entropy", "entropy-unaligned", "learned", "displacement", "random", "random-per-image")
AGGREGATES = ("", "mean", "entropy", "entropy-unaligned", "max", "learned")
ALIGNS = ("average", "nearest", "none", "stitch")
BORDERS = ("", "zeros", "renormalise")
SPACES = ("", "features", "logits")
EDGES = ("", "zeros", "pinned")
JOINS = ("average", "replace")
STATE_FIELDS = ("aggregate", "align", "space", "border", "edges")  # of a Stage, only with states
CONTEXT = 64  # pixels around a tile
MOST = 4096  # states
LARGEST = 2**63 - 1  # of any whole number


@dataclass(frozen=True)
class Gate:
    """Only images whose confidence is below a threshold go on to the stage. Confidence runs from 0 to 1 (certain).

    Args:
        by: "margin" between the two most probable classes, "probability" of the first, "entropy" as 1 - H / log K,
            "agreement" of the passes so far. Of a map, the mean over its pixels.
        below: the threshold; images below it go on.
        share: the share of images that goes on; `better.calibrate(images)` finds the threshold.
        tile: for segmentation: only squares of that many pixels whose mean is below the threshold go on.
        context: pixels around a tile that are computed with it; as far as the network sees, or seams may show.

    Example: `Gate(below=0.5)`, `Gate(share=0.25)`.
    """

    by: str = "margin"
    below: float | None = None
    share: float | None = None
    tile: int | None = None
    context: int = CONTEXT

    def __post_init__(self) -> None:
        _one_of("gate: by", self.by, MEASURES)
        if self.below is None and self.share is None:
            raise OptionError(
                "gate: got neither below nor share. Pass below=0.5 (a threshold) or share=0.25 of the images."
            )
        for name, value, most in (("below", self.below, 1.000001), ("share", self.share, 1.0)):
            if value is not None:
                if not is_number(value) or not 0 <= value <= most:
                    raise OptionError(f"gate: {name}: got {value!r}, expected a number from 0 to 1.")
                object.__setattr__(self, name, float(value))  # 1 and 1.0, and numpy's, are written alike
        _whole("gate: tile", 1 if self.tile is None else self.tile, 1, "pixels")
        _whole("gate: context", self.context, 0, "pixels")

    def passes(self, confidence: Tensor) -> Tensor:
        """Which of these images (B,), or tiles of them (B, rows, columns), pass."""
        if self.below is None:
            raise OptionError(
                f"the gate passes {self.share:.0%} of the images, and its threshold is not known yet. Call "
                "better.calibrate(images) with some unlabelled images, or give a threshold: Gate(below=0.5)."
            )
        return ~(confidence >= self.below)  # NaN is not confident

    def __str__(self) -> str:
        what = "images" if self.tile is None else f"tiles of {self.tile} px"
        if self.below is None:
            return f"the {self.share:.0%} of {what} with the lowest {self.by}"
        share = "" if self.share is None else f" ({self.share:.0%} of {what})"
        return f"{self.by} below {self.below:.4g}{share}" + (
            f" in {what}" if self.tile is not None and not share else ""
        )


@dataclass(frozen=True)
class Near:
    """The `count` states that move the map least, the base state included: no search, one batch, exportable."""

    count: int = 4

    def __post_init__(self) -> None:
        _whole("near: count", self.count, 1, "states")
        if self.count > MOST:
            raise OptionError(f"near: count: got {self.count}, expected at most {MOST}.")

    def __str__(self) -> str:
        return f"the {self.count} nearest states"


@dataclass(frozen=True)
class Search:
    """Algorithm 1 of the paper: best-first search over the states of each image.

    Args:
        budget: states that are evaluated, the base state included.
        criterion: which state is expanded next: entropy, entropy-unaligned, learned, displacement, random (one order
            for all images), random-per-image.
        layers: the subsampling layers that are searched, a contiguous range; None: the paper's choice.
        until: ends an image's search early, once its confidence reaches `below`.
        stop: "exact" evaluates min(budget, |S|) states; "literal" checks `|S| <= B` before an expansion, as printed,
            and may exceed the budget.
        seed: of the random criteria.
    """

    budget: int = 10
    criterion: str = "entropy"
    layers: tuple[int, ...] | None = None
    until: Gate | None = None
    stop: str = "exact"
    seed: int = 0

    def __post_init__(self) -> None:
        _whole("search: budget", self.budget, 1, "states")
        _one_of("search: criterion", self.criterion, CRITERIA)
        _one_of("search: stop", self.stop, ("exact", "literal"))
        _whole("search: seed", self.seed, 0, "")
        if self.layers is not None:
            object.__setattr__(self, "layers", _layer_range(self.layers))
        threshold = isinstance(self.until, Gate) and self.until.below is not None and self.until.tile is None
        if self.until is not None and not threshold:
            raise OptionError(f"search: until: got {self.until!r}, expected a threshold such as Gate(below=0.9).")

    def __str__(self) -> str:
        usual = Search()
        changed = [
            f"{f.name} {getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != getattr(usual, f.name)
        ]
        return f"search of {self.budget} states" + "".join(f", {c}" for c in changed if not c.startswith("budget "))


States = None | Near | Search | tuple[Any, ...]


@dataclass(frozen=True)
class Stage:
    """Passes that are taken together: every view in every state, for the images that pass the gate.

    Args:
        views: such as ("plain", "flip", "1.3x"); each is a View or how it is written.
        states: None (the network as it is), Near(4), Search(budget=10), or a list of states.
        network: which network runs.
        gate: which images go on; None: all.
        join: "average" adds the passes to the answer so far, "replace" starts it anew.
        weights, temperatures: one number for each view; logits are divided by the temperature.
        aggregate, align, space, border, edges: how states are aggregated, see the guide "The paper".
    """

    views: tuple[Any, ...] = (PLAIN,)  # each a View; what is written is parsed
    states: States = None
    network: str = "base"
    gate: Gate | None = None
    join: str = "average"
    weights: tuple[float, ...] = ()
    temperatures: tuple[float, ...] = ()
    aggregate: str = ""
    align: str = "average"
    space: str = ""
    border: str = ""
    edges: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "views", _views(self.views))
        object.__setattr__(self, "states", _states(self.states))
        if not isinstance(self.gate, Gate | None):
            raise OptionError(f"stage: gate: got {self.gate!r}, expected one such as Gate(below=0.5).")
        if not isinstance(self.network, str) or not self.network:
            raise OptionError(f"stage: network: got {self.network!r}, expected a name such as 'base'.")
        for name in ("weights", "temperatures"):
            object.__setattr__(self, name, self._per_view(name))
        for name, allowed in (
            *(("join", JOINS), ("aggregate", AGGREGATES), ("align", ALIGNS)),
            *(("space", SPACES), ("border", BORDERS), ("edges", EDGES)),
        ):
            _one_of(f"stage: {name}", getattr(self, name), allowed)
        usual = type(self).__dataclass_fields__
        given = [name for name in STATE_FIELDS if getattr(self, name) != usual[name].default]
        if self.states is None and given:
            raise OptionError(f"stage: {given[0]} says how states are aggregated, and this stage has no states.")
        if isinstance(self.states, Search) and self.states.criterion == "learned" and self.aggregate != "learned":
            raise OptionError("criterion='learned' is the attention's own score: pass aggregate='learned' with it.")
        if isinstance(self.states, Search) and self.gate is not None and self.gate.tile is not None:
            raise OptionError(
                "a gate with tiles cannot stand before a Search. Take Near states, or a gate without tile."
            )

    def _per_view(self, name: str) -> tuple[float, ...]:
        values = getattr(self, name)
        numbers = isinstance(values, list | tuple) and all(is_number(v) and 1e-6 <= v <= 1e6 for v in values)
        if not numbers or len(values) not in (0, len(self.views)):
            raise OptionError(
                f"stage: {name}: got {values!r}, expected one positive number for each view, from 1e-6 to 1e6."
            )
        return tuple(map(float, values))

    @property
    def pinned(self) -> bool:
        """Whether the edges of large maps stay where they are: always for lists of states, unless asked otherwise."""
        return self.edges == "pinned" or (not self.edges and not isinstance(self.states, Search))

    @property
    def at_border(self) -> str:
        """Where an aligned map has no source: the paper's zeros in a search, renormalised in a list of states."""
        return self.border or ("zeros" if isinstance(self.states, Search) else "renormalise")

    @property
    def aggregation(self) -> str:
        return self.aggregate or "mean"

    @property
    def state_space(self) -> str:
        """Where states are aggregated: "features", "logits" or "" (what the task does)."""
        return self.space or ("" if isinstance(self.states, Search) else "logits")

    def weight(self, view: View) -> float:
        return self.weights[self.views.index(view)] if self.weights else 1.0

    def temperature(self, view: View) -> float:
        return self.temperatures[self.views.index(view)] if self.temperatures else 1.0

    def listed(self, space: StateSpace) -> tuple[State, ...]:
        """The states of one network, where they do not depend on the image."""
        if isinstance(self.states, Near):
            return space.nearest(self.states.count)
        if isinstance(self.states, tuple):
            return tuple(dict.fromkeys(space.parse(s) for s in self.states))
        return (space.zero,)

    def _described(self, view: View) -> str:
        both = (("weight", self.weight(view)), ("temperature", self.temperature(view)))
        described = ", ".join(f"{name} {value:.4g}" for name, value in both if value != 1)
        return f"{view} ({described})" if described else str(view)

    def __str__(self) -> str:
        """Such as `where margin below 0.5: flip (weight 0.5) in the 4 nearest states`."""
        text = " and ".join(map(self._described, self.views))
        if self.network != "base":
            text = f"{self.network}: {text}" if text != "plain" else self.network
        if self.states is not None:
            text += f" in {len(self.states)} states" if isinstance(self.states, tuple) else f" in {self.states}"
            usual = type(self).__dataclass_fields__
            text += "".join(
                f", {name} {getattr(self, name)}" for name in STATE_FIELDS if getattr(self, name) != usual[name].default
            )
        if self.join == "replace":
            text += ", replaces the answer so far"
        return text if self.gate is None else f"where {self.gate}: {text}"


def _views(given: Any) -> tuple[View, ...]:
    views = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | View) else None
    if views is None or not views:
        raise OptionError(f"stage: views: got {given!r}, expected a list such as ('plain', 'flip').")
    parsed = tuple(map(as_view, views))
    if len(set(parsed)) < len(parsed):
        raise OptionError(f"stage: views: got {', '.join(map(str, parsed))}, expected each view once.")
    return parsed


def _states(given: Any) -> States:
    if given is None or isinstance(given, Near | Search):
        return given
    written = plain_states(given) if isinstance(given, list | tuple) else ()
    if not written:
        raise OptionError(
            f"stage: states: got {given!r}, expected None, Near(4), Search(budget=10) or a list of states."
        )
    return written


def plain_states(states: Any) -> tuple[Any, ...]:
    """States as plain, hashable data: of each, a selection or a flat index for every layer; () for anything else."""

    def plain(state: Any) -> tuple[Any, ...]:
        entries = state.selections if isinstance(state, State) else state
        return tuple(
            tuple(map(operator.index, e)) if isinstance(e, list | tuple) else operator.index(e) for e in entries
        )

    try:
        return tuple(map(plain, states))
    except TypeError:
        return ()


def _layer_range(value: Any) -> tuple[int, ...]:
    layers = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else ()
    whole = layers and all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in layers)
    if not whole or layers != tuple(range(layers[0], layers[-1] + 1)):
        raise OptionError(f"search: layers: got {value!r}, expected a contiguous range such as range(2, 5).")
    return layers


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        wanted = ", ".join(repr(a) for a in allowed if a)
        raise OptionError(f"{name}: got {value!r}, expected one of {wanted}.")


def _whole(name: str, value: Any, least: int, unit: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        huge = isinstance(value, int) and value > LARGEST
        what = f"a whole number{f' of {unit}' if unit else ''}, at least {least}"
        raise OptionError(
            f"{name}: got {'a number of many digits' if huge else repr(value)}, expected {what}"
            f"{f' and at most {LARGEST}' if huge else ''}."
        )


def tile_gate(size: tuple[int, ...]) -> Gate:
    """Tiles for images of this size that all pass; `calibrate` or `tune` sets the share."""
    large = min(size) >= 256
    return Gate(share=1.0, tile=32 if large else 16, context=CONTEXT if large else 16)


__all__ = ["Gate", "Near", "Search", "Stage", "plain_states", "tile_gate"]
