"""Aggregation (section 4.1): the aligned maps of all states as one map.

mean: `1/B sum_s f_s`. entropy (Eq. 7 and 8): `sum_s w_s f_s / sum_s w_s` with `w_s = 1 - H(C(f_s)) / log K`, per pixel
where the output is a map. max: the largest value over the states, a baseline. The learned aggregation (Eq. 6) is in
`attention`.

Accumulators take the maps (R, C, H, W), or vectors (R, C), of neighbouring images in one state, state after state, so
that memory does not grow with the budget.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unstride.engine.movers import empty_like
from unstride.method.align import Offset, add_aligned, align, align_covered, coverage
from unstride.tasks.tasks import entropy, in_pieces

BORDERS = ("zeros", "renormalise")
ALL = slice(None)
LEAST = 1e-6  # the smallest weight of a state: a place where no state knows anything still has an answer


def entropy_weight(logits: Tensor, dim: int = 1) -> Tensor:
    """Eq. 7 without Z: `1 - H / log K`, never 0."""
    return (1.0 - entropy(logits, dim)).clamp(min=LEAST)


def aligned(f: Tensor, offset: Offset | None, border: str) -> Tensor:
    """Maps on the common grid; vectors as they are."""
    if offset is None or f.ndim < 3:
        return f
    return align_covered(f, offset) if border == "renormalise" else align(f, offset)


@dataclass(eq=False)
class WeightedMean:
    """Eq. 8: sum Align(w f) / sum Align(w) of `count` images; w is (R,), or a map (R, H, W)."""

    count: int = 1
    border: str = "zeros"
    total: Tensor | None = None
    weight: Tensor | None = None

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if self.total is None or self.weight is None:
            self.total = filled(self.count, f, 0.0)
            self.weight = f.new_zeros((self.count, 1, *f.shape[2:]))
        scale = weight.view(len(f), 1, *(weight.shape[1:] or [1] * (f.ndim - 2)))
        if offset is None or offset.is_zero or f.ndim == 2:
            self.total[images].addcmul_(f, scale)
            self.weight[images].add_(scale)
        else:
            add_aligned(self.total[images], f * scale, offset)
            if weight.ndim > 1:
                add_aligned(self.weight[images], scale, offset)
            else:
                inside = coverage(f.shape[2:], offset, f) if self.border == "renormalise" else 1.0
                self.weight[images].add_(inside * scale)

    def add_by_entropy(self, images: slice, f: Tensor, offset: Offset | None) -> Tensor:
        """Add logit maps, each pixel weighted by the entropy of the aligned map; returns these weights (R, H, W).

        Weighted before alignment, confident cells would spread over uncertain ones beside them.
        """
        f = f.float()
        inside: float | Tensor = 1.0
        if offset is not None:
            inside = coverage(f.shape[2:], offset, f) if self.border == "renormalise" else 1.0
            f = aligned(f, offset, self.border)
        weight = in_pieces(entropy_weight, f) * inside
        self.add(images, f, weight, None)
        return weight

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        assert self.total is not None and self.weight is not None
        return self.total[images] / self.weight[images].clamp(min=1e-12)


@dataclass(eq=False)
class Maximum:
    """The largest value over the states, cell by cell."""

    count: int = 1
    border: str = "zeros"
    best: Tensor | None = None

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if offset is not None and f.ndim > 2:
            inside = coverage(f.shape[2:], offset, f) > 0
            f = aligned(f, offset, self.border)
            f = f.masked_fill(~inside, -math.inf) if self.border == "renormalise" else f
        if self.best is None:
            self.best = filled(self.count, f, -math.inf)
        torch.maximum(self.best[images], f, out=self.best[images])

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        assert self.best is not None
        return self.best[images]


def filled(count: int, like: Tensor, value: float) -> Tensor:
    """A tensor (count, ...) in the memory layout of `like` (R, ...): sums over slices are slow in another layout."""
    return empty_like([count, *like.shape[1:]], like).fill_(value)
