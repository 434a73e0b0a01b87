"""The paper (ECCV 2024, arXiv 2410.01083) in plain PyTorch, to be read beside the PDF. Slow, one image at a time.

It imports nothing from unstride and captures nothing. A network is any module whose strided ops are nn.Conv2d or
nn.MaxPool2d, named in groups: the ops of one group are one subsampling layer, because their outputs meet again.
Equation, line and section numbers are the paper's. A selection is (s_y, s_x); the paper flattens it to s_y R + s_x.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[tuple[int, int], ...]  # one selection per layer


# -- section 3: subsampling layers


def subsample(op: nn.Module, x: Tensor, s: tuple[int, int], size: Sequence[int]) -> Tensor:
    """Eq. 1 for a strided op: out[n] = y[R n + s], where y is the same op with stride 1."""
    pair = lambda v: (v, v) if isinstance(v, int) else v  # noqa: E731
    kernel, dilation, (ry, rx) = pair(op.kernel_size), pair(op.dilation), pair(op.stride)
    (top, left), fill = pair(op.padding), 0.0 if isinstance(op, nn.Conv2d) else -math.inf
    more = [d * (k - 1) + r for d, k, r in zip(dilation, kernel, (ry, rx), strict=True)]  # enough for the last window
    x = F.pad(x, (left, left + more[1], top, top + more[0]), value=fill)
    if isinstance(op, nn.Conv2d):
        y = F.conv2d(x, op.weight, op.bias, 1, 0, dilation, op.groups)
    else:
        y = F.max_pool2d(x, kernel, 1, 0, dilation)
    return y[..., s[0] :: ry, s[1] :: rx][..., : size[0], : size[1]]


@dataclass
class Net:
    """Eq. 3 and 4: y = C(F(I; s)). F ends where the module `head` begins; C is everything from there.

    Segmentation aggregates maps of logits: there C changes nothing, and `head` is the upsampling to the image.
    """

    model: nn.Module
    groups: list[list[str]]  # names of the strided ops of each subsampling layer
    head: str
    C: Callable[[Tensor], Tensor]  # (n, c, h, w) -> (n, K)

    @property
    def rates(self) -> list[int]:
        strides = [self.model.get_submodule(names[0]).stride for names in self.groups]
        return [s if isinstance(s, int) else s[0] for s in strides]

    @torch.no_grad()
    def F(self, image: Tensor, state: State) -> Tensor:
        """(1, 3, H, W) -> (1, c, h, w). Every strided op of layer l uses the selection index s_l."""
        captured: list[Tensor] = []
        handles = [self.model.get_submodule(self.head).register_forward_pre_hook(lambda m, x: captured.append(x[0]))]
        for names, s in zip(self.groups, state, strict=True):
            for name in names:
                hook = lambda op, x, out, s=s: subsample(op, x[0], s, out.shape[2:])  # noqa: E731
                handles.append(self.model.get_submodule(name).register_forward_hook(hook))
        self.model(image)
        for handle in handles:
            handle.remove()
        return captured[0]


# -- section 4.1: aggregating


def displacement(state: State, rates: Sequence[int]) -> tuple[int, int]:
    """Eq. 10, second line: Delta = s_1 + s_2 R1 + s_3 R1 R2 + ..., per axis, over all layers. (The first is a slip.)"""
    cells = [math.prod(rates[:layer]) for layer in range(len(rates))]
    return tuple(sum(s[axis] * cell for s, cell in zip(state, cells, strict=True)) for axis in (0, 1))


def align(f: Tensor, delta: tuple[int, int], T: int, down: str = "average") -> Tensor:
    """Figure 3: resize to input resolution, shift by Delta with zeros, resize back. The appendix says nearest for both.

    Nearest on the way down moves every state with Delta > 0 by a whole cell; the released code averages.
    """
    large = F.interpolate(f, scale_factor=T, mode="nearest")
    shifted = F.pad(large, (delta[1], 0, delta[0], 0))[..., : large.shape[2], : large.shape[3]]
    return F.avg_pool2d(shifted, T) if down == "average" else shifted[..., ::T, ::T]


def entropy(logits: Tensor) -> Tensor:
    """H(softmax(logits)) over the classes: (S, K, ...) -> (S, ...)."""
    return torch.distributions.Categorical(logits=logits.movedim(1, -1)).entropy()


def entropy_weights(logits: Tensor) -> Tensor:
    """Eq. 7 without Z: (S, K, ...) -> (S, ...). Per pixel where C gives a map."""
    return 1 - entropy(logits) / math.log(logits.shape[1])


def weighted(f: Tensor, w: Tensor) -> Tensor:
    """Eq. 8, with Z: maps (S, c, h, w); weights (S,) or, per pixel, (S, h, w)."""
    w = (w / w.sum(0)).view(len(f), 1, *(w.shape[1:] or [1] * (f.ndim - 2)))
    return (w * f).sum(0, keepdim=True)


@dataclass
class Learned:
    """The three parameters of the appendix, "Attention module", Linear(in=c, out=1), with the biases of its layers."""

    w_q: Tensor  # (c,)
    w_k: Tensor
    w_o: Tensor
    b_q: Tensor  # a number
    b_k: Tensor

    def attention(self, f: Tensor) -> Tensor:
        """Eq. 5 at each location: W (S, S', h, w)."""
        q = torch.einsum("s c ..., c -> s ...", f, self.w_q) + self.b_q
        k = torch.einsum("s c ..., c -> s ...", f, self.w_k) + self.b_k
        return (q[:, None] * k[None]).softmax(1)

    def aggregate(self, f: Tensor) -> Tensor:
        """Eq. 6 with MLP(x) = w_o * x and v = f."""
        attended = torch.einsum("s t ..., t c ... -> s c ...", self.attention(f), f)
        return (f + self.w_o.view(-1, *[1] * (f.ndim - 2)) * attended).mean(0, keepdim=True)

    def criterion(self, f: Tensor) -> list[float]:
        """Eq. 11 with the sum over the states that give attention: the printed sum over s' is 1 for every state."""
        return [1 / float(received.mean()) for received in self.attention(f).sum(0)]


# -- section 4.2: searching


def neighbors(state: State, layer: int, rates: Sequence[int]) -> list[State]:
    """The states with another selection index at `layer` (from 1), in index order i = s_y R + s_x."""
    selections = itertools.product(range(rates[layer - 1]), repeat=2)
    return [(*state[: layer - 1], s, *state[layer:]) for s in selections if s != state[layer - 1]]


def search(
    rates: Sequence[int],
    layers: Sequence[int],
    criterion: Callable[[list[State]], list[float]],
    B: int,
    stop: str = "exact",
) -> tuple[list[State], list[tuple[State, int]]]:
    """Algorithm 1: the states, and which state was expanded at which layer.

    `criterion` gives the current value of each state of the set that is found so far. Not printed: state 0 is in the
    set; a state returns to the queue until all its layers are expanded; states that were found before are skipped; ties
    go to the state found first. `exact` never returns more than B states.
    """
    zero = ((0, 0),) * len(rates)
    Q, E, S, expansions = [zero], defaultdict(set), [zero], []  # lines 2 to 5
    while Q and (len(S) <= B if stop == "literal" else len(S) < B):  # line 6
        values = dict(zip(S, criterion(S), strict=True))
        s = min(Q, key=lambda s: (values[s], S.index(s)))  # line 7
        layer = min(set(layers) - E[s])  # line 8, top-down
        E[s].add(layer)  # line 9
        if E[s] == set(layers):
            Q.remove(s)
        new = [t for t in neighbors(s, layer, rates) if t not in S]  # line 10
        new = new if stop == "literal" else new[: B - len(S)]
        Q.extend(new)  # line 12
        S.extend(new)  # line 13
        if new:
            expansions.append((s, layer))
    return S, expansions  # line 14


# -- the whole procedure: Figure 1 (b)


@dataclass
class Result:
    states: list[State]
    expansions: list[tuple[State, int]]
    own: Tensor  # C(F(I; s)) of each state by itself
    y: Tensor


@dataclass
class Paper:
    """Search and aggregate for one image (1, 3, H, W)."""

    net: Net
    layers: Sequence[int]
    B: int
    aggregate: str | Callable[[Tensor], Tensor] = "entropy"  # mean, entropy, learned, or a function of the maps
    criterion: str | Callable[[State], float] = "entropy"  # entropy, learned, displacement, or a function (random)
    down: str = "average"
    stop: str = "exact"
    learned: Learned | None = None

    @torch.no_grad()
    def run(self, image: Tensor) -> Result:
        maps: dict[State, tuple[Tensor, Tensor]] = {}  # F(I; s), and f_s of Eq. 9

        def maps_of(S: list[State]) -> tuple[Tensor, ...]:
            for s in S:
                if s not in maps:
                    own = self.net.F(image, s)
                    maps[s] = own, self.align(own, s)
            return tuple(torch.cat(part) for part in zip(*(maps[s] for s in S), strict=True))

        criterion = lambda S: self.criteria(S, *maps_of(S))  # noqa: E731
        S, expansions = search(self.net.rates, self.layers, criterion, self.B, self.stop)
        own, f = maps_of(S)
        return Result(S, expansions, self.net.C(own), self.net.C(self.aggregated(S, own, f)))

    def align(self, f: Tensor, s: State) -> Tensor:
        """Eq. 9. Vectors have no grid."""
        rates = self.net.rates
        return f if f.ndim == 2 else align(f, displacement(s, rates), math.prod(rates), self.down)

    def logits(self, own: Tensor, f: Tensor) -> Tensor:
        """Whose entropy counts in Eq. 7 and 12: C(f_s)."""
        return self.net.C(f)

    def criteria(self, S: list[State], own: Tensor, f: Tensor) -> list[float]:
        match self.criterion:
            case "entropy":  # Eq. 12; of maps, the mean over the pixels
                return entropy(self.logits(own, f)).reshape(len(S), -1).mean(1).tolist()
            case "displacement":
                return [float(sum(displacement(s, self.net.rates))) for s in S]
            case "learned":
                return self.learned.criterion(f)
        return [self.criterion(s) for s in S]

    def aggregated(self, S: list[State], own: Tensor, f: Tensor) -> Tensor:
        match self.aggregate:
            case "mean" | "entropy":
                return weighted(f, self.weights(S, own, f))
            case "learned":
                return self.learned.aggregate(f)
        return self.aggregate(f)

    def weights(self, S: list[State], own: Tensor, f: Tensor) -> Tensor:
        return torch.ones(len(S)) if self.aggregate == "mean" else entropy_weights(self.logits(own, f))
