"""The paper (ECCV 2024, arXiv 2410.01083) in plain PyTorch, to be read beside the PDF. Slow, one image at a time.

It imports nothing from unstride and captures nothing. A network is any module whose strided ops are nn.Conv2d or
nn.MaxPool2d, named in groups: the ops of one group are one subsampling layer, because their outputs meet again.
Equation, line and section numbers are the paper's. A selection is (s_y, s_x); the paper flattens it to s_y R + s_x.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[tuple[int, int], ...]  # one selection per layer


@dataclass
class Net:
    """y = C(F(I; s)). F ends where the module `head` begins; C is everything from there.

    Segmentation aggregates maps of logits: there C changes nothing, and `head` is the upsampling to the image.
    """

    model: nn.Module
    groups: list[list[str]]  # names of the strided ops of each subsampling layer
    head: str
    classify: Callable[[Tensor], Tensor]  # C: (1, c, h, w) -> (1, K)

    @property
    def rates(self) -> list[int]:
        strides = [self.model.get_submodule(names[0]).stride for names in self.groups]
        return [s if isinstance(s, int) else s[0] for s in strides]

    @property
    def zero(self) -> State:
        return ((0, 0),) * len(self.groups)

    @torch.no_grad()
    def features(self, image: Tensor, state: State) -> Tensor:
        """F(I; s): (1, 3, H, W) -> (1, c, h, w)."""
        with selecting(self, state), capturing(self.model.get_submodule(self.head)) as captured:
            self.model(image)
        return captured[0]


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


@contextmanager
def selecting(net: Net, state: State) -> Iterator[None]:
    """Every strided op of layer l uses the selection index s_l."""
    handles = []
    for names, s in zip(net.groups, state, strict=True):
        for name in names:

            def hook(op: nn.Module, args: tuple, out: Tensor, s: tuple[int, int] = s) -> Tensor:
                return subsample(op, args[0], s, out.shape[2:])

            handles.append(net.model.get_submodule(name).register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capturing(module: nn.Module) -> Iterator[list[Tensor]]:
    captured: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda m, args: captured.append(args[0]))
    try:
        yield captured
    finally:
        handle.remove()


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
    """H(softmax(logits)) over the classes: (1, K, ...) -> (1, ...)."""
    return torch.distributions.Categorical(logits=logits.movedim(1, -1)).entropy()


def mean(f: Tensor) -> Tensor:
    """Section 4.1: 1/B sum f_s; maps are (S, c, h, w) from here on."""
    return f.mean(0, keepdim=True)


def entropy_weights(logits: Tensor) -> Tensor:
    """Eq. 7 without Z: (S, K, ...) -> (S, ...). Per pixel where C gives a map."""
    return 1 - entropy(logits) / math.log(logits.shape[1])


def weighted(f: Tensor, w: Tensor) -> Tensor:
    """Eq. 8, with Z: weights (S,) or, per pixel, (S, h, w)."""
    w = (w / w.sum(0)).view(len(f), 1, *(w.shape[1:] or [1] * (f.ndim - 2)))
    return (w * f).sum(0, keepdim=True)


@dataclass
class Learned:
    """The three parameters of the appendix, "Attention module", with the biases of its linear layers.

    The appendix has one head, Linear(in=c, out=1); the text says multi-head: then each attends to its own channels.
    """

    w_q: Tensor  # (heads, c)
    w_k: Tensor
    w_o: Tensor  # (c,)
    b_q: Tensor  # (heads,)
    b_k: Tensor

    def attention(self, f: Tensor) -> list[Tensor]:
        """Eq. 5 at each location: W (S, S', h, w) of each head."""
        W = []
        for head in range(len(self.w_q)):
            q = torch.einsum("s c ..., c -> s ...", f, self.w_q[head]) + self.b_q[head]
            k = torch.einsum("s c ..., c -> s ...", f, self.w_k[head]) + self.b_k[head]
            scores = torch.exp(q[:, None] * k[None])
            W.append(scores / scores.sum(1, keepdim=True))
        return W

    def aggregate(self, f: Tensor) -> Tensor:
        """Eq. 6 with MLP(x) = w_o * x and v = f."""
        pairs = zip(self.attention(f), f.chunk(len(self.w_q), 1), strict=True)
        attended = torch.cat([torch.einsum("s t ..., t c ... -> s c ...", W, v) for W, v in pairs], 1)
        w_o = self.w_o.view(1, -1, *[1] * (f.ndim - 2))
        return (f + w_o * attended).mean(0, keepdim=True)

    def criterion(self, f: Tensor) -> list[float]:
        """Eq. 11 with the sum over the states that give attention: the printed sum over s' is 1 for every state."""
        received = torch.stack([W.sum(0) for W in self.attention(f)], 1)
        return [1 / float(own.mean()) for own in received]


# -- section 4.2: searching


@dataclass
class Searched:
    states: list[State]
    expansions: list[tuple[State, int]] = field(default_factory=list)


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
) -> Searched:
    """Algorithm 1. `criterion` gives the current value of each state of the set that is found so far.

    Not printed: state 0 is in the set; a state returns to the queue until all its layers are expanded; states that
    were found before are skipped; ties go to the state found first. `exact` never returns more than B states.
    """
    zero = ((0, 0),) * len(rates)
    Q, E, S = [zero], defaultdict(set), [zero]  # lines 2 to 5
    result = Searched(S)
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
            result.expansions.append((s, layer))
    return result  # line 14


