"""What is sure about a gain, from images that the choice did not see: exact, paired, and in words.

Only images whose answer turns from wrong to right or back count. Their share, and the share of them that was
corrected, get an exact (Clopper-Pearson) interval each, at half of the error; the gain follows from the two. Several
cost ceilings are tested in a fixed sequence, the asked one first and then cheaper ones, so that the error of the whole
sequence is that of one test (Maurer, Hothorn and Lehmacher, 1995). Where a gain is no count of images (mIoU, mAP,
errors), the interval is that of a paired bootstrap over images, in the same sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

LEVEL = 0.95


@dataclass(frozen=True)
class Certificate:
    """A gain in accuracy (as a share) with an interval that holds with 95 % confidence."""

    images: int
    corrected: int
    corrupted: int
    low: float
    high: float
    unit: ClassVar[str] = "points"

    @property
    def gain(self) -> float:
        return (self.corrected - self.corrupted) / self.images

    @property
    def better(self) -> bool:
        return self.low > 0

    @property
    def changed(self) -> bool:
        return self.corrected + self.corrupted > 0

    @property
    def worse(self) -> bool:
        return self.high < 0

    def of_plain(self) -> Certificate:
        """What is sure where the recipe is plain after all: nothing turns."""
        return replace(self, corrected=0, corrupted=0, low=0.0, high=0.0)

    def __str__(self) -> str:
        if not self.changed:
            return f"no answer changed on {self.images} images"
        most = f"most likely {_points(self.gain)}"
        if self.worse:
            return f"with 95 % confidence at least {-100 * self.high:.2f} points worse than plain, {most}"
        if self.better:
            return f"with 95 % confidence at least {100 * self.low:.2f} points better than plain, {most}"
        return f"with 95 % confidence at most {-100 * self.low:.2f} points worse than plain, {most}"


@dataclass(frozen=True)
class Measured(Certificate):
    """A gain in mIoU or mAP with a bootstrap interval over images; pixels, or labels, are corrected and corrupted."""

    mean: float = 0.0

    @property
    def gain(self) -> float:
        return self.mean

    def of_plain(self) -> Certificate:
        return replace(self, corrected=0, corrupted=0, low=0.0, high=0.0, mean=0.0)

    @property
    def changed(self) -> bool:
        return bool(self.corrected + self.corrupted or self.mean or self.low or self.high)


@dataclass(frozen=True)
class Saved(Measured):
    """How much smaller an error became, as a share of the plain network's, with a bootstrap interval over images."""

    error: str = ""
    unit: ClassVar[str] = "per cent"

    def __str__(self) -> str:
        if not self.changed:
            return super().__str__()
        most = f"most likely {abs(100 * self.gain):.2f} % {'smaller' if self.gain >= 0 else 'larger'}"
        if self.worse:
            return f"with 95 % confidence {self.error} at least {-100 * self.high:.2f} % larger than plain's, {most}"
        if self.better:
            return f"with 95 % confidence {self.error} at least {100 * self.low:.2f} % smaller than plain's, {most}"
        return f"with 95 % confidence {self.error} at most {-100 * self.low:.2f} % larger than plain's, {most}"


def crossed(proof: Certificate, folds: int) -> Certificate:
    """A bootstrap interval of answers by recipes that were chosen in folds, as wide as the choosing wants it.

    Folds share most of the images that they choose by, so their recipes err together, which the bootstrap does not
    see: its variance is multiplied by 1 + k / (k - 1) for k folds (Nadeau and Bengio, 2003). An exact interval over
    images is wide enough without.
    """
    if not isinstance(proof, Measured):
        return proof
    wide = math.sqrt(1 + folds / (folds - 1))
    low, high = (proof.gain + wide * (end - proof.gain) for end in (proof.low, proof.high))
    return replace(proof, low=low, high=high)


def _points(gain: float) -> str:
    return f"{100 * gain:.2f} better" if gain >= 0 else f"{-100 * gain:.2f} worse"


def certify(corrected: int, corrupted: int, images: int, level: float = LEVEL) -> Certificate:
    """From counts over images that were not used for the choice."""
    changed = corrected + corrupted
    half = (1 - level) / 2  # one half for each of the two intervals
    least, most = clopper_pearson(changed, images, half)
    low, high = clopper_pearson(corrected, changed, half) if changed else (0.0, 1.0)
    ends = [rate * (2 * part - 1) for rate in (least, most) for part in (low, high)]
    return Certificate(images, corrected, corrupted, min(ends), max(ends))


def clopper_pearson(hits: int, count: int, error: float) -> tuple[float, float]:
    """The exact interval of a share, two-sided: outside it with at most this probability."""
    if count == 0:
        return 0.0, 1.0
    low = 0.0 if hits == 0 else _solve(lambda p: _tail(hits, count, p), error / 2)
    high = 1.0 if hits == count else _solve(lambda p: 1 - _tail(hits + 1, count, p), error / 2, falling=True)
    return low, high


def _tail(hits: int, count: int, p: float) -> float:
    """P(X >= hits) for X binomial."""
    if hits <= 0 or p >= 1:
        return 1.0
    if p <= 0:
        return 0.0
    if hits < count * p:  # from the side where the terms are small
        return 1 - _tail(count - hits + 1, count, 1 - p)
    start = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    term = math.exp(start + hits * math.log(p) + (count - hits) * math.log1p(-p))
    total, k = term, hits
    while k < count and term > 1e-17 * total:  # until nothing is added
        term *= (count - k) / (k + 1) * p / (1 - p)
        total += term
        k += 1
    return min(1.0, total)


def _solve(f: Callable[[float], float], wanted: float, falling: bool = False) -> float:
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if (f(middle) < wanted) != falling:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def in_sequence(certificates: Sequence[Certificate]) -> list[int]:
    """Which are shown to be better, from the first on, before one is not.

    Where no answer changes, as with plain, nothing is claimed, so nothing is tested, and the sequence goes on.
    """
    shown: list[int] = []
    for i, c in enumerate(certificates):
        if c.better:
            shown.append(i)
        elif c.changed:
            break
    return shown


def verdict(proofs: Sequence[Certificate], ceilings: Sequence[float], guard: float | None, beside: str | None) -> str:
    """What to do, in words. `proofs` of `ceilings`, the asked one first. `beside`: what is to be known where nothing is
    proved; None: no look was chosen.
    """
    proof = proofs[0]
    if beside is None:
        return f"leave it alone: no look at a cost of {ceilings[0]:g} or less was surely better than plain here"
    if proof.worse:
        return f"leave it alone: {proof}, on images that it was not chosen by"
    if guard is not None and 100 * proof.low < -guard:
        return f"leave it alone: {proof}; so it may lose more than the guard of {guard:g} {proof.unit} allows"
    if not proof.changed:
        return f"not proved: {proof}{beside}"
    if not proof.better:
        return f"not proved: {proof}{beside}. More labelled images may tell"
    least = ceilings[in_sequence(proofs)[-1]]
    return f"use it: {proof}" + (
        f"; what is tuned for {least:g} is proved to be better, too" if least < ceilings[0] else ""
    )
