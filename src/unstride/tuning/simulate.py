"""A recipe on a pool: what `Enhanced` would answer and what it would cost, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unstride.procedure.gates import Stage
from unstride.procedure.looks import Look, Merged
from unstride.tuning.pool import Pool


@dataclass(frozen=True, eq=False)
class Simulated:
    """Merged outputs (N, E), before the final temperature, and the cost (N,) of each image, in plain forwards.

    `sure`: how sure each image was before each gate, and whether it came that far.
    """

    logits: Tensor
    costs: Tensor
    sure: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def cost(self) -> float:
        return float(self.costs.mean())


def simulate(pool: Pool, stages: Sequence[Stage], merge: str = "", gated: bool = True) -> Simulated:
    """`simulate(pool, recipe.stages).logits`; `merge`: as a recipe has it, "" for the task's usual one.

    With `gated=False` every gate is open, as for calibrating.
    """
    count, task = len(pool), pool.meaning
    merged, costs = Merged(merge or task.merges[0], task), torch.zeros(count, dtype=torch.float64)
    alive = torch.ones(count, dtype=torch.bool)
    taken: list[Look] = []
    tops: list[Tensor] = []
    sure: list[tuple[Tensor, Tensor]] = []
    for stage in stages or (Stage(),):  # plain has none
        if stage.gate is not None:
            now = task.sure(merged.logits(), stage.gate.by, tops)
            sure.append((now, alive.clone()))
            if gated:
                alive = alive & stage.gate.opens(now)
        rows = alive.nonzero()[:, 0].tolist()
        new = [Look(v, s) for v in stage.views for s in pool.states(stage, v)]
        new = [look for look in new if look not in taken]
        if rows and new:
            for look in new:
                logits = pool.logits[pool.index[look]]
                here = logits if len(rows) == count else logits[rows]
                merged.add(count, rows, here, stage.weight(look.view), stage.temperature(look.view))
                tops.append(task.own(logits))
            more = pool.costs([*taken, *new]) - (pool.costs(taken) if taken else 0.0)
            costs[rows] += more[rows]
        taken += new
    return Simulated(merged.logits(), costs, tuple(sure))
