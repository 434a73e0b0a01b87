"""Many maps into one. Mean and entropy stream: memory does not grow with the budget; attention sees all states."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from unstride.engine.movers import empty_like
from unstride.errors import OptionError
from unstride.procedure.align import Offset, add_aligned, align, align_covered, coverage

BORDERS = ("renormalise", "zeros")
ALL = slice(None)
LEAST = 1e-6  # of the weight of one state
PIECE = 1 << 20  # elements of a map that are measured together


def two_class(logits: Tensor, dim: int = 1) -> Tensor:
    """One logit per item means sigmoid: the same as two classes with logits (0, z)."""
    return logits if logits.shape[dim] > 1 else torch.cat([torch.zeros_like(logits), logits], dim)


def entropy(logits: Tensor, dim: int = 1) -> Tensor:
    """Entropy of the predicted distribution divided by log K: 0 is certain, 1 knows nothing."""
    logits = two_class(logits, dim).float()
    logp = logits.log_softmax(dim)
    finite = logp.clamp(min=torch.finfo(logp.dtype).min)  # 0 log 0 is 0, where a class is ruled out; NaN stays
    return -(logp.exp() * finite).sum(dim) / math.log(logits.shape[dim])


def in_pieces(measure: Callable[[Tensor], Tensor], maps: Tensor) -> Tensor:
    """`measure(maps)` (R, H, W) of maps (R, K, H, W), some lines at a time: what it needs on the way stays small."""
    if maps.ndim < 3:
        return measure(maps)
    lines = max(1, PIECE * maps.shape[2] // max(1, maps.numel()))
    return torch.cat([measure(part) for part in maps.split(lines, 2)], 1)


def sure_weight(logits: Tensor, dim: int = 1) -> Tensor:
    """The weight of a prediction: 1 - entropy, and never 0, or a place where no state knows anything had no answer."""
    return (1.0 - entropy(logits, dim)).clamp(min=LEAST)


def top_class(logits: Tensor, dim: int = 1) -> Tensor:
    """The likeliest class; -1 where that is not known, because the logits are not numbers."""
    best, index = two_class(logits, dim).max(dim)
    return index.masked_fill_(best.isnan(), -1)


def agreement(own: Tensor, final: Tensor) -> Tensor:
    """Whether classes (S, ...) are the final ones (...), as numbers to be averaged: NaN where one is not known."""
    return (own == final).float().masked_fill_((own < 0) | (final < 0), math.nan)


class Accumulator(Protocol):
    """Takes the maps (R, C, H, W), or vectors (R, C), of the neighbouring `images` in one state, state after state."""

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None: ...
    def value(self, images: slice | list[int] = ALL) -> Tensor: ...


@dataclass(eq=False)
class WeightedMean:
    """sum w Align(f) / sum w of `count` images, w (R,) or, where nothing is left to align, maps (R, H, W)."""

    count: int = 1
    border: str = "renormalise"
    total: Tensor | None = None
    weight: Tensor | None = None

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if self.total is None or self.weight is None:
            self.total = _filled(self.count, f, 0.0)
            self.weight = f.new_zeros((self.count, 1, *f.shape[2:]))
        scale = weight.view(len(f), 1, *(weight.shape[1:] or [1] * (f.ndim - 2)))
        if offset is None or offset.still or f.ndim == 2:
            self.total[images].addcmul_(f, scale)
            self.weight[images].add_(scale)
        else:
            add_aligned(self.total[images], f * scale, offset)
            inside = coverage(f.shape[2:], offset, f) if self.border == "renormalise" else 1.0
            self.weight[images].add_(inside * scale)

    def add_by_entropy(self, images: slice, f: Tensor, offset: Offset | None) -> Tensor:
        """Add logit maps, pixel by pixel by how sure the aligned map is; returns these weights (R, H, W).

        Weighed before it is aligned, as the paper does not, sure cells spread over unsure ones beside them.
        """
        f = f.float()
        inside: float | Tensor = 1.0
        if offset is not None and self.border == "renormalise":
            inside = coverage(f.shape[2:], offset, f)
            f = align_covered(f, offset)
        elif offset is not None:
            f = align(f, offset)
        weight = in_pieces(sure_weight, f) * inside
        self.add(images, f, weight, None)
        return weight

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        assert self.total is not None and self.weight is not None
        return self.total[images] / self.weight[images].clamp(min=1e-12)


@dataclass(eq=False)
class Maximum:
    """The largest value over the states, cell by cell: a baseline."""

    count: int = 1
    border: str = "renormalise"
    best: Tensor | None = None

    def add(self, images: slice, f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if offset is not None and f.ndim > 2:
            if self.border == "renormalise":
                inside = coverage(f.shape[2:], offset, f) > 0
                f = align_covered(f, offset).masked_fill(~inside, -math.inf)
            else:
                f = align(f, offset)
        if self.best is None:
            self.best = _filled(self.count, f, -math.inf)
        torch.maximum(self.best[images], f, out=self.best[images])

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        assert self.best is not None
        return self.best[images]


def _filled(count: int, like: Tensor, value: float) -> Tensor:
    """A tensor (count, ...) laid out as `like` (R, ...): sums over slices of maps are slow in another layout."""
    return empty_like([count, *like.shape[1:]], like).fill_(value)


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

    def check(self, channels: int) -> None:
        """Refuse a map that it was not made for."""
        if self.channels != channels:
            raise OptionError(f"the attention was made for {self.channels} channels, this map has {channels}")

    def received(self, f: Tensor) -> Tensor:
        """Attention that each state receives, averaged over the states that give it: (N, S, C, ...) -> (N, S, ...)."""
        last = f.movedim(2, -1)
        return _received(self.query(last)[..., 0], self.key(last)[..., 0])

    def project(self, f: Tensor) -> Tensor:
        """Query and key of maps (R, C, ...) -> (R, 2, ...), which is all that their criterion needs."""
        weight = torch.cat([self.query.weight, self.key.weight])
        bias = torch.cat([self.query.bias, self.key.bias])
        both = weight @ f.reshape(len(f), self.channels, -1) + bias[:, None]
        return both.view(len(f), 2, *f.shape[2:])

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
    """Keeps the aligned maps of each image for the attention, and of each the query and key: a step costs no more."""

    attention: Attention
    count: int = 1
    border: str = "renormalise"
    maps: list[list[Tensor]] = field(init=False)
    pairs: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.maps, self.pairs = [[] for _ in range(self.count)], [[] for _ in range(self.count)]

    def add(self, images: slice | list[int], f: Tensor, weight: Tensor, offset: Offset | None) -> None:
        f = f.float()
        if offset is not None and f.ndim > 2:
            f = align_covered(f, offset) if self.border == "renormalise" else align(f, offset)
        for i, own, pair in zip(self._numbers(images), f, self.attention.project(f), strict=True):
            self.maps[i].append(own)
            self.pairs[i].append(pair)

    def _numbers(self, images: slice | list[int]) -> Sequence[int]:
        return range(self.count)[images] if isinstance(images, slice) else images

    def _alike(self, images: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Images with as many states as each other, which are computed together: their places, and themselves."""
        counts = [len(self.pairs[i]) for i in images]
        for count in dict.fromkeys(counts):
            places = [k for k, own in enumerate(counts) if own == count]
            yield places, [images[k] for k in places]

    def _received(self, images: list[int]) -> Tensor:
        """(N, S, ...) of images that have S states each."""
        pairs = torch.stack([pair for i in images for pair in self.pairs[i]]).unflatten(0, (len(images), -1))
        return _received(pairs[:, :, 0], pairs[:, :, 1])

    def value(self, images: slice | list[int] = ALL) -> Tensor:
        chosen = self._numbers(images)
        out = _filled(len(chosen), self.maps[chosen[0]][0][None], 0.0)
        for places, some in self._alike(chosen):
            out[places] = self._merged(some)
        return out

    def _merged(self, images: list[int]) -> Tensor:
        got = self._received(images)
        count = got.shape[1]
        total = _filled(len(images), self.maps[images[0]][0][None], 0.0)
        attended = torch.zeros_like(total)
        for s in range(count):  # one by one: no second copy of all maps
            f = torch.stack([self.maps[i][s] for i in images]) if len(images) > 1 else self.maps[images[0]][s][None]
            total += f
            attended.addcmul_(got[:, s].unsqueeze(1), f)
        if count > 1:  # budget 1 is the model, whatever was learned
            total.div_(count).addcmul_(self.attention.out.view(-1, *[1] * (total.ndim - 2)), attended)
        return total

    def criteria(self, images: list[int]) -> list[list[float]]:
        """Of every state of each of these images, in order."""
        found: dict[int, list[float]] = {}
        with torch.no_grad():
            for places, some in self._alike(images):
                found |= zip(places, _criterion(self._received(some)).tolist(), strict=True)
        return [found[k] for k in range(len(images))]
