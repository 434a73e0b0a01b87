"""How much can be measured in a given time: settings that would take too long are left out, and said.

pace = paced({1: [4, 10], 8: [4, 10]}, plain=0.09, seconds=50, repeats=5)
pace.settings, pace.rounds, pace.left_out
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

LEAST = 0.2  # seconds that a call is repeated for
SLOWER = 1.3  # times as long as its MACs: what is usual, so that a promise is kept


@dataclass(frozen=True)
class Pace:
    """Budgets by batch that fit, how often each is measured, and what did not fit (batch, budget)."""

    settings: Mapping[int, Sequence[int]]
    rounds: int
    left_out: tuple[tuple[int, int], ...]
    plain: float  # seconds of one image

    def weight(self, batch: int, budget: int) -> int:
        """What a measured call counts for in the progress: plain forwards of one image."""
        return max(1, round(max(LEAST, _call(self.plain, batch, budget)) / self.plain))

    def total(self, twice: Container[int]) -> int:
        """Of all calls that will be measured, each after a plain one; `twice`: budgets that have TTA beside them."""
        found = [(n, b) for n, budgets in self.settings.items() for b in budgets]
        return self.rounds * sum((1 + (b in twice)) * (self.weight(n, b) + self.weight(n, 1)) for n, b in found)


def paced(settings: Mapping[int, Sequence[int]], plain: float, seconds: float | None, repeats: int) -> Pace:
    """At most `repeats` rounds of all settings, or as many as fit; the dearest settings go first where one does not."""
    kept = [(n, b) for n, budgets in settings.items() for b in budgets]
    gone: list[tuple[int, int]] = []
    if seconds is not None:
        while len(kept) > 1 and _first(kept, plain) + _round(kept, plain) > seconds:
            gone.append(kept.pop(kept.index(max(kept, key=lambda k: k[0] * k[1]))))
        repeats = max(1, min(repeats, int((seconds - _first(kept, plain)) // _round(kept, plain))))
    left = {n: [b for m, b in kept if m == n] for n in settings}
    return Pace({n: budgets for n, budgets in left.items() if budgets}, repeats, tuple(sorted(gone)), plain)


def _call(plain: float, batch: int, budget: int) -> float:
    return SLOWER * plain * batch * budget


def _first(settings: Sequence[tuple[int, int]], plain: float) -> float:
    """Seconds before anything is measured: a first call of each and of TTA, and one that watches the memory."""
    return sum(3 * _call(plain, n, b) + 2 * _call(plain, n, 1) for n, b in settings)


def _round(settings: Sequence[tuple[int, int]], plain: float) -> float:
    return sum(2 * (max(LEAST, _call(plain, n, b)) + max(LEAST, _call(plain, n, 1))) for n, b in settings)
