"""The choice for segmentation: which looks, at which share of the tiles, under a mean cost.

Greedy over units of looks by likelihood, which every pixel has a say in; beside it what people do and other balanced
sets, everywhere. How far to go, and at how many tiles, is decided on images that the greedy choice did not see, by
likelihood or by mIoU: the best of all that are surely better than plain, which with few images is plain itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unstride.evaluation.metrics import Integers
from unstride.procedure.calibrate import threshold
from unstride.procedure.gates import Stage
from unstride.tuning.candidates import sets
from unstride.tuning.choose import PLAIN_WAY, Way, fold_of, laid, surest
from unstride.tuning.pixels import Pixels, simulate_pixels

SHARES = (0.05, 0.1, 0.2, 0.35, 0.5, 1.0)
OBJECTIVES = ("likelihood", "miou")
FOLDS = 5
STEPS = 8


@dataclass(frozen=True)
class Places:
    """Units (by number) at tiles less sure than `below`, which is this share of them; None: everywhere."""

    units: tuple[int, ...] = ()
    share: float = 1.0
    below: float | None = None

    def told(self, pool: Pixels) -> str:
        if not self.units:
            return "plain"
        looks = ", ".join(str(pool.units[u]) for u in self.units)
        return looks if self.below is None else f"{looks} at the least sure {self.share:.0%} of tiles"


def areas(pool: Pixels, p: Tensor) -> Integers:
    """(N, 3, K): pixels of each image that are right, predicted and labelled, as in `unstride.evaluation.metrics`."""
    classes, count = p.shape[1], len(pool)
    guess, stands = p.argmax(1), torch.tensor([s.stands for s in pool.said])
    found = []
    for chosen, kept in ((pool.labels, guess == pool.labels), (guess, None), (pool.labels, None)):
        index = pool.image * classes + chosen
        index = index if kept is None else index[kept]
        found.append(torch.bincount(index, minlength=count * classes).view(count, classes))
    return (torch.stack(found, 1) * stands[:, None, None]).round().long().numpy()


def losses(pool: Pixels, p: Tensor, objective: str) -> Tensor:
    """(N,): what is to be small on average. Of mIoU, which is of all images at once, jackknife pseudo-values."""
    if objective == "likelihood":
        own = -p.gather(1, pool.labels[:, None])[:, 0].clamp(min=1e-9).log()
        total = torch.zeros(len(pool), dtype=torch.float64).index_add_(0, pool.image, own.double())
        return total / torch.bincount(pool.image, minlength=len(pool)).clamp(min=1)
    found, n = areas(pool, p), len(pool)
    total = found.sum(0)
    return torch.from_numpy((n - 1) * _miou(total - found) - n * _miou(total[None]))


def _miou(pixels: Integers) -> np.ndarray:
    """(..., 3, K) -> (...): classes that are nowhere do not count."""
    right, guessed, labelled = pixels[..., 0, :], pixels[..., 1, :], pixels[..., 2, :]
    union = guessed + labelled - right
    iou = np.where(union > 0, right / np.maximum(union, 1), np.nan)
    return np.nanmean(iou, -1)


def greedy(pool: Pixels, images: Tensor, below: float | None, ceiling: float) -> list[int]:
    """Units in the order in which they help most, as long as the mean cost stays under the ceiling."""
    costs = [float(pool.cost(u, below)[images].mean()) for u in range(len(pool.units))]
    known = torch.zeros(len(pool), dtype=torch.bool)
    known[images] = True
    rows = known[pool.image] if below is None else known[pool.image] & pool.opened(below)
    label = pool.p[:, rows].gather(2, pool.labels[rows].expand(len(pool.p), -1)[..., None])[..., 0]
    total, weight, spent, chosen = label[0], 1.0, 1.0, list[int]()
    if not rows.any():
        return []
    while len(chosen) < STEPS:
        open_ = [u for u in range(len(costs)) if u not in chosen and spent + costs[u] <= ceiling + 1e-9]
        if not open_:
            break
        count = torch.tensor([float(pool.count(u)) for u in open_])[:, None]
        means = (total + count * label[[1 + u for u in open_]]) / (weight + count)
        best = open_[int((-means.clamp(min=1e-9).log()).mean(1).argmin())]
        chosen.append(best)
        total, weight, spent = (
            total + pool.count(best) * label[1 + best],
            weight + pool.count(best),
            spent + costs[best],
        )
    return chosen


def saves(pool: Pixels, below: float) -> bool:
    """Whether any unit is spared a twentieth of its area: tiles that lie all over a small image spare nothing."""
    means = [sum(shares) / len(shares) for shares in (pool.shares(u, below) for u in range(len(pool.units)))]
    return min(means) < 0.95


def choose_pixels(pool: Pixels, ceiling: float, objective: str = "likelihood", seed: int = 0) -> Places:
    """The choice under this ceiling."""
    return PixelChooser(pool, objective, seed).choice(ceiling)


class PixelChooser:
    """`PixelChooser(pool).choice(2.0)`: what was found out for one ceiling is known for the next."""

    def __init__(self, pool: Pixels, objective: str = "likelihood", seed: int = 0) -> None:
        self.pool, self.objective = pool, objective
        self.folds = fold_of(len(pool), FOLDS, seed)
        self.held = [(self.folds == k).nonzero()[:, 0] for k in range(FOLDS)]
        self.parts = [pool.rows(rows.tolist()) for rows in self.held]
        tiles = torch.cat([s.sure.flatten() for s in pool.said])
        belows = {share: None if share >= 1 else threshold(tiles, share) for share in SHARES}
        self.belows = {share: b for share, b in belows.items() if b is None or saves(pool, b)}
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def choice(self, ceiling: float) -> Places:
        """Under this ceiling: cross-validated over how far the greedy order is followed at how many tiles."""
        pool, tried = self.pool, {PLAIN_WAY: self._crossed([()] * FOLDS, None)}
        for share, below in self.belows.items():
            paths = [tuple(greedy(pool, (self.folds != k).nonzero()[:, 0], below, ceiling)) for k in range(FOLDS)]
            for j in range(1, min(map(len, paths)) + 1):
                tried[Way(j, share)] = self._crossed([path[:j] for path in paths], below)
        known, every = sets(pool.units)
        for some in sorted(every):
            if 1 + sum(float(pool.cost(u, None).mean()) for u in some) <= ceiling + 1e-9:
                tried[Way(len(some), 1.0, some)] = self._crossed([some] * FOLDS, None)
        way = surest(tried, known)
        if way == PLAIN_WAY or way.units:
            return Places(way.units)
        below = self.belows[way.share]
        return Places(tuple(greedy(pool, torch.arange(len(pool)), below, ceiling)[: way.steps]), way.share, below)

    def _crossed(self, paths: Sequence[tuple[int, ...]], below: float | None) -> Tensor:
        """Losses (N,) of each fold's images by the path that was chosen without them."""
        key = (tuple(paths), below)
        if key not in self._known:
            seen = [simulate_pixels(part, path, below).p for part, path in zip(self.parts, paths, strict=True)]
            whole = losses(joined(self.parts), torch.cat(seen), self.objective)
            self._known[key] = torch.empty_like(whole).scatter(0, torch.cat(self.held), whole)
        return self._known[key]


def joined(parts: Sequence[Pixels]) -> Pixels:
    """Images of several pools as those of one, without what looks said: for labels and sizes."""
    count = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
    image = torch.cat([part.image + count[k] for k, part in enumerate(parts)])
    labels, at = (torch.cat([getattr(part, name) for part in parts]) for name in ("labels", "at"))
    said = tuple(s for part in parts for s in part.said)
    return replace(parts[0], p=parts[0].p[:0], labels=labels, image=image, at=at, said=said)


def stages_of(places: Places, pool: Pixels) -> tuple[Stage, ...]:
    """A choice as stages."""
    gate = None if places.below is None else replace(pool.gate, below=places.below, share=places.share)
    return laid([pool.units[u] for u in places.units], gate)
