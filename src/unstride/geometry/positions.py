"""Where each element of a value is centred on the image: coordinates, and the algebra that rules are written in.

Every value has, beside itself, the place on the image that each of its elements is centred on (NaN: none): row and
column, or as many axes as there are.
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
SMALL = 1 << 14  # elements that need not be compacted


@dataclass(frozen=True, eq=False)
class Pos:
    """Where every element of a value lies in image pixels, a tensor per axis; NaN where it has no position on that."""

    axes: tuple[Tensor, ...]

    @property
    def y(self) -> Tensor:
        """Rows of images and volumes."""
        return self.axes[-2]

    @property
    def x(self) -> Tensor:
        """Columns; of signals, time."""
        return self.axes[-1]

    @property
    def shape(self) -> torch.Size:
        return self.axes[0].shape

    @property
    def ndim(self) -> int:
        return self.axes[0].ndim

    def axis(self, a: int) -> Tensor:
        return self.axes[a]

    def along(self, dim: int) -> list[int]:
        """The axes whose places change along a dimension of the value."""
        return [a for a, t in enumerate(self.axes) if changes(t, dim)]

    def map(self, f: Callable[[Tensor], Tensor]) -> "Pos | None":
        return position_of(*(f(t) for t in self.axes))


class LostPosition:
    def __init__(self, name: str, why: str) -> None:
        self.name, self.why = name, why

    def __repr__(self) -> str:
        return self.name


LOST = LostPosition(
    "LOST", "has lost its position at an op without a rule"
)  # it may have positions, but they are hidden
OTHER_DIRECTION = LostPosition("OTHER_DIRECTION", "joins maps that lie on the image in different directions")
FIXED = LostPosition("FIXED", "holds indices of cells, which cannot be moved")
Position = Pos | LostPosition | None


@dataclass(frozen=True)
class OpWindow:
    """The sliding window of a strided op along one axis: size, dilation, padding at the start and at the end.

    `end` is how far its last window reaches beyond the map, `far` how far the op's own padding goes there.
    """

    size: int
    dilation: int
    start: int
    end: int
    far: int = 0


@dataclass(frozen=True, eq=False)
class Site:
    """One op that thins the grid out: `node` reads `operand`, which a state moves by a selection per axis."""

    node: Node
    operand: Node
    kind: str
    rate: tuple[int, ...]
    # a window per dimension that the op slides over, from the third on; None: the operand is moved as it is (slices,
    # patch merging, resizing)
    windows: tuple[OpWindow, ...] | None = None
    reads: Node | None = None  # the value before a non-constant pad that belongs to the window
    mode: str = "constant"
    over: tuple[int | None, ...] = ()  # the image's axis along each of these dimensions; empty: they are the axes

    def axis(self, d: int) -> int | None:
        """The image's axis that window d slides along."""
        return self.over[d] if self.over else d


