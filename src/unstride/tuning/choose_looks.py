"""The choice for tasks without one class: greedy over looks by what each image loses, cross-validated, maybe plain.

Every set of looks is simulated once on a pool; folds, gates and ceilings read the same losses. A gate is tried where
the task says how sure an answer is, and where an image's answer is its own: in a gallery all vectors are made alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unstride.procedure.calibrate import threshold
from unstride.procedure.gates import Gate, Stage
from unstride.tuning.candidates import Unit
from unstride.tuning.choose import FOLDS, PLAIN_WAY, SHARES, STEPS, Choice, Way, fold_of, laid, surest
from unstride.tuning.judges import judge_of
from unstride.tuning.pool import Pool
from unstride.tuning.simulate import simulate


class Heard:
    """What each image of a pool loses in any set of units, and what that costs, simulated when it is asked for."""

    def __init__(self, pool: Pool, units: Sequence[Unit]) -> None:
        self.pool, self.units, self.judge = pool, tuple(units), judge_of(pool)
        self.gated = "margin" in pool.meaning.gates
        self.margin = pool.meaning.sure(pool.plain, "margin") if self.gated else torch.zeros(len(pool))
        self._known: dict[frozenset[int], tuple[Tensor, float]] = {}

    def at(self, units: Sequence[int]) -> tuple[Tensor, float]:
        """Losses (N,) and the mean cost where all images take these looks."""
        key = frozenset(units)
        if key not in self._known:
            done = simulate(self.pool, laid([self.units[u] for u in sorted(key)]))
            self._known[key] = self.judge.losses(done.logits), done.cost
        return self._known[key]

    def losses(self, units: Sequence[int], below: float) -> Tensor:
        """(N,) where the images whose margin is below take these looks."""
        return torch.where(self.margin < below, self.at(units)[0], self.at(())[0])

    def stages(self, choice: Choice) -> tuple[Stage, ...]:
        """A choice as stages, with the threshold of these images."""
        below = threshold(self.margin, choice.share) if choice.share < 1 else None
        return laid(choice.units, None if below is None else Gate("margin", below, choice.share))


def greedy(heard: Heard, rows: Tensor, share: float, ceiling: float) -> list[int]:
    """Units in the order in which they help these images most, as long as the mean cost stays under the ceiling."""
    chosen: list[int] = []
    while len(chosen) < STEPS and len(rows):
        spent = heard.at(chosen)[1]
        more = {u: heard.at([*chosen, u])[1] for u in range(len(heard.units)) if u not in chosen}
        able = [u for u, cost in more.items() if cost > spent and 1 + share * (cost - 1) <= ceiling + 1e-9]
        if not able:
            break
        chosen.append(min(able, key=lambda u: float(heard.at([*chosen, u])[0][rows].mean())))
    return chosen


def choose_looks(heard: Heard, ceiling: float, seed: int = 0) -> Choice:
    """The choice under this ceiling: cross-validated over how far the greedy order is followed behind which gate."""
    count = len(heard.pool)
    folds = fold_of(count, FOLDS, seed)
    tried = {PLAIN_WAY: heard.at(())[0]}
    shares = SHARES if heard.gated else (1.0,)
    for share in shares:
        paths = torch.full((STEPS + 1, count), math.nan, dtype=torch.float64)
        for k in range(FOLDS):
            train, held = (folds != k).nonzero()[:, 0], folds == k
            path, below = _path(heard, train, share, ceiling)
            for j in range(1, len(path) + 1):
                paths[j, held] = heard.losses(path[:j], below)[held]
        tried |= {Way(j, share): paths[j] for j in range(1, STEPS + 1) if not paths[j].isnan().any()}
    way = surest(tried)
    path = _path(heard, torch.arange(count), way.share, ceiling)[0][: way.steps]
    return Choice(tuple(heard.units[u] for u in path), way.share)


def _path(heard: Heard, rows: Tensor, share: float, ceiling: float) -> tuple[list[int], float]:
    below = threshold(heard.margin[rows], share) if share < 1 else math.inf
    return greedy(heard, rows[heard.margin[rows] < below], share, ceiling), below