# -- the whole procedure: Figure 1 (b)


@dataclass
class Paper:
    """Search and aggregate for one image. `space`: f_s is the aligned map, or the logits of the state (no grid)."""

    net: Net
    layers: Sequence[int]
    B: int
    aggregate: str = "entropy"  # mean, entropy, max, learned
    criterion: str | Callable[[State], float] = "entropy"  # entropy, learned, displacement, or any function (random)
    space: str = "features"
    down: str = "average"
    border: str = "zeros"  # ours: "renormalise" divides by the part of a cell that the shifted map covers
    stop: str = "exact"
    entropy_of: str = "aligned"  # or "unaligned": of the state's own prediction
    learned: Learned | None = None
    maps: dict[State, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # of the image at hand

    def search(self, image: Tensor) -> Searched:
        """The visited states of an image (1, 3, H, W)."""
        self.maps = {}
        return search(self.net.rates, self.layers, lambda S: self.criteria(image, S), self.B, self.stop)

    def predict(self, image: Tensor, states: list[State]) -> Tensor:
        """y = C(A(F)) over these states."""
        f, _, logits = self.all_of(image, states)
        cover = torch.cat([self.cover(f, s) for s in states])
        match self.aggregate:
            case "mean":
                total = mean(f) if self.border == "zeros" else weighted(f, cover)
            case "entropy":
                w = entropy_weights(logits)
                total = weighted(f, w if self.border == "zeros" else w.view(len(f), *[1] * (f.ndim - 2)) * cover)
            case "max":
                total = f.amax(0, keepdim=True)
            case "learned":
                total = self.learned.aggregate(f)
        return total if self.space == "logits" else self.net.classify(total)

    def all_of(self, image: Tensor, states: list[State]) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(torch.cat(part) for part in zip(*(self.one(image, s) for s in states), strict=True))

    def one(self, image: Tensor, s: State) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 9: f_s, the state's own logits, and the logits whose entropy counts."""
        if s not in self.maps:
            f = self.net.features(image, s)
            own = self.net.classify(f)
            if self.space == "logits":
                self.maps[s] = own, own, own
            else:
                f = align(f, displacement(s, self.net.rates), math.prod(self.net.rates), self.down)
                f = f if self.border == "zeros" else f / self.cover(f, s).unsqueeze(1).clamp(min=1e-12)
                self.maps[s] = f, own, self.net.classify(f) if self.entropy_of == "aligned" else own
        return self.maps[s]

    def cover(self, f: Tensor, s: State) -> Tensor:
        """The part of each cell that the shifted map covers: (1, h, w)."""
        ones = torch.ones(1, 1, *f.shape[2:])
        if f.ndim > 2:
            ones = align(ones, displacement(s, self.net.rates), math.prod(self.net.rates), self.down)
        return ones[0]

    def criteria(self, image: Tensor, states: list[State]) -> list[float]:
        match self.criterion:
            case "entropy":  # Eq. 12; of maps, the mean over the pixels
                return entropy(self.all_of(image, states)[2]).reshape(len(states), -1).mean(1).tolist()
            case "displacement":
                return [float(sum(displacement(s, self.net.rates))) for s in states]
            case "learned":
                return self.learned.criterion(self.all_of(image, states)[0])
        return [self.criterion(s) for s in states]
