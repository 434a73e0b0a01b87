"""Finer features: the states that lie evenly between the cells of the plain map, stitched into one grid."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from unstride.errors import OptionError
from unstride.geometry.states import State
from unstride.procedure.stitch import Stitched, sample
from unstride.procedure.tasks import Plan


def phases(plan: Plan, finer: int) -> tuple[State, ...]:
    """The finer^axes states whose maps lie k / finer of a cell beyond the plain one, along every axis, the plain first.

    Late layers come first: they move by half a cell for the least work.
    """
    space, grid = plan.found.space, plan.targets[0].grid
    assert grid is not None
    steps = [[_steps(plan, axis, k * t / finer) for k in range(finer)] for axis, t in enumerate(grid.spacing)]
    if any(one is None for axis in steps for one in axis):
        able = [n for n in range(2, 17) if all(_steps(plan, a, t / n) is not None for a, t in enumerate(grid.spacing))]
        spacing = " x ".join(f"{t:g}" for t in grid.spacing)
        raise OptionError(f"finer: got {finer}, but cells of {spacing} pixels can be parted by {able or 'nothing'}")
    found = []
    for chosen in itertools.product(*steps):
        per_layer = zip(*(one for one in chosen if one is not None), strict=True)
        found.append(State(tuple(tuple(s) for s in per_layer)))
    return tuple(dict.fromkeys([space.zero, *found]))


def _steps(plan: Plan, axis: int, distance: float) -> list[int] | None:
    """One selection per layer that moves the map by so many pixels along an axis; None where there is none."""
    space, paths = plan.found.space, plan.found.paths[plan.targets[0].tap]
    chosen = [0] * len(space.rates)
    for layer in range(len(space.rates), 0, -1):
        rate, stride = space.rates[layer - 1][axis], space.strides[layer - 1][axis]
        if layer in paths[axis]:
            phase = min(int(distance / stride + 1e-6), rate - 1)
            distance -= phase * stride
            sides = range(rate) if space.sides is None else space.sides[layer - 1][axis]
            chosen[layer - 1] = sides[phase]
    return chosen if abs(distance) < 1e-3 else None


@torch.no_grad()
def finer_features(plan: Plan, images: Tensor, finer: int) -> Tensor:
    """(B, C, h, w) of the plain map -> (B, C, finer h, finer w): cell i lies at i / finer of the plain map's cells."""
    if not isinstance(finer, int) or isinstance(finer, bool) or finer < 1:
        raise OptionError(f"finer: got {finer!r}, wanted a whole number, such as 2 for twice as many cells")
    target = plan.targets[0]
    assert target.grid is not None
    size = tuple(n * finer for n in target.grid.size)
    at = tuple(torch.arange(n, dtype=torch.float32, device=images.device) / finer for n in size)
    sums, run = Stitched(target, size, len(images), at=at), plan.engine.start(images)
    ones = torch.ones(len(images), device=images.device)
    tap = plan.engine.taps.index(target.tap)
    for state in phases(plan, finer):
        rows: Sequence[tuple[int, State]] = [(i, state) for i in range(len(images))]
        value = run.plain[target.tap] if state.plain else run.add(rows)[tap]
        sums.add(slice(None), plan.maps(value, target), ones, plan.offset(state, target))
    return sums.value().to(images.dtype)


def interpolated(maps: Tensor, finer: int) -> Tensor:
    """A plain map (B, C, h, w) read at the places of the finer one: what stitching is compared with."""
    return sample(maps, [torch.arange(n * finer, device=maps.device) / finer for n in maps.shape[2:]])
