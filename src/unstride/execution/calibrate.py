"""Gates set from unlabelled images: one run with open gates gives every threshold and the mean cost.

An image that reaches a gate has taken all passes before it, whatever the other gates do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from unstride.errors import InputError, OptionError
from unstride.execution.record import Record
from unstride.execution.runner import StageResult, tiling_for
from unstride.execution.tiles import Tiling
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Gate, Stage
from unstride.recipe.view import PLAIN, View
from unstride.tasks.temperature import match_temperature
from unstride.views.source import Canvas

EVERYTHING = 1.000001  # a threshold that every confidence is below
Price = float | Callable[[Tensor], float]  # of a stage, in forward passes; or its mean, from the open tiles


@dataclass(frozen=True, eq=False)
class OpenRun:
    """A batch of images of one size that passed every gate.

    `confidences`: before each gate, of the images (N,), or of their tiles (N, rows, columns).
    """

    confidences: Sequence[Tensor]
    prices: Sequence[Price]

    def __len__(self) -> int:
        return len(self.confidences[0])


@dataclass(frozen=True)
class Calibration:
    """What `better.calibrate(images, cost=1.5)` set. `print` shows the cost and the share that passes each gate."""

    images: int
    cost: float  # mean, in forward passes of the base model
    shares: tuple[float, ...]  # of all images, or of their tiles, that pass each gate
    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        gates = [s.gate for s in self.stages if s.gate is not None]
        lines = [f"  {share:.0%} pass the gate: {gate}" for share, gate in zip(self.shares, gates, strict=True)]
        plural = "" if self.images == 1 else "s"
        return "\n".join([f"mean cost {self.cost:.2f} forward passes, on {self.images:,} image{plural}", *lines])


def open_run(result: StageResult, stride: Sequence[int] | None) -> OpenRun:
    """What calibration needs of a run with open gates."""
    record = result.record
    return OpenRun(record.confidences, stage_prices(result.recipe, record, stride))


def stage_prices(recipe: Recipe, record: Record, stride: Sequence[int] | None) -> list[Price]:
    """The cost of each stage for one image; behind a gate with tiles, by the area of their windows."""
    base = max(1, record.base_work)
    prices: list[Price] = []
    gate: Gate | None = None
    for stage, macs in zip(recipe.stages, record.stage_work, strict=True):
        gate = stage.gate or gate
        cost = sum(macs) / len(macs) / base
        prices.append(cost)
        if gate is not None and gate.tile is not None and record.frame is not None:
            tilings = [tiling_for(view, gate, record.frame, stride) for view in stage.views]
            prices[-1] = partial(_window_price, cost, tilings)
    return prices


def _window_price(cost: float, tilings: Sequence[Tiling], open_tiles: Tensor) -> float:
    """The mean over images whose tiles (N, rows, columns) are open."""
    areas = [math.prod(t.shown) for t in tilings]
    shares = [[t.share(where) for where in open_tiles] for t in tilings]
    return cost * sum(a * sum(own) / len(own) for a, own in zip(areas, shares, strict=True)) / sum(areas)


def calibrate(stages: Sequence[Stage], runs: Sequence[OpenRun], cost: float | None = None) -> Calibration:
    """With `cost`, every gate passes the same share of what reaches it, so that the mean cost is that; without, each
    gate passes its own share.
    """
    gates = sum(s.gate is not None for s in stages)
    if not gates:
        raise OptionError("this recipe has no gate, so there is nothing to calibrate.")
    if not runs:
        raise InputError("calibrate: got no images.")
    if cost is None:
        shares = [s.gate.share for s in stages if s.gate is not None]
        if any(s is None for s in shares):
            raise OptionError(
                "calibrate: pass cost=1.5 (mean forward passes), or gates with a share: Gate(share=0.25)."
            )
        return _with_shares(stages, runs, [float(s) for s in shares if s is not None], of_all=True)
    least, most = (_with_shares(stages, runs, [share] * gates) for share in (0.0, 1.0))
    if not least.cost - 1e-9 <= cost:
        raise OptionError(
            f"calibrate: cost: got {cost:g}, but the passes that every image takes cost {least.cost:.3g}."
        )
    low, high, best = 0.0, 1.0, least
    for _ in range(24):
        middle = (low + high) / 2
        tried = _with_shares(stages, runs, [middle] * gates)
        low, high, best = (middle, high, tried) if tried.cost <= cost else (low, middle, best)
    return most if most.cost <= cost else best


def _with_shares(
    stages: Sequence[Stage], runs: Sequence[OpenRun], shares: Sequence[float], of_all: bool = False
) -> Calibration:
    alive = [torch.ones(run.confidences[0].shape, dtype=torch.bool) for run in runs]
    count, every = sum(map(len, runs)), sum(a.numel() for a in alive)
    done: list[Stage] = []
    passed: list[float] = []
    total = 0.0
    for number, stage in enumerate(stages):
        if stage.gate is not None:
            now = [run.confidences[len(passed)] for run in runs]
            left = torch.cat([values[a] for values, a in zip(now, alive, strict=True)])
            below = threshold(left, shares[len(passed)] * (every / max(1, len(left)) if of_all else 1.0))
            alive = [a & ~(values >= below) for values, a in zip(now, alive, strict=True)]
            passed.append(sum(int(a.sum()) for a in alive) / every)
            stage = replace(stage, gate=replace(stage.gate, below=below, share=passed[-1]))
        done.append(stage)
        for run, a in zip(runs, alive, strict=True):
            price = run.prices[number]
            total += len(run) / count * (price(a) if callable(price) else price * float(a.double().mean()))
    return Calibration(count, total, tuple(passed), tuple(done))


def threshold(confidence: Tensor, share: float) -> float:
    """The value that this share of the confidences is below."""
    ordered = confidence.double().sort().values
    k = round(share * len(ordered))
    if k <= 0:
        return 0.0
    return EVERYTHING if k >= len(ordered) else float((ordered[k - 1] + ordered[k]) / 2)


def matched_stages(stages: Sequence[Stage], results: Sequence[StageResult]) -> tuple[Stage, ...]:
    """The stages with a temperature for every view of another size, matched to the plain view.

    Larger views are usually overconfident. `results`: of all images, with details and open gates; no labels are needed.
    """
    outputs: dict[View, list[Tensor]] = {}
    for result in results:
        for passes in result.record.passes:
            for p in passes:
                if p.state.plain and p.network == stages[0].network:
                    outputs.setdefault(p.view, []).append(p.output)
    plain = torch.stack(outputs[PLAIN])
    matched = {
        view: match_temperature(torch.stack(own), plain)
        for view, own in outputs.items()
        if any(op.name in ("Size", "Crop") for op in view.ops)
    }
    return tuple(
        replace(s, temperatures=tuple(matched.get(v, 1.0) for v in s.views)) if set(s.views) & set(matched) else s
        for s in stages
    )


def batches(images: Any) -> Iterator[Any]:
    """Batches of what a model takes, of a loader or list of that, with or without labels."""
    listed = isinstance(images, list) and bool(images) and not isinstance(images[0], Image.Image)
    if listed or (isinstance(images, Iterable) and not isinstance(images, Tensor | list | tuple | Canvas)):
        for batch in images:
            yield batch[0] if isinstance(batch, list | tuple) else batch
    else:
        yield images
