"""Learned aggregation (section 4.1 and the appendix, "Attention module") and the criterion that comes from it.

Where the print is ambiguous:
- Several heads (the text says "multi-head", the appendix gives `Linear(in=c, out=1)`): each head has a scalar query and
  key and attends to its own share of the channels; `w_o` has one number per channel. One head is the appendix.
- The printed learned criterion sums W over the index that the softmax normalises, so it is 1 for every state. We sum
  over the other index: the attention that a state receives, "the feature that contributes the most".
- A single state is returned as it is: one forward pass is the model, whatever was learned.
- The released code adds dropout and a learned table over displacements. The paper mentions neither; both are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from unstride.errors import OptionError

ALL = slice(None)
KEY_GAIN = 0.01  # of the Xavier initialisation of w_k, as in the released code


class Attention(nn.Module):
    """`1/B sum_s (f_s + w_o * sum_s' W_ss' f_s')` with `W = softmax(q k^T)` at each location (Eq. 5 and 6).

    `w_o` starts at 0, so the untrained module is the mean. Trained at one budget, usable at any.

    Args:
        channels: Channels of the feature map.
        heads: 1 in the appendix of the paper; must divide `channels`.
        seed: Of the initialisation of w_k. The global random state is neither read nor changed.
    """

    def __init__(self, channels: int, heads: int = 1, seed: int = 0) -> None:
        super().__init__()
        if heads < 1 or channels % heads:
            raise OptionError(f"heads: got {heads}, expected a divisor of the {channels} channels of the feature map")
        self.channels, self.heads = channels, heads
        self.query = nn.utils.skip_init(nn.Linear, channels, heads)
        self.key = nn.utils.skip_init(nn.Linear, channels, heads)
        self.out = nn.Parameter(torch.zeros(channels))
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        """w_q and w_o at 0, w_k small: no state is preferred before training."""
        for parameter in (self.query.weight, self.query.bias, self.key.bias):
            nn.init.zeros_(parameter)
        nn.init.xavier_normal_(self.key.weight, KEY_GAIN, torch.Generator().manual_seed(seed))

    def check(self, channels: int) -> None:
        """Raise OptionError for a map with another number of channels."""
        if self.channels != channels:
            raise OptionError(f"the attention was made for {self.channels} channels, this map has {channels}")

    def project(self, f: Tensor) -> Tensor:
        """Queries and keys of maps (R, C, ...) -> (R, 2, heads, ...), which is all that the criterion needs."""
        weight = torch.cat([self.query.weight, self.key.weight])
        bias = torch.cat([self.query.bias, self.key.bias])
        both = weight @ f.reshape(len(f), self.channels, -1) + bias[:, None]
        return both.view(len(f), 2, self.heads, *f.shape[2:])

    def received(self, f: Tensor) -> Tensor:
        """Attention that each state receives, averaged over those who give it: (N, S, C, ...) -> (N, S, heads, ...)."""
        pairs = self.project(f.flatten(0, 1)).unflatten(0, f.shape[:2])
        return attention_received(pairs)

    def forward(self, f: Tensor) -> Tensor:
        """Aggregate maps (N, S, C, ...) -> (N, C, ...)."""
        if f.shape[1] == 1:
            return f[:, 0]
        return f.mean(1) + self.scaled((self.per_channel(self.received(f), 2) * f).sum(1))

    def per_channel(self, weight: Tensor, dim: int) -> Tensor:
        """A number for each head along `dim` -> for each channel; one head is left to broadcasting."""
        return weight if self.heads == 1 else weight.repeat_interleave(self.channels // self.heads, dim)

    def scaled(self, attended: Tensor) -> Tensor:
        """`w_o * x` of maps (N, C, ...), the MLP of Eq. 6."""
        return self.out.view(-1, *[1] * (attended.ndim - 2)) * attended


def attention_received(pairs: Tensor) -> Tensor:
    """W (Eq. 5) averaged over the states that give attention: queries and keys (N, S, 2, ...) -> (N, S, ...)."""
    query, key = pairs[:, :, 0], pairs[:, :, 1]
    return (query.unsqueeze(2) * key.unsqueeze(1)).softmax(2).mean(1)


def learned_criterion(received: Tensor) -> Tensor:
    """Eq. 11: 1 / the attention a state receives, over heads and locations: (N, S, ...) -> (N, S). Lower is better."""
    total = received * received.shape[1]  # the sum over the giving states, 1 on average
    return 1.0 / total.flatten(2).mean(2).clamp(min=1e-12)


@dataclass(eq=False)
class Attended:
    """The learned aggregate of `count` images whose states come one after another.

    Keeps the aligned maps of each image for the value, and of each map its query and key, so that the criterion of all
    states is current after every step at little cost.
    """

    attention: Attention
    count: int = 1
    maps: list[list[Tensor]] = field(init=False)
    pairs: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.maps, self.pairs = [[] for _ in range(self.count)], [[] for _ in range(self.count)]

    def add(self, images: slice | Sequence[int], f: Tensor) -> None:
        """Take one aligned map (R, C, ...) for each of these images; an image may come more than once."""
        f = f.float()
        for i, own, pair in zip(self._numbers(images), f, self.attention.project(f), strict=True):
            self.maps[i].append(own)
            self.pairs[i].append(pair)

    def value(self, images: slice | Sequence[int] = ALL) -> Tensor:
        """The aggregate (R, C, ...) of these images (Eq. 6)."""
        numbers = self._numbers(images)
        out = self.maps[numbers[0]][0].new_empty((len(numbers), *self.maps[numbers[0]][0].shape))
        for places, some in self._alike(numbers):
            out[places] = self._aggregate(some)
        return out

    @torch.no_grad()
    def criteria(self, images: Sequence[int]) -> list[list[float]]:
        """The current learned criterion (Eq. 11) of every state of each of these images, in order."""
        result: list[list[float]] = [[] for _ in images]
        for places, some in self._alike(images):
            for place, criteria in zip(places, learned_criterion(self._received(some)).tolist(), strict=True):
                result[place] = criteria
        return result

    def _numbers(self, images: slice | Sequence[int]) -> Sequence[int]:
        return range(self.count)[images] if isinstance(images, slice) else images

    def _alike(self, images: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
        """Images with equally many states, which are computed together: their places in `images`, and themselves."""
        counts = [len(self.pairs[i]) for i in images]
        for count in dict.fromkeys(counts):
            places = [k for k, own in enumerate(counts) if own == count]
            yield places, [images[k] for k in places]

    def _received(self, images: Sequence[int]) -> Tensor:
        """(N, S, heads, ...) of images that have S states each."""
        return attention_received(
            torch.stack([pair for i in images for pair in self.pairs[i]]).unflatten(0, (len(images), -1))
        )

    def _aggregate(self, images: Sequence[int]) -> Tensor:
        received = self._received(images)
        count = received.shape[1]
        total = torch.stack([self.maps[i][0] for i in images])
        if count == 1:
            return total
        attended = self.attention.per_channel(received[:, 0], 1) * total
        for s in range(1, count):  # one state at a time: no second copy of all maps
            f = torch.stack([self.maps[i][s] for i in images])
            total = total + f
            attended = torch.addcmul(attended, self.attention.per_channel(received[:, s], 1), f)
        return total / count + self.attention.scaled(attended)
