"""Greedy policy search (GPS): which views are averaged, chosen one after another by calibrated log-likelihood.

`gps` as first published (Lyzhov et al., UAI 2020): with replacement, the running mean of probabilities, each candidate
with its own temperature. `gps-shanmugam` as the paper's baseline has it (Shanmugam et al., ICCV 2021): three different
views, one temperature, and the mean of their logits at test time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Blocks = Sequence[tuple[Tensor, Tensor]]  # logits (V, n, K) of all views and labels (n,), some images at a time
TOGETHER = 16  # views of a block that are calibrated at once: bounds memory
STEPS, TOLERANCE = 20, 1e-4  # of Newton's method


@dataclass(frozen=True)
class GreedyVariant:
    """How views are chosen: `length` steps (None: as many as there are views), and what is calibrated."""

    length: int | None
    replacement: bool
    every_candidate: bool  # its own temperature for each candidate; otherwise that of the first view for all


VARIANTS = {"gps": GreedyVariant(None, True, True), "gps-shanmugam": GreedyVariant(3, False, False)}


@dataclass(frozen=True)
class GreedyStep:
    """One step: the view that was taken, and the NLL of the mean with it."""

    view: int
    nll: float


def select_views(blocks: Blocks, variant: GreedyVariant) -> list[GreedyStep]:
    """The views that the search takes, in order."""
    views, images = len(blocks[0][0]), sum(len(labels) for _, labels in blocks)
    length = variant.length or views
    length = length if variant.replacement else min(length, views)
    inverse = torch.ones(views, dtype=torch.float64)  # temperatures
    scale = 1.0
    if not variant.every_candidate:
        scale = float(_calibrated(blocks, [0], [None] * len(blocks), 0, inverse[:1].clone(), 1.0, True)[1][0])
    steps: list[GreedyStep] = []
    running: list[Tensor | None] = [None] * len(blocks)  # log of the mean of the probabilities of the views so far
    for number in range(length):
        taken = {step.view for step in steps}
        candidates = [v for v in range(views) if variant.replacement or v not in taken]
        start = inverse[candidates] if variant.every_candidate else torch.ones(len(candidates), dtype=torch.float64)
        loss, fitted = _calibrated(blocks, candidates, running, number, start, scale, variant.every_candidate)
        inverse[candidates] = fitted
        best = int(loss.argmin())
        steps.append(GreedyStep(candidates[best], float(loss[best]) / images))
        for i, (logits, _) in enumerate(blocks):
            running[i] = _log_mean(logits[[candidates[best]]].float() * scale, running[i], number)[0]
    return steps


def _log_mean(logits: Tensor, running: Tensor | None, count: int) -> Tensor:
    """Log of the mean of `count` views' probabilities and of those of each candidate (C, n, K)."""
    new = logits.log_softmax(-1)
    return new if running is None else torch.logaddexp(new, running + math.log(count)) - math.log(count + 1)


def _calibrated(
    blocks: Blocks,
    candidates: list[int],
    running: Sequence[Tensor | None],
    count: int,
    inverse: Tensor,
    scale: float,
    search: bool,
) -> tuple[Tensor, Tensor]:
    """The summed NLL of each candidate mean at its best inverse temperature, by Newton's method (the NLL is convex)."""
    loss = torch.zeros_like(inverse)
    for _ in range(STEPS):
        loss, slope, curve = (torch.zeros_like(inverse) for _ in range(3))
        for (logits, labels), mean in zip(blocks, running, strict=True):
            for start in range(0, len(candidates), TOGETHER):
                part = slice(start, start + TOGETHER)
                logp = _log_mean(logits[candidates[part]].float() * scale, mean, count)
                tempered = (logp * inverse[part, None, None].to(logp)).log_softmax(-1)
                truth = labels.expand(len(logp), -1).unsqueeze(-1)
                loss[part] -= tempered.gather(-1, truth).double().sum((1, 2))
                if search:
                    q = tempered.exp()
                    expected = (q * logp).sum(-1)
                    slope[part] += (expected - logp.gather(-1, truth)[..., 0]).double().sum(1)
                    curve[part] += ((q * logp.square()).sum(-1) - expected.square()).clamp(min=0).double().sum(1)
        if not search:
            break
        target = inverse - slope / curve.clamp(min=1e-9)
        moved = torch.minimum(torch.maximum(target, inverse / 2), inverse * 2).clamp(0.01, 100.0)
        if bool(((moved - inverse).abs() <= TOLERANCE * inverse).all()):
            break
        inverse = moved
    return loss, inverse