@dataclass
class Trace:
    """What the walk found: a position per node, the operands it came from (per axis), sites, unknown ops, MACs."""

    pos: dict[Node, Any] = field(default_factory=dict)
    sources: dict[Node, tuple[list[Node], ...]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    merges: dict[Node, tuple[int, ...]] = field(default_factory=dict)  # nodes that contract over neighbouring positions
    passed: dict[Node, str] = field(default_factory=dict)  # ops that thin the grid out but are no layer, and why
    unknown: dict[Node, str] = field(default_factory=dict)
    places: set[Node] = field(default_factory=set)  # values that say where to read: moved, they would say it wrongly
    shapes: dict[Node, Any] = field(default_factory=dict)
    macs: dict[Node, int] = field(default_factory=dict)


def position_of(*coords: Tensor) -> Pos | None:
    """`position_of(y, x)`: an axis on which nothing varies has no position; a value without any axis has none."""
    coords = tuple(map(compacted, coords))
    vary = [varies(t) for t in coords]
    if not any(vary):
        return None
    return Pos(tuple(t if v else no_position(t.shape) for t, v in zip(coords, vary, strict=True)))


def unexpanded(t: Tensor) -> Tensor:
    """Without repetitions: dimensions along which a broadcast tensor repeats itself become 1 (for speed)."""
    for d in range(t.ndim):
        if t.stride(d) == 0 and t.shape[d] > 1:
            t = t.narrow(d, 0, 1)
    return t


def compacted(t: Tensor) -> Tensor:
    """The same coordinates, of which one is kept along each dimension where they repeat: they are kept for every op."""
    shape, t = t.shape, unexpanded(t)
    if t.numel() < SMALL:
        return t.expand(shape)
    for d in range(t.ndim):
        first = t.narrow(d, 0, 1)
        if t.shape[d] > 1 and bool(((t == first) | (t.isnan() & first.isnan())).all()):
            t = first
    return t.clone().expand(shape)


def changes(t: Tensor, dim: int) -> bool:
    """Whether coordinates differ along a dimension."""
    t = unexpanded(t)
    return t.shape[dim] > 1 and bool((t.diff(dim=dim).nan_to_num().abs() > EPS).any())


def step_direction(p: Pos, dim: int) -> Tensor:
    """How far on the image, along each axis, a usual step along a dimension of the value goes."""
    steps = [t.diff(dim=dim) if t.shape[dim] > 1 else t.new_zeros(1) for t in map(unexpanded, p.axes)]
    return torch.stack([step.nanmedian() for step in steps]).nan_to_num()


def in_other_directions(p: Pos, q: Pos) -> bool:
    """Do two values that are joined element by element have different directions (one is flipped or rotated)?

    A state moves the one another way than the other. Aligned corners make steps shorter, and again at each upsampling.
    """
    for d in range(-1, -1 - min(p.ndim, q.ndim), -1):
        one, two = step_direction(p, d), step_direction(q, d)
        lengths = float(one @ one), float(two @ two)
        if min(lengths) > EPS and float(one @ two) < 0.25 * max(lengths):
            return True
    return False


def varies(t: Tensor) -> bool:
    return span(t) > EPS


def span(t: Tensor) -> float:
    t = unexpanded(t)
    known = t[~t.isnan()]
    return 0.0 if known.numel() == 0 else float(known.max() - known.min())


def has_no_position(t: Tensor) -> bool:
    return bool(unexpanded(t).isnan().all())


def has_axis(p: Any, a: int) -> bool:
    """Does the value have a position on axis a? LOST may have one on both."""
    return isinstance(p, LostPosition) or (isinstance(p, Pos) and not has_no_position(p.axis(a)))


def first_known(a: Tensor, b: Tensor) -> Tensor:
    """Coordinates of `a`, and those of `b` where `a` has none."""
    if has_no_position(a):
        return b
    a_core, b_core = unexpanded(a), unexpanded(b)
    return torch.where(a_core.isnan(), b_core, a_core).expand(a.shape)


def no_position(shape: Sequence[int]) -> Tensor:
    return torch.tensor(NAN).expand(tuple(shape))


def resample(t: Tensor, dim: int, centres: Tensor) -> Tensor:
    """Values of `t` at fractional indices along `dim`, continued linearly beyond the ends."""
    n, full = t.shape[dim], [*t.shape[:dim], len(centres), *t.shape[dim + 1 :]]
    t = unexpanded(t)
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
    t = unexpanded(t)
    mean = t.nanmean(dims, keepdim=True).expand(full) if any(t.shape[d] > 1 for d in dims) else t.expand(full)
    if all(t.shape[d] == 1 for d in dims) or has_no_position(t):
        return (mean if keepdim else _drop(mean, dims)), False
    high = t.nan_to_num(nan=-math.inf).amax(dims, keepdim=True)
    low = t.nan_to_num(nan=math.inf).amin(dims, keepdim=True)
    spread = (high - low).nan_to_num(posinf=0, neginf=0).amax()
    mixed = False
    if spread > EPS:
        if spread > 0.5 * span(t) + EPS:
            mean = no_position(mean.shape)
        else:
            mixed = True
    return (mean if keepdim else _drop(mean, dims)), mixed


def _drop(t: Tensor, dims: Sequence[int]) -> Tensor:
    for d in sorted(dims, reverse=True):
        t = t.squeeze(d)
    return t
