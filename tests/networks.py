"""Random small networks: plans drawn by hypothesis (so that a failure shrinks), and the modules they describe."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

C = 4  # channels everywhere, but in the middle of a concatenation


@dataclass(frozen=True)
class Plan:
    """A network: image size, blocks (nested tuples: kind and its options) and what comes out at the end."""

    size: tuple[int, int]
    blocks: tuple[Any, ...]
    head: str
    seed: int


# ---------------------------------------------------------------- plans
def convs() -> st.SearchStrategy[tuple[Any, ...]]:
    return st.tuples(
        st.just("conv"),
        st.sampled_from([(2, 2), (2, 2), (3, 3), (2, 1), (1, 2), (2, 3)]),
        st.sampled_from([1, 2, 3, 5]),
        st.integers(0, 2),
        st.sampled_from([1, 1, 2]),
        st.sampled_from([1, 2, C]),
        st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]),
    )


def downs() -> st.SearchStrategy[tuple[Any, ...]]:
    return st.one_of(
        convs(),
        st.tuples(st.just("max"), st.sampled_from([(2, 2, 0), (3, 2, 1), (3, 3, 1), (3, 2, 0)]), st.booleans()),
        st.tuples(st.just("avg"), st.sampled_from([(2, 2, 0), (3, 2, 1), (3, 3, 1)]), st.booleans(), st.booleans()),
        st.tuples(st.just("blur"), st.sampled_from(["reflect", "replicate", "constant"])),
        st.tuples(st.just("slice"), st.sampled_from([(2, 2), (3, 2)])),
        st.tuples(st.just("unshuffle")),
        st.tuples(st.just("merge")),
        st.tuples(st.just("half"), st.sampled_from(["nearest", "bilinear"])),
        st.tuples(st.just("same"), st.sampled_from([3, 4])),
        st.tuples(
            st.just("residual"),
            st.lists(st.sampled_from(["conv", "pool", "slice", "max"]), min_size=1, max_size=2).map(tuple),
            st.sampled_from(["add", "cat"]),
        ),
        st.tuples(st.just("inception")),
        st.tuples(st.just("attention"), st.booleans()),
    )


def flats() -> st.SearchStrategy[tuple[Any, ...]]:
    """Blocks that keep the grid."""
    return st.sampled_from([("plain",), ("gate",), ("split",), ("window",), ("reduced",), ("inplace",), ("norm",)])


def nests() -> st.SearchStrategy[tuple[Any, ...]]:
    """Down, something, up again, and a skip: U-Nets and pyramids."""
    return st.tuples(
        st.just("unet"),
        st.sampled_from([("same", 3), ("max", (2, 2, 0), True), ("residual", ("conv",), "add")]),
        st.lists(flats(), max_size=1).map(tuple),
        st.sampled_from(["nearest", "bilinear", "transposed", "shuffle"]),
        st.sampled_from(["add", "cat"]),
    )


def plans() -> st.SearchStrategy[Plan]:
    return st.builds(
        Plan,
        st.tuples(st.integers(12, 33), st.integers(12, 33)),
        st.lists(st.one_of(downs(), downs(), flats(), nests()), min_size=1, max_size=4).map(tuple),
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

    merges = (1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.reduce = nn.LayerNorm(4 * C), nn.Linear(4 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        b, h, w, c = x.shape
        x = x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduce(self.norm(x))


class Attention(nn.Module):
    """A strided query and a strided skip (MViT), or keys and values from a coarser map (PVT)."""

    def __init__(self, strided: bool) -> None:
        super().__init__()
        step = 2 if strided else 1
        self.q, self.kv = nn.Conv2d(C, C, 3, step, 1), nn.Conv2d(C, 2 * C, 2, 2)
        self.skip = nn.MaxPool2d(3, step, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, (k, v) = self.q(x), self.kv(x).flatten(2).chunk(2, 1)
        tokens = q.flatten(2).transpose(1, 2)
        mixed = (tokens @ k).softmax(-1) @ v.transpose(1, 2)
        return mixed.transpose(1, 2).reshape(q.shape) + self.skip(x)


def _even(x: Tensor) -> Tensor:
    return F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))


def _conv(options: tuple[Any, ...], extent: tuple[int, int]) -> nn.Module:
    _, stride, kernel, padding, dilation, groups, mode = options
    padding = min(padding, kernel // 2)
    if dilation * (kernel - 1) + 1 > min(extent) + 2 * padding:
        kernel, padding, dilation = 1, 0, 1
    return nn.Conv2d(C, C, kernel, stride, padding, dilation, groups, padding_mode=mode if padding else "zeros")


def _shortcut(kind: str) -> nn.Module:
    if kind == "conv":
        return nn.Conv2d(C, C, 1, 2)
    if kind == "pool":
        return nn.Sequential(nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), nn.Conv2d(C, C, 1))
    if kind == "max":
        return nn.MaxPool2d(3, 2, 1)
    return Fn(lambda m, x: F.pad(x[:, : C // 2, ::2, ::2], (0, 0, 0, 0, 1, C - C // 2 - 1)))


def _window(m: nn.Module, x: Tensor) -> Tensor:
    """Attention inside windows of 2x2 cells."""
    h, w = x.shape[2:]
    x = _even(x)
    b, c, hh, ww = x.shape
    t = x.reshape(b, c, hh // 2, 2, ww // 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(-1, 4, c)
    t = (t @ t.transpose(1, 2) / 4).softmax(-1) @ m.mix(t)
    t = t.reshape(b, hh // 2, ww // 2, 2, 2, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, hh, ww)
    return (x + t)[:, :, :h, :w]


def block(options: tuple[Any, ...], extent: tuple[int, int]) -> nn.Module:
    kind = options[0]
    conv = nn.Conv2d(C, C, 3, 1, 1)
    if kind == "conv":
        return _conv(options, extent)
    if kind == "max":
        return nn.Sequential(nn.MaxPool2d(*options[1], ceil_mode=options[2]), conv)
    if kind == "avg":
        return nn.Sequential(nn.AvgPool2d(*options[1], ceil_mode=options[2], count_include_pad=options[3]), conv)
    if kind == "blur":
        blur = nn.Conv2d(C, C, 3, 2, groups=C, bias=False)
        return Fn(lambda m, x: m.blur(F.pad(m.conv(x).relu(), (1, 1, 1, 1), mode=options[1])), conv=conv, blur=blur)
    if kind == "slice":
        y, x_ = options[1]
        return Fn(lambda m, x: m.conv(x[:, :, ::y, ::x_]), conv=conv)
    if kind == "unshuffle":
        return Fn(lambda m, x: m.conv(F.pixel_unshuffle(_even(x), 2)), conv=nn.Conv2d(4 * C, C, 3, 1, 1))
    if kind == "merge":
        return Fn(lambda m, x: m.merge(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), merge=Merge())
    if kind == "half":
        return Fn(lambda m, x: m.conv(F.interpolate(_even(x), scale_factor=0.5, mode=options[1])), conv=conv)
    if kind == "same":
        k = options[1]
        strided = nn.Conv2d(C, C, k, 2)

        def same(m: nn.Module, x: Tensor) -> Tensor:
            pads = [max((-(-n // 2) - 1) * 2 + k - n, 0) for n in x.shape[2:]]
            return m.conv(F.pad(x, (pads[1] // 2, pads[1] - pads[1] // 2, pads[0] // 2, pads[0] - pads[0] // 2)))

        return Fn(same, conv=strided)
    if kind == "residual":
        body = nn.Sequential(nn.Conv2d(C, C, 3, 2, 1), nn.BatchNorm2d(C), nn.ReLU(), conv)
        shorts = nn.ModuleList(_shortcut(name) for name in options[1])
        if options[2] == "add":
            return Fn(lambda m, x: m.body(x) + sum(s(x) for s in m.shorts), body=body, shorts=shorts)
        out = nn.Conv2d(C * (1 + len(shorts)), C, 1)
        return Fn(
            lambda m, x: m.out(torch.cat([m.body(x), *(s(x) for s in m.shorts)], 1)), body=body, shorts=shorts, out=out
        )
    if kind == "inception":
        arms = nn.ModuleList(
            [
                nn.Conv2d(C, 2, 3, 2, 1),
                nn.Sequential(nn.Conv2d(C, 3, 1), nn.ReLU(inplace=True), nn.Conv2d(3, 2, 5, 2, 2)),
                nn.MaxPool2d(3, 2, 1),
                nn.AvgPool2d(3, 2, 1, count_include_pad=False),
            ]
        )
        return Fn(lambda m, x: m.out(torch.cat([a(x) for a in m.arms], 1)), arms=arms, out=nn.Conv2d(4 + 2 * C, C, 1))
    if kind == "attention":
        return Attention(options[1])
    if kind == "plain":
        return nn.Sequential(conv, nn.BatchNorm2d(C), nn.ReLU6())
    if kind == "gate":
        return Fn(lambda m, x: x * m.gate(F.adaptive_avg_pool2d(x, 1)).sigmoid(), gate=nn.Conv2d(C, C, 1))
    if kind == "split":

        def shuffle(m: nn.Module, x: Tensor) -> Tensor:
            a, b = x.chunk(2, 1)
            return torch.stack([a, m.branch(b)], 2).flatten(1, 2)

        return Fn(shuffle, branch=nn.Conv2d(C // 2, C // 2, 3, 1, 1))
    if kind == "window":
        return Fn(_window, mix=nn.Linear(C, C))
    if kind == "reduced":
        return Attention(strided=False)
    if kind == "inplace":
        return Fn(lambda m, x: m.conv(x).relu_().mul_(0.5).add_(x), conv=conv)
    if kind == "norm":
        return Fn(lambda m, x: m.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2), norm=nn.LayerNorm(C))
    assert kind == "unet"
    return Unet(options, extent)


class Unet(nn.Module):
    def __init__(self, options: tuple[Any, ...], extent: tuple[int, int]) -> None:
        super().__init__()
        _, down, inner, up, self.how = options
        self.down = block(down, extent)
        self.inner = nn.Sequential(*(block(o, extent) for o in inner))
        self.mode = up
        ups = {"transposed": nn.ConvTranspose2d(C, C, 2, 2), "shuffle": nn.Conv2d(C, 4 * C, 1)}
        self.up = ups.get(up, nn.Identity())
        self.out = nn.Conv2d(2 * C if self.how == "cat" else C, C, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.inner(self.down(x)))
        if self.mode == "shuffle":
            y = F.pixel_shuffle(y, 2)
        elif self.mode != "transposed":
            y = F.interpolate(y, scale_factor=2, mode=self.mode)
        y = y[:, :, : x.shape[2], : x.shape[3]]
        return self.out(torch.cat([x, y], 1) if self.how == "cat" else x + y)


class RandomNet(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.head = plan.head
        self.stem = nn.Conv2d(3, C, 3, 1, 1)
        self.blocks = nn.ModuleList()
        x = torch.zeros(1, C, *plan.size)
        for options in plan.blocks:
            part = block(options, (x.shape[2], x.shape[3])).eval()
            with torch.no_grad():
                y = part(x)
            if min(y.shape[2:]) < 3:  # nothing is left to move
                continue
            self.blocks.append(part)
            x = y
        self.map = nn.Conv2d(C, 3, 1)
        self.fc = nn.Linear(C * x.shape[2] * x.shape[3] if plan.head == "flat" else C, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.stem(x)
        for part in self.blocks:
            x = part(x)
        if self.head == "map":
            return F.interpolate(self.map(x), scale_factor=2, mode="bilinear")
        logits = self.fc(x.flatten(1) if self.head == "flat" else x.mean((2, 3)))
        if self.head == "both":
            return logits, self.map(x)
        return {"logits": logits, "map": self.map(x)} if self.head == "dict" else logits


def build(plan: Plan) -> nn.Module:
    """The network of a plan in float64, with weights that matter everywhere."""
    torch.manual_seed(plan.seed)
    net = RandomNet(plan)
    for m in net.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.running_mean, -0.3, 0.3)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
            nn.init.uniform_(m.weight, 0.5, 1.5)
    return net.double().eval()
