"""Which looks a pool holds: views that cost little and help often, near states, and what people do instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from unstride.errors import OptionError
from unstride.procedure.gates import near_count
from unstride.tasks.tasks import TASKS
from unstride.recipe.view import View, parse_view
from unstride.views.source import Canvas, PILImages, Source, flip_axes

SIZES = ("small", "medium", "large")
_SMALL_IMAGE = 96  # pixels: below, a network knows objects in one size only, and a pixel is a long way
_CORNERS = tuple(f"FiveCrop={corner}" for corner in ("LeftTop", "RightTop", "LeftBottom", "RightBottom"))


@dataclass(frozen=True)
class Unit:
    """What may be added at once: a view in its plain state, or in its nearest states, which share their prefixes."""

    view: View
    states: str = "plain"

    @property
    def count(self) -> int:
        return near_count(self.states)

    def __str__(self) -> str:
        return str(self.view) if self.states == "plain" else f"{self.view} in {self.states}"


def candidates(source: Source, pool: str, task: str) -> list[Unit]:
    """Units for such images; `pool` bounds how many. What the network refuses is left out when it is tried."""
    if pool not in SIZES:
        raise OptionError(f"pool: got {pool!r}, wanted one of {', '.join(SIZES)}")
    level = SIZES.index(pool)
    if TASKS[task].maps:
        views = ["flip", "1.25x", "flip + 1.25x"]
        views += ["0.75x", "flip + 0.75x", "1.5x", "flip + 1.5x"] if level else []
        views += ["0.5x", "flip + 0.5x", "1.75x", "flip + 1.75x"] if level > 1 else []
        return [*map(_unit, views), _unit("plain", "near:4")]
    if min(source.size) < _SMALL_IMAGE:
        return _small(level)
    field = wider(source)
    seen = f" + Crop={field!r}" if field > 1.01 else ""
    views = ["flip"]
    for scale in ((1.15,), (1.15, 1.3, 0.86), (1.15, 1.3, 0.86, 1.45))[level]:
        at = f"Size={field if seen and scale == 1.15 else scale!r}{seen}"
        views += [at, f"flip + {at}"]
    if level:
        views += _CORNERS
    units = [_unit(v) for v in views]
    if level:
        units.append(_unit("plain", "near:4"))
    if level > 1:
        units += [_unit(v) for v in ("1.15x", "1.3x", *(f"flip + {c}" for c in _CORNERS))]
        units += [_unit("plain", "near:8"), _unit("plain", "near:13"), _unit("flip", "near:4")]
    return list(dict.fromkeys(units))


def _small(level: int) -> list[Unit]:
    units = [_unit("flip"), _unit("ShiftY=1 + ShiftX=1"), _unit("ShiftY=-1 + ShiftX=-1"), _unit("plain", "near:4")]
    if level:
        moved = ["ShiftY=1 + ShiftX=-1", "ShiftY=-1 + ShiftX=1", "1.125x", "flip + 1.125x"]
        moved += ["flip + ShiftY=1 + ShiftX=1", "flip + ShiftY=-1 + ShiftX=-1"]
        units += [*map(_unit, moved), _unit("flip", "near:4")]
    if level > 1:
        far = ["ShiftY=2", "ShiftY=-2", "ShiftX=2", "ShiftX=-2", "1.25x"]
        units += [*map(_unit, far), _unit("plain", "near:8"), _unit("plain", "near:13")]
    return units


def _unit(view: str, states: str = "plain") -> Unit:
    return Unit(parse_view(view), states)


def wider(source: Source) -> float:
    """How much more of the image there is than the crop shows, linearly: 256 of 224 is 1.143."""
    size = source.size
    if isinstance(source, Canvas):
        return round(min(source.pixels.shape[2] / size[0], source.pixels.shape[3] / size[1]), 4)
    if isinstance(source, PILImages) and isinstance(source.preprocess.resize, int):
        return max(1.0, round(source.preprocess.resize / max(size), 4))
    return 1.0


def usual(units: list[Unit]) -> dict[str, list[Unit]]:
    """What a user would do instead, as far as these units have it."""
    alone = [u for u in units if u.states == "plain"]
    mirror = [u for u in alone if u.view == parse_view("flip")]
    corners = [u for u in alone if str(u.view) in _CORNERS]
    sizes = [u for u in alone if any(op.name == "Size" and float(op.value or 0) > 1 for op in u.view.ops)]
    still = [u for u in sizes if not flip_axes(u.view)]
    rows = {"flip": mirror}
    if len(corners) == 4:
        rows["five-crop"] = corners
    if still:
        rows["multi-scale"] = [still[min(1, len(still) - 1)]]
        rows["multi-scale, flip"] = [*mirror, *sizes]
    return {name: chosen for name, chosen in rows.items() if chosen}


def sets(units: Sequence[Unit]) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """What is tried as it is, by the numbers of its units: what people do, and all of it with the balanced sets."""
    found = usual(list(units)).values(), balanced(list(units))
    known, others = ({tuple(sorted(units.index(u) for u in some)) for some in part} for part in found)
    return known, known | others


def balanced(units: list[Unit]) -> list[list[Unit]]:
    """Sets that treat left and right alike: views with their mirror images, one or two of them, with and without the
    mirrored image itself; and single mirrored views. Few to choose among, so that little can be chosen by chance.
    """
    by = {u.view: u for u in units if u.states == "plain"}
    mirror = by.get(parse_view("flip"))
    twins = [(u, by.get(parse_view(f"flip + {u.view!s}"))) for v, u in by.items() if not flip_axes(v)]
    pairs = [[u, twin] for u, twin in twins if twin is not None]
    found = [[twin] for _, twin in pairs] + pairs
    if mirror is not None:
        found += [[mirror, *pair] for pair in pairs]
        found += [[mirror, *one, *other] for one, other in combinations(pairs, 2)]
    return found
