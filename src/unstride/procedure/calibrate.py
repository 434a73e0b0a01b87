"""Gates set from unlabelled pictures: a picture that reaches a gate has taken all looks before it, whatever the other
gates do, so thresholds and mean cost follow from one run with every gate open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from unstride.errors import OptionError
from unstride.procedure.gates import Stage

Price = float | Callable[[Tensor], float]  # of a stage, in plain forwards; or the mean of it, from the open tiles


@dataclass(frozen=True)
class Calibration:
    """What `better.calibrate(pictures, cost=1.5)` found: `print` tells what it will cost, and what share goes on."""

    pictures: int
    cost: float  # mean, in plain forwards
    shares: tuple[float, ...]  # of all pictures, or of their tiles, that pass each gate
    stages: tuple[Stage, ...]

    def __str__(self) -> str:
        gates = [f"  {share:.0%} look again where {s.gate}" for share, s in zip(self.shares, self._gated, strict=True)]
        return "\n".join([f"mean cost {self.cost:.2f} plain forwards, on {self.pictures} pictures", *gates])

    @property
    def _gated(self) -> list[Stage]:
        return [s for s in self.stages if s.gate is not None]


def calibrate(
    stages: Sequence[Stage], sure: Sequence[Tensor], costs: Sequence[Price], cost: float | None = None
) -> Calibration:
    """`sure`: of all pictures before each gate, (N,) each, or of their tiles, (N, rows, columns).

    With `cost`, every gate lets the same share of what reaches it through, so that the mean cost is that; without, each
    has its own share.
    """
    if not sure:
        raise OptionError("this recipe has no gate: there is nothing to calibrate")
    if cost is None:
        shares = [s.gate.share for s in stages if s.gate is not None]
        if any(s is None for s in shares):
            raise OptionError("give cost=1.5 (mean plain forwards), or gates with a share: Gate(share=0.25)")
        return _settled(stages, sure, costs, [float(s) for s in shares if s is not None], of_all=True)
    least, most = (_settled(stages, sure, costs, [share] * len(sure)) for share in (0.0, 1.0))
    if not least.cost - 1e-9 <= cost:
        raise OptionError(f"cost: got {cost:g}, but what every picture takes costs {least.cost:.3g} plain forwards")
    low, high, best = 0.0, 1.0, least
    for _ in range(24):
        middle = (low + high) / 2
        tried = _settled(stages, sure, costs, [middle] * len(sure))
        low, high, best = (middle, high, tried) if tried.cost <= cost else (low, middle, best)
    return most if most.cost <= cost else best


def _settled(
    stages: Sequence[Stage],
    sure: Sequence[Tensor],
    costs: Sequence[Price],
    shares: Sequence[float],
    of_all: bool = False,
) -> Calibration:
    count = len(sure[0])
    alive = torch.ones(sure[0].shape, dtype=torch.bool)
    done: list[Stage] = []
    passed: list[float] = []
    total, gate = 0.0, 0
    for stage, price in zip(stages, costs, strict=True):
        if stage.gate is not None:
            now = sure[gate].cpu()
            share = shares[gate] * (alive.numel() / max(1, int(alive.sum())) if of_all else 1.0)
            below = threshold(now[alive], share)
            alive = alive & ~(now >= below)
            gate += 1
            passed.append(float(alive.double().mean()))
            stage = replace(stage, gate=replace(stage.gate, below=below, share=passed[-1]))
        done.append(stage)
        total += price(alive) if callable(price) else price * float(alive.double().mean())
    return Calibration(count, total, tuple(passed), tuple(done))


def threshold(sure: Tensor, share: float) -> float:
    """Below it lies this share of the values."""
    if share <= 0 or not len(sure):
        return 0.0
    ordered = sure.double().sort().values
    k = round(share * len(ordered))
    if k >= len(ordered):
        return EVERYTHING
    return float((ordered[k - 1] + ordered[k]) / 2) if k else float(ordered[0])


EVERYTHING = 1.000001  # a threshold that everything lies below
