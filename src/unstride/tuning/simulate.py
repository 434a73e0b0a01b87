"""A recipe on a pool: what `Enhanced` would answer and what it would cost, without running anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unstride.procedure.aggregate import two_class
from unstride.procedure.gates import Gate, Stage, sureness
from unstride.procedure.looks import Look, Merged
from unstride.tuning.pool import Pool


@dataclass(frozen=True, eq=False)
class Simulated:
    """Merged logits (N, K), before the final temperature, and the cost (N,) of each picture, in plain forwards.

    `sure`: how sure each picture was before each gate, and whether it came that far.
    """

    logits: Tensor
    costs: Tensor
    sure: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def cost(self) -> float:
        return float(self.costs.mean())


def simulate(pool: Pool, stages: Sequence[Stage], merge: str = "logits", gated: bool = True) -> Simulated:
    """`simulate(pool, recipe.stages).logits`. With `gated=False` every gate is open, as for calibrating."""
    count = len(pool)
    merged, costs = Merged(merge), torch.zeros(count, dtype=torch.float64)
    alive = torch.ones(count, dtype=torch.bool)
    taken: list[Look] = []
    tops: list[Tensor] = []
    sure: list[tuple[Tensor, Tensor]] = []
    for stage in stages:
        if stage.gate is not None:
            now = sureness(merged.logits(), stage.gate.by, tops)
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
                tops.append(two_class(logits).argmax(1))
            costs[rows] += pool.cost([*taken, *new]) - (pool.cost(taken) if taken else 0.0)
        taken += new
    return Simulated(merged.logits(), costs, tuple(sure))


def calibrated(
    pool: Pool, stages: Sequence[Stage], cost: float | None = None, merge: str = "logits"
) -> tuple[Stage, ...]:
    """The stages with thresholds instead of shares: so that the mean cost is `cost`, or each gate's own share.

    Thresholds are set gate by gate, on the pictures that come so far. With `cost`, all gates let the same share through.
    """
    if cost is None:
        return _with_shares(pool, stages, [None if s.gate is None else s.gate.share for s in stages], merge)
    low, high = 0.0, 1.0
    best = _with_shares(pool, stages, [0.0] * len(stages), merge)
    for _ in range(24):
        middle = (low + high) / 2
        tried = _with_shares(pool, stages, [middle] * len(stages), merge)
        if simulate(pool, tried, merge).cost <= cost:
            low, best = middle, tried
        else:
            high = middle
    everything = _with_shares(pool, stages, [1.0] * len(stages), merge)
    return everything if simulate(pool, everything, merge).cost <= cost else best


def _with_shares(pool: Pool, stages: Sequence[Stage], shares: Sequence[float | None], merge: str) -> tuple[Stage, ...]:
    """Each gate at the quantile of what reaches it; a share is of the pictures that do."""
    done: list[Stage] = []
    for stage, share in zip(stages, shares, strict=True):
        if stage.gate is None or share is None:
            done.append(stage)
            continue
        probe = replace(stage, gate=Gate(stage.gate.by, below=0.0))  # what comes so far, before this gate
        now, alive = simulate(pool, [*done, probe], merge).sure[-1]
        done.append(replace(stage, gate=Gate(stage.gate.by, threshold(now[alive], share), share)))
    return tuple(done)


def threshold(sure: Tensor, share: float) -> float:
    """Below it lies this share of the values."""
    if share <= 0 or not len(sure):
        return 0.0
    if share >= 1:
        return 1.000001
    ordered = sure.double().sort().values
    k = min(len(ordered) - 1, round(share * len(ordered)))
    return float((ordered[k - 1] + ordered[k]) / 2) if k else float(ordered[0])
