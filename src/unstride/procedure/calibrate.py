"""Gates set from unlabelled images: an image that reaches a gate has taken all looks before it, whatever the other
gates do, so thresholds and mean cost follow from one run with every gate open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unstride.errors import InputError, OptionError
from unstride.procedure.gates import Stage

Price = float | Callable[[Tensor], float]  # of a stage, in plain forwards; or the mean of it, from the open tiles


@dataclass(frozen=True, eq=False)
class Opened:
    """A batch of images of one size that passed every gate: how sure each was before it, and what stages cost it.

    `sure`: of the images (N,), or of their tiles, (N, rows, columns).
    """

    sure: Sequence[Tensor]
    prices: Sequence[Price]

    def __len__(self) -> int:
        return len(self.sure[0])


@dataclass(frozen=True)
class Calibration:
    """What `better.calibrate(images, cost=1.5)` found: `print` tells what it will cost, and what share goes on."""

    images: int
    cost: float  # mean, in plain forwards
    shares: tuple[float, ...]  # of all images, or of their tiles, that pass each gate
    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        gates = [f"  {share:.0%} look again where {s.gate}" for share, s in zip(self.shares, self._gated, strict=True)]
        several = "s" if self.images > 1 else ""
        return "\n".join([f"mean cost {self.cost:.2f} plain forwards, on {self.images} image{several}", *gates])

    @property
    def _gated(self) -> list[Stage]:
        return [s for s in self.stages if s.gate is not None]


def calibrate(stages: Sequence[Stage], runs: Sequence[Opened], cost: float | None = None) -> Calibration:
    """With `cost`, every gate lets the same share of what reaches it through, so that the mean cost is that; without,
    each has its own share.
    """
    gates = sum(s.gate is not None for s in stages)
    if not gates:
        raise OptionError("this recipe has no gate: there is nothing to calibrate")
    if not runs:
        raise InputError("calibrate: got no images")
    if cost is None:
        shares = [s.gate.share for s in stages if s.gate is not None]
        if any(s is None for s in shares):
            raise OptionError("give cost=1.5 (mean plain forwards), or gates with a share: Gate(share=0.25)")
        return _settled(stages, runs, [float(s) for s in shares if s is not None], of_all=True)
    least, most = (_settled(stages, runs, [share] * gates) for share in (0.0, 1.0))
    if not least.cost - 1e-9 <= cost:
        raise OptionError(f"cost: got {cost:g}, but what every image takes costs {least.cost:.3g} plain forwards")
    low, high, best = 0.0, 1.0, least
    for _ in range(24):
        middle = (low + high) / 2
        tried = _settled(stages, runs, [middle] * gates)
        low, high, best = (middle, high, tried) if tried.cost <= cost else (low, middle, best)
    return most if most.cost <= cost else best


def _settled(
    stages: Sequence[Stage], runs: Sequence[Opened], shares: Sequence[float], of_all: bool = False
) -> Calibration:
    alive = [torch.ones(run.sure[0].shape, dtype=torch.bool) for run in runs]
    count, every = sum(map(len, runs)), sum(a.numel() for a in alive)
    done: list[Stage] = []
    passed: list[float] = []
    total = 0.0
    for number, stage in enumerate(stages):
        if stage.gate is not None:
            now = [run.sure[len(passed)].cpu() for run in runs]
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


def threshold(sure: Tensor, share: float) -> float:
    """Below it lies this share of the values."""
    ordered = sure.double().sort().values
    k = round(share * len(ordered))
    if k <= 0:
        return 0.0
    return EVERYTHING if k >= len(ordered) else float((ordered[k - 1] + ordered[k]) / 2)


EVERYTHING = 1.000001  # a threshold that everything lies below
