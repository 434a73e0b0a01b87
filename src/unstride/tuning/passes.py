"""Groups of forward passes of a batch of images, as the runner computes them, with their work and time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unstride.enhanced import Enhanced
from unstride.errors import UnstrideError
from unstride.recipe.recipe import Recipe
from unstride.recipe.stage import Stage
from unstride.tasks.tasks import TASKS
from unstride.tuning.candidates import PassGroup
from unstride.views.source import Source

MEMORY = 1 << 29  # bytes of maps that are held at once
Values = dict[str, Any]


@dataclass(frozen=True, eq=False)
class PassRunner:
    """Runs groups of passes of some images."""

    better: Enhanced

    @property
    def task(self) -> str:
        return self.better.task

    @property
    def combine(self) -> str:
        """Under which one pass alone is returned as it is."""
        return next(c for c in TASKS[self.task].combines if c in ("logits", "values"))

    def run(self, source: Source, groups: Sequence[PassGroup]) -> dict[PassGroup, Values]:
        """Of each group its outputs (S, B, ...), MACs (B,) and seconds of an image."""
        if TASKS[self.task].maps:
            return self._maps(source, groups)
        return {group: self._vectors(source, group) for group in groups}

    def _vectors(self, source: Source, group: PassGroup) -> Values:
        recipe = Recipe((Stage((group.view,), group.states, group.network),), self.task, self.combine)
        start = time.perf_counter()
        result = self.better.replace(recipe).run(source, details=group.states is not None)
        seconds = (time.perf_counter() - start) / len(source)
        if group.states is None:
            return {"output": result.output.cpu()[None], "macs": result.record.macs, "seconds": seconds}
        return {**_moved(result.record.passes, result.record.base_macs), "seconds": seconds}

    def _maps(self, source: Source, groups: Sequence[PassGroup]) -> dict[PassGroup, Values]:
        """With the plain pass of the first network, over which all others are laid."""
        found: dict[PassGroup, Values] = {}
        plain = PassGroup("base")
        direct = [g for g in groups if g.states is None and g != plain]
        size = self._map_bytes(source)
        step = max(1, MEMORY // max(1, 2 * size))
        parts = [direct[i : i + step] for i in range(0, len(direct), step)] or ([[]] if plain in groups else [])
        for part in [*parts, *([g] for g in groups if g.states is not None)]:
            stages = [Stage(), *(Stage((g.view,), g.states, g.network) for g in part)]
            start = time.perf_counter()
            record = (
                self.better.replace(Recipe(tuple(stages), self.task, self.combine)).run(source, details=True).record
            )
            spent = time.perf_counter() - start
            count = sum(map(len, record.passes))
            for number, group in enumerate([plain, *part]):
                if group not in groups or (group == plain and group in found):
                    continue
                own = [[p for p in passes if p.stage == number] for passes in record.passes]
                found[group] = _moved(own, record.base_macs, keep_base=group.states is None)
                macs = sum(found[group]["macs"])
                share = macs / sum(record.macs) if sum(record.macs) else sum(map(len, own)) / count
                found[group]["seconds"] = spent * share / len(source)
                found[group]["padded"] = record.frame is not None and record.frame.padded
        return found

    def _map_bytes(self, source: Source) -> int:
        height, width = source.size[:2]
        count = getattr(self.better.networks["base"].model, "num_classes", 0)
        return 4 * height * width * (count if isinstance(count, int) and count else 32)


def _moved(passes: Sequence[Sequence[Any]], base_macs: int, keep_base: bool = False) -> Values:
    """Of the passes of each image, those in other states than the base state."""
    kept = [[p for p in own if keep_base or not p.state.plain] for own in passes]
    outputs = [torch.stack([p.output for p in own]).cpu() if own else torch.empty(0) for own in kept]
    macs = [round(sum(p.cost for p in own) * max(1, base_macs)) for own in kept]
    return {"output": torch.stack(outputs, 1), "macs": macs}


def usable_groups(
    runner: PassRunner, source: Source, groups: Sequence[PassGroup], ceiling: float = math.inf
) -> tuple[list[PassGroup], dict[str, list[str]]]:
    """The groups that the networks take, tried on one image; the others by their reason.

    A network that does not take its plain pass is an error. One that costs more than the ceiling runs on few images
    only: it is left without views of other sizes, which cost more still.
    """
    kept: list[PassGroup] = []
    refused: dict[str, list[str]] = {}
    macs: dict[str, int] = {}  # of the plain pass of each network, the first one's first
    one = source.rows([0])
    for group in groups:
        resized = any(op.name == "Size" for op in group.view.ops)
        if resized and macs[group.network] > ceiling * next(iter(macs.values())):
            refused.setdefault("the network costs more than the ceiling", []).append(str(group))
            continue
        try:
            values = runner.run(one, [group])[group]
        except UnstrideError as error:
            if group.plain:
                raise
            refused.setdefault(str(error).splitlines()[0], []).append(str(group))
            continue
        if len(values["output"]):
            kept.append(group)
            macs.setdefault(group.network, int(values["macs"][0]))
        else:
            refused.setdefault("the network has no strided layers that could be moved", []).append(str(group))
    return kept, refused
