"""Many maps into one. Mean and entropy stream: memory does not grow with the budget; attention sees all states."""

import math
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from unstride.align import Offset, add_aligned, align, align_covered, coverage

BORDERS = ("renormalise", "zeros")


def two_class(logits: Tensor, dim: int = 1) -> Tensor:
    """One logit per item means sigmoid: the same as two classes with logits (0, z)."""
    return logits if logits.shape[dim] > 1 else torch.cat([torch.zeros_like(logits), logits], dim)


def entropy(logits: Tensor, dim: int = 1) -> Tensor:
    """Entropy of the predicted distribution divided by log K: 0 is certain, 1 knows nothing."""
    logits = two_class(logits, dim).float()
    logp = logits.log_softmax(dim)
    return -(logp.exp() * logp).sum(dim) / math.log(logits.shape[dim])


class Accumulator(Protocol):
    """Takes the maps (C, H, W), or vectors (C,), of one image's states one by one."""

    def add(self, f: Tensor, weight: float | Tensor, offset: Offset | None) -> None: ...
    def value(self) -> Tensor: ...


@dataclass(eq=False)
class WeightedMean:
    """sum w Align(f) / sum w, w a number or, where nothing is left to align, a map (H, W)."""

    border: str = "renormalise"
    total: Tensor | None = None
    weight: Tensor | None = None

    def add(self, f: Tensor, weight: float | Tensor, offset: Offset | None) -> None:
        f = f.float()
        if self.total is None or self.weight is None:
            self.total = torch.zeros_like(f)
            self.weight = f.new_zeros((1, *f.shape[1:]) if f.ndim == 3 else ())
        if offset is None or f.ndim == 1:
            self.total.add_(f * weight)
            self.weight.add_(weight)
        else:
            assert not isinstance(weight, Tensor)
            add_aligned(self.total, f, offset, weight)
            if self.border == "renormalise":
                self.weight.add_(coverage((f.shape[1], f.shape[2]), offset, f), alpha=weight)
            else:
                self.weight.add_(weight)

    def add_by_entropy(self, f: Tensor, offset: Offset | None) -> Tensor:
        """Add a logit map, pixel by pixel by how sure the aligned map is; returns these weights (H, W).

        Weighed before it is aligned, as the paper does not, sure cells spread over unsure ones beside them.
        """
        f = f.float()
        inside: float | Tensor = 1.0
        if offset is not None and self.border == "renormalise":
            inside = coverage((f.shape[1], f.shape[2]), offset, f)[0]
            f = align_covered(f, offset)
        elif offset is not None:
            f = align(f, offset)
        weight = (1.0 - entropy(f, 0)) * inside
        self.add(f, weight, None)
        return weight

    def value(self) -> Tensor:
        assert self.total is not None and self.weight is not None
        return self.total / self.weight.clamp(min=1e-12)


@dataclass(eq=False)
class Maximum:
    """The largest value over the states, cell by cell: a baseline."""

    border: str = "renormalise"
    best: Tensor | None = None

    def add(self, f: Tensor, weight: float | Tensor, offset: Offset | None) -> None:
        f = f.float()
        if offset is not None and f.ndim == 3:
            if self.border == "renormalise":
                inside = coverage((f.shape[1], f.shape[2]), offset, f) > 0
                f = align_covered(f, offset).masked_fill(~inside, -math.inf)
            else:
                f = align(f, offset)
        self.best = f if self.best is None else torch.maximum(self.best, f)

    def value(self) -> Tensor:
        assert self.best is not None
        return self.best


class Attention(nn.Module):
    """The learned aggregation: scalar queries and keys per location, values are the maps, `w_o` starts at 0 (the mean).

    `1/B sum_s (f_s + w_o * sum_s' W_ss' f_s')`, `W = softmax(q k^T)`. Trained at one budget, usable at any.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.query = nn.Linear(channels, 1)
        self.key = nn.Linear(channels, 1)
        self.out = nn.Parameter(torch.zeros(channels))

    def received(self, f: Tensor) -> Tensor:
        """Attention that each state receives, averaged over the states that give it: (N, S, C, ...) -> (N, S, ...)."""
        last = f.movedim(2, -1)
        return _received(self.query(last)[..., 0], self.key(last)[..., 0])

    def project(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key of one map (C, ...) -> (...), which is all that its criterion needs."""
        both = torch.cat([self.query.weight, self.key.weight]) @ f.reshape(self.channels, -1)
        shape = f.shape[1:]
        return both[0].view(shape) + self.query.bias[0], both[1].view(shape) + self.key.bias[0]

    def forward(self, f: Tensor) -> Tensor:
        """(N, S, C, ...) -> (N, C, ...)."""
        got = self.received(f).unsqueeze(2)
        out = self.out.view(-1, *[1] * (f.ndim - 3))
        return f.mean(1) + out * (got * f).sum(1)

    def criterion(self, f: Tensor) -> Tensor:
        """1 / the attention a state receives, over all locations: (N, S, C, ...) -> (N, S). Lower is better.

        The paper sums W over its normalised index, which is always 1; what it argues for, "contributes the most to the
        aggregate", is the other sum.
        """
        return _criterion(self.received(f))


def _received(q: Tensor, k: Tensor) -> Tensor:
    """softmax(q k^T) summed over those who give it: queries and keys (N, S, ...) -> (N, S, ...)."""
    return (q.unsqueeze(2) * k.unsqueeze(1)).softmax(2).mean(1)


def _criterion(received: Tensor) -> Tensor:
    got = received * received.shape[1]
    return 1.0 / got.flatten(2).mean(2).clamp(min=1e-12) if got.ndim > 2 else 1.0 / got.clamp(min=1e-12)


@dataclass(eq=False)
class Attended:
    """Keeps the aligned maps of one image for the attention, and of each the query and key: a step costs no more."""

    attention: Attention
    border: str = "renormalise"
    maps: list[Tensor] = field(default_factory=list)
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, f: Tensor, weight: float | Tensor, offset: Offset | None) -> None:
        f = f.float()
        if offset is not None and f.ndim == 3:
            f = align_covered(f, offset) if self.border == "renormalise" else align(f, offset)
        self.maps.append(f)
        self.pairs.append(self.attention.project(f))

    def _received(self) -> Tensor:
        q, k = (torch.stack(part)[None] for part in zip(*self.pairs, strict=True))
        return _received(q, k)

    def value(self) -> Tensor:
        if len(self.maps) == 1:  # budget 1 is the model, whatever was learned
            return self.maps[0]
        total, attended = torch.zeros_like(self.maps[0]), torch.zeros_like(self.maps[0])
        for f, got in zip(self.maps, self._received()[0], strict=True):  # one by one: no second copy of all maps
            total += f
            attended.addcmul_(got, f)
        return total / len(self.maps) + self.attention.out.view(-1, *[1] * (total.ndim - 1)) * attended

    def criteria(self) -> list[float]:
        with torch.no_grad():
            return [float(v) for v in _criterion(self._received())[0]]
