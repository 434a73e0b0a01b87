"""When an image is easy, stop early: rules on the running prediction, as in `enhance(..., stop=Confident(p=0.9))`."""

from dataclasses import dataclass
from typing import Protocol

from unstride.errors import OptionError


@dataclass(frozen=True)
class Progress:
    """What is known of one image while it is searched: the running prediction and how the states agree with it."""

    states: int
    top: float  # probability of the first class
    margin: float  # between the first and the second
    entropy: float  # divided by log K
    agreement: float  # share of states with the same first class


class Stop(Protocol):
    def reason(self, now: Progress) -> str | None: ...


def _share(name: str, value: float) -> None:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise OptionError(f"{name}: got {value!r}, wanted a number from 0 to 1")


@dataclass(frozen=True)
class Confident:
    """Stop once the running prediction's probability reaches `p`."""

    p: float = 0.9

    def __post_init__(self) -> None:
        _share("Confident(p)", self.p)

    def reason(self, now: Progress) -> str | None:
        return f"probability {now.top:.3f} >= {self.p:g}" if now.top >= self.p else None


@dataclass(frozen=True)
class Margin:
    """Stop once the first class leads the second by `m` in probability."""

    m: float = 0.5

    def __post_init__(self) -> None:
        _share("Margin(m)", self.m)

    def reason(self, now: Progress) -> str | None:
        return f"margin {now.margin:.3f} >= {self.m:g}" if now.margin >= self.m else None


@dataclass(frozen=True)
class LowEntropy:
    """Stop once the running prediction's entropy (divided by log K) falls to `h`."""

    h: float = 0.1

    def __post_init__(self) -> None:
        _share("LowEntropy(h)", self.h)

    def reason(self, now: Progress) -> str | None:
        return f"entropy {now.entropy:.3f} <= {self.h:g}" if now.entropy <= self.h else None


@dataclass(frozen=True)
class Agreement:
    """Stop once at least `states` states are known and `share` of them give the running prediction's class."""

    share: float = 1.0
    states: int = 4

    def __post_init__(self) -> None:
        _share("Agreement(share)", self.share)
        if self.states < 2:
            raise OptionError(f"Agreement(states): got {self.states}, wanted at least 2")

    def reason(self, now: Progress) -> str | None:
        if now.states >= self.states and now.agreement >= self.share:
            return f"{now.agreement:.0%} of {now.states} states agree"
        return None
