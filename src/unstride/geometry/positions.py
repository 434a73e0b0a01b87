"""Where each element of a value is centred on the image: coordinates, and the algebra that rules are written in.

Every value has, beside itself, the image row and column that each of its elements is centred on (NaN: nowhere).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

NAN = float("nan")
EPS = 1e-3


@dataclass(frozen=True, eq=False)
class Pos:
    """Row and column in image pixels for every element of a value; NaN where it has no position on that axis."""

    y: Tensor
    x: Tensor

    def axis(self, a: int) -> Tensor:
        return self.y if a == 0 else self.x

    def map(self, f: Callable[[Tensor], Tensor]) -> "Pos | None":
        return settle(f(self.y), f(self.x))


class Lost:
    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why

    def __repr__(self) -> str:
        return self.name


LOST = Lost("LOST", "has lost its position at an op without a rule")  # it may have positions, but they are hidden
FIXED = Lost("FIXED", "holds indices of cells, which cannot be moved")
Position = Pos | Lost | None


@dataclass(frozen=True)
class Window:
    """The sliding window of a strided op along one axis: size, dilation, padding at the start and at the end.

    `end` is how far its last window reaches beyond the map, `far` how far the op's own padding goes there.
    """

    size: int
    dilation: int
    start: int
    end: int
    far: int


@dataclass(frozen=True, eq=False)
class Site:
    """One op that thins the grid out: `node` reads `operand`, which a state moves by a selection per axis."""

    node: Node
    operand: Node
    kind: str
    rate: tuple[int, ...]
    windows: tuple[Window, ...] | None = None  # None: the operand is moved as it is (slices, patch merging, resizing)
    reads: Node | None = None  # the value before a non-constant pad that belongs to the window
    mode: str = "constant"


@dataclass
class Trace:
    """What the walk found: a position per node, the operands it came from (per axis), sites, unknown ops, MACs."""

    pos: dict[Node, Any] = field(default_factory=dict)
    sources: dict[Node, tuple[list[Node], list[Node]]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    merges: dict[Node, tuple[int, int]] = field(default_factory=dict)  # nodes that contract over neighbouring positions
    passed: dict[Node, str] = field(default_factory=dict)  # ops that thin the grid out but are no layer, and why
    unknown: dict[Node, str] = field(default_factory=dict)
    shapes: dict[Node, Any] = field(default_factory=dict)
    macs: dict[Node, int] = field(default_factory=dict)


def settle(y: Tensor, x: Tensor) -> Pos | None:
    """An axis on which nothing varies has no position; a value without any axis has none at all."""
    vy, vx = varies(y), varies(x)
    if not vy and not vx:
        return None
    return Pos(y if vy else blank(y.shape), x if vx else blank(x.shape))


def core(t: Tensor) -> Tensor:
    """Without repetitions: dimensions along which a broadcast tensor repeats itself become 1 (it keeps us fast)."""
    for d in range(t.ndim):
        if t.stride(d) == 0 and t.shape[d] > 1:
            t = t.narrow(d, 0, 1)
    return t


def varies(t: Tensor) -> bool:
    return span(t) > EPS


def span(t: Tensor) -> float:
    t = core(t)
    known = t[~t.isnan()]
    return 0.0 if known.numel() == 0 else float(known.max() - known.min())


def nowhere(t: Tensor) -> bool:
    return bool(core(t).isnan().all())


def has_axis(p: Any, a: int) -> bool:
    """Does the value have a position on axis a? LOST may have one on both."""
    return isinstance(p, Lost) or (isinstance(p, Pos) and not nowhere(p.axis(a)))


def first_known(a: Tensor, b: Tensor) -> Tensor:
    """Coordinates of `a`, and those of `b` where `a` has none."""
    if nowhere(a):
        return b
    a_core, b_core = core(a), core(b)
    return torch.where(a_core.isnan(), b_core, a_core).expand(a.shape)


def blank(shape: Sequence[int]) -> Tensor:
    return torch.tensor(NAN).expand(tuple(shape))


def resample(t: Tensor, dim: int, centres: Tensor) -> Tensor:
    """Values of `t` at fractional indices along `dim`, continued linearly beyond the ends."""
    n, full = t.shape[dim], [*t.shape[:dim], len(centres), *t.shape[dim + 1 :]]
    t = core(t)
    if t.shape[dim] == 1:
        return t.expand(full)
    shape = [1] * t.ndim
    shape[dim] = -1
    low = centres.floor().clamp(0, n - 2).long()
    part = (centres - low).to(t.dtype).view(shape)
    a, b = t.index_select(dim, low), t.index_select(dim, low + 1)
    return (a + part * (b - a)).expand(full)


def contract(t: Tensor, dims: Sequence[int], keepdim: bool = True) -> tuple[Tensor, bool]:
    """Coordinates after a reduction over `dims`, and whether neighbouring positions were mixed.

    Elements that agree keep their position; a neighbourhood becomes its mean (mixed); over half of the map, NaN.
    """
    dims = [d % t.ndim for d in dims]
    full = [1 if d in dims else size for d, size in enumerate(t.shape)]
    t = core(t)
    mean = t.nanmean(dims, keepdim=True).expand(full) if any(t.shape[d] > 1 for d in dims) else t.expand(full)
    if all(t.shape[d] == 1 for d in dims) or nowhere(t):
        return (mean if keepdim else _drop(mean, dims)), False
    high = t.nan_to_num(nan=-math.inf).amax(dims, keepdim=True)
    low = t.nan_to_num(nan=math.inf).amin(dims, keepdim=True)
    spread = (high - low).nan_to_num(posinf=0, neginf=0).amax()
    mixed = False
    if spread > EPS:
        if spread > 0.5 * span(t) + EPS:
            mean = blank(mean.shape)
        else:
            mixed = True
    return (mean if keepdim else _drop(mean, dims)), mixed


def _drop(t: Tensor, dims: Sequence[int]) -> Tensor:
    for d in sorted(dims, reverse=True):
        t = t.squeeze(d)
    return t
