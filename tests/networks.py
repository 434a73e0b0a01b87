"""Random small networks: plans drawn by hypothesis (so that a failure shrinks), and the modules they describe."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

C = 4  # channels everywhere, but in the middle of a concatenation
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
UP = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
MAX = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
INSTANCE = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
POOLED = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
SMOOTH = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class Plan:
    """A network: image size (so many axes), blocks (nested tuples: kind and its options), what comes out at the end."""

    size: tuple[int, ...]
    blocks: tuple[Any, ...]
    head: str
    seed: int


# ---------------------------------------------------------------- plans
def convs(n: int) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(
        st.just("conv"),
        st.sampled_from([(2, 2, 2), (2, 2, 2), (3, 3, 3), (2, 1, 2), (1, 2, 1), (2, 3, 1)]).map(lambda r: r[:n]),
        st.sampled_from([1, 2, 3, 5]),
        st.integers(0, 2),
        st.sampled_from([1, 1, 2]),
        st.sampled_from([1, 2, C]),
        st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]),
    )


def downs(n: int) -> st.SearchStrategy[tuple[Any, ...]]:
    only_images = [st.tuples(st.just("unshuffle"))] if n == 2 else []
    return st.one_of(
        convs(n),
        st.tuples(st.just("max"), st.sampled_from([(2, 2, 0), (3, 2, 1), (3, 3, 1), (3, 2, 0)]), st.booleans()),
        st.tuples(st.just("avg"), st.sampled_from([(2, 2, 0), (3, 2, 1), (3, 3, 1)]), st.booleans(), st.booleans()),
        st.tuples(st.just("blur"), st.sampled_from(["reflect", "replicate", "constant"])),
        st.tuples(st.just("slice"), st.sampled_from([(2, 2, 2), (3, 2, 2)]).map(lambda r: r[:n])),
        *only_images,
        st.tuples(st.just("merge")),
        st.tuples(st.just("half"), st.sampled_from(["nearest", SMOOTH[n]])),
        st.tuples(st.just("same"), st.sampled_from([3, 4])),
        st.tuples(
            st.just("residual"),
            st.lists(st.sampled_from(["conv", "pool", "slice", "max"]), min_size=1, max_size=2).map(tuple),
            st.sampled_from(["add", "cat"]),
        ),
        st.tuples(st.just("inception")),
        st.tuples(st.just("attention"), st.booleans()),
    )


def flats(n: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Blocks that keep the grid."""
    kinds = ["plain", "gate", "split", "window", "reduced", "inplace", "norm", "group", "instance"]
    return st.sampled_from([(kind,) for kind in kinds])


def nests(n: int) -> st.SearchStrategy[tuple[Any, ...]]:
    """Down, something, up again, and a skip: U-Nets and pyramids."""
    return st.tuples(
        st.just("unet"),
        st.sampled_from([("same", 3), ("max", (2, 2, 0), True), ("residual", ("conv",), "add")]),
        st.lists(flats(n), max_size=1).map(tuple),
        st.sampled_from(["nearest", SMOOTH[n], "transposed", *(["shuffle"] if n == 2 else [])]),
        st.sampled_from(["add", "cat"]),
    )


def plans(n: int = 2) -> st.SearchStrategy[Plan]:
    extent = st.integers(12, 33) if n < 3 else st.integers(9, 17)
    return st.builds(
        Plan,
        st.tuples(*[extent] * n),
        st.lists(st.one_of(downs(n), downs(n), flats(n), nests(n)), min_size=1, max_size=4 if n < 3 else 3).map(tuple),
        st.sampled_from(["pool", "map", "both", "flat", "dict"]),
        st.integers(0, 2**16),
    )


