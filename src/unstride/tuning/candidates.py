"""What `tune` tries: groups of forward passes, and candidates that put them into steps behind gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Near, Stage
from unstride.recipe.view import PLAIN, View, parse_view
from unstride.tasks.tasks import TASKS
from unstride.views.images import Preprocess

SMALL_IMAGE = 96  # pixels: smaller images are shifted by a pixel instead of cropped, and scaled by less
NEAR_STATES = 4
FLIP = parse_view("flip")
CORNERS = tuple(f"FiveCrop={corner}" for corner in ("LeftTop", "RightTop", "LeftBottom", "RightBottom"))
SHIFTS = ("ShiftY=1 + ShiftX=1", "ShiftY=-1 + ShiftX=-1", "ShiftY=1 + ShiftX=-1", "ShiftY=-1 + ShiftX=1")


@dataclass(frozen=True)
class PassGroup:
    """Forward passes that are added together: one network, one view, the base state or the nearest other states."""

    network: str
    view: View = PLAIN
    states: Near | None = None

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # choosing compares groups some hundred thousand times
        return hash((self.network, self.view, self.states))

    @property
    def plain(self) -> bool:
        return self.view == PLAIN and self.states is None

    def __str__(self) -> str:
        states = "" if self.states is None else f" in {self.states}"
        return f"{self.network}: {self.view}{states}"


Groups = tuple[PassGroup, ...]


@dataclass(frozen=True)
class Step:
    """Groups that are taken together, by this share of all images.

    Args:
        weight: of each pass, beside the passes of earlier steps.
        join: "average" adds to the answer so far, "replace" starts it anew.
    """

    groups: Groups
    share: float = 1.0
    weight: float = 1.0
    join: str = "average"


@dataclass(frozen=True)
class Candidate:
    """A recipe without thresholds and temperatures, which come from the images.

    Args:
        combine: how passes are combined, as in a Recipe.
        by: the measure of all its gates.
    """

    steps: tuple[Step, ...]
    combine: str
    by: str = "margin"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.steps, self.combine, self.by))

    @property
    def groups(self) -> Groups:
        return tuple(g for step in self.steps for g in step.groups)

    @property
    def networks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(g.network for g in self.groups))

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(step.share for step in self.steps[1:])

    @property
    def gated(self) -> bool:
        return any(share < 1 for share in self.shares)

    @property
    def structure(self) -> Candidate:
        """The same whatever the shares."""
        return replace(self, steps=tuple(replace(step, share=1.0) for step in self.steps))

    def with_shares(self, shares: Sequence[float]) -> Candidate:
        first, *rest = self.steps
        return replace(self, steps=(first, *(replace(s, share=v) for s, v in zip(rest, shares, strict=True))))

    def added(self, step: Step) -> Candidate:
        return replace(self, steps=(*self.steps, step))


# ---------------------------------------------------------------- which passes a pool has
def pool_groups(
    networks: Mapping[str, Preprocess | None], size: tuple[int, ...], task: str, margins: Mapping[str, float]
) -> list[PassGroup]:
    """The passes of every network, its plain pass first.

    Args:
        networks: by name, the first defines cost 1.0.
        size: of the images as the first network takes them.
        margins: of each network, how much more of the image there is than its crop shows: 256 of 224 is 1.143.
    """
    first = next(iter(networks))
    found = []
    for name, preprocess in networks.items():
        own = size if preprocess is None or preprocess.size is None else preprocess.size
        views = _views(own, task, margins.get(name, 1.0), name == first)
        found += [PassGroup(name), *(PassGroup(name, parse_view(v)) for v in views)]
        if len(size) == 2 and name == first:
            found.append(PassGroup(name, PLAIN, Near(NEAR_STATES)))
    return found


def _views(size: tuple[int, ...], task: str, margin: float, first: bool) -> list[str]:
    """Of the first network more, because it is usually the cheapest."""
    if len(size) != 2:  # signals, clips and volumes
        return ["flip"]
    if TASKS[task].maps:
        scales = ("1.25x", "0.75x", "1.5x") if first else ("1.25x",)
        return ["flip", *(view for scale in scales for view in (scale, f"flip + {scale}"))]
    if min(size) < SMALL_IMAGE:
        return ["flip", "1.125x", "flip + 1.125x", *(SHIFTS if first else SHIFTS[:2])]
    wide = f" + Crop={margin!r}" if margin > 1.01 else ""
    views = ["flip", *_both(f"Size={margin if wide else 1.15!r}{wide}")]
    return [*views, *_both(f"Size=1.3{wide}"), *CORNERS] if first else views


def _both(view: str) -> tuple[str, str]:
    return view, f"flip + {view}"


# ---------------------------------------------------------------- sets of groups that treat left and right alike
@dataclass(frozen=True)
class SearchSpace:
    """The sets of passes of each network that a step may have, by the groups that could be computed."""

    groups: Groups

    def networks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(g.network for g in self.groups))

    def extras(self, network: str) -> list[Groups]:
        """Sets beside the plain pass: flips, scales with their flips, corners, shifts, near states."""
        own = {g.view: g for g in self.groups if g.network == network and g.states is None and not g.plain}
        flip = _present(own, "flip")
        scales = [g for v, g in own.items() if any(op.name == "Size" for op in v.ops) and "flip" not in str(v)]
        pairs = [(g, *_present(own, f"flip + {g.view}")) for g in scales]
        corners, shifts = _present(own, *CORNERS), _present(own, *SHIFTS)
        found = [flip, *((g,) for g in scales), *((twin,) for _, *t in pairs for twin in t)]
        found += [part for pair in pairs for part in (pair, (*flip, pair[0]), (*flip, *pair))]
        found += [corners, (*flip, *corners), shifts[:2], (*flip, *shifts)]
        found.append((*flip, *(g for pair in pairs for g in pair)))
        near = tuple(g for g in self.groups if g.network == network and g.states is not None)
        found += [near, (*flip, *near)] if near else []
        return [some for some in dict.fromkeys(found) if some]

    def firsts(self) -> list[Groups]:
        """What a recipe may begin with."""
        found: list[Groups] = []
        for name in self.networks():
            plain = (PassGroup(name),)
            scales = [some for some in self.extras(name) if len(some) == 1 and some[0].states is None]
            found += [plain, *((*plain, *some) for some in scales[:2]), *scales[1:2]]
            found += [(*plain, *some) for some in self.extras(name) if 1 < len(some) <= 3]
        return list(dict.fromkeys(found))

    def extensions(self, taken: Groups) -> list[Groups]:
        """What may follow these passes: more views of their networks, or another network with some of its views."""
        seen = {g.network for g in taken}
        found: list[Groups] = []
        for name in self.networks():
            extras = self.extras(name)
            if name in seen:
                found += [some for some in extras if not set(some) & set(taken)]
            else:
                plain = PassGroup(name)
                found += [
                    (plain,),
                    *((plain, *some) for some in extras),
                    *(s for s in extras[1:4] if s[0].view != FLIP),
                ]
        return [some for some in found if _complete(some, taken)]


def _present(own: Mapping[View, PassGroup], *views: str) -> Groups:
    return tuple(own[v] for v in map(parse_view, views) if v in own)


def _complete(groups: Groups, taken: Groups) -> bool:
    """Near states follow the base state of their network."""
    plain = {g.network for g in (*taken, *groups) if g.plain}
    return all(g.states is None or g.network in plain for g in groups)


def standards(space: SearchSpace, combine: str) -> dict[str, Candidate]:
    """What people do: each network alone and with a flip, the ensemble of all, more scales, five crops; by name."""
    found: dict[str, Candidate] = {}

    def add(name: str, *steps: Groups) -> None:
        found.setdefault(name, Candidate(tuple(map(Step, steps)), combine))

    names = space.networks()
    for name in names:
        add(name, (PassGroup(name),))
        flip = PassGroup(name, FLIP)
        if flip in space.groups:
            add(f"{name} + flip", (PassGroup(name), flip))
    if len(names) > 1:
        add("ensemble of all", *((PassGroup(name),) for name in names))
        flips = [(PassGroup(name), PassGroup(name, FLIP)) for name in names if PassGroup(name, FLIP) in space.groups]
        if len(flips) == len(names):
            add("ensemble of all + flip", *flips)
    for name in names[:1]:
        own = {g.view: g for g in space.groups if g.network == name and g.states is None}
        scales = [g for v, g in own.items() if any(op.name == "Size" for op in v.ops)]
        if len(scales) > 1:
            add(f"{name} + multi-scale + flip", (PassGroup(name), *_present(own, "flip"), *scales))
        if len(_present(own, *CORNERS)) == len(CORNERS):
            add(f"{name} + five crops", (PassGroup(name), *_present(own, *CORNERS)))
    return found


# ---------------------------------------------------------------- a candidate as a recipe
def stages_of(
    candidate: Candidate, gates: Sequence[Gate | None], temperatures: Mapping[str, float] | None = None
) -> tuple[Stage, ...]:
    """Its stages: one for each run of groups with the same network and states.

    Args:
        gates: of each step, the first None.
        temperatures: of each network.
    """
    stages = []
    for step, gate in zip(candidate.steps, gates, strict=True):
        for number, ((network, states), some) in enumerate(groupby(step.groups, lambda g: (g.network, g.states))):
            views = tuple(g.view for g in some)
            begins = number == 0
            stages.append(
                Stage(
                    views,
                    states,
                    network,
                    gate if begins else None,
                    step.join if begins else "average",
                    () if step.weight == 1 else (step.weight,) * len(views),
                    () if temperatures is None else (temperatures[network],) * len(views),
                )
            )
    return tuple(stages)


def recipe_of(
    candidate: Candidate,
    task: str,
    gates: Sequence[Gate | None] | None = None,
    temperatures: Mapping[str, float] | None = None,
    name: str = "",
) -> Recipe:
    """Without `gates` every image takes every step."""
    gates = [None] * len(candidate.steps) if gates is None else gates
    return Recipe(stages_of(candidate, gates, temperatures), task, candidate.combine, name=name)


def groups_of_recipe(recipe: Recipe, groups: Iterable[PassGroup]) -> list[Groups] | None:
    """Of each stage, its groups among those of a pool; None if a pass of it is not there."""
    known, found = set(groups), []
    for stage in recipe.stages:
        states = stage.states if isinstance(stage.states, Near) else None
        own = tuple(PassGroup(stage.network, view, states) for view in stage.views)
        usual = replace(Stage(stage.views, stage.states), views=stage.views)
        same = all(getattr(stage, f) == getattr(usual, f) for f in ("aggregate", "align", "space", "border", "edges"))
        if not set(own) <= known or not same or not isinstance(stage.states, Near | None):
            return None
        found.append(own)
    return found