# ---------------------------------------------------------------- modules
class Fn(nn.Module):
    def __init__(self, f: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.f = f
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.f(self, x)


class Merge(nn.Module):
    """Patch merging as Swin does it: channels last, reshape, permute, norm, linear."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.merges = tuple(range(1, 1 + n))
        self.norm, self.reduce = nn.LayerNorm(2**n * C), nn.Linear(2**n * C, C)

    def forward(self, x: Tensor) -> Tensor:
        n = x.ndim - 2
        x = _even(x, 1)
        halves = [k for size in x.shape[1:-1] for k in (size // 2, 2)]
        x = x.reshape(x.shape[0], *halves, x.shape[-1])
        x = x.permute(0, *range(1, 2 * n, 2), *range(2 * n, 0, -2), 2 * n + 1).flatten(1 + n)
        return self.reduce(self.norm(x))


class Attention(nn.Module):
    """A strided query and a strided skip (MViT), or keys and values from a coarser map (PVT)."""

    def __init__(self, n: int, strided: bool) -> None:
        super().__init__()
        step = 2 if strided else 1
        self.q, self.kv = CONV[n](C, C, 3, step, 1), CONV[n](C, 2 * C, 2, 2)
        self.skip = MAX[n](3, step, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).flatten(2).chunk(2, 1)
        tokens = q.flatten(2).transpose(1, 2)
        mixed = (tokens @ k).softmax(-1) @ v.transpose(1, 2)
        return mixed.transpose(1, 2).reshape(q.shape) + self.skip(x)


def _even(x: Tensor, first: int = 2) -> Tensor:
    """Padded at the far ends so that the spatial dims, from `first` on, can be halved."""
    n = x.ndim - 2
    pads = [side for d in reversed(range(first, first + n)) for side in (0, x.shape[d] % 2)]
    return F.pad(x, [0, 0] * (2 - first) + pads)


def _conv(options: tuple[Any, ...], extent: tuple[int, ...]) -> nn.Module:
    _, stride, kernel, padding, dilation, groups, mode = options
    padding = min(padding, kernel // 2)
    if dilation * (kernel - 1) + 1 > min(extent) + 2 * padding:
        kernel, padding, dilation = 1, 0, 1
    mode = mode if padding else "zeros"
    return CONV[len(extent)](C, C, kernel, stride, padding, dilation, groups, padding_mode=mode)


def _shortcut(kind: str, n: int) -> nn.Module:
    if kind == "conv":
        return CONV[n](C, C, 1, 2)
    if kind == "pool":
        return nn.Sequential(AVG[n](2, 2, ceil_mode=True, count_include_pad=False), CONV[n](C, C, 1))
    if kind == "max":
        return MAX[n](3, 2, 1)
    channels = (0, 0) * n + (1, C - C // 2 - 1)
    return Fn(lambda m, x: F.pad(_every(x[:, : C // 2], (2,) * n), channels))


def _every(x: Tensor, steps: tuple[int, ...]) -> Tensor:
    """x[:, :, ::2, ::2]."""
    return x[(slice(None), slice(None), *(slice(None, None, k) for k in steps))]


def _window(m: nn.Module, x: Tensor) -> Tensor:
    """Attention inside windows of two cells per axis."""
    size, x = x.shape[2:], _even(x)
    n, (b, c), even = len(size), x.shape[:2], x.shape[2:]
    halves = [k for e in even for k in (e // 2, 2)]
    outer, inner = range(2, 2 * n + 2, 2), range(3, 2 * n + 3, 2)
    t = x.reshape(b, c, *halves).permute(0, *outer, *inner, 1).reshape(-1, 2**n, c)
    t = (t @ t.transpose(1, 2) / 4).softmax(-1) @ m.mix(t)
    t = t.reshape(b, *(e // 2 for e in even), *[2] * n, c)
    back = [d for a in range(n) for d in (1 + a, 1 + n + a)]
    t = t.permute(0, 2 * n + 1, *back).reshape(b, c, *even)
    return (x + t)[(slice(None), slice(None), *map(slice, size))]


def block(options: tuple[Any, ...], extent: tuple[int, ...]) -> nn.Module:
    kind, n = options[0], len(extent)
    conv = CONV[n](C, C, 3, 1, 1)
    if kind == "conv":
        return _conv(options, extent)
    if kind == "max":
        return nn.Sequential(MAX[n](*options[1], ceil_mode=options[2]), conv)
    if kind == "avg":
        return nn.Sequential(AVG[n](*options[1], ceil_mode=options[2], count_include_pad=options[3]), conv)
    if kind == "blur":
        blur = CONV[n](C, C, 3, 2, groups=C, bias=False)
        return Fn(lambda m, x: m.blur(F.pad(m.conv(x).relu(), (1, 1) * n, mode=options[1])), conv=conv, blur=blur)
    if kind == "slice":
        return Fn(lambda m, x: m.conv(_every(x, options[1])), conv=conv)
    if kind == "unshuffle":
        return Fn(lambda m, x: m.conv(F.pixel_unshuffle(_even(x), 2)), conv=nn.Conv2d(4 * C, C, 3, 1, 1))
    if kind == "merge":
        return Fn(lambda m, x: m.merge(x.movedim(1, -1)).movedim(-1, 1), merge=Merge(n))
    if kind == "half":
        return Fn(lambda m, x: m.conv(F.interpolate(_even(x), scale_factor=0.5, mode=options[1])), conv=conv)
    if kind == "same":
        k = options[1]
        strided = CONV[n](C, C, k, 2)

        def same(m: nn.Module, x: Tensor) -> Tensor:
            pads = [max((-(-size // 2) - 1) * 2 + k - size, 0) for size in x.shape[2:]]
            return m.conv(F.pad(x, [side for p in reversed(pads) for side in (p // 2, p - p // 2)]))

        return Fn(same, conv=strided)
    if kind == "residual":
        body = nn.Sequential(CONV[n](C, C, 3, 2, 1), NORM[n](C), nn.ReLU(), conv)
        shorts = nn.ModuleList(_shortcut(name, n) for name in options[1])
        if options[2] == "add":
            return Fn(lambda m, x: m.body(x) + sum(s(x) for s in m.shorts), body=body, shorts=shorts)
        out = CONV[n](C * (1 + len(shorts)), C, 1)
        return Fn(
            lambda m, x: m.out(torch.cat([m.body(x), *(s(x) for s in m.shorts)], 1)), body=body, shorts=shorts, out=out
        )
    if kind == "inception":
        arms = nn.ModuleList(
            [
                CONV[n](C, 2, 3, 2, 1),
                nn.Sequential(CONV[n](C, 3, 1), nn.ReLU(inplace=True), CONV[n](3, 2, 5, 2, 2)),
                MAX[n](3, 2, 1),
                AVG[n](3, 2, 1, count_include_pad=False),
            ]
        )
        return Fn(lambda m, x: m.out(torch.cat([a(x) for a in m.arms], 1)), arms=arms, out=CONV[n](4 + 2 * C, C, 1))
    if kind == "attention":
        return Attention(n, options[1])
    if kind == "plain":
        return nn.Sequential(conv, NORM[n](C), nn.ReLU6())
    if kind == "gate":
        return Fn(lambda m, x: x * m.gate(POOLED[n](x, 1)).sigmoid(), gate=CONV[n](C, C, 1))
    if kind == "split":

        def shuffle(m: nn.Module, x: Tensor) -> Tensor:
            a, b = x.chunk(2, 1)
            return torch.stack([a, m.branch(b)], 2).flatten(1, 2)

        return Fn(shuffle, branch=CONV[n](C // 2, C // 2, 3, 1, 1))
    if kind == "window":
        return Fn(_window, mix=nn.Linear(C, C))
    if kind == "reduced":
        return Attention(n, strided=False)
    if kind == "inplace":
        return Fn(lambda m, x: m.conv(x).relu_().mul_(0.5).add_(x), conv=conv)
    if kind == "norm":
        return Fn(lambda m, x: m.norm(x.movedim(1, -1)).movedim(-1, 1), norm=nn.LayerNorm(C))
    if kind == "group":
        return nn.Sequential(conv, nn.GroupNorm(2, C), nn.ReLU())
    if kind == "instance":
        return nn.Sequential(conv, INSTANCE[n](C, affine=True), nn.ReLU())
    assert kind == "unet"
    return Unet(options, extent)


class Unet(nn.Module):
    def __init__(self, options: tuple[Any, ...], extent: tuple[int, ...]) -> None:
        super().__init__()
        n = len(extent)
        _, down, inner, up, self.how = options
        self.down = block(down, extent)
        self.inner = nn.Sequential(*(block(o, extent) for o in inner))
        self.mode = up
        ups = {"transposed": UP[n](C, C, 2, 2), "shuffle": nn.Conv2d(C, 4 * C, 1)}
        self.up = ups.get(up, nn.Identity())
        self.out = CONV[n](2 * C if self.how == "cat" else C, C, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.inner(self.down(x)))
        if self.mode == "shuffle":
            y = F.pixel_shuffle(y, 2)
        elif self.mode != "transposed":
            y = F.interpolate(y, scale_factor=2, mode=self.mode)
        y = y[(slice(None), slice(None), *map(slice, x.shape[2:]))]
        return self.out(torch.cat([x, y], 1) if self.how == "cat" else x + y)


class RandomNet(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        n = len(plan.size)
        self.head = plan.head
        self.stem = CONV[n](3, C, 3, 1, 1)
        self.blocks = nn.ModuleList()
        x = torch.zeros(1, C, *plan.size)
        for options in plan.blocks:
            part = block(options, tuple(x.shape[2:])).eval()
            with torch.no_grad():
                y = part(x)
            if min(y.shape[2:]) < 3:  # nothing is left to move
                continue
            self.blocks.append(part)
            x = y
        self.map = CONV[n](C, 3, 1)
        self.fc = nn.Linear(x[0].numel() if plan.head == "flat" else C, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for part in self.blocks:
            x = part(x)
        if self.head == "map":
            return F.interpolate(self.map(x), scale_factor=2, mode=SMOOTH[x.ndim - 2])
        logits = self.fc(x.flatten(1) if self.head == "flat" else x.flatten(2).mean(2))
        if self.head == "both":
            return logits, self.map(x)
        return {"logits": logits, "map": self.map(x)} if self.head == "dict" else logits


def build(plan: Plan) -> nn.Module:
    """The network of a plan in float64, with weights that matter everywhere."""
    torch.manual_seed(plan.seed)
    net = RandomNet(plan)
    for m in net.modules():
        if isinstance(m, tuple(NORM.values())):
            nn.init.uniform_(m.running_mean, -0.3, 0.3)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
            nn.init.uniform_(m.weight, 0.5, 1.5)
    return net.double().eval()
